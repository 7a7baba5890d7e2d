package idempotentclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// ErrStale is in the chain of the error of a call that was begun so long ago
// that the server may have forgotten its key and would run it a second time. Ask
// the server whether the call took effect, and settle it with Done.
var ErrStale = errors.New("idempotentclient: the call was begun longer ago than its key is good for")

var errInUse = errors.New("it is in use, and a journal has one writer: stop the other process, or give each a journal of its own")

// DefaultKeyAge is how long a journal resumes a call with its key: an hour less
// than servers keep keys by default, for clocks that differ and for attempts
// that are still to come.
const DefaultKeyAge = wire.DefaultTTL - time.Hour

// A PendingCall is a logical call that was begun and is not done.
type PendingCall struct {
	Name  string
	Key   string
	Begun time.Time // by the clock of the journal
}

// Resume returns a context whose call carries the key, or an error with
// [ErrStale] in its chain for a call older than keyAge, which counts as
// [DefaultKeyAge] if it is not positive. It is for journals of other kinds.
func (c PendingCall) Resume(ctx context.Context, now time.Time, keyAge time.Duration) (context.Context, error) {
	if keyAge <= 0 {
		keyAge = DefaultKeyAge
	}
	if age := now.Sub(c.Begun); age > keyAge {
		return nil, fmt.Errorf("%w: %q began %v ago with key %q; find out whether it took effect, then call Done", ErrStale, c.Name, age.Round(time.Second), c.Key)
	}
	return WithKey(ctx, c.Key), nil
}

// A Journal remembers the keys of logical calls in a file, so that a process
// that is killed resumes a call with the key that it began with:
//
//	journal, err := idempotentclient.OpenJournal("charges.journal", 0)
//	...
//	call, err := journal.Begin(ctx, "charge order 17")
//	...
//	resp, err := client.CreatePaymentWithResponse(call, payment)
//	... // note the final answer where it lasts
//	err = journal.Done("charge order 17")
//
// # Names
//
// A name says which effect is meant, in words that the restarted process finds
// again in what it has stored: "charge order 17", not "charge 17.50 EUR" nor
// "call 3". Two effects never share a name. The request, too, must be built of
// what is stored, for a server refuses another body with the same key.
//
// # When a call is done
//
// Between Begin and Done a name has one key. After Done it is forgotten, and
// Begin would make a new key and so a second effect. So call Done when both are
// true: the answer is final, and it has been noted where the process looks
// before it begins calls. Final are the operation's own answers. No answer is
// not ([Error]), nor is one that can change: 5xx, 429, a key in flight (see
// [Check]); leave these pending and call again later. For [NotReplayable] and
// [OutcomeUnknown] look for the effect, note what you find, and call Done; for
// [KeyReused] mend the code: the request was not built of what is stored.
//
// A process that is killed between its note and Done finds the call in Pending,
// sees its note, and calls Done. One that is killed before Begin has sent
// nothing, and finds the work where it found it the first time.
//
// # What is promised
//
// When Begin returns, the key survives the process and the machine: file and
// directory were synced. A record that was torn by a crash is one that Begin had
// not returned, and is dropped; other damage makes OpenJournal fail rather than
// forget a key. A file that is lost loses the keys of its pending calls, and
// whoever begins these again makes them twice. Put it on a local disk: it is
// locked with the file beside it, whose name ends in ".lock", against a second
// process. Systems other than Linux, macOS, the BSDs and Windows have no such
// lock, and there OpenJournal fails.
//
// The file holds what is pending, and some hundred records more at most. A
// Journal is safe for concurrent use; each Begin and Done waits for the disk.
type Journal struct {
	path   string
	keyAge time.Duration
	lock   *os.File

	mu      sync.Mutex
	file    *os.File
	failed  error         // why nothing more can be written
	pending []PendingCall // in the order of their Begin
	records int           // in the file
}

const (
	journalHeader = "oapi-idempotent journal 1\n"

	// compactAfter is how many records of calls that are done stay in the file
	// before it is written anew.
	compactAfter = 250
)

// A journalRecord is one line of the file, behind its checksum.
type journalRecord struct {
	Begin string     `json:"begin,omitempty"` // the name of a call
	Key   string     `json:"key,omitempty"`
	At    *time.Time `json:"at,omitempty"`
	Done  string     `json:"done,omitempty"` // the name of a call
}

// OpenJournal opens the journal in the file, and makes it if there is none. It
// fails at once if another process, or another Journal of this one, has it.
// Calls older than keyAge are not resumed, see [ErrStale]; give it less than the
// ttl of the operations' x-idempotent, or 0 for [DefaultKeyAge]. Close it in the
// end; a process that is killed leaves no lock behind.
func OpenJournal(path string, keyAge time.Duration) (*Journal, error) {
	fail := func(err error) (*Journal, error) {
		return nil, fmt.Errorf("idempotentclient: opening the journal %s: %w", path, err)
	}
	// By another name it is the same journal, with the same lock.
	switch target, err := filepath.EvalSymlinks(path); {
	case err == nil:
		path = target
	case !errors.Is(err, fs.ErrNotExist):
		return fail(err)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return fail(err)
	}
	j := &Journal{path: path, keyAge: keyAge, lock: lock}
	if err = j.read(); err == nil {
		err = j.rewrite()
	}
	if err != nil {
		return fail(errors.Join(err, j.Close()))
	}
	return j, nil
}

// Begin begins the call of this name, or resumes it if it is pending, and
// returns a context whose call carries its key. When it returns, the key is on
// disk. After an error, nothing may be sent. Of two calls of one name at the
// same time both have the one key, and the server answers both with one effect.
func (j *Journal) Begin(ctx context.Context, name string) (context.Context, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if name == "" || !utf8.ValidString(name) {
		return nil, fmt.Errorf("idempotentclient: %q is no name of a call; say which effect is meant, in UTF-8", name)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if i := j.find(name); i >= 0 {
		return j.pending[i].Resume(ctx, time.Now(), j.keyAge)
	}
	key, err := UUIDv4(ctx)
	if err != nil {
		return nil, err
	}
	call := PendingCall{Name: name, Key: key, Begun: time.Now().UTC().Round(0)}
	if err := j.append(beginRecord(call)); err != nil {
		return nil, err
	}
	j.pending = append(j.pending, call)
	return WithKey(ctx, key), nil
}

// Done forgets the call of this name. For a name that is not pending it does
// nothing.
func (j *Journal) Done(name string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	i := j.find(name)
	if i < 0 {
		return nil
	}
	if err := j.append(journalRecord{Done: name}); err != nil {
		return err
	}
	j.pending = slices.Delete(j.pending, i, i+1)
	return nil
}

// Pending returns the calls that were begun, by this process or an earlier one,
// and are not done, in the order of their Begin.
func (j *Journal) Pending() []PendingCall {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.pending)
}

// Close lets another process open the journal. What is pending stays so.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	var err error
	if j.file != nil {
		err = j.file.Close()
	}
	j.file, j.failed = nil, fs.ErrClosed
	return errors.Join(err, j.lock.Close())
}

func (j *Journal) find(name string) int {
	return slices.IndexFunc(j.pending, func(c PendingCall) bool { return c.Name == name })
}

func beginRecord(c PendingCall) journalRecord {
	return journalRecord{Begin: c.Name, Key: c.Key, At: &c.Begun}
}

// fsync is what makes a file, or the names in a directory, durable: a variable,
// so that a test can be the disk.
var fsync = (*os.File).Sync

// append makes a record durable. After a failure nobody knows what the file
// holds, so nothing more is written to it: opening it again finds out.
func (j *Journal) append(r journalRecord) error {
	if j.failed == nil && j.records > compactAfter+2*len(j.pending) {
		j.failed = j.rewrite()
	}
	if j.failed == nil {
		_, err := j.file.Write(encodeRecord(r))
		j.failed = errors.Join(err, fsync(j.file))
		j.records++
	}
	if j.failed != nil {
		return fmt.Errorf("idempotentclient: writing the journal %s: %w; open it again", j.path, j.failed)
	}
	return nil
}

var checksums = crc32.MakeTable(crc32.Castagnoli)

func encodeRecord(r journalRecord) []byte {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and a time of this century
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.Checksum(text, checksums), text)
}

func decodeRecord(line string) (r journalRecord, ok bool) {
	sum, text, _ := strings.Cut(line, " ")
	if sum != fmt.Sprintf("%08x", crc32.Checksum([]byte(text), checksums)) || json.Unmarshal([]byte(text), &r) != nil {
		return journalRecord{}, false
	}
	return r, r.Done != "" || r.Begin != "" && r.Key != "" && r.At != nil
}

// read reads the file, if there is one.
func (j *Journal) read() error {
	data, err := os.ReadFile(j.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(data) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	text, ok := strings.CutPrefix(string(data), journalHeader)
	if !ok {
		return errors.New("this file is no journal, or a newer version's; name another")
	}
	lines := strings.SplitAfter(text, "\n")
	for i, line := range lines[:len(lines)-1] { // what follows the last line break is torn, or nothing
		r, ok := decodeRecord(strings.TrimSuffix(line, "\n"))
		if !ok && i == len(lines)-2 && lines[i+1] == "" {
			return nil // torn, though its end was written
		}
		if !ok {
			return fmt.Errorf("line %d is damaged; restore the file, or find out which of its calls took effect and remove it", i+2)
		}
		if r.Done == "" {
			j.pending = append(j.pending, PendingCall{Name: r.Begin, Key: r.Key, Begun: *r.At})
		} else if i := j.find(r.Done); i >= 0 {
			j.pending = slices.Delete(j.pending, i, i+1)
		}
	}
	return nil
}

// rewrite replaces the file by one that holds the pending calls, at every moment
// whole, and opens it.
func (j *Journal) rewrite() error {
	var content bytes.Buffer
	content.WriteString(journalHeader)
	for _, call := range j.pending {
		content.Write(encodeRecord(beginRecord(call)))
	}
	temporary := j.path + ".tmp"
	err := writeSynced(temporary, content.Bytes())
	if err == nil && j.file != nil {
		err = j.file.Close() // Windows replaces no file that is open
		j.file = nil
	}
	if err == nil {
		err = os.Rename(temporary, j.path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(j.path))
	}
	if err == nil {
		j.file, err = os.OpenFile(j.path, os.O_WRONLY|os.O_APPEND, 0)
	}
	j.records = len(j.pending)
	return err
}

func writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, fsync(f), f.Close())
}
