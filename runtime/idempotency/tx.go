package idempotency

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

var (
	// errFreed rolls a transaction back whose answer is not recorded.
	errFreed = errors.New("idempotency: the answer frees the key")
	// errRaced ends a request whose run was rolled back because another wrote
	// the key. It does not run again: its body has been read.
	errRaced = errors.New("idempotency: another request wrote the key meanwhile")
	// errTooLarge is what the handler gets when it writes past the limit.
	errTooLarge = errors.New("idempotency: the answer is larger than maxRecordedBody, and everything is rolled back")
)

// runInTx claims the key, runs the handler and records its answer in one
// transaction. A run that leaves no record leaves nothing.
func (e *execution) runInTx(ctx context.Context, req *Request, next runner) (*Response, error) {
	runCtx := e.begin(ctx)
	defer e.end()
	var (
		ran        bool
		resp       *Response
		handlerErr error
		outcome    Outcome
		recorded   bool
	)
	defer func() {
		// What was taken over is a row of its own; without this the next request
		// would wait for its lease.
		if e.tookOver && !recorded {
			_ = e.call(ctx, time.Now(), e.guard.storeTimeout, func(ctx context.Context) error { return e.guard.store.Release(ctx, &e.claim) })
		}
	}()
	handle := func(ctx context.Context) (Outcome, bool, error) {
		defer e.countStoreTime(-1, time.Now())
		ran = true
		returned := false
		defer func() {
			if !returned {
				e.panicked(ctx)
			}
		}()
		resp, handlerErr = next.run(ctx)
		e.handlerReturned()
		returned = true
		if resp == nil || e.passErr != nil {
			return Outcome{}, false, errFreed
		}
		if resp.Status == 0 {
			resp.Status = http.StatusOK
		}
		if e.refused || !e.op.records(resp.Status) {
			return Outcome{}, false, errFreed
		}
		if int64(len(resp.Body)) > e.op.MaxRecordedBody && !e.op.Replay.None {
			e.passErr = errTooLarge
			return Outcome{}, false, errFreed
		}
		outcome = e.outcome(ctx, resp)
		return outcome, resp.Status < 400, nil
	}
	row, v, err := e.acquire(ctx, func() (Row, error) {
		if ran {
			return Row{}, errRaced
		}
		e.asked = time.Now()
		row, err := e.op.transactor.InTx(runCtx, &e.claim, handle)
		e.countStoreTime(1, e.asked)
		if err == nil && ran && !row.Won && (row.IsZero() || e.decide(&row) == verdictTakeOver) {
			err = errRaced
		}
		return row, err
	})
	recorded = err == nil && v == verdictRun
	switch {
	case recorded:
		e.emitSettled(ctx, outcome)
		return resp, handlerErr
	case err == nil:
		return e.guard.answer(ctx, e, req, &row, v), nil
	case errors.Is(err, errFreed) && e.passErr != nil:
		return e.guard.refuseAs(ctx, e, req, &refusal{name: wire.ResponseTooLarge, status: http.StatusInternalServerError, detail: "Nothing was done.", err: e.passErr}), nil
	case errors.Is(err, errFreed):
		event := Event{Kind: EventReleased, Attempt: e.claim.Attempt, Err: handlerErr}
		if resp != nil {
			event.Status = resp.Status
		} else if handlerErr == nil {
			handlerErr = errNoAnswer
		}
		e.emit(ctx, event)
		return resp, handlerErr
	}
	kind, refused := EventStoreFailed, unavailable(err)
	switch {
	case errors.Is(err, ErrOutcomeUnknown):
		refused = unsettled()
	case errors.Is(err, ErrTxEnded):
		kind = EventUnknown
		refused = &refusal{name: wire.OutcomeUnknown, status: http.StatusInternalServerError, detail: "What was done was not recorded. It is not run again.", err: err}
	}
	e.emit(ctx, Event{Kind: kind, Attempt: e.claim.Attempt, Err: err})
	return e.guard.refuseAs(ctx, e, req, refused), nil
}

func (e *execution) countStoreTime(sign time.Duration, since time.Time) {
	e.storeTime.Add(int64(sign * time.Since(since)))
}
