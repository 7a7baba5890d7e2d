// Package storetest holds every promise of [idempotency.Store] and
// [idempotency.Sweeper] as a test, named after the promise. Whoever writes a
// store runs it:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) idempotency.Store {
//			return openEmptyStore(t)
//		})
//	}
//
// A store keeps its own time, so the suite waits for real leases of some
// milliseconds, always for a condition and never longer than [patience].
package storetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

const (
	// long is a lease or a time to live that no test lives to see the end of.
	long = time.Hour
	// brief is one that ends while a test waits for it.
	brief = 20 * time.Millisecond
	// tick is more than what a store's clock, which may tick in milliseconds,
	// can be off by.
	tick = 5 * time.Millisecond
	// patience is how long a test waits for what must happen.
	patience = 20 * time.Second
)

// Run tests the stores that newStore returns. It calls newStore once for each
// promise; the store is empty, and shares no rows with the others. The subtests
// run in parallel. Stores that are no [idempotency.Sweeper] break the promises
// of that interface.
func Run(t *testing.T, newStore func(t *testing.T) idempotency.Store) {
	t.Helper()
	for _, p := range promises {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			store := newStore(t)
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			if err := p.test(ctx, store); err != nil {
				t.Errorf("broken promise: %s: %v", p.name, err)
			}
		})
	}
}

// A promise is one sentence of the contract.
type promise struct {
	name string
	// check fails if an empty store breaks the promise.
	check func(*check)
}

// test returns how an empty store breaks the promise, or nil.
func (p promise) test(ctx context.Context, s idempotency.Store) (err error) {
	defer func() {
		switch v := recover().(type) {
		case nil:
		case failure:
			err = v.error
		default:
			panic(v)
		}
	}()
	p.check(&check{ctx, s})
	return nil
}

// A check tries one store. Its methods end the check by a panic with a failure
// at the first thing that is wrong: so that it can be wrong on purpose, a check
// is no *testing.T.
type check struct {
	ctx   context.Context
	store idempotency.Store
}

type failure struct{ error }

func (k *check) fail(format string, args ...any) {
	panic(failure{fmt.Errorf(format, args...)})
}

func (k *check) ok(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// newClaim returns a fresh claim of a fresh key.
func newClaim() *idempotency.Claim {
	c := &idempotency.Claim{
		Operation:   "POST /orders",
		Key:         "8e03978e-40d5-43dd-bc93-6894a57f9324",
		Fingerprint: []byte{0, 1, 0xfe, 0xff, '\'', '\\', '"', '\n'},
		Lease:       long,
		TTL:         long,
		Attempt:     1,
	}
	rand.Read(c.ID[:])
	rand.Read(c.Hash[:])
	rand.Read(c.Owner[:])
	return c
}

// rival returns another claim of c's key: another request, with an owner and a
// fingerprint of its own.
func rival(c *idempotency.Claim) *idempotency.Claim {
	r := newClaim()
	r.Hash = c.Hash
	r.Fingerprint = []byte("another request")
	return r
}

// brieflyHeld returns a fresh claim whose lease soon ends.
func brieflyHeld() *idempotency.Claim {
	c := newClaim()
	c.Lease = brief
	return c
}

var answer = idempotency.Outcome{
	State:  idempotency.Completed,
	Status: 201,
	Header: []byte("Location: /orders/1\r\n"),
	Body:   []byte(`{"b":1,"a":1.0}`),
}

func (k *check) claim(c *idempotency.Claim) idempotency.Row {
	row, err := k.store.Claim(k.ctx, c)
	k.ok(err)
	return row
}

func (k *check) takeover(c *idempotency.Claim, seen idempotency.ClaimID) idempotency.Row {
	row, err := k.store.Takeover(k.ctx, c, seen)
	k.ok(err)
	return row
}

func (k *check) trySettle(c *idempotency.Claim, o idempotency.Outcome) idempotency.Row {
	row, err := k.store.Settle(k.ctx, c, o)
	k.ok(err)
	return row
}

func (k *check) renew(c *idempotency.Claim)   { k.ok(k.store.Renew(k.ctx, c)) }
func (k *check) mark(c *idempotency.Claim)    { k.ok(k.store.MarkEffect(k.ctx, c)) }
func (k *check) release(c *idempotency.Claim) { k.ok(k.store.Release(k.ctx, c)) }

func (k *check) leaseLost(method string, err error) {
	if !errors.Is(err, idempotency.ErrLeaseLost) {
		k.fail("%s returned %v, not ErrLeaseLost", method, err)
	}
}

func (k *check) sweeper() idempotency.Sweeper {
	sweeper, ok := k.store.(idempotency.Sweeper)
	if !ok {
		k.fail("the store is no Sweeper")
	}
	return sweeper
}

// win claims c, which must succeed.
func (k *check) win(c *idempotency.Claim) {
	if row := k.claim(c); !row.Won {
		k.fail("the claim did not win: %s", show(row))
	}
}

// settle settles c with o, which must succeed.
func (k *check) settle(c *idempotency.Claim, o idempotency.Outcome) {
	if row := k.trySettle(c, o); !row.Won {
		k.fail("the settlement did not win: %s", show(row))
	}
}

// peek reads the row of c's key, which must be there, by claiming it in vain.
func (k *check) peek(c *idempotency.Claim) idempotency.Row {
	row := k.claim(rival(c))
	if row.Won || row.IsZero() {
		k.fail("the row is gone: another claim of the key got %s", show(row))
	}
	return row
}

// await peeks until the row is as it must become.
func (k *check) await(c *idempotency.Claim, what string, is func(idempotency.Row) bool) {
	for deadline := time.Now().Add(patience); ; time.Sleep(brief / 10) {
		row := k.peek(c)
		if is(row) {
			return
		}
		if time.Now().After(deadline) {
			k.fail("the row never became %s: %s", what, show(row))
		}
	}
}

func (k *check) awaitLapsed(c *idempotency.Claim) {
	k.await(c, "lapsed", func(r idempotency.Row) bool { return r.Lapsed })
}

func (k *check) awaitExpired(c *idempotency.Claim) {
	k.await(c, "expired", func(r idempotency.Row) bool { return r.Expired })
}

// holds checks that the row of c's key is still c's.
func (k *check) holds(c *idempotency.Claim) {
	if row := k.peek(c); row.ID != c.ID || row.State != idempotency.Processing {
		k.fail("the row is not held by its claim any more: %s", show(row))
	}
}

// lost checks that every write of the claim c is refused and changes nothing of
// the row that is there.
func (k *check) lost(c *idempotency.Claim) {
	before := k.peek(c)
	k.leaseLost("Renew", k.store.Renew(k.ctx, c))
	k.leaseLost("MarkEffect", k.store.MarkEffect(k.ctx, c))
	k.same(k.trySettle(c, idempotency.Outcome{State: idempotency.Completed, Status: 299, Body: []byte("late")}), before)
	k.leaseLost("Release", k.store.Release(k.ctx, c))
	k.same(k.peek(c), before)
}

// same compares all of two rows but what passes with time.
func (k *check) same(got, want idempotency.Row) {
	if got.Won != want.Won || got.State != want.State || got.ID != want.ID || got.Owner != want.Owner ||
		!bytes.Equal(got.Fingerprint, want.Fingerprint) || got.AtMostOnce != want.AtMostOnce || got.Attempt != want.Attempt {
		k.fail("got row %s, want %s", show(got), show(want))
	}
	k.sameOutcome(got.Outcome, want.Outcome)
}

func (k *check) sameOutcome(got, want idempotency.Outcome) {
	if got.State != want.State || got.Status != want.Status {
		k.fail("got outcome of state %d and status %d, want %d and %d", got.State, got.Status, want.State, want.Status)
	}
	k.sameBytes("headers", got.Header, want.Header)
	k.sameBytes("body", got.Body, want.Body)
}

func (k *check) sameBytes(what string, got, want []byte) {
	if bytes.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	k.fail("%s: got %d bytes, want %d; they differ from byte %d on", what, len(got), len(want), i)
}

func show(r idempotency.Row) string {
	return fmt.Sprintf("{won %t, state %d, id %s, owner %x…, fingerprint %q, lapsed %t, expired %t, at most once %t, lease left %v, expires in %v, attempt %d, status %d}",
		r.Won, r.State, r.ID, r.Owner[:4], r.Fingerprint, r.Lapsed, r.Expired, r.AtMostOnce, r.LeaseLeft, r.ExpiresIn, r.Attempt, r.Outcome.Status)
}

// together calls run n times at once and returns what it returned.
func together[T any](k *check, n int, run func() (T, error)) []T {
	results := make([]T, n)
	errs := make([]error, n)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			results[i], errs[i] = run()
		})
	}
	close(start)
	wg.Wait()
	k.ok(errors.Join(errs...))
	return results
}

// oneWinner checks that one row won and that the others are the winner's.
func (k *check) oneWinner(rows []idempotency.Row) {
	var won []idempotency.Row
	for _, row := range rows {
		if row.Won {
			won = append(won, row)
		}
	}
	if len(won) != 1 {
		k.fail("%d of %d won", len(won), len(rows))
	}
	want := won[0]
	want.Won = false
	for _, row := range rows {
		if !row.Won {
			k.same(row, want)
		}
	}
}
