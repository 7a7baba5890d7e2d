package guardtest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var aForm = request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}

// afterItsLease sends r, which is held by a run that panicked, until it is not in
// flight.
func (f *fixture) afterItsLease(r request) answer {
	f.Helper()
	return f.until("the end of the lease", r, func(a answer) bool {
		if a.StatusCode == http.StatusConflict && a.Header.Get("Retry-After") != "" {
			f.refuses("before the lease ended", a, http.StatusConflict, wire.InFlight)
			return false
		}
		return true
	})
}

// markedPanic has a handler panic that has marked an effect.
func markedPanic(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if err := idempotency.MarkEffect(ctx); err != nil {
			t.Errorf("marking: %v", err)
		}
		panic("charged, then lost")
	})
	f.ran("a panic", f.send(aForm), http.StatusInternalServerError)
	f.refuses("after the lease ended", f.afterItsLease(aForm), http.StatusConflict, wire.OutcomeUnknown)
	f.ranTimes(1)
}

// half is a handler that panics behind a part of its answer.
var half = Reply{Status: http.StatusCreated, Header: http.Header{"X-Half": {"1"}, "Set-Cookie": {"half=1"}}, Body: "half", Panic: "out of lamps"}

// unrecovered has nothing recover a panic: the connection breaks, and no byte of
// an answer has left.
func unrecovered(t *testing.T, target Target) {
	for what, reply := range map[string]Reply{
		"a panic":                       {Panic: "out of lamps"},
		"a panic behind half an answer": half,
		"http.ErrAbortHandler":          {Panic: http.ErrAbortHandler},
	} {
		f := serve(t, target, func(ctx context.Context, call Call) Reply {
			if idempotency.Attempt(ctx) == 1 {
				return reply
			}
			return created(ctx, call)
		}, func(s *Server) { s.NoRecovery = true })
		w := f.dial() // net/http's client would send it again by itself
		w.write("POST "+files+" HTTP/1.1", "Host: things", "Idempotency-Key: a", "Content-Type: application/x-www-form-urlencoded", "Content-Length: 9", "", "item=lamp")
		if got, err := io.ReadAll(w.read); len(got) != 0 {
			f.Errorf("%s: %q came, %v; want nothing", what, got, err)
		}
		f.ran(what+", after the lease ended", f.afterItsLease(aForm), http.StatusCreated)
		f.replays(what+", the same again", f.send(aForm), http.StatusCreated)
		f.ranTimes(2)
	}
}

// recovered has the router's recovery answer for a handler that panics behind a
// part of its answer: nothing of that is sent.
func recovered(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if idempotency.Attempt(ctx) == 1 {
			return half
		}
		return created(ctx, call)
	})
	first := f.send(aForm)
	f.ran("the recovery", first, http.StatusInternalServerError)
	if first.Header.Get("X-Half") != "" || first.Header.Get("Set-Cookie") != "" || strings.Contains(first.body, "half") {
		f.Errorf("the recovery's answer has of the handler's: %q %q", first.Header, first.body)
	}
	again := f.afterItsLease(aForm)
	f.ran("after the lease ended", again, http.StatusCreated)
	if again.body != lamp || again.Header.Get("X-Half") != "" {
		f.Errorf("the second run's answer is %q %q", again.Header, again.body)
	}
}

// recoveredFlush has the recovery come behind what was flushed.
func recoveredFlush(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Write: func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "half")
			w.(http.Flusher).Flush()
			panic("out of lamps")
		}}
	})
	resp, err := f.open(aForm)
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	begin := make([]byte, len("half"))
	if _, err := io.ReadFull(resp.Body, begin); err != nil || resp.StatusCode != http.StatusCreated || string(begin) != "half" {
		f.Errorf("what was flushed came as %d %q: %v", resp.StatusCode, begin, err)
	}
	f.refuses("after a panic behind a flush", f.send(aForm), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

// timeoutHandler has http.TimeoutHandler give up on a handler that goes on.
func timeoutHandler(t *testing.T, target Target) {
	proceed := make(chan struct{})
	ctxErr := make(chan error, 1)
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		run := idempotency.RunContext(ctx)
		<-run.Done()
		ctxErr <- run.Err()
		<-proceed
		return created(ctx, call)
	}, func(s *Server) {
		s.Around = func(next http.Handler) http.Handler {
			return http.TimeoutHandler(next, 100*time.Millisecond, "too late")
		}
	})
	r := request{path: things, key: "a", body: lamp}
	if a := f.send(r); a.StatusCode != http.StatusServiceUnavailable || a.body != "too late" {
		f.Errorf("the one that took too long: %d %s", a.StatusCode, a.body)
	}
	if err := wait(f, "the end of the run's context", ctxErr); !errors.Is(err, context.DeadlineExceeded) {
		f.Errorf("the run's context ended with %v", err)
	}
	f.refuses("a duplicate meanwhile", f.send(r), http.StatusConflict, wire.InFlight)
	close(proceed)
	f.replays("the same again", f.until("a replay", r, func(a answer) bool { return a.StatusCode != http.StatusConflict }), http.StatusCreated)
	f.ranTimes(1)
}

// unguardedFailures has what runs without a key fail as if there were no guard.
func unguardedFailures(t *testing.T, target Target) {
	form := aForm
	form.key = ""
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Err: &Error{http.StatusConflict, "sold out"}}
	})
	status, text := http.StatusConflict, "handled: sold out"
	if target.ErrorsAre500 {
		status, text = http.StatusInternalServerError, "sold out"
	}
	if a := f.send(form); a.StatusCode != status || a.body != text && a.body != text+"\n" {
		f.Errorf("the failure is rendered as %d %q, want %d %q", a.StatusCode, a.body, status, text)
	}
	f = serve(t, target, func(context.Context, Call) Reply { panic("out of lamps") })
	f.ran("a panic", f.send(form), http.StatusInternalServerError)
}
