//go:build !race

// The race detector empties pools at random, and so counts other allocations; and
// it looks at each byte of a large body for long.

package idempotency_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strconv"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
	golden "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/stdhttp/want"
)

// TestAllocations holds what the guard and a store in memory allocate beside the
// handler: at most 4 times for a replay, 6 for a fresh request and never for an
// operation that is not annotated.
func TestAllocations(t *testing.T) {
	const runs = 1000
	bare := newLoop(serving(answering))
	handler := testing.AllocsPerRun(runs, func() { bare.send("k") })

	replays := newLoop(behindGuard(t, answering))
	replays.send("k")
	if n := testing.AllocsPerRun(runs, func() { replays.send("k") }); n > 4 { // the handler does not run
		t.Errorf("a replay allocates %v times", n)
	}

	var keys [runs + 1]string
	for i := range keys {
		keys[i] = fmt.Sprintf("key %d", i)
	}
	fresh, next := newLoop(behindGuard(t, answering)), 0
	n := testing.AllocsPerRun(runs, func() {
		fresh.send(keys[next])
		next++
	})
	if n -= handler; n > 6 {
		t.Errorf("a fresh request allocates %v times more than its handler", n)
	}

	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	woven := newLoop(serving(golden.GuardServer(orders{}, guard).ListOrders))
	if n := testing.AllocsPerRun(runs, func() { woven.send("k") }); n != handler {
		t.Errorf("an unannotated operation allocates %v times, its handler %v times", n, handler)
	}
}

// TestLargeBodiesAreHeldOnce counts all bytes that are allocated for a request with
// a large body, and for an answer with one.
func TestLargeBodiesAreHeldOnce(t *testing.T) {
	const size = 64 << 20
	p := idempotency.DefaultPolicy("POST /orders")
	p.MaxRequestBody, p.MaxRecordedBody = 2*size, 2*size
	large := make([]byte, size)
	small := func(w http.ResponseWriter, r *http.Request) {
		if n, err := io.Copy(io.Discard, r.Body); err != nil || n < size {
			t.Errorf("the handler read %d bytes: %v", n, err)
		}
		w.WriteHeader(http.StatusCreated)
	}
	for _, test := range []struct {
		name        string
		contentType string
		body        func() []byte
		handler     http.HandlerFunc
		// How many bodies are allocated; a replay allocates those of the request.
		fresh, replay float64
		answered      int
	}{
		{"raw", "application/octet-stream", func() []byte { return large }, small, 1, 1, 0},
		{"json", "application/json", func() []byte { return jsonOf(size) }, small, 1, 1, 0},
		{"multipart", "multipart/form-data; boundary=b", func() []byte { return multipartOf(large) }, small, 1, 1, 0},
		// One is the handler's answer, which is sent, and one is the store's.
		{"answered at once", "text/plain", func() []byte { return nil }, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(large) }, 2, 0, size},
		{"answered with a length", "text/plain", func() []byte { return nil }, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", strconv.Itoa(size))
			_, _ = io.Copy(w, reader{bytes.NewReader(large)})
		}, 2, 0, size},
	} {
		t.Run(test.name, func(t *testing.T) {
			guard, err := idempotency.New(memorystore.New())
			if err != nil {
				t.Fatal(err)
			}
			idempotency.Register[*http.Request](guard, &p)
			body := test.body()
			for _, want := range []float64{test.fresh, test.replay} {
				r, err := http.NewRequest("POST", "/orders", reader{bytes.NewReader(body)})
				if err != nil {
					t.Fatal(err)
				}
				r.ContentLength = int64(len(body))
				r.Header = http.Header{"Idempotency-Key": {test.name}, "Content-Type": {test.contentType}}
				w := &discarded{header: http.Header{}}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				guard.Handle(&p, w, r, test.handler)
				runtime.ReadMemStats(&after)
				if w.status >= 300 || w.size != test.answered {
					t.Fatalf("%d with %d bytes", w.status, w.size)
				}
				if bodies := float64(after.TotalAlloc-before.TotalAlloc) / size; bodies > want+0.25 {
					t.Errorf("%.2f bodies are allocated, want %v", bodies, want)
				}
			}
		})
	}
}
