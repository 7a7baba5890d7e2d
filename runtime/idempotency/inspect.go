package idempotency

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// An Inspector shows the keys of a store to operators, and lets them settle what
// no request settles any more. It is safe for concurrent use, also beside
// servers. An error means that the infrastructure failed; that a row changed
// meanwhile is a result.
type Inspector interface {
	// List returns what matches f, the oldest claim first, without recorded
	// header fields and bodies.
	List(ctx context.Context, f Filter) ([]Entry, error)

	// Find returns at most two of the entries whose key hash begins with these
	// hexadecimal digits: none, the one that is meant, or the proof that the
	// digits are too few. Anything but 1 to 64 such digits is an error.
	Find(ctx context.Context, hash string) ([]Entry, error)

	// Settle gives the key that was seen the outcome o, which lasts for ttl from
	// now, and Forget deletes it, so that the next request with the key runs.
	// They report false, and write nothing, when the row does not hold the claim
	// and the state that were seen, or when its lease holds, by the store's
	// clock, and force is not given. A run in flight that is overruled by force
	// learns of it as of a lost lease.
	Settle(ctx context.Context, seen *Entry, o Outcome, ttl time.Duration, force bool) (bool, error)
	Forget(ctx context.Context, seen *Entry, force bool) (bool, error)

	// Tally counts all keys by operation and condition.
	Tally(ctx context.Context) ([]Tally, error)
}

// A Condition is what the state of a key means now, by the store's clock.
type Condition string

const (
	ConditionInFlight Condition = "in-flight" // a run holds the lease
	// ConditionStuck is a run whose lease has ended. The next request takes
	// over, unless the key is at-most-once.
	ConditionStuck Condition = "stuck"
	// ConditionUnknown is a run of which it is recorded that nobody knows how it
	// ended. As a filter it matches what is stuck and at-most-once too, since
	// requests get the same answer.
	ConditionUnknown       Condition = "unknown"
	ConditionCompleted     Condition = "completed"      // the recorded answer is replayed
	ConditionNotReplayable Condition = "not-replayable" // completed, and the answer was not recorded
	ConditionExpired       Condition = "expired"        // counts as absent, until it is swept
)

// A Filter selects entries. Its zero value selects all.
type Filter struct {
	Condition Condition
	Operation string        // as in [Policy]
	OlderThan time.Duration // since the claim
	Limit     int           // at most so many; 0: no limit
}

// An Entry is a row as an operator sees it.
type Entry struct {
	Hash       [32]byte
	ID         ClaimID
	Operation  string
	Key        string
	State      State
	Condition  Condition
	AtMostOnce bool
	Attempt    int
	Age        time.Duration // since the claim, by the store's clock
	Claimed    time.Time
	LeaseUntil time.Time
	Expires    time.Time // zero: never
	Outcome    Outcome
}

// A Tally counts the keys of one operation in one condition.
type Tally struct {
	Operation string
	Condition Condition
	Keys      int64
	Oldest    time.Duration // the age of the oldest claim
}

// EncodeOutcome returns the outcome Completed that replays resp. It returns an
// error for what would not be replayed as it is: a status that is not final, a
// header field that is never recorded, a body where the status allows none.
func EncodeOutcome(resp *Response) (Outcome, error) {
	if resp.Status < 200 || resp.Status > 599 {
		return Outcome{}, fmt.Errorf("idempotency: %d is no status of an answer; write one from 200 to 599", resp.Status)
	}
	if len(resp.Body) > 0 && !bodyAllowed(resp.Status) {
		return Outcome{}, fmt.Errorf("idempotency: an answer %d has no body; leave it out", resp.Status)
	}
	for name := range resp.Header {
		if !recordable(http.CanonicalHeaderKey(name)) {
			return Outcome{}, fmt.Errorf("idempotency: the header field %s is never replayed; leave it out", name)
		}
	}
	return Outcome{State: Completed, Status: resp.Status, Header: encodeHeader(resp.Header, ""), Body: resp.Body}, nil
}

// DecodeOutcome returns the answer that a Completed outcome records. It returns
// an error for one that is sealed (see [WithSealer]).
func DecodeOutcome(o Outcome) (*Response, error) {
	if len(o.Header) > 0 && o.Header[0] == sealedEncoding {
		return nil, errors.New("idempotency: the record is sealed; only a server that has the sealing key can read it")
	}
	h, err := decodeHeader(o.Header)
	if err != nil {
		return nil, err
	}
	return &Response{Status: o.Status, Header: h, Body: o.Body}, nil
}
