package idempotency

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"net/http"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// Do guards one request: it returns the answer of run, of an earlier run, or a
// refusal. Generated glue calls it for routers that are not net/http's.
//
// The context that run gets is detached from ctx, see [Policy.Timeout], and
// carries what [KeyFrom] and the other functions of handlers read; when the
// request is not guarded (no key where none is needed, [Passthrough], or a
// guard around this one that guards the same operation) it is ctx itself. An
// error of run means that it has no answer; it is passed on after the key was
// freed or, under at-most-once, its outcome marked unknown. Do itself fails in
// no other way. A panic of run goes on.
//
// A nil Response with a nil error means that the bytes have passed already; see
// [Passing].
func (g *Guard) Do(ctx context.Context, p *Policy, req *Request, run func(context.Context) (*Response, error)) (*Response, error) {
	if g.passthrough {
		return run(ctx)
	}
	return g.do(ctx, p, req, runFunc(run), new(execution))
}

// A runner runs the handler in the context it is given, and returns its answer.
type runner interface {
	run(ctx context.Context) (*Response, error)
}

type runFunc func(context.Context) (*Response, error)

func (run runFunc) run(ctx context.Context) (*Response, error) { return run(ctx) }

// do is Do with an execution that is still empty.
func (g *Guard) do(ctx context.Context, p *Policy, req *Request, next runner, e *execution) (*Response, error) {
	e.guard, e.op = g, g.operation(p)
	key, refused := e.op.parseKey(req.Header)
	if outer := executionFrom(ctx); outer != nil && outer.op == e.op && outer.claim.Key == key {
		return next.run(ctx)
	}
	if refused != nil && refused.name == wire.MissingKey && (p.OnMissing == RunUnguarded || g.optionalKeys) {
		g.emit(ctx, Event{Kind: EventUnguarded, Operation: p.Operation})
		return next.run(ctx)
	}
	var principal string
	if refused == nil {
		principal, refused = e.op.authenticate(req)
	}
	if refused == nil {
		refused = e.op.digestRequest(&e.digest, req)
	}
	if refused != nil {
		g.emit(ctx, Event{Kind: EventRefused, Operation: p.Operation, Problem: refused.name, Status: refused.status, Err: refused.err})
		return g.refuse(ctx, req, refused), nil
	}
	e.claim = Claim{
		Operation:   p.Operation,
		Key:         key,
		Fingerprint: append(e.fingerprint[:0], fingerprint(e.digest, g.currentSecret())...),
		Lease:       p.Lease,
		TTL:         p.TTL,
		AtMostOnce:  p.Guarantee == AtMostOnce,
		Attempt:     1,
		StepTimeout: g.storeTimeout,
	}
	e.claim.Hash, e.claim.Owner = e.op.identify(principal, key)
	if row, ok := g.replays.get(&e.claim.Hash); ok {
		return g.answer(ctx, e, req, &row, e.decide(&row)), nil
	}
	_, _ = rand.Read(e.claim.ID[:]) // never fails, says crypto/rand

	if !e.op.readsBody && req.length() > p.MaxRequestBody {
		// It is not refused before the claim: a known key gets its answer
		// whatever the new body says.
		next = runFunc(func(context.Context) (*Response, error) {
			e.refused = true
			return g.refuse(ctx, req, unreadable(ErrBodyTooLarge)), nil
		})
	}
	if e.op.transactor != nil {
		return e.runInTx(ctx, req, next)
	}
	row, v, err := e.acquire(ctx, func() (Row, error) {
		return e.claimRow(ctx, func(ctx context.Context) (Row, error) {
			return g.store.Claim(ctx, &e.claim)
		})
	})
	if err != nil {
		return g.refuseAs(ctx, e, req, unavailable(err)), nil
	}
	if v != verdictRun {
		return g.answer(ctx, e, req, &row, v), nil
	}
	return e.run(ctx, req, next)
}

// retryAfterFailure is when a client may try again after the store failed.
const retryAfterFailure = time.Second

// retryAfterInFlight bounds how long a client is told to wait for the request
// in flight: most end long before their lease.
const retryAfterInFlight = 2 * time.Second

func (op *operation) authenticate(req *Request) (string, *refusal) {
	var principal string
	if op.principal != nil {
		var err error
		principal, err = op.principal(req.Native)
		switch {
		case errors.Is(err, ErrUnauthenticated):
			return "", &refusal{name: wire.Unauthenticated, status: http.StatusUnauthorized, err: err}
		case errors.Is(err, ErrForbidden):
			return "", &refusal{name: wire.Forbidden, status: http.StatusForbidden, err: err}
		case err != nil:
			return "", &refusal{name: wire.PrincipalFailed, status: http.StatusInternalServerError, err: err}
		}
	}
	if op.Secured && principal == "" {
		return "", &refusal{name: wire.Unauthenticated, status: http.StatusUnauthorized}
	}
	return principal, nil
}

// maxTakeovers bounds how often one request takes over or claims anew because
// what it read has changed since. Whoever changed it has made progress.
const maxTakeovers = 8

// acquire claims the key, taking over what lapsed or expired and waiting for
// what is in flight as the policy says.
func (e *execution) acquire(ctx context.Context, claim func() (Row, error)) (row Row, v verdict, err error) {
	var waitUntil time.Time
	pause := firstPause
	takeovers := 0
	again := true
	for {
		if again {
			row, err = claim()
			if waitUntil.IsZero() {
				waitUntil = e.asked.Add(e.op.WaitFor)
			}
			if err == nil && row.IsZero() {
				err = errors.New("idempotency: the store returned no row for a claim")
			}
			if err != nil {
				return row, 0, err
			}
		}
		again = true
		switch v = e.decide(&row); v {
		case verdictTakeOver:
			if takeovers++; takeovers > maxTakeovers {
				return row, verdictInFlight, nil
			}
			seen := row.ID
			row, err = e.claimRow(ctx, func(ctx context.Context) (Row, error) {
				return e.guard.store.Takeover(ctx, &e.claim, seen)
			})
			if err != nil {
				return row, 0, err
			}
			// In a transaction what was taken over is claimed once more.
			again = row.IsZero() || row.Won && e.op.transactor != nil
			if row.Won {
				e.tookOver = true
				e.emit(ctx, Event{Kind: EventTakenOver, Attempt: row.Attempt})
			}
		case verdictInFlight:
			left := time.Until(waitUntil)
			if left <= 0 || !sleep(ctx, min(left, jitter(pause))) {
				return row, v, nil
			}
			pause = min(2*pause, lastPause)
		default:
			return row, v, nil
		}
	}
}

func (e *execution) claimRow(ctx context.Context, f func(context.Context) (Row, error)) (row Row, err error) {
	e.asked = time.Now()
	err = e.call(ctx, e.asked, e.guard.storeTimeout, func(ctx context.Context) (err error) {
		row, err = f(ctx)
		return err
	})
	if row.Won {
		e.lease.start = e.asked
		e.claim.Attempt = max(row.Attempt, 1)
	}
	return row, err
}

func jitter(d time.Duration) time.Duration { return d/2 + mathrand.N(d/2+1) }

// sleep reports false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (e *execution) run(ctx context.Context, req *Request, next runner) (*Response, error) {
	run := e.begin(ctx)
	defer e.end()
	returned := false
	defer func() {
		if !returned {
			e.panicked(ctx)
		}
	}()
	resp, err := next.run(run)
	returned = true
	return e.finish(ctx, req, resp, err)
}

// answer sends what a verdict other than "run" means.
func (g *Guard) answer(ctx context.Context, e *execution, req *Request, row *Row, v verdict) *Response {
	switch v {
	case verdictReplay:
		resp, err := e.replay(row)
		if err == nil {
			g.replays.put(&e.claim.Hash, row, e.asked)
			e.emit(ctx, Event{Kind: EventReplayed, Status: resp.Status, Attempt: row.Attempt})
			return resp
		}
		return g.refuseAs(ctx, e, req, notReplayable(err))
	case verdictNotReplayable:
		return g.refuseAs(ctx, e, req, notReplayable(nil))
	case verdictMismatch:
		status := int(e.op.OnMismatch)
		if e.op.OnMismatch == ReplayAnyway {
			status = wire.DefaultOnMismatch // another owner's answer is nobody else's
		}
		return g.refuseAs(ctx, e, req, &refusal{name: wire.KeyReused, status: status, detail: "Use a new key for a new request, and send the same request again with its key."})
	case verdictInFlight, verdictTakeOver:
		return g.refuseAs(ctx, e, req, &refusal{
			name:       wire.InFlight,
			status:     http.StatusConflict,
			detail:     "Send the request again with the same key to get its answer.",
			retryAfter: max(min(row.LeaseLeft, retryAfterInFlight), 1),
		})
	}
	return g.refuseAs(ctx, e, req, &refusal{name: wire.OutcomeUnknown, status: http.StatusConflict, detail: "An earlier attempt began and did not say how it ended. It is not run again."})
}

func unavailable(err error) *refusal {
	return &refusal{
		name:       wire.StoreUnavailable,
		status:     http.StatusServiceUnavailable,
		detail:     "This attempt was not processed. Send it again with the same key.",
		retryAfter: retryAfterFailure,
		err:        err,
	}
}

func notReplayable(err error) *refusal {
	return &refusal{name: wire.NotReplayable, status: http.StatusConflict, detail: "It is not run again.", err: err}
}

// unsettled is the answer when the handler ran and the record of it is in doubt.
func unsettled() *refusal {
	return &refusal{
		name:       wire.OutcomeUnknown,
		status:     http.StatusServiceUnavailable,
		detail:     "The request may have been processed. Send it again with the same key to learn.",
		retryAfter: retryAfterFailure,
	}
}

func (g *Guard) refuseAs(ctx context.Context, e *execution, req *Request, r *refusal) *Response {
	e.emit(ctx, Event{Kind: EventRefused, Problem: r.name, Status: r.status, Err: r.err})
	return g.refuse(ctx, req, r)
}
