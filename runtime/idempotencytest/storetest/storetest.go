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
	"slices"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

const (
	// long is a lease or a time to live that no test lives to see the end of.
	long = time.Hour
	// brief is one that ends while a test waits for it.
	brief = 20 * time.Millisecond
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
			if err := p.check(ctx, store); err != nil {
				t.Errorf("broken promise: %s: %v", p.name, err)
			}
		})
	}
}

// A promise is one sentence of the contract.
type promise struct {
	name string
	// check returns how an empty store breaks the promise, or nil.
	check func(context.Context, idempotency.Store) error
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

// win claims c, which must succeed.
func win(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	row, err := s.Claim(ctx, c)
	if err != nil {
		return fmt.Errorf("Claim: %w", err)
	}
	if !row.Won {
		return fmt.Errorf("Claim did not win: %s", show(row))
	}
	return nil
}

// settle settles c with o, which must succeed.
func settle(ctx context.Context, s idempotency.Store, c *idempotency.Claim, o idempotency.Outcome) error {
	row, err := s.Settle(ctx, c, o)
	if err != nil {
		return fmt.Errorf("Settle: %w", err)
	}
	if !row.Won {
		return fmt.Errorf("Settle did not win: %s", show(row))
	}
	return nil
}

// peek reads the row of c's key, which must be there, by claiming it in vain.
func peek(ctx context.Context, s idempotency.Store, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := s.Claim(ctx, rival(c))
	switch {
	case err != nil:
		return row, fmt.Errorf("Claim: %w", err)
	case row.Won:
		return row, errors.New("the row is gone: another claim of the key won")
	case row.IsZero():
		return row, errors.New("Claim returned a zero row")
	}
	return row, nil
}

// await peeks until the row is as it must become.
func await(ctx context.Context, s idempotency.Store, c *idempotency.Claim, what string, ok func(idempotency.Row) bool) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(brief / 10) {
		row, err := peek(ctx, s, c)
		if err != nil || ok(row) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the row never became %s: %s", what, show(row))
		}
	}
}

func awaitLapsed(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	return await(ctx, s, c, "lapsed", func(r idempotency.Row) bool { return r.Lapsed })
}

func awaitExpired(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	return await(ctx, s, c, "expired", func(r idempotency.Row) bool { return r.Expired })
}

// holds checks that the row of c's key is still c's, as it was claimed.
func holds(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.ID != c.ID || row.State != idempotency.Processing {
		return fmt.Errorf("the row is not held by its claim any more: %s", show(row))
	}
	return nil
}

// lost checks that every write of the claim c is refused and changes nothing of
// the row that is there.
func lost(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	before, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if err := s.Renew(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
		return fmt.Errorf("Renew returned %v, not ErrLeaseLost", err)
	}
	if err := s.MarkEffect(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
		return fmt.Errorf("MarkEffect returned %v, not ErrLeaseLost", err)
	}
	row, err := s.Settle(ctx, c, idempotency.Outcome{State: idempotency.Completed, Status: 299, Body: []byte("late")})
	if err != nil {
		return fmt.Errorf("Settle: %w", err)
	}
	if err := same(row, before); err != nil {
		return fmt.Errorf("a late Settle did not return the row that is there: %w", err)
	}
	if err := s.Release(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
		return fmt.Errorf("Release returned %v, not ErrLeaseLost", err)
	}
	after, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if err := same(after, before); err != nil {
		return fmt.Errorf("a late write changed the row: %w", err)
	}
	return nil
}

// same compares all of two rows but what passes with time.
func same(got, want idempotency.Row) error {
	if got.Won != want.Won || got.State != want.State || got.ID != want.ID || got.Owner != want.Owner ||
		!bytes.Equal(got.Fingerprint, want.Fingerprint) || got.AtMostOnce != want.AtMostOnce || got.Attempt != want.Attempt {
		return fmt.Errorf("got %s, want %s", show(got), show(want))
	}
	return sameOutcome(got.Outcome, want.Outcome)
}

func sameOutcome(got, want idempotency.Outcome) error {
	if got.State != want.State {
		return fmt.Errorf("got outcome of state %d, want %d", got.State, want.State)
	}
	if got.Status != want.Status {
		return fmt.Errorf("got status %d, want %d", got.Status, want.Status)
	}
	if !bytes.Equal(got.Header, want.Header) {
		return fmt.Errorf("headers differ: got %d bytes, want %d: %s", len(got.Header), len(want.Header), difference(got.Header, want.Header))
	}
	if !bytes.Equal(got.Body, want.Body) {
		return fmt.Errorf("bodies differ: got %d bytes, want %d: %s", len(got.Body), len(want.Body), difference(got.Body, want.Body))
	}
	return nil
}

func difference(got, want []byte) string {
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	return fmt.Sprintf("from byte %d on", i)
}

func show(r idempotency.Row) string {
	return fmt.Sprintf("{won %t, state %d, id %s, owner %x…, fingerprint %q, lapsed %t, expired %t, at most once %t, lease left %v, attempt %d, status %d}",
		r.Won, r.State, r.ID, r.Owner[:4], r.Fingerprint, r.Lapsed, r.Expired, r.AtMostOnce, r.LeaseLeft, r.Attempt, r.Outcome.Status)
}

// together runs n functions at once and returns what they returned.
func together[T any](n int, run func(i int) (T, error)) ([]T, error) {
	results := make([]T, n)
	errs := make(chan error, n)
	start := make(chan struct{})
	for i := range n {
		go func() {
			<-start
			var err error
			results[i], err = run(i)
			errs <- err
		}()
	}
	close(start)
	var all []error
	for range n {
		all = append(all, <-errs)
	}
	return results, errors.Join(all...)
}

// winners returns those of rows that won.
func winners(rows []idempotency.Row) []idempotency.Row {
	return slices.DeleteFunc(slices.Clone(rows), func(r idempotency.Row) bool { return !r.Won })
}
