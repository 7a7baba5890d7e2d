package guardtest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// patience bounds every wait for something that is expected.
const patience = time.Minute

// A fixture is a served target and a client of it.
type fixture struct {
	*testing.T
	Running
	client *http.Client
	runs   atomic.Int64 // of handlers
}

// serve serves handle over memory, or as the options have it.
func serve(t *testing.T, target Target, handle Handler, options ...func(*Server)) *fixture {
	t.Helper()
	transport := &http.Transport{DisableCompression: true}
	f := &fixture{T: t, client: &http.Client{
		Transport:     transport,
		Timeout:       patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	s := Server{Guard: over(t, memorystore.New())}
	s.Handle = func(ctx context.Context, call Call) Reply {
		f.runs.Add(1)
		return handle(ctx, call)
	}
	for _, option := range options {
		option(&s)
	}
	f.Running = target.Serve(t, s)
	t.Cleanup(transport.CloseIdleConnections)
	return f
}

// over returns a guard over store for [Server].
func over(t *testing.T, store idempotency.Store, options ...idempotency.Option) func(idempotency.Option) *idempotency.Guard {
	return func(principal idempotency.Option) *idempotency.Guard {
		guard, err := idempotency.New(store, append(options, principal)...)
		if err != nil {
			t.Fatal(err)
		}
		return guard
	}
}

// created is a handler's usual reply.
func created(context.Context, Call) Reply {
	return Reply{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}, "Location": {"/things/1"}},
		Body:   `{"item":"lamp"}`,
	}
}

// A request is a POST with a JSON body, unless it says otherwise.
type request struct {
	method, path, key, body string
	contentType             string
	header                  http.Header
	chunked                 bool // sent without Content-Length
	ctx                     context.Context
}

const (
	things   = "/things"
	payments = "/accounts/a1/payments"
	files    = "/files"

	lamp = `{"item":"lamp"}`
	vase = `{"item":"vase"}`
)

type answer struct {
	*http.Response
	body string
}

// open sends r and leaves its answer's body to be read.
func (f *fixture) open(r request) (*http.Response, error) {
	var body io.Reader = strings.NewReader(r.body)
	if r.chunked {
		body = io.MultiReader(body)
	}
	if r.method == "" {
		r.method = http.MethodPost
	}
	if r.ctx == nil {
		r.ctx = f.Context()
	}
	req, err := http.NewRequestWithContext(r.ctx, r.method, f.URL+r.path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for name, values := range r.header {
		req.Header[name] = values
	}
	if r.contentType != "" {
		req.Header.Set("Content-Type", r.contentType)
	}
	if r.key != "" {
		req.Header.Set(wire.HeaderKey, r.key)
	}
	return f.client.Do(req)
}

func (f *fixture) send(r request) answer {
	f.Helper()
	resp, err := f.open(r)
	if err != nil {
		f.Errorf("%s: %v", r.path, err)
		return answer{Response: &http.Response{Header: http.Header{}}}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		f.Errorf("%s: reading the answer: %v", r.path, err)
	}
	return answer{resp, string(body)}
}

// A connection is one on which requests are written by hand.
type connection struct {
	net.Conn
	f    *fixture
	read *bufio.Reader
}

func (f *fixture) dial() *connection {
	f.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(patience))
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { conn.Close() })
	return &connection{conn, f, bufio.NewReader(conn)}
}

// write writes lines, each but the last with its end, as they are.
func (w *connection) write(lines ...string) {
	w.f.Helper()
	if _, err := io.WriteString(w, strings.Join(lines, "\r\n")); err != nil {
		w.f.Errorf("writing %q: %v", lines[0], err)
	}
}

// answer reads the answer to a request with the method.
func (w *connection) answer(method string) answer {
	w.f.Helper()
	resp, err := http.ReadResponse(w.read, &http.Request{Method: method})
	if err != nil {
		w.f.Errorf("reading an answer: %v", err)
		return answer{Response: &http.Response{Header: http.Header{}}}
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.f.Errorf("reading the body of an answer: %v", err)
	}
	return answer{resp, string(body)}
}

// post writes a POST of lamp with header lines of its own.
func (w *connection) post(target string, header ...string) {
	w.f.Helper()
	w.write(append(append([]string{"POST " + target + " HTTP/1.1", "Host: things"}, header...),
		"Content-Type: application/json", fmt.Sprintf("Content-Length: %d", len(lamp)), "", lamp)...)
}

// start sends r and returns its answer to be waited for.
func (f *fixture) start(r request) <-chan answer {
	done := make(chan answer, 1)
	go func() { done <- f.send(r) }()
	return done
}

// wait returns what comes, and ends the test if nothing does.
func wait[T any](f *fixture, what string, c <-chan T) T {
	f.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		f.Fatalf("%s did not happen within %v", what, patience)
		panic("unreachable")
	}
}

// until sends r until its answer is as wanted, and returns that.
func (f *fixture) until(what string, r request, wanted func(answer) bool) answer {
	f.Helper()
	deadline := time.Now().Add(patience)
	for {
		a := f.send(r)
		if wanted(a) {
			return a
		}
		if time.Now().After(deadline) {
			f.Fatalf("%s did not happen within %v; the last answer is %d %s", what, patience, a.StatusCode, a.body)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (a answer) replayed() bool { return a.Header.Get(wire.HeaderReplayed) == "true" }

// ran expects the handler's own answer, and replays a recorded one.
func (f *fixture) ran(what string, a answer, status int) {
	f.Helper()
	if a.StatusCode != status || a.replayed() {
		f.Errorf("%s: got %d %q, replayed: %v; want %d from the handler", what, a.StatusCode, a.body, a.replayed(), status)
	}
}

func (f *fixture) replays(what string, a answer, status int) {
	f.Helper()
	if a.StatusCode != status || !a.replayed() {
		f.Errorf("%s: got %d %q, replayed: %v; want %d, replayed", what, a.StatusCode, a.body, a.replayed(), status)
	}
}

// refuses expects a problem of the guard.
func (f *fixture) refuses(what string, a answer, status int, problem string) {
	f.Helper()
	if a.StatusCode != status || a.Header.Get("Content-Type") != "application/problem+json" || !strings.Contains(a.body, wire.ProblemBase+problem) {
		f.Errorf("%s: got %d %q %q, want the problem %d %s", what, a.StatusCode, a.Header.Get("Content-Type"), a.body, status, problem)
	}
}

func (f *fixture) ranTimes(want int64) {
	f.Helper()
	if got := f.runs.Load(); got != want {
		f.Errorf("handlers ran %d times, want %d", got, want)
	}
}
