package idempotentclient_test

import (
	"context"
	"errors"
	"fmt"
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
	for age, stale := range map[time.Duration]bool{-time.Hour: false, 23 * time.Hour: false, 23*time.Hour + time.Second: true} {
		call := idempotentclient.PendingCall{Name: "charge tea", Key: "key", Begun: now.Add(-age)}
		if _, err := call.Resume(t.Context(), now, 0); errors.Is(err, idempotentclient.ErrStale) != stale {
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
	if _, err := j.Begin(t.Context(), "charge coffee"); !errors.Is(err, os.ErrClosed) {
		t.Fatalf("a closed journal began a call: %v", err)
	}
	if err := j.Done("charge tea"); !errors.Is(err, os.ErrClosed) {
		t.Fatalf("a closed journal forgot a call: %v", err)
	}
	if names := pendingNames(openJournal(t, path)); names != "charge tea" {
		t.Fatalf("pending are %q", names)
	}
}

// However far a crash let the last record get, what was begun before is there.
func TestJournalToleratesATornLastRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	tea := begin(t, j, "charge tea")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, j, "charge coffee")
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lost := append([]byte(nil), whole...)
	clear(lost[len(before) : len(lost)-1]) // the file system kept the end alone
	states := [][]byte{lost}
	for size := len(before); size < len(whole); size += 9 {
		states = append(states, whole[:size])
	}
	for _, state := range states {
		if err := os.WriteFile(path, state, 0o600); err != nil {
			t.Fatal(err)
		}
		j := openJournal(t, path)
		if names := pendingNames(j); names != "charge tea" {
			t.Fatalf("of %d bytes pending are %q", len(state), names)
		}
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
	if err := os.WriteFile(path, before, 0o600); err != nil {
		t.Fatal(err)
	}
	if key := begin(t, openJournal(t, path), "charge tea"); key != tea {
		t.Fatal("the key changed")
	}
}

// A key that is forgotten is an effect that comes twice.
func TestJournalForgetsNoKeyOverADamagedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := openJournal(t, path)
	begin(t, j, "charge tea")
	begin(t, j, "charge coffee")
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, damaged := range map[string]string{
		"line 2 is damaged": strings.Replace(string(whole), "charge tea", "charge tee", 1),
		"no journal":        "a shopping list\n",
	} {
		if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := idempotentclient.OpenJournal(path, 0); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("want an error with %q, got %v", name, err)
		}
		if left, err := os.ReadFile(path); err != nil || string(left) != damaged {
			t.Errorf("the file was changed to %q, %v", left, err)
		}
	}
	// Whoever mends it can open it: what fails leaves no lock.
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if names := pendingNames(openJournal(t, path)); names != "charge tea, charge coffee" {
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
}

func TestJournalFileDoesNotGrow(t *testing.T) {
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
	if info, err := os.Stat(path); err != nil || info.Size() > 1000 {
		t.Errorf("of one pending call the opened file has %d bytes, %v", info.Size(), err)
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
// out that may not be in it.
func TestJournalGivesOutNoKeyThatIsNotOnDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	j := openJournal(t, filepath.Join(dir, "journal"))
	begin(t, j, "charge tea")
	if err := os.RemoveAll(dir); err != nil { // so that it cannot be written anew
		t.Fatal(err)
	}
	var failed error
	for i := 0; failed == nil && i < 1000; i++ {
		name := fmt.Sprint("charge order ", i)
		if _, failed = j.Begin(t.Context(), name); failed == nil {
			failed = j.Done(name)
		}
	}
	if !errors.Is(failed, os.ErrNotExist) || !strings.Contains(failed.Error(), "open it again") {
		t.Fatalf("got %v", failed)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Begin(t.Context(), "charge coffee"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a call was begun after a write failed: %v", err)
	}
	if begin(t, j, "charge tea") == "" {
		t.Error("what was on disk is not resumed")
	}
}
