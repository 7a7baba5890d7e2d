package idempotency_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
	golden "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/stdhttp/want"
)

// answering is a handler like most: it reads a small body and writes a small
// answer with two header fields of its own.
func answering(w http.ResponseWriter, r *http.Request) {
	var body [64]byte
	for {
		if _, err := r.Body.Read(body[:]); err != nil {
			break
		}
	}
	h := w.Header()
	h["Location"], h["Content-Type"] = location, contentType
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, answered)
}

var (
	location    = []string{"/orders/1"}
	contentType = []string{"application/json"}
	answered    = `{"id":"ord_01J8ZC3Q7V","item":"tea","quantity":2,"price":250,"state":"accepted","at":"2026-03-01T12:00:00Z"}`
	requested   = []byte(`{"item":"tea","quantity":2,"price":250}`)
)

// A loop sends one request again and again to a handler, without HTTP: what it
// allocates is the handler's.
type loop struct {
	handler http.Handler
	request *http.Request
	body    bytes.Reader
	header  http.Header
	key     []string
	status  int
}

func newLoop(handler http.Handler) *loop {
	l := &loop{handler: handler, request: httptest.NewRequest("POST", "/orders", nil), header: http.Header{}, key: []string{""}}
	l.request.ContentLength = int64(len(requested))
	l.request.Header["Content-Type"] = contentType
	l.request.Header["Idempotency-Key"] = l.key
	return l
}

func (l *loop) Header() http.Header               { return l.header }
func (l *loop) WriteHeader(status int)            { l.status = status }
func (l *loop) Write(b []byte) (int, error)       { return len(b), nil }
func (l *loop) WriteString(s string) (int, error) { return len(s), nil }
func (l *loop) Close() error                      { return nil }
func (l *loop) Read(b []byte) (int, error)        { return l.body.Read(b) }

func (l *loop) send(key string) {
	l.body.Reset(requested)
	l.request.Body = l
	l.key[0] = key
	clear(l.header)
	l.handler.ServeHTTP(l, l.request)
}

type serving = http.HandlerFunc

// behindGuard returns handler behind a guard over a store in memory.
func behindGuard(t testing.TB, handler http.HandlerFunc) http.Handler {
	return behindStore(t, memorystore.New(), handler)
}

func behindStore(t testing.TB, store idempotency.Store, handler http.HandlerFunc, options ...idempotency.Option) http.Handler {
	p := idempotency.DefaultPolicy("POST /orders")
	guard, err := idempotency.New(store, options...)
	if err != nil {
		t.Fatal(err)
	}
	idempotency.Register[*http.Request](guard, &p)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { guard.Handle(&p, w, r, handler) })
}

// BenchmarkHandle shows what the guard and a store in memory cost without HTTP.
func BenchmarkHandle(b *testing.B) {
	b.Run("bare", func(b *testing.B) {
		l := newLoop(serving(answering))
		b.ReportAllocs()
		for b.Loop() {
			l.send("k")
		}
	})
	b.Run("replay", func(b *testing.B) {
		l := newLoop(behindGuard(b, answering))
		l.send("k")
		b.ReportAllocs()
		for b.Loop() {
			l.send("k")
		}
	})
	b.Run("fresh", func(b *testing.B) {
		l := newLoop(behindGuard(b, answering))
		b.ReportAllocs()
		for n := 0; b.Loop(); n++ {
			l.send(fmt.Sprint(n)) // two allocations of its own
		}
	})
}

// BenchmarkHTTP shows the same over HTTP, on one connection each, a bare handler
// and a guarded one in turns. The metric is how many requests the guarded one
// answers in the time of one of the bare one's, by the medians, which hold on a
// machine that does other things too.
func BenchmarkHTTP(b *testing.B) {
	for _, fresh := range []bool{false, true} {
		name := map[bool]string{false: "replay", true: "fresh"}[fresh]
		b.Run(name, func(b *testing.B) {
			bare, guard := dial(b, serving(answering)), dial(b, behindGuard(b, answering))
			var bareTimes, guardTimes []time.Duration
			for n := 0; b.Loop(); n++ {
				key := 0
				if fresh {
					key = n
				}
				bareTimes = append(bareTimes, bare.post(b, key))
				guardTimes = append(guardTimes, guard.post(b, key))
			}
			bareTime, guardTime := median(bareTimes), median(guardTimes)
			b.ReportMetric(float64(bareTime)/float64(guardTime), "×bare")
			b.ReportMetric(float64(guardTime), "ns/guarded")
		})
	}
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}

// A conn is a client that does as little as it can.
type conn struct {
	net.Conn
	in      *bufio.Reader
	request []byte
}

func dial(b *testing.B, handler http.Handler) *conn {
	server := httptest.NewServer(handler)
	b.Cleanup(server.Close)
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return &conn{Conn: c, in: bufio.NewReader(c)}
}

// post sends a request and returns how long its answer took.
func (c *conn) post(b *testing.B, key int) time.Duration {
	c.request = fmt.Appendf(c.request[:0], "POST /orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: %d\r\nContent-Length: %d\r\n\r\n%s", key, len(requested), requested)
	start := time.Now()
	if _, err := c.Write(c.request); err != nil {
		b.Fatal(err)
	}
	length := 0
	for {
		line, err := c.in.ReadSlice('\n')
		if err != nil {
			b.Fatal(err)
		}
		if len(line) == 2 {
			break
		}
		_, _ = fmt.Sscanf(string(line), "Content-Length: %d", &length)
	}
	if length != len(answered) {
		b.Fatalf("the answer has %d bytes", length)
	}
	if _, err := c.in.Discard(length); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// An unannotated operation of a guarded server is the handler itself.
type orders struct{ golden.ServerInterface }

func (orders) ListOrders(w http.ResponseWriter, r *http.Request) { answering(w, r) }

func BenchmarkUnannotated(b *testing.B) {
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		b.Fatal(err)
	}
	var woven, stock golden.ServerInterface = golden.GuardServer(orders{}, guard), orders{}
	loops := [2]*loop{}
	for i, si := range []golden.ServerInterface{woven, stock} {
		loops[i] = newLoop(serving(si.ListOrders))
	}
	var times [2][]time.Duration
	for b.Loop() {
		for i, l := range loops {
			start := time.Now()
			for range 100 {
				l.send("k")
			}
			times[i] = append(times[i], time.Since(start))
		}
	}
	b.ReportMetric(float64(median(times[1]))/float64(median(times[0])), "×stock")
}

var _ io.ReadCloser = (*loop)(nil)
