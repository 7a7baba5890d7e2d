package sqlstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

var (
	// errUnsent says that a call failed before anything was asked of the server.
	errUnsent = errors.New("nothing was sent")
	// errUnanswered says that an earlier try of a call may have been received,
	// whatever became of the last.
	errUnanswered = errors.New("an earlier try was not answered")
)

// unwritten reports whether err says that nothing was written: that the server
// refused, or was not asked. A pooler that has lost the server says so in class 08.
func unwritten(err error) bool {
	var refused interface{ SQLState() string }
	var network *net.OpError
	return !errors.Is(err, errUnanswered) &&
		(errors.Is(err, errUnsent) || errors.As(err, &network) && network.Op == "dial" ||
			errors.As(err, &refused) && !strings.HasPrefix(refused.SQLState(), "08"))
}

// afterwards returns how a call failed whose earlier try failed too, or nil.
func afterwards(earlier, err error) error {
	if err == nil || earlier == nil || unwritten(earlier) {
		return err
	}
	return fmt.Errorf("%w: %w", errUnanswered, err)
}

// A group runs calls of one kind together. While few come each runs alone, at
// once, on its caller's goroutine: the database lets their commits share what they
// wait for. While more are under way, or some run together, others queue, and what
// has queued when one ends runs together. Where many came of late a call waits, for
// no time, for those that are about to. Nothing is held when nobody calls.
//
// A call that is part of a run that failed runs again, alone: so calls must be
// such that running twice is like running once.
type group[Q, R any] struct {
	// alone runs one call.
	alone func(context.Context, Q) (R, error)
	// together makes ready a run of calls, whose results are in their order. It
	// must copy what it needs of them: their callers may leave while the run
	// is under way. The context ends when all of them have left.
	together func([]Q) func(context.Context) ([]R, error)
	// joins begins a run: it returns what reports of one call after another
	// whether it is part of it. The first is.
	joins func() func(Q) bool
	// limit is how many may run alone before others queue.
	limit int
	// patience is how long calls queue while nothing begins: what is under way may
	// never end, and then one run more begins. 0: for ever.
	patience time.Duration

	mu      sync.Mutex
	single  int       // how many run alone
	running int       // how many runs of several there are: one, unless it is late
	crowd   float64   // how many run together of late, a moving average
	began   time.Time // of what began last
	queue   []*waiter[Q, R]
}

// A waiter is a call that has queued.
type waiter[Q, R any] struct {
	call   Q
	run    *groupRun // nil while it has not begun
	done   chan struct{}
	result R
	err    error // of the run
}

// A leftError is the error of a call that left a run to the others. What the run
// does to it is over when done is closed.
type leftError struct {
	error
	done <-chan struct{}
}

func (e *leftError) Unwrap() error { return e.error }

// A groupRun is a run of several calls.
type groupRun struct {
	callers int // who have not left; guarded by the group's lock
	end     context.CancelFunc
}

func (g *group[Q, R]) do(ctx context.Context, q Q) (R, error) {
	g.mu.Lock()
	if g.running == 0 && g.single < g.limit && g.crowd < float64(g.limit+1) {
		g.single++
		g.began = time.Now()
		g.mu.Unlock()
		defer g.next()
		return g.alone(ctx, q)
	}
	w := &waiter[Q, R]{call: q, done: make(chan struct{})}
	g.queue = append(g.queue, w)
	if g.running == 0 && g.single == 0 {
		g.begin()
	}
	g.hurry()
	g.mu.Unlock()
	return g.await(ctx, w)
}

// hurry begins a run if something has queued and none has begun for too long. It
// is called with g.mu held.
func (g *group[Q, R]) hurry() {
	if now := time.Now(); g.patience > 0 && len(g.queue) > 0 && now.Sub(g.began) >= g.patience {
		g.began = now
		g.begin()
	}
}

// begin has what has queued run. It is called with g.mu held.
func (g *group[Q, R]) begin() {
	g.running++
	go g.drain()
}

// ran notes how many ran together. It is called with g.mu held.
func (g *group[Q, R]) ran(n int) { g.crowd += (float64(n) - g.crowd) / 4 }

// await waits for the run that w is part of.
func (g *group[Q, R]) await(ctx context.Context, w *waiter[Q, R]) (R, error) {
	var late <-chan time.Time
	if g.patience > 0 {
		ticker := time.NewTicker(g.patience)
		defer ticker.Stop()
		late = ticker.C
	}
	for {
		select {
		case <-w.done:
			if w.err == nil {
				return w.result, nil
			}
			result, err := g.alone(ctx, w.call)
			return result, afterwards(w.err, err)
		case <-late:
			g.mu.Lock()
			g.hurry()
			g.mu.Unlock()
		case <-ctx.Done():
			sent := g.leave(w)
			var none R
			if sent {
				return none, &leftError{ctx.Err(), w.done}
			}
			return none, fmt.Errorf("%w: %w", errUnsent, ctx.Err())
		}
	}
}

// leave takes w out of the queue or, if it is under way, leaves the run to the
// others and returns true. The last to leave ends it.
func (g *group[Q, R]) leave(w *waiter[Q, R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.run != nil {
		if w.run.callers--; w.run.callers == 0 {
			w.run.end()
		}
		return true
	}
	for i, queued := range g.queue {
		if queued == w {
			g.queue = slices.Delete(g.queue, i, i+1)
			break
		}
	}
	return false
}

// next hands over to those who have queued, if anybody has.
func (g *group[Q, R]) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.single--
	if len(g.queue) == 0 {
		g.ran(1)
	} else if g.running == 0 {
		g.begin()
	}
}

// drain runs what has queued until nothing is left.
func (g *group[Q, R]) drain() {
	for {
		// Who is about to call comes along, and who has just been answered joins
		// the next run, not each second.
		runtime.Gosched()
		ctx, end := context.WithCancel(context.Background())
		waiters, run := g.take(end)
		if len(waiters) == 0 {
			end()
			return
		}
		results, err := run(ctx)
		end()
		for i, w := range waiters {
			if w.err = err; err == nil {
				w.result = results[i]
			}
			close(w.done)
		}
	}
}

// take takes what may run together out of the queue.
func (g *group[Q, R]) take(end context.CancelFunc) ([]*waiter[Q, R], func(context.Context) ([]R, error)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var taken []*waiter[Q, R]
	var calls []Q
	left, joins := g.queue[:0], g.joins()
	for _, w := range g.queue {
		if joins(w.call) {
			taken, calls = append(taken, w), append(calls, w.call)
		} else {
			left = append(left, w)
		}
	}
	clear(g.queue[len(left):])
	g.queue = left
	if len(taken) == 0 {
		g.running--
		return nil, nil
	}
	g.began = time.Now()
	g.ran(len(taken))
	run := &groupRun{callers: len(taken), end: end}
	for _, w := range taken {
		w.run = run
	}
	return taken, g.together(calls)
}
