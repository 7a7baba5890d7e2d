package sqlstore_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

type sweeps []int

func (s *sweeps) Sweep(_ context.Context, max int) (int, error) {
	if len(*s) == 0 {
		return 0, errors.New("nothing left")
	}
	n := min((*s)[0], max)
	*s = (*s)[1:]
	return n, nil
}

// silent never answers the first call.
type silent struct{ calls int }

func (s *silent) Sweep(ctx context.Context, _ int) (int, error) {
	if s.calls++; s.calls == 1 {
		<-ctx.Done()
	}
	return 0, ctx.Err()
}

func TestSweeperLeavesASilentStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		s := sqlstore.NewSweeper(&silent{})
		var errs []error
		s.Observe = func(_ context.Context, _ int, err error) {
			if errs = append(errs, err); len(errs) == 2 {
				cancel()
			}
		}
		if err := s.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if took := time.Since(start); took != s.Timeout+s.Interval || !errors.Is(errs[0], context.DeadlineExceeded) || errs[1] != nil {
			t.Errorf("after %v: %v", took, errs)
		}
	})
}

func TestSweeperGoesOnWhileBatchesAreFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		var times []time.Duration
		var errs []error
		s := sqlstore.NewSweeper(&sweeps{10, 10, 3, 0})
		s.Batch = 10
		s.Observe = func(_ context.Context, _ int, err error) {
			times = append(times, time.Since(start))
			errs = append(errs, err)
			if len(times) == 6 {
				cancel()
			}
		}
		if err := s.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		for i, want := range []time.Duration{0, 0, 0, time.Minute, 2 * time.Minute, 3 * time.Minute} {
			if times[i] != want || (errs[i] != nil) != (i > 3) {
				t.Errorf("sweep %d at %v: %v, want at %v", i, times[i], errs[i], want)
			}
		}
	})
}
