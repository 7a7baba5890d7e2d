package idempotentclient_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// An api is a client as the generator writes it.
type api struct {
	Server         string
	Client         idempotentclient.Doer
	RequestEditors []editor
	idempotency    idempotentclient.Config
}

type editor func(context.Context, *http.Request) error

var createOrder = idempotentclient.Operation{
	ID:     "createOrder",
	Header: "Idempotency-Key",
	Marker: "Idempotent-Replayed",
	Retry:  idempotentclient.Retry{MaxAttempts: 4, Base: time.Millisecond, Max: 8 * time.Millisecond, MaxElapsed: 30 * time.Second},
}

var cancelOrder = idempotentclient.Operation{ID: "cancelOrder", Header: "Idempotency-Key", Retry: createOrder.Retry}

// CreateOrder has the key parameter of a generated method's params.
func (c *api) CreateOrder(ctx context.Context, param string, body io.Reader, editors ...editor) (*http.Response, error) {
	return c.call(ctx, &createOrder, "/orders", param, body, editors...)
}

func (c *api) CancelOrder(ctx context.Context) (*http.Response, error) {
	return c.call(ctx, &cancelOrder, "/orders/1/cancel", "", nil)
}

func (c *api) call(ctx context.Context, op *idempotentclient.Operation, path, param string, body io.Reader, editors ...editor) (*http.Response, error) {
	req, err := http.NewRequest(http.MethodPost, c.Server+path, body)
	if err != nil {
		return nil, err
	}
	if param != "" {
		req.Header.Set("Idempotency-Key", param)
	}
	req = req.WithContext(ctx)
	call := c.idempotency.Start(op, req)
	for _, edit := range append(c.RequestEditors, editors...) {
		if err := edit(ctx, req); err != nil {
			return nil, err
		}
	}
	return call.Do(c.Client)
}

// A request is what a server saw of one attempt.
type request struct {
	keys []string
	body string
	path string
}

// A log is what a server saw, in order.
type log struct {
	mu   sync.Mutex
	seen []request
}

func (l *log) add(r *http.Request) int {
	var body []byte
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen, request{r.Header.Values("Idempotency-Key"), string(body), r.URL.Path})
	return len(l.seen)
}

func (l *log) requests() []request {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen
}

// oneKey fails unless there were n requests, all with one key and one body. It
// returns the key.
func (l *log) oneKey(t *testing.T, n int, body string) string {
	t.Helper()
	seen := l.requests()
	if len(seen) != n {
		t.Fatalf("the server saw %d requests, want %d: %v", len(seen), n, seen)
	}
	for _, r := range seen {
		if len(r.keys) != 1 || r.keys[0] == "" || r.keys[0] != seen[0].keys[0] || r.body != body {
			t.Fatalf("the requests differ, or do not have the body %q: %v", body, seen)
		}
	}
	return seen[0].keys[0]
}

// A memory is a Doer that is a server: the nth request gets the nth answer, and
// the last answer from then on.
type memory struct {
	log
	answers []http.HandlerFunc
	at      []time.Time
}

func (m *memory) Do(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	m.at = append(m.at, time.Now())
	n := m.add(r)
	w := httptest.NewRecorder()
	m.answers[min(n, len(m.answers))-1](w, r)
	return w.Result(), nil
}

// answer answers with a status and header fields, as name and value pairs.
func answer(status int, fields ...string) http.HandlerFunc {
	return body(status, "", fields...)
}

func body(status int, text string, fields ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(fields); i += 2 {
			w.Header().Set(fields[i], fields[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, text)
	}
}

func problem(status int, kind string, fields ...string) http.HandlerFunc {
	return body(status, `{"type":"`+kind+`","title":"A title.","detail":"What to do."}`,
		append(fields, "Content-Type", "application/problem+json")...)
}

// A step is what a wire server does with one connection's next request.
type step func(*net.TCPConn, *bufio.Reader, *log)

// wire starts a server that speaks HTTP/1.1 by hand: the nth request, over all
// connections, meets the nth step, and the last from then on.
func wire(t *testing.T, steps ...step) (url string, seen *log) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	seen = &log{}
	var (
		mu    sync.Mutex
		next  int
		conns = map[net.Conn]bool{}
		done  sync.WaitGroup
	)
	take := func() step {
		mu.Lock()
		defer mu.Unlock()
		next++
		return steps[min(next, len(steps))-1]
	}
	done.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns[conn] = true
			mu.Unlock()
			done.Go(func() {
				defer conn.Close()
				r := bufio.NewReader(conn)
				for {
					if _, err := r.Peek(1); err != nil {
						return
					}
					take()(conn.(*net.TCPConn), r, seen)
				}
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		mu.Lock()
		for conn := range conns {
			conn.Close()
		}
		mu.Unlock()
		done.Wait()
	})
	return "http://" + listener.Addr().String(), seen
}

func read(r *bufio.Reader, seen *log) {
	if req, err := http.ReadRequest(r); err == nil {
		seen.add(req)
	}
}

// say reads the request and writes raw bytes.
func say(raw string) step {
	return func(c *net.TCPConn, r *bufio.Reader, seen *log) {
		read(r, seen)
		io.WriteString(c, raw)
	}
}

// sayAndClose closes the connection behind them.
func sayAndClose(raw string) step {
	return func(c *net.TCPConn, r *bufio.Reader, seen *log) {
		say(raw)(c, r, seen)
		c.Close()
	}
}

// resetAfterReading resets the connection when the request was read whole.
func resetAfterReading(c *net.TCPConn, r *bufio.Reader, seen *log) {
	read(r, seen)
	c.SetLinger(0)
	c.Close()
}

// resetBeforeReading resets it with the request unread.
func resetBeforeReading(c *net.TCPConn, r *bufio.Reader, _ *log) {
	c.SetLinger(0)
	c.Close()
	r.Reset(c)
}

// silence reads the request and says nothing until the client hangs up.
func silence(c *net.TCPConn, r *bufio.Reader, seen *log) {
	read(r, seen)
	r.Peek(1)
	c.Close()
}

func http11(status int, text string, fields ...string) string {
	var b bytes.Buffer
	resp := http.Response{
		StatusCode: status, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
		ContentLength: int64(len(text)), Body: io.NopCloser(bytes.NewBufferString(text)),
	}
	for i := 0; i < len(fields); i += 2 {
		resp.Header.Set(fields[i], fields[i+1])
	}
	resp.Write(&b)
	return b.String()
}

// netClient returns an http.Client with connections of its own.
func netClient(t *testing.T) *http.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func drain(t *testing.T, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("reading the answer: %v", err)
	}
	return string(text)
}
