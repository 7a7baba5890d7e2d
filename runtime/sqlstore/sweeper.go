package sqlstore

import (
	"context"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// A Sweeper deletes what expired, again and again. Any number of processes may
// run one on the same table; the work is done once.
type Sweeper struct {
	store idempotency.Sweeper
	// Interval is the pause after a sweep that found everything swept.
	Interval time.Duration
	// Batch is how many rows one call deletes at most.
	Batch int
	// Observe, if set, is called after each call with the number of rows that
	// it deleted and its error. A failed sweep is tried again after Interval.
	Observe func(ctx context.Context, swept int, err error)
}

// NewSweeper returns a sweeper of store with an Interval of one minute and a
// Batch of 10,000 rows.
func NewSweeper(store idempotency.Sweeper) *Sweeper {
	return &Sweeper{store: store, Interval: time.Minute, Batch: 10_000}
}

// Run sweeps until ctx ends, and returns its error.
func (s *Sweeper) Run(ctx context.Context) error {
	for {
		swept, err := s.store.Sweep(ctx, s.Batch)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if s.Observe != nil {
			s.Observe(ctx, swept, err)
		}
		if err == nil && swept > 0 && swept == s.Batch {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(s.Interval):
		}
	}
}
