package idempotency

import (
	"context"
	"encoding/hex"
	"errors"
	"time"
)

// A Store holds claims and their outcomes. It is told what to write and reports
// what it read; it decides nothing but the two comparisons that must be atomic:
// whether a key is taken, and whether a claim is still the caller's.
//
// Every method is safe for concurrent use, by any number of processes on one
// database. An error means that the infrastructure failed, or, where said, that
// a lease was lost; a key that is taken is a result, not an error. Every method
// returns soon after its context ends, even on a connection that has gone
// silent. Times are the store's own clock's: an application's clock is never
// compared with it.
//
// The suite idempotencytest/storetest holds each sentence here as a test.
type Store interface {
	// Claim inserts a row for c, or reads the one that is there, in one atomic
	// step. The row has Won when it holds c.ID in state Processing: when this
	// call inserted it, and also when an earlier attempt of the same call did
	// whose answer was lost. An existing row is returned as it is, expired or
	// not. A claim that keeps losing races to rows that vanish returns a row in
	// state Processing that is not Lapsed, or an error; never a zero Row. After
	// an error c.ID is not used again: the store may give the claim back.
	Claim(ctx context.Context, c *Claim) (Row, error)

	// Takeover replaces the claim seen by c, with every column anew, if the row
	// still holds seen and, by the store's clock, is a lapsed processing row
	// that is not at-most-once, or is expired. Attempt becomes one more than
	// the row's, or 1 for an expired row. It compares nothing else. Of any
	// number of takeovers of one claim one wins. A loser gets the row as it is
	// now, or a zero Row (see [Row.IsZero]) if there is none any more.
	Takeover(ctx context.Context, c *Claim, seen ClaimID) (Row, error)

	// Renew moves the end of the lease to c.Lease from now, also when it had
	// ended but nobody took over. It returns ErrLeaseLost when the row is not
	// c's in state Processing.
	Renew(ctx context.Context, c *Claim) error

	// MarkEffect makes the row at-most-once, durably before it returns.
	// ErrLeaseLost as in Renew.
	MarkEffect(ctx context.Context, c *Claim) error

	// Settle ends c's processing with the outcome o, whose State is Completed,
	// NotReplayable or Unknown, durably before it returns, also when the lease
	// had ended but nobody took over. The row has Won when it holds c.ID and o:
	// when this call settled it or an earlier attempt of the same call did.
	// Otherwise it is the row that is there now, or a zero Row if there is none.
	Settle(ctx context.Context, c *Claim, o Outcome) (Row, error)

	// Release deletes the row if it is c's in state Processing, so that the
	// next Claim wins at once. It returns nil when there is no row, and
	// ErrLeaseLost when the row there is not c's in state Processing.
	Release(ctx context.Context, c *Claim) error
}

// A Sweeper is a Store that can delete what expired.
type Sweeper interface {
	// Sweep deletes at most max expired rows and returns how many it deleted.
	// It never deletes a row that is not expired, and it may run concurrently
	// with everything else. Less than max does not mean that nothing is left.
	Sweep(ctx context.Context, max int) (int, error)
}

// A Transactor is a Store that can run a handler inside a transaction of its
// own database, for [Transaction].
type Transactor interface {
	// CheckTx returns nil, or why InTx cannot work here.
	CheckTx() error

	// InTx claims the key in a new transaction, calls run on the caller's
	// goroutine with a context that carries the transaction, and commits run's
	// writes and its outcome, which is Completed or NotReplayable, together.
	//
	// A key is free when there is no row, the row is expired, or it is
	// Processing and holds c.ID. If it is not free, run is not called and the
	// row is returned; for one that another transaction holds, and that cannot
	// be seen yet, a Processing row with c's owner and fingerprint that is not
	// Lapsed. A row that has Won is committed. One that has not, although run
	// was called, was written meanwhile by another: everything was rolled back.
	//
	// When keepWrites is false run's writes are rolled back and its outcome is
	// recorded. When run fails or panics everything is rolled back, and the
	// error or the panic goes on. Each step of the store's own takes at most
	// c.StepTimeout. An error means that nothing happened, unless it is
	// ErrOutcomeUnknown or ErrTxEnded.
	InTx(ctx context.Context, c *Claim, run func(context.Context) (o Outcome, keepWrites bool, err error)) (Row, error)
}

// ErrOutcomeUnknown says that a commit was sent, and that nobody could be asked
// whether it took place.
var ErrOutcomeUnknown = errors.New("idempotency: the outcome of the commit is unknown")

// ErrTxEnded says that a handler committed or rolled back the guard's
// transaction by itself. The key's outcome is then unknown.
var ErrTxEnded = errors.New("idempotency: the handler ended the guard's transaction by itself; leave commit and rollback to the guard")

// ErrLeaseLost says that a row does not hold the caller's claim any more: its
// lease ended and another took over, or an operator settled it.
var ErrLeaseLost = errors.New("idempotency: lease lost")

// A ClaimID identifies one claim: 16 random bytes made before the statement
// that claims, so that a claim recognises its own row. It fences every later
// write. (A counter could not: rows are deleted and begin anew.)
type ClaimID [16]byte

// String returns the id in hexadecimal.
func (id ClaimID) String() string { return hex.EncodeToString(id[:]) }

// A Claim is one request's claim of one key.
type Claim struct {
	ID   ClaimID
	Hash [32]byte // identifies the key within its scope; the UNIQUE column
	// Owner hashes operation and principal. It is stored, never compared by a
	// store.
	Owner     [32]byte
	Operation string // Policy.Operation, for operators
	Key       string // as sent, unquoted, for operators
	// Fingerprint is opaque, at most 128 bytes, and never compared by a store.
	Fingerprint []byte
	Lease       time.Duration
	TTL         time.Duration
	AtMostOnce  bool
	Attempt     int           // 1 for a fresh claim; after Takeover the row's
	StepTimeout time.Duration // for Transactor.InTx
}

// A State is the state of a row. The numbers are stored.
type State int16

const (
	Processing    State = 0 // claimed; the handler runs, or its process died
	Completed     State = 1 // the outcome can be replayed
	NotReplayable State = 2 // completed, but the answer was not recorded
	Unknown       State = 3 // the handler began and nobody knows how it ended
)

// A Row is what a store read, with what time decides decided by its clock.
type Row struct {
	// Won says that the caller's write took hold; see each method of [Store].
	Won         bool
	State       State
	ID          ClaimID
	Owner       [32]byte
	Fingerprint []byte
	// Lapsed says that State is Processing and the lease has ended.
	Lapsed bool
	// Expired says that the row's time to live is over, so that it counts as
	// absent. Completed and NotReplayable rows expire TTL after completion. A
	// Processing row expires TTL after its lease, unless it is at-most-once:
	// such a row, like one in state Unknown, never expires.
	Expired    bool
	AtMostOnce bool
	// LeaseLeft is how long the lease still holds; zero unless Processing and
	// not Lapsed.
	LeaseLeft time.Duration
	// ExpiresIn is how long it is until the row expires: never longer than it
	// is. It is zero while Processing, when Expired, and for a row that never
	// expires.
	ExpiresIn time.Duration
	Attempt   int
	// Outcome is set in state Completed, and as far as known in NotReplayable
	// and Unknown.
	Outcome Outcome
}

// IsZero reports whether r stands for "there is no row". Every row has an ID.
func (r *Row) IsZero() bool { return r.ID == ClaimID{} }

// An Outcome is how a processing row ends. Header and Body are encoded by this
// package and opaque to stores, which return them byte for byte.
type Outcome struct {
	State  State
	Status int
	Header []byte
	Body   []byte
}
