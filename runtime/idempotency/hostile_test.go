package idempotency_test

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A goroutine that the handler left behind marks an effect in the instant in
// which its key is released.
func TestNoEffectIsMarkedOnceTheHandlerHasReturned(t *testing.T) {
	var left *http.Request
	s := &flaky{Store: memorystore.New()}
	marked := func() error {
		if err := idempotency.MarkEffect(left.Context()); !errors.Is(err, idempotency.ErrLeaseLost) {
			t.Errorf("MarkEffect after the handler returned: %v", err)
		}
		if err := idempotency.Passing(left.Context()); err == nil {
			t.Error("bytes may pass after the handler returned")
		}
		return nil
	}
	s.release.Store(&marked)
	f := serve(t, setup{store: s}, func(w http.ResponseWriter, r *http.Request) {
		left = r
		w.WriteHeader(500)
	})
	f.post("k", `{}`).is(t, 500, "")
	f.post("k", `{}`).is(t, 500, "")
	f.ran(2)
}

func TestMarkAndFlushAtOnce(t *testing.T) {
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		done := make(chan error)
		go func() { done <- idempotency.MarkEffect(r.Context()) }()
		_, _ = io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	f.post("k", `{}`).is(t, 200, "x")
	f.post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
}

func TestDeeplyNestedJSONIsComparedByteForByte(t *testing.T) {
	deep := strings.Repeat(`{"a":`, 9000) + "1" + strings.Repeat("}", 9000)
	f := serve(t, setup{}, created)
	f.post("k", deep).is(t, 201, `{"id":1}`)
	f.post("k", deep).replayed(t, true)
	f.post("k", " "+deep).refused(t, 422, "idempotency-key-reused")
}

func TestLimitsWithoutABound(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) {
		p.MaxRequestBody, p.MaxRecordedBody, p.Lease = math.MaxInt64, math.MaxInt64, 200*365*24*time.Hour
	}}, func(w http.ResponseWriter, r *http.Request) {
		if err := r.Context().Err(); err != nil {
			t.Error(err)
		}
		_, _ = io.Copy(w, r.Body)
	})
	f.post("k", `{"n":1}`).is(t, 200, `{"n":1}`)
	f.post("k", `{"n":2}`).refused(t, 422, "idempotency-key-reused")
}

func TestShortLeasesAreRefused(t *testing.T) {
	p := idempotency.DefaultPolicy("POST /")
	p.Lease = 99 * time.Millisecond
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("a lease of 99 ms was registered")
		}
	}()
	idempotency.Register[*http.Request](guard, &p)
}

func TestTrailers(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"declared": func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Trailer", "X-Sum")
			_, _ = io.WriteString(w, "x")
			h.Set("X-Sum", "42")
		},
		"marked": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Other")
			_, _ = io.WriteString(w, "x")
			w.Header().Set(http.TrailerPrefix+"X-Sum", "42")
		},
		"flushed": func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Trailer", "X-Sum")
			_, _ = io.WriteString(w, "x")
			w.(http.Flusher).Flush()
			h.Set("X-Sum", "42")
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := serve(t, setup{}, handler).post("k", `{}`)
			a.is(t, 200, "x")
			if got := a.Trailer.Get("X-Sum"); got != "42" {
				t.Errorf("the trailer is %q", got)
			}
			if a.Header.Get("X-Sum") != "" {
				t.Error("the trailer is a header field too")
			}
		})
	}
}

func TestFieldsThatAHandlerSuppresses(t *testing.T) {
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>")
	})
	for range 2 {
		a := f.post("k", `{}`)
		if _, there := a.Header["Content-Type"]; there {
			t.Errorf("Content-Type %q", a.Header.Get("Content-Type"))
		}
	}
	f.ran(1)
}

func TestStatusesThatAreNone(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.Lease = 200 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(1000)
	})
	f.Config.ErrorLog = discard
	if _, err := f.Client().Transport.RoundTrip(f.request("k", `{}`)); err == nil {
		t.Fatal("status 1000 was answered")
	}
	f.post("k", `{}`).refused(t, 409, "idempotency-in-flight") // the handler panicked
}

func TestQueriesThatCannotBeParsedAreComparedAsTheyAre(t *testing.T) {
	f := serve(t, setup{}, created)
	query := func(q string) func(*http.Request) {
		return func(r *http.Request) { r.URL.RawQuery = q }
	}
	f.post("k", `{}`, query("x=%zz")).is(t, 201, `{"id":1}`)
	f.post("k", `{}`, query("x=%25zz")).refused(t, 422, "idempotency-key-reused")
	f.post("k", `{}`, query("x=%zz")).replayed(t, true)
}

func TestPartsWithAnotherEncodingAreOtherParts(t *testing.T) {
	part := func(fields string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"f\"\r\n" + fields + "\r\na=41\r\n--b--\r\n"
	}
	multipart := func(r *http.Request) { r.Header.Set("Content-Type", "multipart/form-data; boundary=b") }
	f := serve(t, setup{}, created)
	f.post("k", part(""), multipart).is(t, 201, `{"id":1}`)
	f.post("k", part("Content-Transfer-Encoding: quoted-printable\r\n"), multipart).refused(t, 422, "idempotency-key-reused")
}

func TestAProblemsHeaderMayBeShared(t *testing.T) {
	shared := http.Header{"Content-Type": {"text/plain"}}
	release := make(chan struct{})
	f := serve(t, setup{options: []idempotency.Option{idempotency.WithProblem(func(_ context.Context, _ *idempotency.Request, p idempotency.Problem) idempotency.Response {
		return idempotency.Response{Header: shared, Body: []byte(p.Name)}
	})}}, func(w http.ResponseWriter, r *http.Request) { <-release })
	defer close(release)
	go func() { _, _ = f.Client().Do(f.request("k", `{}`)) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	a := f.post("k", `{}`)
	a.is(t, 409, "idempotency-in-flight")
	if a.Header.Get("Retry-After") != "2" || len(shared) != 1 {
		t.Errorf("Retry-After %q, shared header %v", a.Header.Get("Retry-After"), shared)
	}
	f.post("", `{}`).is(t, 400, "missing-idempotency-key")
}

func TestOnePackageIsRegisteredForOneRouter(t *testing.T) {
	p := idempotency.DefaultPolicy("POST /")
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	idempotency.Register[*http.Request](guard, &p)
	defer func() {
		if recover() == nil {
			t.Error("one policy was registered for two routers")
		}
	}()
	idempotency.Register[string](guard, &p)
}
