//go:build unix

package idempotentclient_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// A disk keeps of a directory what was synced: of each file the content at its
// last fsync, and the names that the directory had at its own.
type disk struct {
	dir   string
	files []diskFile
	names map[string]os.FileInfo

	// What this disk forgets to do; the zero disk is a good one.
	forgetsFiles, forgetsNames, isLate bool
	late                               []func()
}

type diskFile struct {
	os.FileInfo
	content []byte
}

// newDisk is the disk beneath dir until the test ends.
func newDisk(t *testing.T) *disk {
	d := &disk{dir: t.TempDir()}
	t.Cleanup(idempotentclient.SetSync(d.sync))
	return d
}

func (d *disk) sync(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	keep := func() {}
	if info.IsDir() && !d.forgetsNames {
		names := map[string]os.FileInfo{}
		entries, err := os.ReadDir(d.dir)
		if err != nil {
			return err
		}
		for _, entry := range entries {
			if names[entry.Name()], err = entry.Info(); err != nil {
				return err
			}
		}
		keep = func() { d.names = names }
	} else if !info.IsDir() && !d.forgetsFiles {
		content, err := io.ReadAll(io.NewSectionReader(f, 0, info.Size())) // whatever its name is now
		if err != nil {
			return err
		}
		keep = func() {
			d.files = slices.DeleteFunc(d.files, func(f diskFile) bool { return os.SameFile(f.FileInfo, info) })
			d.files = append(d.files, diskFile{info, content})
		}
	}
	if d.isLate {
		d.late = append(d.late, keep)
		return nil
	}
	keep()
	return nil
}

// catchUp does what a late disk has promised.
func (d *disk) catchUp() {
	for _, keep := range d.late {
		keep()
	}
	d.late = nil
}

// keys returns the keys of the calls that are pending, by name, after the power
// failed and came back.
func (d *disk) keys(t *testing.T, journal string) (map[string]string, error) {
	t.Helper()
	dir := t.TempDir()
	for name, info := range d.names {
		var content []byte
		if i := slices.IndexFunc(d.files, func(f diskFile) bool { return os.SameFile(f.FileInfo, info) }); i >= 0 {
			content = d.files[i].content
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	defer idempotentclient.SetSync(func(*os.File) error { return nil })() // this copy need not last
	j, err := idempotentclient.OpenJournal(filepath.Join(dir, journal), 0)
	if err != nil {
		return nil, err
	}
	defer j.Close()
	keys := map[string]string{}
	for _, call := range j.Pending() {
		keys[call.Name] = call.Key
	}
	return keys, nil
}

// sentBeforeSynced begins and makes a call on the disk, and returns what was not
// on it when the first byte of the request was sent.
func sentBeforeSynced(t *testing.T, d *disk) (missing error) {
	j := openJournal(t, filepath.Join(d.dir, "journal"))
	call, err := j.Begin(t.Context(), "charge tea")
	if err != nil {
		t.Fatal(err)
	}
	sent := false
	c := api{Server: "http://orders", Client: doerFunc(func(r *http.Request) (*http.Response, error) {
		sent = true
		keys, err := d.keys(t, "journal")
		if key := r.Header.Get("Idempotency-Key"); err != nil || key == "" || keys["charge tea"] != key {
			missing = fmt.Errorf("the key %q was sent, and on disk are %v, %v", key, keys, err)
		}
		d.catchUp()
		return nil, errors.New("the power failed")
	}), idempotency: idempotentclient.NewConfig(idempotentclient.NoRetry())}
	_, err = c.CreateOrder(call, "", strings.NewReader("order"))
	if err == nil || !sent {
		t.Fatalf("nothing was sent: %v", err)
	}
	if keys, err := d.keys(t, "journal"); d.isLate && (err != nil || keys["charge tea"] == "") {
		t.Fatalf("a late disk has %v, %v in the end", keys, err)
	}
	return missing
}

// TestJournalIsOnDiskBeforeTheFirstByteIsSent fails the power at the moment in
// which a request is sent. Disks that forget show that it would be noticed.
func TestJournalIsOnDiskBeforeTheFirstByteIsSent(t *testing.T) {
	if missing := sentBeforeSynced(t, newDisk(t)); missing != nil {
		t.Error(missing)
	}
	for name, spoil := range map[string]func(*disk){
		"the file is not synced":      func(d *disk) { d.forgetsFiles = true },
		"the directory is not synced": func(d *disk) { d.forgetsNames = true },
		"sent before it is synced":    func(d *disk) { d.isLate = true },
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t)
			spoil(d)
			if sentBeforeSynced(t, d) == nil {
				t.Error("and nobody noticed")
			}
		})
	}
}

// TestJournalSurvivesEveryPowerFailure fails the power after each fsync and each
// return of so many calls that the file is rewritten several times: what was
// begun has its key, and what is done is only back if its Done had not returned.
func TestJournalSurvivesEveryPowerFailure(t *testing.T) {
	d := newDisk(t)
	begun := map[string]string{}
	doing := "" // may be on disk or not
	failures := 0
	check := func() {
		t.Helper()
		failures++
		keys, err := d.keys(t, "journal")
		if err != nil {
			t.Fatal(err)
		}
		delete(keys, doing)
		for name, key := range begun {
			if name != doing && keys[name] != key {
				t.Fatalf("%s has the key %q on disk, and %q was given out", name, keys[name], key)
			}
			delete(keys, name)
		}
		if len(keys) > 0 {
			t.Fatalf("done are, and on disk again: %v", keys)
		}
	}
	j := openJournal(t, filepath.Join(d.dir, "journal"))
	idempotentclient.SetSync(func(f *os.File) error {
		err := d.sync(f)
		check()
		return err
	})
	for i := range 320 {
		doing = fmt.Sprint("charge order ", i)
		call, err := j.Begin(t.Context(), doing)
		if err != nil {
			t.Fatal(err)
		}
		begun[doing] = sentKey(t, call)
		doing = ""
		check()
		if i%40 == 0 {
			continue // stays pending
		}
		doing = fmt.Sprint("charge order ", i)
		done(t, j, doing)
		delete(begun, doing)
		doing = ""
		check()
	}
	if calls := 2*320 + 2*(320-8); failures < calls+2 { // a rewritten file is synced, and so is its directory
		t.Errorf("the power failed %d times over %d calls: the file was never rewritten", failures, calls)
	}
}

// A process that was killed in Begin may have left a record that is in the file
// and not on the disk: whoever resumes the call makes it durable.
func TestJournalIsOnDiskBeforeItIsResumed(t *testing.T) {
	d := newDisk(t)
	restore := idempotentclient.SetSync(func(*os.File) error { return nil }) // the kill came first
	path := filepath.Join(d.dir, "journal")
	j := openJournal(t, path)
	key := begin(t, j, "charge tea")
	restore()
	if again := begin(t, reopen(t, j, path), "charge tea"); again != key {
		t.Fatalf("the key became %s, was %s", again, key)
	}
	if keys, err := d.keys(t, "journal"); err != nil || keys["charge tea"] != key {
		t.Errorf("the key %q was resumed, and on disk are %v, %v", key, keys, err)
	}
}

// A system may take for durable what it failed to write: a second fsync that
// succeeds says nothing, unless the record is written again before.
func TestJournalWritesAgainWhatADiskMayHaveLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	broken := errors.New("input/output error")
	restore := idempotentclient.SetSync(func(*os.File) error { return broken })
	if _, err := j.Begin(t.Context(), "charge tea"); !errors.Is(err, broken) {
		t.Fatalf("got %v", err)
	}
	restore()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	clean := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, clean, clean); err != nil {
		t.Fatal(err)
	}
	synced := false
	t.Cleanup(idempotentclient.SetSync(func(f *os.File) error {
		info, err := f.Stat()
		if err == nil && !info.IsDir() {
			synced = info.ModTime().After(clean.Add(time.Minute))
		}
		return errors.Join(err, f.Sync())
	}))
	begin(t, openJournal(t, path), "charge tea")
	if !synced {
		t.Error("nothing was written before the file was synced")
	}
}
