package idempotency

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// An execution is one request's way through the guard, and the state that its
// handler reaches through the context.
type execution struct {
	guard *Guard
	op    *operation
	claim Claim
	// digest is what the claim's fingerprint was made of.
	digest [32]byte

	// The lease is counted from before the statement that got it, on the
	// monotonic clock, so that it ends here no later than in the store.
	leaseStart time.Time
	storeTime  time.Duration
	tookOver   bool
	// refused says that the answer is the guard's own: the handler did not run.
	refused bool

	mu      sync.Mutex // guards what follows, against the renewal timer
	stopped bool
	renewed time.Time // when the last renewal that succeeded was sent
	timer   *time.Timer
	expiry  *time.Timer
	cancel  context.CancelCauseFunc

	// effect is held while the handler marks an effect or lets bytes pass, and
	// while the guard notes that the handler has returned: a goroutine that it
	// left behind must not mark what is being released.
	effect   sync.Mutex
	returned bool

	marked  atomic.Bool // MarkEffect succeeded
	passed  bool        // "not replayable" is durable and bytes may pass
	passErr error       // it could not be made durable
}

type executionKey struct{}

func executionFrom(ctx context.Context) *execution {
	e, _ := RunContext(ctx).Value(executionKey{}).(*execution)
	return e
}

// call runs one call of the store with its deadline. The request's own
// cancellation does not reach it: a caller that hangs up must not leave a claim
// of which nobody knows.
func (e *execution) call(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	start := time.Now()
	err := f(ctx)
	e.mu.Lock()
	e.storeTime += time.Since(start)
	e.mu.Unlock()
	if err != nil && !errors.Is(err, ErrLeaseLost) {
		e.emit(ctx, Event{Kind: EventStoreFailed, Err: err})
	}
	return err
}

func (e *execution) emit(ctx context.Context, event Event) {
	if e.guard.observe == nil {
		return
	}
	event.Operation = e.op.Operation
	event.KeyHash = Key{hash: e.claim.Hash}.ID()
	e.mu.Lock()
	event.StoreTime = e.storeTime
	e.mu.Unlock()
	e.guard.emit(ctx, event)
}

// begin starts the lease's renewal and returns the context in which the handler
// runs: detached from the caller, who may hang up, and cancelled by the
// policy's timeout unless the caller's context has a deadline, and when the
// lease is lost or about to end.
func (e *execution) begin(ctx context.Context) (context.Context, func()) {
	detached := context.WithoutCancel(ctx)
	var release context.CancelFunc
	if deadline, ok := ctx.Deadline(); ok {
		detached, release = context.WithDeadline(detached, deadline)
	} else {
		detached, release = context.WithTimeout(detached, e.op.Timeout)
	}
	detached, e.cancel = context.WithCancelCause(detached)
	run := context.WithValue(detached, executionKey{}, e)

	if e.op.transactor != nil { // a transaction holds its key for as long as it lasts
		return run, func() {
			e.cancel(context.Canceled)
			release()
		}
	}
	lease := e.op.Lease
	e.mu.Lock()
	defer e.mu.Unlock()
	e.renewed = e.leaseStart
	e.timer = time.AfterFunc(lease/3, func() { e.renew(run) })
	e.expiry = time.AfterFunc(time.Until(e.leaseStart.Add(lease-lease/6)), func() { e.cancel(ErrLeaseLost) })
	return run, func() {
		e.stopRenewal()
		e.cancel(context.Canceled)
		release()
	}
}

func (e *execution) renew(ctx context.Context) {
	lease := e.op.Lease
	sent := time.Now()
	err := e.call(ctx, min(e.guard.storeTimeout, lease/3), func(ctx context.Context) error {
		return e.guard.store.Renew(ctx, &e.claim)
	})
	e.mu.Lock()
	if e.stopped {
		e.mu.Unlock()
		return
	}
	switch {
	case err == nil:
		e.renewed = sent
		e.expiry.Reset(time.Until(sent.Add(lease - lease/6)))
		e.timer.Reset(lease / 3)
	case errors.Is(err, ErrLeaseLost):
		e.stopped = true
		e.expiry.Stop()
	default:
		e.timer.Reset(lease / 12)
	}
	e.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, ErrLeaseLost):
		e.cancel(ErrLeaseLost)
		e.emit(ctx, Event{Kind: EventLeaseLost, Attempt: e.claim.Attempt, Err: err})
	default:
		e.emit(ctx, Event{Kind: EventRenewFailed, Attempt: e.claim.Attempt, Err: err})
	}
}

func (e *execution) stopRenewal() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true
	e.timer.Stop()
	e.expiry.Stop()
}

// leaseEnd is when the lease ends unless it is renewed again.
func (e *execution) leaseEnd() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.renewed.Add(e.op.Lease)
}

func (e *execution) atMostOnce() bool {
	return e.op.Guarantee == AtMostOnce || e.marked.Load()
}

// settle makes o durable, trying again until the lease ends. A row that did not
// win is the one that is there in its place.
func (e *execution) settle(ctx context.Context, o Outcome) (Row, error) {
	e.stopRenewal()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		var row Row
		err := e.call(ctx, e.guard.storeTimeout, func(ctx context.Context) (err error) {
			row, err = e.guard.store.Settle(ctx, &e.claim, o)
			return err
		})
		if err == nil || time.Now().Add(pause).After(e.leaseEnd()) {
			return row, err
		}
		time.Sleep(pause)
	}
}

// Between two tries of one step the guard pauses for firstPause, then twice as
// long each time, up to lastPause.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

var errNoAnswer = errors.New("idempotency: the handler returned neither a response nor an error")

// handlerReturned ends what a goroutine that the handler left behind could still
// mark or let pass.
func (e *execution) handlerReturned() {
	e.effect.Lock()
	defer e.effect.Unlock()
	e.returned = true
}

// finish records the handler's answer or frees the key, and returns what is
// sent: the answer only once its record is durable.
func (e *execution) finish(ctx context.Context, req *Request, resp *Response, err error) (*Response, error) {
	e.handlerReturned()
	attempt := e.claim.Attempt
	switch {
	case e.passErr != nil:
		return e.guard.refuseAs(ctx, e, req, unsettled()), nil
	case e.passed:
		return nil, err
	case resp == nil:
		if err == nil {
			err = errNoAnswer
		}
		if e.atMostOnce() {
			e.emit(ctx, Event{Kind: EventUnknown, Attempt: attempt, Err: err})
			return e.settled(ctx, req, Outcome{State: Unknown}, nil, err)
		}
		return e.release(ctx, req, nil, err)
	}
	if resp.Status == 0 {
		resp.Status = http.StatusOK
	}
	if e.refused || !e.atMostOnce() && !e.op.records(resp.Status) {
		return e.release(ctx, req, resp, err)
	}
	o := e.outcome(ctx, resp)
	answer, err := e.settled(ctx, req, o, resp, err)
	if answer == resp {
		e.emitSettled(ctx, o)
	}
	return answer, err
}

func (e *execution) emitSettled(ctx context.Context, o Outcome) {
	kind := EventRecorded
	if o.State != Completed {
		kind = EventNotReplayable
	}
	e.emit(ctx, Event{Kind: kind, Attempt: e.claim.Attempt, Status: o.Status})
}

// outcome returns what is recorded of an answer.
func (e *execution) outcome(ctx context.Context, resp *Response) Outcome {
	notReplayable := Outcome{State: NotReplayable, Status: resp.Status}
	if e.op.Replay.None || int64(len(resp.Body)) > e.op.MaxRecordedBody {
		return notReplayable
	}
	o := Outcome{State: Completed, Status: resp.Status, Header: encodeHeader(resp.Header, e.op.Replay.Marker)}
	if bodyAllowed(resp.Status) {
		o.Body = resp.Body
	}
	if e.guard.sealer == nil {
		return o
	}
	sealed, err := seal(e.guard.sealer, o, e.claim.Hash, e.claim.ID)
	if err != nil {
		e.emit(ctx, Event{Kind: EventSealFailed, Attempt: e.claim.Attempt, Status: resp.Status, Err: err})
		return notReplayable
	}
	return sealed
}

func (e *execution) settled(ctx context.Context, req *Request, o Outcome, resp *Response, handlerErr error) (*Response, error) {
	row, err := e.settle(ctx, o)
	switch {
	case err != nil:
		return e.guard.refuseAs(ctx, e, req, unsettled()), nil
	case row.Won:
		return resp, handlerErr
	}
	return e.superseded(ctx, req, &row), nil
}

// release frees the key for the next request. If that fails the key is held
// until the lease ends, which comes to the same a little later; the answer is
// as true.
func (e *execution) release(ctx context.Context, req *Request, resp *Response, handlerErr error) (*Response, error) {
	e.stopRenewal()
	err := e.call(ctx, e.guard.storeTimeout, func(ctx context.Context) error {
		return e.guard.store.Release(ctx, &e.claim)
	})
	if errors.Is(err, ErrLeaseLost) {
		return e.superseded(ctx, req, &Row{}), nil
	}
	event := Event{Kind: EventReleased, Attempt: e.claim.Attempt, Err: handlerErr}
	if resp != nil {
		event.Status = resp.Status
	}
	e.emit(ctx, event)
	return resp, handlerErr
}

// superseded answers a run whose lease was lost like a duplicate of what is
// there now. It never claims or runs again.
func (e *execution) superseded(ctx context.Context, req *Request, row *Row) *Response {
	e.emit(ctx, Event{Kind: EventLeaseLost, Attempt: e.claim.Attempt, Err: ErrLeaseLost})
	if row.IsZero() {
		return e.guard.refuseAs(ctx, e, req, unsettled())
	}
	v := e.decide(row)
	if v == verdictRun || v == verdictTakeOver {
		return e.guard.refuseAs(ctx, e, req, unsettled())
	}
	return e.guard.answer(ctx, e, req, row, v)
}
