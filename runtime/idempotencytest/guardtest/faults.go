package guardtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func failures(t *testing.T, target Target) {
	fail := func(status int, text string) (again answer, f *fixture) {
		f = serve(t, target, func(context.Context, Call) Reply { return Reply{Err: &Error{status, text}} })
		want := "handled: " + text
		if target.ErrorsAre500 {
			status, want = http.StatusInternalServerError, text
		}
		first := f.send(request{path: things, key: "a", body: lamp})
		f.ran("a failure", first, status)
		again = f.send(request{path: things, key: "a", body: lamp})
		for _, a := range []answer{first, again} {
			if a.StatusCode != status || strings.TrimSpace(a.body) != want {
				f.Errorf("the failure is rendered as %d %q, want %d %q", a.StatusCode, a.body, status, want)
			}
		}
		return again, f
	}
	recorded := !target.ErrorsAre500 && !target.ErrorsAreOutside
	for _, status := range []int{http.StatusNotFound, http.StatusConflict} {
		again, f := fail(status, "sold out")
		if again.replayed() != recorded {
			f.Errorf("%d was replayed: %v, want %v", status, again.replayed(), recorded)
		}
		if recorded {
			f.ranTimes(1)
		} else {
			f.ranTimes(2)
		}
	}
	again, f := fail(http.StatusTooManyRequests, "later")
	f.ranTimes(2)
	if again.replayed() {
		f.Error("429 was recorded by its class")
	}
}

func serverError(t *testing.T, target Target) {
	var broken atomic.Bool
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if broken.Load() {
			return Reply{Status: http.StatusBadGateway, Body: "broken"}
		}
		return created(ctx, call)
	})
	broken.Store(true)
	f.ran("broken", f.send(request{path: things, key: "a", body: lamp}), http.StatusBadGateway)
	broken.Store(false)
	f.ran("mended", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.ranTimes(2)
}

func panics(t *testing.T, target Target) {
	var attempts sync.Map
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		attempts.Store(idempotency.Attempt(ctx), true)
		if idempotency.Attempt(ctx) == 1 {
			panic("out of lamps")
		}
		return created(ctx, call)
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	f.ran("a panic", f.send(form), http.StatusInternalServerError)
	again := f.until("a second run", form, func(a answer) bool {
		if a.StatusCode == http.StatusConflict {
			f.refuses("before the lease ended", a, http.StatusConflict, wire.InFlight)
			return false
		}
		return true
	})
	f.ran("after the lease ended", again, http.StatusCreated)
	f.ranTimes(2)
	if _, ok := attempts.Load(2); !ok {
		f.Error("the second run was not attempt 2")
	}
}

func atMostOnce(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply { return Reply{Status: http.StatusBadGateway, Body: "broken"} })
	pay := request{path: payments, key: "a", body: lamp, header: http.Header{"X-User": {"ann"}}}
	f.ran("broken", f.send(pay), http.StatusBadGateway)
	f.replays("the same again", f.send(pay), http.StatusBadGateway)
	f.ranTimes(1)
}

func hangUp(t *testing.T, target Target) {
	handle, begun, release := held()
	cancelled := make(chan error, 1)
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if call.Operation != "createThing" {
			return Reply{Status: http.StatusOK}
		}
		reply := handle(ctx, call)
		cancelled <- idempotency.RunContext(ctx).Err()
		return reply
	})
	t.Cleanup(release)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := f.open(request{path: things, key: "a", body: lamp, ctx: ctx}); err == nil {
			resp.Body.Close()
		}
	}()
	wait(f, "the first run", begun)
	cancel()
	wait(f, "the hanging up", gone)
	f.ran("another request", f.send(request{method: http.MethodGet, path: things}), http.StatusOK)
	release()
	if err := wait(f, "the run's end", cancelled); err != nil {
		f.Errorf("the run's context: %v", err)
	}
	again := f.until("a replay", request{path: things, key: "a", body: lamp}, func(a answer) bool { return a.StatusCode != http.StatusConflict })
	f.replays("the same again", again, http.StatusCreated)
	f.ranTimes(2) // with the other request
}

func shutdown(t *testing.T, target Target) {
	handle, begun, release := held()
	f := serve(t, target, handle)
	t.Cleanup(release)
	first := f.start(request{path: things, key: "a", body: lamp})
	wait(f, "the first run", begun)
	down := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		down <- f.Shutdown(ctx)
	}()
	address := strings.TrimPrefix(f.URL, "http://")
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			break
		}
		conn.Close()
		if time.Now().After(deadline) {
			f.Fatal("the server still accepts connections")
		}
	}
	select {
	case err := <-down:
		f.Fatalf("the server went down (%v) with a request in flight", err)
	default:
	}
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.client.CloseIdleConnections()
	if err := wait(f, "the shutdown", down); err != nil {
		f.Errorf("shutdown: %v", err)
	}
}

// A store is one that can be watched and can fail.
type store struct {
	idempotency.Store
	claimed  func(idempotency.Row)
	settled  func(idempotency.Outcome)
	claims   atomic.Bool // fail
	settling atomic.Bool // fails
}

var errDown = errors.New("the store is down")

func (s *store) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	if s.claims.Load() {
		return idempotency.Row{}, errDown
	}
	row, err := s.Store.Claim(ctx, c)
	if s.claimed != nil && err == nil {
		s.claimed(row)
	}
	return row, err
}

func (s *store) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	if s.settling.Load() {
		return idempotency.Row{}, errDown
	}
	if s.settled != nil {
		s.settled(o)
	}
	return s.Store.Settle(ctx, c, o)
}

func storeDown(t *testing.T, target Target) {
	s := &store{Store: memorystore.New()}
	f := serve(t, target, created, func(server *Server) { server.Guard = over(t, s) })
	s.claims.Store(true)
	down := f.send(request{path: things, key: "a", body: lamp})
	f.refuses("store down", down, http.StatusServiceUnavailable, wire.StoreUnavailable)
	if down.Header.Get("Retry-After") == "" {
		f.Error("no Retry-After")
	}
	f.ranTimes(0)
	s.claims.Store(false)
	f.ran("store up", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func storeDownMeanwhile(t *testing.T, target Target) {
	s := &store{Store: memorystore.New()}
	for _, streaming := range []bool{false, true} {
		f := serve(t, target, func(ctx context.Context, call Call) Reply {
			reply := created(ctx, call)
			reply.Header.Set("X-Secret", "1")
			if streaming {
				reply.Stream, reply.Body = []string{"one", "two"}, ""
			}
			return reply
		}, func(server *Server) { server.Guard = over(t, s) })
		s.settling.Store(true)
		a := f.send(request{path: files, key: fmt.Sprint("a", streaming), contentType: "application/x-www-form-urlencoded", body: "item=lamp"})
		f.refuses("not recorded", a, http.StatusServiceUnavailable, wire.OutcomeUnknown)
		if a.Header.Get("X-Secret") != "" || a.Header.Get("Location") != "" || a.Header.Get("Retry-After") == "" {
			f.Errorf("the refusal's header is %q", a.Header)
		}
	}
}

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

// unrecovered has nothing recover a panic: the connection breaks, no byte of an
// answer has left, and the key is held until its lease ends.
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
		breaks := func(r request) {
			w := f.dial() // net/http's client would send it again by itself
			w.write("POST "+r.path+" HTTP/1.1", "Host: things", "Idempotency-Key: "+r.key, "Content-Type: "+r.contentType, fmt.Sprintf("Content-Length: %d", len(r.body)), "", r.body)
			if got, err := io.ReadAll(w.read); len(got) != 0 {
				f.Errorf("%s: %q came, %v; want nothing", what, got, err)
			}
		}
		held := request{path: things, key: "a", contentType: "application/json", body: lamp}
		breaks(held)
		f.refuses(what+", the same again", f.send(held), http.StatusConflict, wire.InFlight)
		if reply.Panic == http.ErrAbortHandler {
			breaks(aForm)
			f.ran("after the lease ended", f.afterItsLease(aForm), http.StatusCreated)
		}
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
	inTime := func(a answer) bool { return a.StatusCode != http.StatusServiceUnavailable } // as a busy machine may not be
	f.refuses("a duplicate meanwhile", f.until("a refusal", r, inTime), http.StatusConflict, wire.InFlight)
	close(proceed)
	again := f.until("a replay", r, func(a answer) bool { return inTime(a) && a.StatusCode != http.StatusConflict })
	f.replays("the same again", again, http.StatusCreated)
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
