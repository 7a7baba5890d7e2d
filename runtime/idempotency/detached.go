package idempotency

import (
	"context"
	"sync"
	"time"
)

// A detached context has its parent's values and none of its end: it ends at a
// deadline of its own, or when it is cancelled. It becomes one of package
// context's when somebody asks for its channel, which many handlers and some
// stores never do.
type detached struct {
	parent   context.Context
	deadline time.Time
	run      *execution // the one that runs in it, if one does

	mu      sync.Mutex
	values  context.Context // the parent without its end
	made    context.Context
	stop    context.CancelCauseFunc
	release context.CancelFunc
	err     error // why it ended before it was made
}

// detach makes c a context that has the parent's values and ends at the
// deadline.
func (c *detached) detach(parent context.Context, deadline time.Time) context.Context {
	c.parent, c.deadline = parent, deadline
	return c
}

func (c *detached) Deadline() (time.Time, bool) { return c.deadline, true }

func (c *detached) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.make().Done()
}

func (c *detached) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made != nil {
		return c.made.Err()
	}
	if c.err == nil && !time.Now().Before(c.deadline) {
		c.err = context.DeadlineExceeded
	}
	return c.err
}

func (c *detached) Value(key any) any {
	switch key {
	case executionKey{}:
		if c.run != nil {
			return c.run
		}
	case RunContextKey: // asked for by each function of this package
		return c.parent.Value(key)
	}
	c.mu.Lock()
	ctx := c.made
	if ctx == nil {
		ctx = c.inherit()
	}
	c.mu.Unlock()
	return ctx.Value(key)
}

// cancel ends the context for a cause that [context.Cause] reports.
func (c *detached) cancel(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.make()
	c.stop(cause)
}

// end ends the context when nobody should need it any more.
func (c *detached) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made != nil {
		c.stop(context.Canceled)
		c.release()
	} else if c.err == nil {
		c.err = context.Canceled
	}
}

// inherit and make are called with c.mu held.
func (c *detached) inherit() context.Context {
	if c.values == nil {
		c.values = context.WithoutCancel(c.parent)
	}
	return c.values
}

func (c *detached) make() context.Context {
	if c.made != nil {
		return c.made
	}
	ctx, stop := context.WithCancelCause(c.inherit())
	if c.err == context.Canceled {
		stop(c.err)
	}
	c.made, c.release = context.WithDeadline(ctx, c.deadline)
	c.stop = stop
	return c.made
}
