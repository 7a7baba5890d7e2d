package idempotentclient

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// ErrStale is in the chain of the error of a call whose key the server may have
// forgotten, so that it would run the call a second time: one that was begun too
// long ago, or in the future, by a clock that was set back since. Find out
// whether the call took effect, and settle it with Done.
var ErrStale = errors.New("idempotentclient: the server may have forgotten the call's key")

var (
	errInUse   = errors.New("it is in use, and a journal has one writer: stop the other process, or give each a journal of its own")
	errMoved   = errors.New("the file was removed, renamed or replaced while it was open; put it back, for another one does not know its keys")
	errChanged = errors.New("the file was changed by others while it was open; restore it, and open it again")
)

// clocksDiffer is by how much clocks may differ, or be set back.
const clocksDiffer = time.Hour

// DefaultKeyAge is how long a journal resumes a call with its key: an hour less
// than servers keep keys by default, for clocks that differ and for attempts
// that are still to come.
const DefaultKeyAge = wire.DefaultTTL - clocksDiffer

// A PendingCall is a logical call that was begun and is not done.
type PendingCall struct {
	Name  string
	Key   string
	Begun time.Time // by the clock of the journal
}

// Resume returns a context whose call carries the key, or an error with
// [ErrStale] in its chain for a call older than keyAge, which counts as
// [DefaultKeyAge] if it is not positive, and for one begun more than an hour
// after now, whose age nobody knows. It is for journals of other kinds.
func (c PendingCall) Resume(ctx context.Context, now time.Time, keyAge time.Duration) (context.Context, error) {
	if keyAge <= 0 {
		keyAge = DefaultKeyAge
	}
	var when string
	switch age := now.Sub(c.Begun); {
	case age > keyAge:
		when = age.Round(time.Second).String() + " ago"
	case age < -clocksDiffer:
		when = (-age).Round(time.Second).String() + " in the future, so the clock was set back,"
	default:
		return WithKey(ctx, c.Key), nil
	}
	return nil, fmt.Errorf("%w: %q began %s with key %q; find out whether it took effect, then call Done", ErrStale, c.Name, when, c.Key)
}

// A Journal remembers the keys of logical calls in a file, so that a process
// that is killed resumes a call with the key that it began with:
//
//	journal, err := idempotentclient.OpenJournal("charges.journal", 0)
//	...
//	call, err := journal.Begin(ctx, "charge order 17")
//	...
//	if !noted(17) { // looked for after Begin, see below
//		resp, err := client.CreatePaymentWithResponse(call, payment)
//		... // note the final answer where it lasts
//	}
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
// Between Begin and Done a name has one key. After Done it is forgotten, and the
// next Begin makes a new key, with which a request is a second effect. So each
// call takes these steps in this order:
//
//  1. Begin.
//  2. Look whether its final answer is noted. If so, go to 5 and send nothing.
//  3. Send the request.
//  4. Note its final answer where it lasts and where step 2 looks.
//  5. Done.
//
// What was looked for before Begin returned may have been noted since by another
// goroutine, or process, that has called Done, too: then the key is new. A note
// that is found is always true, so a call in Pending that is noted needs only
// Done.
//
// Final are the operation's own answers. No answer is not ([Error]), nor is one
// that can change: 5xx, 429, a key in flight (see [Check]). Leave the call pending
// then, and call again later with the same key, also for [OutcomeUnknown] with
// status 503: the server could not tell yet. [OutcomeUnknown] with status 409
// does not change, nor does [NotReplayable]: look for the effect, note what you
// find, and call Done. For [KeyReused] mend the code: the request was not built of
// what is stored.
//
// A process that is killed between its note and Done finds the call in Pending,
// sees its note, and calls Done. One that is killed before Begin has sent
// nothing, and finds the work where it found it the first time.
//
// # What is promised
//
// When Begin returns, the key survives the process and the machine: file and
// directory were synced, and the path that OpenJournal was given still led to the
// file when the key was written. Once the file was removed, renamed, replaced, or
// changed by others, Begin and Done fail: put it back. A file that is lost or
// emptied loses the keys of its pending calls, and whoever begins these again
// makes them twice. Put it on a local disk.
//
// A crash can tear the last record, whose Begin or Done had not returned: it ends
// before its line break, or has zeros where the disk wrote nothing. OpenJournal
// cuts that off. Over any other damage it fails, and leaves the file as it is.
// Damage that looks as if a crash had done it is not noticed: an end that is cut
// off, or zeros in the last record.
//
// While it is open the file is locked against a second process. To be made
// smaller it is replaced by a new one, whose name ended in ".tmp": so it should
// not be a mount point itself. It grows to three times what is pending and some
// hundred records more, or on, where it cannot be replaced. Systems other than Linux, macOS, the BSDs and Windows
// have no such lock, and there OpenJournal fails.
//
// A Journal is safe for concurrent use; each Begin of a call that is not pending,
// and each Done of one that is, waits for the disk.
type Journal struct {
	path   string // as it was given, but absolute
	target string // where that led, for the file that replaces it
	keyAge time.Duration

	mu        sync.Mutex
	file      *os.File // nil once closed
	size      int64
	records   int    // in the file
	postponed int    // how many it may have before it is written anew, if that failed
	failed    error  // why nothing more can be written
	doubted   string // the name whose Done failed, and may be on disk or not
	pending   map[string]begunCall
	begun     int // calls so far
}

// A begunCall is a pending call, and which one it was.
type begunCall struct {
	PendingCall
	nth int
}

const (
	journalHeader = "oapi-idempotent journal 1\n"

	// compactAfter is how many records of calls that are done stay in the file
	// before it is written anew.
	compactAfter = 250

	// sector is the least that a disk writes at once.
	sector = 512
)

// A journalRecord is one line of the file, behind its checksum.
type journalRecord struct {
	Begin string     `json:"begin,omitempty"` // the name of a call
	Key   string     `json:"key,omitempty"`
	At    *time.Time `json:"at,omitempty"`
	Done  string     `json:"done,omitempty"` // the name of a call
}

// OpenJournal opens the journal in the file, which may be empty, and makes it if
// there is none. It fails at once if another process, or another Journal of this
// one, has it, and for what is no regular file. A relative path is meant from the
// directory that is current now, and a symbolic link is followed. Calls older
// than keyAge are not resumed, see [ErrStale]; give it less than the ttl of the
// operations' x-idempotent, or 0 for [DefaultKeyAge]. Close it in the end; a
// process that is killed leaves no lock behind.
func OpenJournal(path string, keyAge time.Duration) (*Journal, error) {
	j := &Journal{path: path, keyAge: keyAge, pending: map[string]begunCall{}}
	if err := j.open(); err != nil {
		return nil, fmt.Errorf("idempotentclient: opening the journal %s: %w", path, errors.Join(err, j.Close()))
	}
	return j, nil
}

func (j *Journal) open() (err error) {
	if j.path, err = filepath.Abs(j.path); err != nil {
		return err
	}
	// Before it is opened, for that alone can wait for ever, or do something.
	if info, err := os.Stat(j.path); err == nil && !info.Mode().IsRegular() {
		return errors.New("it is no regular file; name another")
	}
	if j.file, err = openLocked(j.path, os.O_CREATE); err != nil {
		return err
	}
	if j.target, err = filepath.EvalSymlinks(j.path); err != nil {
		return err
	}
	data, err := io.ReadAll(j.file)
	if err != nil {
		return err
	}
	j.size = int64(len(data))
	if err := j.check(); err == errMoved {
		return errInUse // its owner was writing it anew
	} else if err != nil {
		return err
	}
	if len(data) == 0 {
		_, err := j.rewrite() // it was made just now, or before a crash
		return err
	}
	return j.read(string(data))
}

// Begin begins the call of this name, or resumes it if it is pending, and
// returns a context whose call carries its key. When it returns, the key is on
// disk. It is a [UUIDv4], whatever the client's [WithGenerator] makes. After an
// error, nothing may be sent. Of two calls of one name at the
// same time both have the one key, and the server answers both with one effect.
//
// After a failed write, such as on a full disk, what is pending is still
// resumed, and anything else fails until the journal is opened again.
func (j *Journal) Begin(ctx context.Context, name string) (context.Context, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if name == "" || !utf8.ValidString(name) {
		return nil, fmt.Errorf("idempotentclient: %q is no name of a call; say which effect is meant, in UTF-8", name)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if call, ok := j.pending[name]; ok && name != j.doubted {
		if err := j.check(); err != nil {
			return nil, fmt.Errorf("idempotentclient: resuming from the journal %s: %w", j.path, err)
		}
		return call.Resume(ctx, time.Now(), j.keyAge)
	}
	key, err := UUIDv4(ctx)
	if err != nil {
		return nil, err
	}
	call := PendingCall{Name: name, Key: key, Begun: time.Now().UTC().Round(0)}
	if err := j.append(beginRecord(call)); err != nil {
		return nil, err
	}
	j.keep(call)
	return WithKey(ctx, key), nil
}

// Done forgets the call of this name. For a name that is not pending it does
// nothing.
func (j *Journal) Done(name string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, ok := j.pending[name]; !ok && j.file != nil {
		return nil
	}
	if err := j.append(journalRecord{Done: name}); err != nil {
		return err
	}
	delete(j.pending, name)
	return nil
}

// Pending returns the calls that were begun, by this process or an earlier one,
// and are not done, in the order of their Begin.
func (j *Journal) Pending() []PendingCall {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.inOrder()
}

// Close lets another process open the journal. What is pending stays so. After
// it Begin and Done fail with [fs.ErrClosed], and Close does nothing.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	file := j.file
	j.file, j.failed = nil, fs.ErrClosed
	if file == nil {
		return nil
	}
	return closeLocked(file)
}

func (j *Journal) keep(call PendingCall) {
	j.begun++
	j.pending[call.Name] = begunCall{call, j.begun}
}

func (j *Journal) inOrder() []PendingCall {
	calls := make([]PendingCall, 0, len(j.pending))
	for _, call := range slices.SortedFunc(maps.Values(j.pending), func(a, b begunCall) int { return cmp.Compare(a.nth, b.nth) }) {
		calls = append(calls, call.PendingCall)
	}
	return calls
}

func beginRecord(c PendingCall) journalRecord {
	return journalRecord{Begin: c.Name, Key: c.Key, At: &c.Begun}
}

// fsync is what makes a file, or the names in a directory, durable: a variable,
// so that a test can be the disk.
var fsync = (*os.File).Sync

// check fails unless the path names the file that is open, as it was left here:
// the next process looks for the keys there.
func (j *Journal) check() error {
	if j.file == nil {
		return j.failed
	}
	open, err := j.file.Stat()
	if err != nil {
		return err
	}
	named, err := os.Stat(j.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil || !os.SameFile(open, named) {
		return errMoved
	}
	if j.failed == nil && open.Size() != j.size {
		return errChanged
	}
	return nil
}

// append makes a record durable. After a failure nobody knows what the file
// holds, so nothing more is written to it: opening it again finds out.
func (j *Journal) append(r journalRecord) error {
	if j.failed == nil {
		if err := j.check(); err != nil {
			return fmt.Errorf("idempotentclient: writing the journal %s: %w", j.path, err)
		}
		if j.failed = j.write(r); j.failed == nil {
			j.failed = j.check() // it may have been renamed in the meantime
		}
		if j.failed != nil {
			j.doubted = r.Done
		}
	}
	if j.failed != nil {
		return fmt.Errorf("idempotentclient: writing the journal %s: %w; open it again", j.path, j.failed)
	}
	return nil
}

func (j *Journal) write(r journalRecord) error {
	if j.records > max(compactAfter+2*len(j.pending), j.postponed) {
		replaced, err := j.rewrite()
		if replaced && err != nil {
			return err
		}
		if err != nil { // the file is as it was, and may grow
			j.postponed = 2 * j.records
		}
	}
	line := encodeRecord(r)
	_, err := j.file.WriteAt(line, j.size)
	if err == nil {
		err = fsync(j.file)
	}
	if e, ok := err.(*fs.PathError); ok {
		err = e.Err // without the name that the file had before it replaced another
	}
	j.size += int64(len(line))
	j.records++
	return err
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

// read reads the content of the file, and cuts off a record that was torn.
func (j *Journal) read(text string) error {
	text, ok := strings.CutPrefix(text, journalHeader)
	if !ok {
		return errors.New("this file is no journal, or a newer version's; name another")
	}
	last, end := journalHeader, int64(len(journalHeader))
	for text != "" {
		line, rest, ended := strings.Cut(text, "\n")
		if !ended {
			line = strings.TrimRight(line, "\x00") // whole but for its line break, it is as good
		}
		r, ok := decodeRecord(line)
		if !ok && rest == "" && torn(text) {
			break
		}
		if ok {
			ok = j.replay(r)
		}
		if !ok {
			return fmt.Errorf("line %d is damaged; restore the file, or find out which of its calls took effect and remove it", j.records+2)
		}
		last, text = line+"\n", rest
		end += int64(len(last))
		j.records++
	}
	if j.size > end {
		if err := j.file.Truncate(end); err != nil {
			return err
		}
	}
	// Whoever wrote the last record may have been killed before it was durable,
	// or have been told by the disk that it failed: then it must be written
	// again, for a system may take for durable what it failed to write once.
	if _, err := j.file.WriteAt([]byte(last), end-int64(len(last))); err != nil {
		return err
	}
	j.size = end
	return errors.Join(fsync(j.file), syncDir(filepath.Dir(j.target)))
}

// replay does once more what a record stands for, unless no journal has it in
// this place.
func (j *Journal) replay(r journalRecord) bool {
	name, begins := cmp.Or(r.Done, r.Begin), r.Done == ""
	if _, pending := j.pending[name]; pending == begins {
		return false
	}
	if begins {
		j.keep(PendingCall{Name: name, Key: r.Key, Begun: *r.At})
	} else {
		delete(j.pending, name)
	}
	return true
}

// torn reports whether a crash can have left this end of a file: a part of one
// record, and zeros for sectors that were not written. A damaged record is
// nothing of the kind, nor are two of which the line break between is damaged.
func torn(end string) bool {
	if _, text, ok := strings.Cut(end, " "); ok {
		var record json.RawMessage
		decoder := json.NewDecoder(strings.NewReader(text))
		if decoder.Decode(&record) == nil {
			if _, whole := decodeRecord(end[:int64(len(end)-len(text))+decoder.InputOffset()]); whole {
				return false
			}
		}
	}
	return !strings.HasSuffix(end, "\n") || end[0] == 0 || strings.Contains(end, strings.Repeat("\x00", sector))
}

// rewrite replaces the file by one that holds the pending calls, at every moment
// whole. It reports whether the file is no longer the one that it was.
func (j *Journal) rewrite() (replaced bool, err error) {
	var content bytes.Buffer
	content.WriteString(journalHeader)
	for _, call := range j.inOrder() {
		content.Write(encodeRecord(beginRecord(call)))
	}
	info, err := j.file.Stat()
	if err != nil {
		return false, err
	}
	temporary := j.target + ".tmp"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) { // a crash left it
		return false, err
	}
	next, err := openLocked(temporary, os.O_CREATE|os.O_EXCL)
	if err != nil {
		return false, err
	}
	_, err = next.Write(content.Bytes())
	if err == nil {
		err = errors.Join(next.Chmod(info.Mode().Perm()), fsync(next))
	}
	if err != nil {
		return false, errors.Join(err, next.Close(), os.Remove(temporary))
	}
	old := j.file
	if j.file, err = replace(old, next, j.target); err != nil {
		return j.file != old, err
	}
	j.size, j.records, j.postponed = int64(content.Len()), len(j.pending), 0
	return true, errors.Join(syncDir(filepath.Dir(j.target)), j.check())
}
