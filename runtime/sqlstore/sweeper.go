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
	// Timeout bounds one call, which a connection that has gone silent would
	// otherwise hold for as long as the operating system waits.
	Timeout time.Duration
	// Observe, if set, is called after each call with the number of rows that
	// it deleted and its error. A failed sweep is tried again after Interval.
	Observe func(ctx context.Context, swept int, err error)
}

// NewSweeper returns a sweeper of store with an Interval of one minute, a Batch of
// 10,000 rows and a Timeout of ten minutes.
func NewSweeper(store idempotency.Sweeper) *Sweeper {
	return &Sweeper{store: store, Interval: time.Minute, Batch: 10_000, Timeout: 10 * time.Minute}
}

// Run sweeps until ctx ends, and returns its error.
func (s *Sweeper) Run(ctx context.Context) error {
	for {
		swept, err := s.sweep(ctx)
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

func (s *Sweeper) sweep(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	return s.store.Sweep(ctx, s.Batch)
}
