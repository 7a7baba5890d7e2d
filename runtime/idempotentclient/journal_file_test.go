//go:build unix

package idempotentclient_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// must is for steps that a test takes only to get somewhere.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestJournalGivesOutNoKeyThatItsPathDoesNotLeadTo does to an open journal what
// others do to files: the next process would not find the keys.
func TestJournalGivesOutNoKeyThatItsPathDoesNotLeadTo(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, dir, file string) (mend func()){
		"renamed": func(t *testing.T, dir, file string) func() {
			must(t, os.Rename(file, file+".1"))
			return func() { must(t, os.Rename(file+".1", file)) }
		},
		"replaced": func(t *testing.T, dir, file string) func() {
			text := content(t, file)
			must(t, os.Rename(file, file+".1"))
			write(t, file, text)
			return func() { must(t, os.Rename(file+".1", file)) }
		},
		"removed": func(t *testing.T, dir, file string) func() {
			must(t, os.Remove(file))
			return nil
		},
		"emptied": func(t *testing.T, dir, file string) func() {
			text := content(t, file)
			must(t, os.Truncate(file, 0))
			return func() { write(t, file, text) }
		},
		"in a directory that is renamed": func(t *testing.T, dir, file string) func() {
			must(t, os.Rename(filepath.Dir(file), filepath.Join(dir, "old")))
			return func() { must(t, os.Rename(filepath.Join(dir, "old"), filepath.Dir(file))) }
		},
		"behind a link that leads elsewhere": func(t *testing.T, dir, file string) func() {
			must(t, os.Remove(filepath.Join(dir, "link")))
			must(t, os.Symlink(filepath.Join(dir, "elsewhere"), filepath.Join(dir, "link")))
			return func() {
				must(t, os.Remove(filepath.Join(dir, "link")))
				must(t, os.Symlink(file, filepath.Join(dir, "link")))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "current", "journal")
			must(t, os.Mkdir(filepath.Dir(file), 0o700))
			must(t, os.Symlink(file, filepath.Join(dir, "link")))
			j := openJournal(t, filepath.Join(dir, "link"))
			tea := begin(t, j, "charge tea")
			mend := harm(t, dir, file)
			for _, name := range []string{"charge tea", "charge coffee"} { // pending, and not
				if _, err := j.Begin(t.Context(), name); err == nil || !strings.Contains(err.Error(), "while it was open") {
					t.Errorf("%s was begun: %v", name, err)
				}
			}
			if err := j.Done("charge tea"); err == nil {
				t.Error("a call was done")
			}
			if mend == nil {
				return
			}
			mend()
			coffee := begin(t, j, "charge coffee")
			j = reopen(t, j, filepath.Join(dir, "link"))
			if begin(t, j, "charge tea") != tea || begin(t, j, "charge coffee") != coffee {
				t.Error("a key changed")
			}
		})
	}
}

func TestJournalIsLockedByEveryName(t *testing.T) {
	dir := t.TempDir()
	openJournal(t, filepath.Join(dir, "journal"))
	must(t, os.Link(filepath.Join(dir, "journal"), filepath.Join(dir, "link")))
	if _, err := idempotentclient.OpenJournal(filepath.Join(dir, "link"), 0); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("got %v", err)
	}
}

// A link that leads to no file yet is where the file is to be, such as a volume.
func TestJournalIsMadeWhereALinkLeads(t *testing.T) {
	volume, dir := t.TempDir(), t.TempDir()
	link := filepath.Join(dir, "journal")
	must(t, os.Symlink(filepath.Join(volume, "journal"), link))
	j := openJournal(t, link)
	begin(t, j, "charge tea")
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link became %v, %v", info.Mode(), err)
	}
	must(t, j.Close())
	if names := pendingNames(openJournal(t, filepath.Join(volume, "journal"))); names != "charge tea" {
		t.Errorf("pending are %q", names)
	}
}

func TestJournalIsARegularFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	must(t, syscall.Mkfifo(path, 0o600))
	if _, err := idempotentclient.OpenJournal(path, 0); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("got %v", err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeNamedPipe {
		t.Errorf("the pipe became %v, %v", info.Mode(), err)
	}
}

func TestJournalWrittenAnewHasItsModeAndNothingOfOthers(t *testing.T) {
	unsynced(t)
	dir := t.TempDir()
	path, precious := filepath.Join(dir, "journal"), filepath.Join(dir, "precious")
	write(t, path, "")
	must(t, os.Chmod(path, 0o660)) // more than the umask leaves to a new file
	write(t, precious, "precious")
	must(t, os.Symlink(precious, path+".tmp"))
	j := openJournal(t, path)
	key := begin(t, j, "charge tea")
	must(t, os.Symlink(precious, path+".tmp"))
	for i := range 300 {
		name := fmt.Sprint("charge order ", i)
		begin(t, j, name)
		done(t, j, name)
	}
	if text := content(t, precious); text != "precious" {
		t.Errorf("another's file became %q", text)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != 0o660 {
		t.Errorf("the mode became %v, %v", info.Mode(), err)
	}
	if begin(t, reopen(t, j, path), "charge tea") != key {
		t.Error("the key changed")
	}
}

// Until the file that replaces another is there, nothing is lost by going on.
func TestJournalThatCannotBeWrittenAnewGoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := idempotentclient.OpenJournal(path, 0)
	must(t, err)
	defer func() { must(t, j.Close()) }()
	must(t, os.MkdirAll(path+".tmp/in the way", 0o700))
	begin := func(name string) {
		_, err := j.Begin(t.Context(), name)
		must(t, err)
	}
	begin("order 0")
	for range 1000 {
		begin("order 1")
		must(t, j.Done("order 1"))
	}
	large := len(content(t, path))
	must(t, os.RemoveAll(path+".tmp"))
	for range 1000 {
		begin("order 1")
		must(t, j.Done("order 1"))
	}
	if size := len(content(t, path)); size >= large {
		t.Errorf("the file has %d bytes, and had %d before it could be written anew", size, large)
	}
	if pending := j.Pending(); len(pending) != 1 || pending[0].Name != "order 0" {
		t.Errorf("pending is %v", pending)
	}
}

func TestJournalRenamedWhileItIsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := idempotentclient.OpenJournal(path, 0)
	must(t, err)
	defer j.Close()
	defer idempotentclient.SetSync(func(f *os.File) error {
		return errors.Join(f.Sync(), os.Rename(path, path+".old"))
	})()
	if _, err := j.Begin(t.Context(), "order 1"); err == nil {
		t.Error("Begin gave out a key that the next process does not find")
	}
}

// A child that is being started has copies of the files of its parent.
func TestJournalOpensAgainBesideProcessesThatStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	done := make(chan struct{})
	var children sync.WaitGroup
	children.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = exec.Command("true").Run()
			}
		}
	})
	defer children.Wait()
	defer close(done)
	for range 300 {
		j, err := idempotentclient.OpenJournal(path, 0)
		must(t, err)
		must(t, j.Close())
	}
}
