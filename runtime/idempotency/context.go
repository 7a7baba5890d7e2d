package idempotency

import (
	"context"
	"crypto/rand"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// RunContextKey is the name under which glue keeps the context of a run in a
// router's own context that, unlike net/http's, finds values by name only. It is
// read by [RunContext].
const RunContextKey = "github.com/oapi-idempotent/oapi-idempotent/run"

// RunContext returns the context of the guarded run that a router's own context
// belongs to; any other context it returns as it is. The functions of this
// package call it themselves. A handler that gets a *gin.Context in place of a
// context needs it for what looks further: deadlines, cancellation, values.
func RunContext(ctx context.Context) context.Context {
	if run, ok := ctx.Value(RunContextKey).(context.Context); ok {
		return run
	}
	return ctx
}

// A Key is the idempotency key of a guarded run. The zero Key belongs to a run
// that is not guarded.
type Key struct {
	text string
	hash [32]byte
}

// KeyFrom returns the key of the guarded run that ctx belongs to.
func KeyFrom(ctx context.Context) Key {
	if e := executionFrom(ctx); e != nil {
		return Key{e.claim.Key, e.claim.Hash}
	}
	return Key{}
}

// String returns the key as the client sent it, without quotes and, under
// format: uuid, in lower case.
func (k Key) String() string { return k.text }

// ID returns the hash that stands for the key in its scope, in hexadecimal: 64
// characters, the same on every attempt, and empty for the zero Key. Stored
// under a UNIQUE of the handler's own tables it is a second line of defence: on
// a conflict the handler reads and returns what is there.
func (k Key) ID() string {
	if k == (Key{}) {
		return ""
	}
	return hex.EncodeToString(k.hash[:])
}

// Attempt returns which run of its key this is, from 1: more after a crash. It
// is 0 in a run that is not guarded.
func Attempt(ctx context.Context) int {
	if e := executionFrom(ctx); e != nil {
		return e.claim.Attempt
	}
	return 0
}

// DeriveKey returns a key for a call that the handler makes to another system:
// a UUID of version 5 (RFC 9562) that is the same on every attempt of this key
// and differs by name. In a run that is not guarded, and so has no other
// attempt, it is a random UUID.
func DeriveKey(ctx context.Context, name string) string {
	e := executionFrom(ctx)
	if e == nil {
		var u [16]byte
		_, _ = rand.Read(u[:])
		return formatUUID(u, 4)
	}
	h := sha1.New()
	h.Write(e.claim.Hash[:16])
	h.Write([]byte(name))
	return formatUUID([16]byte(h.Sum(nil)[:16]), 5)
}

func formatUUID(u [16]byte, version byte) string {
	u[6] = u[6]&0x0f | version<<4
	u[8] = u[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// MarkEffect says that the handler is about to do what must not be done twice:
// from here on this run is at-most-once, whatever its operation's guarantee,
// and every answer of it is recorded. That is durable before MarkEffect returns
// nil. When it returns an error the handler must not go on: the lease is lost
// (ErrLeaseLost), or the store could not be told. In a run that is not guarded
// it does nothing.
func MarkEffect(ctx context.Context) error {
	e := executionFrom(ctx)
	if e == nil || e.atMostOnce() {
		return nil
	}
	e.effect.Lock()
	defer e.effect.Unlock()
	if e.passed {
		return nil
	}
	if e.returned {
		return fmt.Errorf("idempotency: the effect could not be marked, the handler has returned: %w", ErrLeaseLost)
	}
	if e.op.transactor != nil {
		return errors.New("idempotency: MarkEffect is not for guarantee: transaction, where a run that fails leaves nothing behind")
	}
	err := e.call(ctx, time.Now(), e.guard.storeTimeout, func(ctx context.Context) error {
		return e.guard.store.MarkEffect(ctx, &e.claim)
	})
	if err != nil {
		return fmt.Errorf("idempotency: the effect could not be marked, do not go on: %w", err)
	}
	e.marked.Store(true)
	return nil
}

// Passing is called by glue before any byte of an answer leaves uncaptured, at
// a flush, a hijack or past the policy's MaxRecordedBody. When it returns nil,
// "not replayable" is durable, the bytes may pass, and [Guard.Do] will return
// no response. When it returns an error no byte may pass. In a run that is not
// guarded it does nothing. It may be called again. Under [Transaction] it always
// fails: no byte leaves before the commit.
func Passing(ctx context.Context) error {
	e := executionFrom(ctx)
	if e == nil {
		return nil
	}
	e.effect.Lock()
	defer e.effect.Unlock()
	if e.passed {
		return nil
	}
	if e.passErr != nil {
		return e.passErr
	}
	if e.returned {
		return errors.New("idempotency: the answer may not pass, the handler has returned")
	}
	if e.op.transactor != nil {
		e.passErr = errTooLarge
		return e.passErr
	}
	row, err := e.settle(ctx, Outcome{State: NotReplayable})
	if err == nil && !row.Won {
		err = ErrLeaseLost
	}
	if err != nil {
		e.passErr = fmt.Errorf("idempotency: the answer may not pass, its record is not durable: %w", err)
		if errors.Is(err, ErrLeaseLost) {
			e.emit(ctx, Event{Kind: EventLeaseLost, Attempt: e.claim.Attempt, Err: err})
		}
		return e.passErr
	}
	e.passed = true
	e.emit(ctx, Event{Kind: EventNotReplayable, Attempt: e.claim.Attempt})
	return nil
}
