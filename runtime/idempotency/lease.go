package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A lease is a run's hold of its key. It is renewed at a third; when that fails,
// the handler is cancelled at five sixths of it.
type lease struct {
	// It is counted from before the statement that got it, on the monotonic
	// clock, so that it ends here no later than in the store.
	start time.Time

	mu      sync.Mutex // guards what follows, against the timers
	stopped bool
	renewed time.Time // when the last renewal that succeeded was sent
	timer   *time.Timer
	expiry  *time.Timer

	// Guarded by the mutex of the queue that the run is in.
	queued     bool
	due        time.Time
	prev, next *execution
}

// A leaseQueue holds the runs of one operation that have not yet lasted for a
// third of their lease, the oldest first. Most never do, so they share a timer.
type leaseQueue struct {
	mu          sync.Mutex
	first, last *execution
	timer       *time.Timer
	armed       bool
}

// keep begins to keep e's lease until drop ends it.
func (e *execution) keep() {
	l, third := &e.lease, e.op.Lease/3
	l.renewed = l.start
	now := time.Now()
	if now.Sub(l.start) > third/2 {
		// The claim took so long that what the queue bears is over.
		e.keepAlone(third)
		return
	}
	q := &e.op.leases
	q.mu.Lock()
	defer q.mu.Unlock()
	l.queued, l.due, l.prev = true, now.Add(third), q.last
	if q.last != nil {
		q.last.lease.next = e
	} else {
		q.first = e
	}
	q.last = e
	switch {
	case q.armed:
		return
	case q.timer == nil:
		q.timer = time.AfterFunc(third, q.fire)
	default:
		q.timer.Reset(third)
	}
	q.armed = true
}

// fire gives the runs that are due timers of their own.
func (q *leaseQueue) fire() {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	for q.first != nil && !q.first.lease.due.After(now) {
		e := q.first
		q.remove(e)
		e.keepAlone(0)
	}
	if q.armed = q.first != nil; q.armed {
		q.timer.Reset(q.first.lease.due.Sub(now))
	}
}

// remove is called with q.mu held.
func (q *leaseQueue) remove(e *execution) {
	l := &e.lease
	if !l.queued {
		return
	}
	if l.prev != nil {
		l.prev.lease.next = l.next
	} else {
		q.first = l.next
	}
	if l.next != nil {
		l.next.lease.prev = l.prev
	} else {
		q.last = l.prev
	}
	l.queued, l.prev, l.next = false, nil, nil
}

// keepAlone begins renewals with timers of e's own.
func (e *execution) keepAlone(first time.Duration) {
	l, length := &e.lease, e.op.Lease
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return
	}
	l.timer = time.AfterFunc(first, e.renew)
	l.expiry = time.AfterFunc(time.Until(l.start.Add(length-length/6)), func() { e.runCtx.cancel(ErrLeaseLost) })
}

// drop ends the renewals. It may be called again.
func (e *execution) drop() {
	q := &e.op.leases
	q.mu.Lock()
	q.remove(e)
	q.mu.Unlock()
	l := &e.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	if l.timer != nil {
		l.timer.Stop()
		l.expiry.Stop()
	}
}

func (e *execution) renew() {
	l, length := &e.lease, e.op.Lease
	ctx := context.Context(&e.runCtx)
	sent := time.Now()
	err := e.call(ctx, sent, min(e.guard.storeTimeout, length/3), func(ctx context.Context) error {
		return e.guard.store.Renew(ctx, &e.claim)
	})
	l.mu.Lock()
	if l.stopped {
		l.mu.Unlock()
		return
	}
	switch {
	case err == nil:
		l.renewed = sent
		l.expiry.Reset(time.Until(sent.Add(length - length/6)))
		l.timer.Reset(length / 3)
	case errors.Is(err, ErrLeaseLost):
		l.stopped = true
		l.expiry.Stop()
	default:
		l.timer.Reset(length / 12)
	}
	l.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, ErrLeaseLost):
		e.runCtx.cancel(ErrLeaseLost)
		e.emit(ctx, Event{Kind: EventLeaseLost, Attempt: e.claim.Attempt, Err: err})
	default:
		e.emit(ctx, Event{Kind: EventRenewFailed, Attempt: e.claim.Attempt, Err: err})
	}
}

// leaseEnd is when the lease ends unless it is renewed again.
func (e *execution) leaseEnd() time.Time {
	e.lease.mu.Lock()
	defer e.lease.mu.Unlock()
	return e.lease.renewed.Add(e.op.Lease)
}
