package idempotentclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

func openJournal(t *testing.T, path string) *idempotentclient.Journal {
	t.Helper()
	j, err := idempotentclient.OpenJournal(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() }) // most tests have closed it
	return j
}

// begin begins a call, makes it, and returns the key that the server saw.
func begin(t *testing.T, j *idempotentclient.Journal, name string) string {
	t.Helper()
	call, err := j.Begin(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return sentKey(t, call)
}

func sentKey(t *testing.T, call context.Context) string {
	t.Helper()
	server := &memory{answers: []http.HandlerFunc{answer(201)}}
	c := api{Server: "http://orders", Client: server}
	resp, err := c.CreateOrder(call, "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return server.oneKey(t, 1, "order")
}

func done(t *testing.T, j *idempotentclient.Journal, name string) {
	t.Helper()
	if err := j.Done(name); err != nil {
		t.Fatal(err)
	}
}

func reopen(t *testing.T, j *idempotentclient.Journal, path string) *idempotentclient.Journal {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	return openJournal(t, path)
}

func pendingNames(j *idempotentclient.Journal) string {
	var names []string
	for _, call := range j.Pending() {
		names = append(names, call.Name)
	}
	return strings.Join(names, ", ")
}

// unsynced is for tests that write much, and whose machine does not fail.
func unsynced(t *testing.T) {
	t.Cleanup(idempotentclient.SetSync(func(*os.File) error { return nil }))
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestJournalKeepsTheKeyOfANameUntilItIsDone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	tea, coffee := begin(t, j, "charge tea"), begin(t, j, "charge coffee ☕\n\"2\"")
	if tea == coffee {
		t.Fatal("two calls have one key")
	}
	for range 2 {
		if key := begin(t, j, "charge tea"); key != tea {
			t.Fatalf("the key became %s, was %s", key, tea)
		}
		j = reopen(t, j, path)
		if key := begin(t, j, "charge coffee ☕\n\"2\""); key != coffee {
			t.Fatalf("the key became %s, was %s", key, coffee)
		}
	}
	calls := j.Pending()
	if len(calls) != 2 || calls[0].Name != "charge tea" || calls[0].Key != tea || time.Since(calls[0].Begun) > time.Minute || calls[1].Key != coffee {
		t.Fatalf("pending are %+v", calls)
	}

	done(t, j, "charge tea")
	done(t, j, "charge tea") // what is done stays done
	done(t, j, "never begun")
	j = reopen(t, j, path)
	if names := pendingNames(j); names != "charge coffee ☕\n\"2\"" {
		t.Fatalf("pending are %q", names)
	}
	if key := begin(t, j, "charge tea"); key == tea {
		t.Fatal("a call begun after Done has the key of the one before")
	}
}

func TestJournalRefusesNamesItCannotKeep(t *testing.T) {
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	for _, name := range []string{"", "charge \xff"} {
		if _, err := j.Begin(t.Context(), name); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := j.Begin(ended, "charge tea"); !errors.Is(err, context.Canceled) {
		t.Errorf("a call was begun after its context ended: %v", err)
	}
	if calls := j.Pending(); len(calls) > 0 {
		t.Errorf("pending are %+v", calls)
	}
}

func TestJournalDoesNotResumeWhatTheServerMayHaveForgotten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := idempotentclient.OpenJournal(path, time.Nanosecond)
	if err != nil {
		t.Fatal(err)
	}
	key := begin(t, j, "charge tea")
	if _, err := j.Begin(t.Context(), "charge tea"); !errors.Is(err, idempotentclient.ErrStale) || !strings.Contains(err.Error(), key) {
		t.Fatalf("got %v", err)
	}
	done(t, j, "charge tea")
	begin(t, j, "charge tea")
	j = reopen(t, j, path)
	begin(t, j, "charge tea")

	now := time.Now()
	for age, stale := range map[time.Duration]string{
		-time.Hour - time.Second:   "1h0m1s in the future, so the clock was set back",
		-time.Hour:                 "",
		23 * time.Hour:             "",
		23*time.Hour + time.Second: "23h0m1s ago",
	} {
		call := idempotentclient.PendingCall{Name: "charge tea", Key: "key", Begun: now.Add(-age)}
		_, err := call.Resume(t.Context(), now, 0)
		if errors.Is(err, idempotentclient.ErrStale) != (stale != "") || err != nil && !strings.Contains(err.Error(), stale) {
			t.Errorf("after %v: %v", age, err)
		}
	}
}

func TestJournalIsForOneWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	key := begin(t, j, "charge tea")
	if _, err := idempotentclient.OpenJournal(path, 0); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatalf("a second journal in one file: %v", err)
	}
	if again := begin(t, j, "charge tea"); again != key {
		t.Fatal("whoever was locked out changed the key")
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"charge tea", "charge coffee"} { // pending, and not
		if _, err := j.Begin(t.Context(), name); !errors.Is(err, os.ErrClosed) {
			t.Errorf("a closed journal began a call: %v", err)
		}
		if err := j.Done(name); !errors.Is(err, os.ErrClosed) {
			t.Errorf("a closed journal forgot a call: %v", err)
		}
	}
	if err := j.Close(); err != nil {
		t.Errorf("closing it again: %v", err)
	}
	if names := pendingNames(openJournal(t, path)); names != "charge tea" {
		t.Fatalf("pending are %q", names)
	}
}

// However far a crash let the last record get, what was begun before is there.
func TestJournalToleratesATornLastRecord(t *testing.T) {
	unsynced(t)
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	tea := begin(t, j, "charge tea")
	before := content(t, path)
	name := strings.Repeat("coffee ", 200)
	coffee := begin(t, j, name)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	whole := content(t, path)
	zeros := strings.Repeat("\x00", len(whole))
	states := []string{
		before + zeros[:len(whole)-len(before)-1] + "\n", // only the last sector was written
		before + zeros[:512-len(before)] + whole[512:],   // all but the first
		whole[:512] + zeros[:512] + whole[1024:],         // all but one in the middle
		whole + zeros[:3],
	}
	for size := len(before); size < len(whole); size++ {
		states = append(states, whole[:size])
		if size%50 == 0 || size > len(whole)-3 {
			states = append(states, whole[:size]+zeros[size:]) // all but the last
		}
	}
	for _, state := range states {
		write(t, path, state)
		want := "charge tea"
		if strings.HasPrefix(state, whole[:len(whole)-1]) {
			want += ", " + name // but for its line break it is there
		}
		j := openJournal(t, path)
		if names := pendingNames(j); names != want {
			t.Fatalf("of %d bytes pending are %q", len(state), names)
		}
		if key := begin(t, j, "charge tea"); key != tea {
			t.Fatal("the key changed")
		}
		if key := begin(t, j, name); want != "charge tea" && key != coffee {
			t.Fatal("the key of a record without its line break changed")
		}
		done(t, j, name)
		done(t, j, "charge tea") // what comes after a torn record is read again
		begin(t, j, "charge milk")
		j = reopen(t, j, path)
		if names := pendingNames(j); names != "charge milk" {
			t.Fatalf("of %d bytes, later, pending are %q", len(state), names)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A key that is forgotten is an effect that comes twice.
func TestJournalForgetsNoKeyOverADamagedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	begin(t, j, "charge tea")
	begin(t, j, "charge coffee")
	begin(t, j, "charge order 17@home")
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	whole := content(t, path)
	refused := func(what, damaged, want string) {
		t.Helper()
		write(t, path, damaged)
		j, err := idempotentclient.OpenJournal(path, 0)
		if err == nil {
			t.Errorf("%s: opened, pending are %q", what, pendingNames(j))
			_ = j.Close()
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: want an error with %q, got %v", what, want, err)
		}
		if content(t, path) != damaged {
			t.Errorf("%s: the file was changed", what)
		}
	}
	for i := range whole {
		for bit := range 8 {
			damaged := []byte(whole)
			damaged[i] ^= 1 << bit
			refused(fmt.Sprintf("bit %d of byte %d", bit, i), string(damaged), "")
		}
	}
	lines := strings.SplitAfter(whole, "\n")
	refused("another name", strings.Replace(whole, "charge tea", "charge tee", 1), "line 2 is damaged")
	refused("another name in the end", strings.Replace(whole, "charge order", "charge 0rder", 1), "line 4 is damaged")
	refused("no line breaks, and torn", lines[0]+lines[1]+strings.TrimSuffix(lines[2], "\n")+lines[3][:40], "line 3 is damaged")
	refused("a line twice", whole+lines[1], "line 5 is damaged")
	refused("no journal", "a shopping list\n", "no journal")
	// Whoever mends it can open it: what fails leaves no lock.
	write(t, path, whole)
	if names := pendingNames(openJournal(t, path)); names != "charge tea, charge coffee, charge order 17@home" {
		t.Errorf("pending are %q", names)
	}
}

func TestJournalTakesAnEmptyFileAndNoDirectory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	begin(t, openJournal(t, path), "charge tea")
	if _, err := idempotentclient.OpenJournal(filepath.Join(path, "journal"), 0); err == nil {
		t.Error("a file was taken for a directory")
	}
	if _, err := idempotentclient.OpenJournal(filepath.Dir(path), 0); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("a directory was taken for a file: %v", err)
	}
}

func TestJournalFileDoesNotGrow(t *testing.T) {
	unsynced(t)
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	key := begin(t, j, "charge tea")
	var largest int64
	for i := range 300 {
		name := fmt.Sprint("charge order ", i)
		if _, err := j.Begin(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		done(t, j, name)
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		largest = max(largest, info.Size())
	}
	if largest > 60_000 {
		t.Errorf("the file grew to %d bytes", largest)
	}
	j = reopen(t, j, path)
	if again := begin(t, j, "charge tea"); again != key {
		t.Error("the key changed")
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("beside the journal are files: %v, %v", entries, err)
	}
}

func TestJournalKeepsTheOrderOfBegin(t *testing.T) {
	unsynced(t)
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	var want []string
	for i := range 400 { // often enough for the file to be written anew
		name := fmt.Sprint("charge order ", i)
		begin(t, j, name)
		if i%7 == 0 {
			want = append(want, name)
		} else {
			done(t, j, name)
		}
	}
	for range 2 {
		if names := pendingNames(j); names != strings.Join(want, ", ") {
			t.Fatalf("pending are %q", names)
		}
		j = reopen(t, j, path)
	}
}

func TestJournalIsForManyGoroutines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	keys := make([]string, 40)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() { keys[i] = begin(t, j, fmt.Sprint("charge ", i/4)) })
	}
	wg.Wait()
	distinct := map[string]bool{}
	for i, key := range keys {
		if key != keys[i/4*4] {
			t.Errorf("call %d has two keys", i/4)
		}
		distinct[key] = true
	}
	if len(distinct) != 10 || len(reopen(t, j, path).Pending()) != 10 {
		t.Errorf("10 calls have %d keys", len(distinct))
	}
}

// After a write that failed nobody knows what the file holds: no key is given
// out that may not be in it, and one that is in it still is.
func TestJournalGivesOutNoKeyThatIsNotOnDisk(t *testing.T) {
	full := errors.New("no space left on device")
	for _, breaks := range []func(j *idempotentclient.Journal) error{
		func(j *idempotentclient.Journal) error { _, err := j.Begin(t.Context(), "charge milk"); return err },
		func(j *idempotentclient.Journal) error { return j.Done("charge coffee") },
	} {
		path := filepath.Join(t.TempDir(), "journal")
		j := openJournal(t, path)
		tea := begin(t, j, "charge tea")
		begin(t, j, "charge coffee")
		restore := idempotentclient.SetSync(func(*os.File) error { return full })
		err := breaks(j)
		restore()
		if !errors.Is(err, full) || !strings.Contains(err.Error(), "open it again") {
			t.Fatalf("got %v", err)
		}
		if _, err := j.Begin(t.Context(), "charge milk"); !errors.Is(err, full) {
			t.Errorf("a call was begun after a write failed: %v", err)
		}
		if err := j.Done("charge coffee"); !errors.Is(err, full) {
			t.Errorf("a call was done after a write failed: %v", err)
		}
		if key := begin(t, j, "charge tea"); key != tea {
			t.Error("what was on disk is not resumed")
		}
		j = reopen(t, j, path)
		if key := begin(t, j, "charge tea"); key != tea {
			t.Error("what was on disk is not there when it is opened again")
		}
		begin(t, j, "charge milk")
	}
}

// The call whose Done failed may be off the disk: its key is not given out again.
func TestJournalDoesNotResumeACallWhoseDoneFailed(t *testing.T) {
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	begin(t, j, "charge tea")
	full := errors.New("no space left on device")
	t.Cleanup(idempotentclient.SetSync(func(*os.File) error { return full }))
	if err := j.Done("charge tea"); !errors.Is(err, full) {
		t.Fatalf("got %v", err)
	}
	if _, err := j.Begin(t.Context(), "charge tea"); !errors.Is(err, full) {
		t.Errorf("it was resumed: %v", err)
	}
}

// Where no new file can be made, as on a full disk, the one that is there is
// opened, and what is pending resumed.
func TestJournalIsOpenedInPlace(t *testing.T) {
	unsynced(t)
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	key := begin(t, j, "charge tea")
	if err := os.MkdirAll(filepath.Join(path+".tmp", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, path, content(t, path)+"0123") // torn
	j = openJournal(t, path)
	for range 2 {
		if again := begin(t, j, "charge tea"); again != key {
			t.Fatalf("the key became %s, was %s", again, key)
		}
		j = reopen(t, j, path)
	}
}

// A relative path means the file that it meant when the journal was opened.
func TestJournalStaysWhereItWasOpened(t *testing.T) {
	unsynced(t)
	first, second := t.TempDir(), t.TempDir()
	t.Chdir(first)
	j := openJournal(t, "journal")
	t.Chdir(second)
	key := begin(t, j, "charge tea")
	for i := range 300 { // so that the file is written anew
		name := fmt.Sprint("charge order ", i)
		begin(t, j, name)
		done(t, j, name)
	}
	if entries, err := os.ReadDir(second); err != nil || len(entries) > 0 {
		t.Errorf("in the other directory are %v, %v", entries, err)
	}
	if again := begin(t, reopen(t, j, filepath.Join(first, "journal")), "charge tea"); again != key {
		t.Error("the key changed")
	}
}

// Two that follow the steps of the documentation have one effect, whenever one
// overtakes the other.
func TestJournalOfTwoThatMakeOneCall(t *testing.T) {
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	var mu sync.Mutex
	noted, effects := map[string]bool{}, map[string]map[string]bool{} // for each order the keys that were sent
	client := api{Server: "http://orders", Client: doerFunc(func(r *http.Request) (*http.Response, error) {
		order, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		if effects[string(order)] == nil {
			effects[string(order)] = map[string]bool{}
		}
		effects[string(order)][r.Header.Get("Idempotency-Key")] = true
		return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
	})}
	charge := func(order string, reached func(step int)) error {
		reached(1)
		call, err := j.Begin(t.Context(), order)
		if err != nil {
			return err
		}
		reached(2)
		mu.Lock()
		charged := noted[order]
		mu.Unlock()
		if !charged {
			reached(3)
			resp, err := client.CreateOrder(call, "", strings.NewReader(order))
			if err != nil {
				return err
			}
			resp.Body.Close()
			reached(4)
			mu.Lock()
			noted[order] = true
			mu.Unlock()
		}
		reached(5)
		return j.Done(order)
	}
	goOn := func(int) {}
	for overtaken := range 6 {
		order := fmt.Sprint("overtaken before step ", overtaken)
		if err := charge(order, func(step int) {
			if step != overtaken {
				return
			}
			overtaker := make(chan error)
			go func() { overtaker <- charge(order, goOn) }()
			if err := <-overtaker; err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Error(err)
		}
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := range 100 {
				if err := charge(fmt.Sprint("order ", i), goOn); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for order, keys := range effects {
		if len(keys) != 1 {
			t.Errorf("%s: %d effects", order, len(keys))
		}
	}
	if len(effects) != 106 || len(j.Pending()) > 0 {
		t.Errorf("%d orders have effects, pending are %v", len(effects), j.Pending())
	}
}
