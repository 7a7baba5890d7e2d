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
// handler reaches through the context. It holds what most requests need, so that
// they need little else.
type execution struct {
	guard *Guard
	op    *operation
	claim Claim
	// digest is what the claim's fingerprint was made of.
	digest [32]byte
	// into is where a replay may write its answer; nil: to a new one.
	into *Response

	asked     time.Time // when the store was last asked for the row
	lease     lease
	storeTime atomic.Int64 // nanoseconds, for the observer
	tookOver  bool
	// refused says that the answer is the guard's own: the handler did not run.
	refused bool

	// effect is held while the handler marks an effect or lets bytes pass, and
	// while the guard notes that the handler has returned: a goroutine that it
	// left behind must not mark what is being released.
	effect   sync.Mutex
	returned bool

	recorder *Recorder // of the run, if it has one

	marked  atomic.Bool // MarkEffect succeeded
	passed  bool        // "not replayable" is durable and bytes may pass
	passErr error       // it could not be made durable

	runCtx   detached
	callCtxs [2]detached // of the first calls of the store: a claim and its settlement
	calls    atomic.Int32

	fingerprint [2 + 32 + 32]byte // the claim's
	header      [192]byte         // the recorded one, unless it is longer
}

type executionKey struct{}

func executionFrom(ctx context.Context) *execution {
	e, _ := RunContext(ctx).Value(executionKey{}).(*execution)
	return e
}

// call runs one call of the store, which starts now, with its deadline. The request's own
// cancellation does not reach it: a caller that hangs up must not leave a claim
// of which nobody knows.
func (e *execution) call(ctx context.Context, start time.Time, limit time.Duration, f func(context.Context) error) error {
	// A store may keep the context, so none is used again.
	var c *detached
	if n := int(e.calls.Add(1)); n <= len(e.callCtxs) {
		c = &e.callCtxs[n-1]
	} else {
		c = new(detached)
	}
	err := f(c.detach(ctx, start.Add(limit)))
	c.end()
	if e.guard.observe != nil {
		e.storeTime.Add(int64(time.Since(start)))
	}
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
	event.StoreTime = time.Duration(e.storeTime.Load())
	e.guard.emit(ctx, event)
}

// begin starts to keep the lease and returns the context in which the handler
// runs: detached from the caller, who may hang up, and cancelled by the
// policy's timeout unless the caller's context has a deadline, and when the
// lease is lost or about to end.
func (e *execution) begin(ctx context.Context) context.Context {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(e.op.Timeout)
	}
	e.runCtx.run = e
	run := e.runCtx.detach(ctx, deadline)
	if e.op.transactor == nil { // a transaction holds its key for as long as it lasts
		e.keep()
	}
	return run
}

func (e *execution) end() {
	e.drop()
	e.runCtx.end()
}

func (e *execution) atMostOnce() bool {
	return e.op.Guarantee == AtMostOnce || e.marked.Load()
}

// settle makes o durable, trying again until the lease ends. A row that did not
// win is the one that is there in its place.
func (e *execution) settle(ctx context.Context, o Outcome) (Row, error) {
	e.drop()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		var row Row
		e.asked = time.Now()
		err := e.call(ctx, e.asked, e.guard.storeTimeout, func(ctx context.Context) (err error) {
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

// panicked is called when the handler panics.
func (e *execution) panicked(ctx context.Context) {
	e.recorder.restore()
	e.emit(ctx, Event{Kind: EventPanicked, Attempt: e.claim.Attempt})
}

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
	o := Outcome{State: Completed, Status: resp.Status, Header: appendHeader(e.header[:0], resp.Header, e.op.marker)}
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
		e.guard.replays.put(&e.claim.Hash, &row, e.asked)
		return resp, handlerErr
	}
	return e.superseded(ctx, req, &row), nil
}

// release frees the key for the next request. If that fails the key is held
// until the lease ends, which comes to the same a little later; the answer is
// as true.
func (e *execution) release(ctx context.Context, req *Request, resp *Response, handlerErr error) (*Response, error) {
	e.drop()
	err := e.call(ctx, time.Now(), e.guard.storeTimeout, func(ctx context.Context) error {
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
