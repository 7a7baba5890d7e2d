// Package memorystore keeps claims and outcomes in the memory of one process.
//
// It is the reference for what a store promises and the one to use in tests
// and in programs that run as a single process. It guards nothing across
// processes and forgets everything when the process ends; package sqlstore does
// neither. Nothing is deleted but by [Store.Sweep]: a program that runs for long
// calls it now and then.
package memorystore

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var (
	_ idempotency.Store   = (*Store)(nil)
	_ idempotency.Sweeper = (*Store)(nil)
)

// A Store is an [idempotency.Store] and an [idempotency.Sweeper] in memory. Its
// clock is the process's monotonic clock. The byte slices of the rows that it
// returns are shared with other callers and must not be changed.
type Store struct {
	mu   sync.Mutex
	rows map[[32]byte]*row
}

// A row is one key's claim. Its byte slices are replaced, never changed.
type row struct {
	id          idempotency.ClaimID
	owner       [32]byte
	fingerprint []byte
	state       idempotency.State
	atMostOnce  bool
	attempt     int
	leaseUntil  time.Time
	expiresAt   time.Time // zero: never
	outcome     idempotency.Outcome
	short       [34]byte // the fingerprint, unless it is longer
}

// New returns an empty store.
func New() *Store {
	return &Store{rows: make(map[[32]byte]*row)}
}

// Claim implements [idempotency.Store].
func (s *Store) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	if err := ctx.Err(); err != nil {
		return idempotency.Row{}, fmt.Errorf("memorystore: claim: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	r, ok := s.rows[c.Hash]
	if !ok {
		r = newRow(c, 1, now)
		s.rows[c.Hash] = r
	}
	return r.read(c, now), nil
}

// Takeover implements [idempotency.Store].
func (s *Store) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	if err := ctx.Err(); err != nil {
		return idempotency.Row{}, fmt.Errorf("memorystore: takeover: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	r, ok := s.rows[c.Hash]
	if !ok {
		return idempotency.Row{}, nil
	}
	if r.id == seen {
		switch {
		case r.expired(now):
			r = newRow(c, 1, now)
		case r.lapsed(now) && !r.atMostOnce:
			r = newRow(c, r.attempt+1, now)
		}
		s.rows[c.Hash] = r
	}
	return r.read(c, now), nil
}

// Renew implements [idempotency.Store].
func (s *Store) Renew(ctx context.Context, c *idempotency.Claim) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memorystore: renew: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.held(c)
	if r == nil {
		return idempotency.ErrLeaseLost
	}
	r.extend(c, time.Now())
	return nil
}

// MarkEffect implements [idempotency.Store].
func (s *Store) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memorystore: mark effect: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.held(c)
	if r == nil {
		return idempotency.ErrLeaseLost
	}
	r.atMostOnce = true
	r.expiresAt = time.Time{}
	return nil
}

// Settle implements [idempotency.Store].
func (s *Store) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	if err := ctx.Err(); err != nil {
		return idempotency.Row{}, fmt.Errorf("memorystore: settle: %w", err)
	}
	// Copied before the lock is taken: a body may be large.
	kept := o
	both := append(append(make([]byte, 0, len(o.Header)+len(o.Body)), o.Header...), o.Body...)
	kept.Header = slices.Clip(both[:len(o.Header)])
	kept.Body = both[len(o.Header):]
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if r := s.held(c); r != nil {
		r.state = o.State
		r.outcome = kept
		r.expiresAt = now.Add(c.TTL)
		if o.State == idempotency.Unknown {
			r.expiresAt = time.Time{}
		}
	}
	r, ok := s.rows[c.Hash]
	if !ok {
		return idempotency.Row{}, nil
	}
	read := r.read(c, now)
	read.Won = r.id == c.ID && equal(&r.outcome, &o)
	return read, nil
}

// Release implements [idempotency.Store].
func (s *Store) Release(ctx context.Context, c *idempotency.Claim) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memorystore: release: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.rows[c.Hash]; !ok {
		return nil
	}
	if s.held(c) == nil {
		return idempotency.ErrLeaseLost
	}
	delete(s.rows, c.Hash)
	return nil
}

// Sweep implements [idempotency.Sweeper]. It holds up every other call while it
// looks through the rows.
func (s *Store) Sweep(ctx context.Context, max int) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("memorystore: sweep: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	swept := 0
	for hash, r := range s.rows {
		if swept >= max {
			break
		}
		if r.expired(now) {
			delete(s.rows, hash)
			swept++
		}
	}
	return swept, nil
}

// held returns c's row if it is still c's to settle, else nil.
func (s *Store) held(c *idempotency.Claim) *row {
	r, ok := s.rows[c.Hash]
	if !ok || r.id != c.ID || r.state != idempotency.Processing {
		return nil
	}
	return r
}

func newRow(c *idempotency.Claim, attempt int, now time.Time) *row {
	r := &row{
		id:         c.ID,
		owner:      c.Owner,
		atMostOnce: c.AtMostOnce,
		attempt:    attempt,
	}
	r.fingerprint = append(r.short[:0], c.Fingerprint...)
	r.extend(c, now)
	return r
}

// extend lets r's lease begin anew.
func (r *row) extend(c *idempotency.Claim, now time.Time) {
	r.leaseUntil = now.Add(c.Lease)
	if !r.atMostOnce {
		r.expiresAt = r.leaseUntil.Add(c.TTL)
	}
}

func (r *row) lapsed(now time.Time) bool {
	return r.state == idempotency.Processing && !r.leaseUntil.After(now)
}

func (r *row) expired(now time.Time) bool {
	return !r.expiresAt.IsZero() && !r.expiresAt.After(now)
}

// read returns what c's claimant may know of r.
func (r *row) read(c *idempotency.Claim, now time.Time) idempotency.Row {
	read := idempotency.Row{
		Won:         r.id == c.ID && r.state == idempotency.Processing,
		State:       r.state,
		ID:          r.id,
		Owner:       r.owner,
		Fingerprint: r.fingerprint,
		Lapsed:      r.lapsed(now),
		Expired:     r.expired(now),
		AtMostOnce:  r.atMostOnce,
		Attempt:     r.attempt,
		Outcome:     r.outcome,
	}
	if r.state == idempotency.Processing && !read.Lapsed {
		read.LeaseLeft = r.leaseUntil.Sub(now)
	}
	if r.state != idempotency.Processing && !read.Expired && !r.expiresAt.IsZero() {
		read.ExpiresIn = r.expiresAt.Sub(now)
	}
	return read
}

func equal(a, b *idempotency.Outcome) bool {
	return a.State == b.State && a.Status == b.Status && bytes.Equal(a.Header, b.Header) && bytes.Equal(a.Body, b.Body)
}
