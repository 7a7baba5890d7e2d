package idempotency_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// An asked store counts its calls, and may change the rows that claims read.
type asked struct {
	idempotency.Store
	calls  atomic.Int64
	change func(*idempotency.Row)
}

func (s *asked) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	s.calls.Add(1)
	row, err := s.Store.Claim(ctx, c)
	if s.change != nil {
		s.change(&row)
	}
	return row, err
}

func (s *asked) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	s.calls.Add(1)
	return s.Store.Takeover(ctx, c, seen)
}

func (s *asked) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	s.calls.Add(1)
	return s.Store.Settle(ctx, c, o)
}

// asks checks how often the store is asked while do runs.
func (s *asked) asks(t *testing.T, want int64, do func()) {
	t.Helper()
	before := s.calls.Load()
	do()
	if got := s.calls.Load() - before; got != want {
		t.Fatalf("the store was asked %d times, want %d", got, want)
	}
}

func newAsked() *asked { return &asked{Store: memorystore.New()} }

var cached = idempotency.WithReplayCache(1 << 20)

func TestReplayCacheAsksNoStore(t *testing.T) {
	store := newAsked()
	f := serve(t, setup{store: store, options: []idempotency.Option{cached}}, created)
	first := f.post("k", `{}`)
	replay := func(f *fixture) func() {
		return func() {
			a := f.post("k", `{}`)
			a.is(t, 201, `{"id":1}`)
			a.replayed(t, true)
			if a.Header.Get("Location") != first.Header.Get("Location") || a.Header.Get("Content-Type") != first.Header.Get("Content-Type") {
				t.Errorf("the replay has the header %v, the answer had %v", a.Header, first.Header)
			}
		}
	}
	for range 3 {
		store.asks(t, 0, replay(f))
	}
	// Another process reads it once.
	other := serve(t, setup{store: store, options: []idempotency.Option{cached}}, created)
	store.asks(t, 1, replay(other))
	for range 3 {
		store.asks(t, 0, replay(other))
	}
	f.ran(1)
	other.ran(0)
	if f.saw(idempotency.EventReplayed) != 3 {
		t.Error("a replay from the cache was not observed")
	}
}

// What is decided of a request that finds a copy is what would be decided of the
// row.
func TestReplayCacheDecidesAlike(t *testing.T) {
	as := func(name string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("X-User", name) }
	}
	for _, scope := range []idempotency.Scope{idempotency.ScopePrincipal, idempotency.ScopeOperation, idempotency.ScopeGlobal} {
		t.Run(string(scope), func(t *testing.T) {
			var answers [2][]string
			for i, options := range [][]idempotency.Option{nil, {cached}} {
				store, revoked := newAsked(), false
				who := idempotency.WithPrincipal(func(r *http.Request) (string, error) {
					switch name := r.Header.Get("X-User"); {
					case name == "":
						return "", idempotency.ErrUnauthenticated
					case revoked:
						return "", idempotency.ErrForbidden
					default:
						return name, nil
					}
				})
				f := serve(t, setup{store: store, options: append(options, who), policy: func(p *idempotency.Policy) { p.Scope, p.Secured = scope, true }},
					func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "for "+r.Header.Get("X-User")) })
				note := func(a answer) {
					answers[i] = append(answers[i], fmt.Sprint(a.StatusCode, a.body, a.Header.Get("Idempotent-Replayed")))
				}
				note(f.post("k", `{}`, as("ann")))
				note(f.post("k", `{}`, as("ann")))
				before := store.calls.Load()
				note(f.post("k", `{"n":2}`, as("ann")))
				note(f.post("k", `{}`))
				if asked := store.calls.Load() - before; (asked == 0) != (options != nil) {
					t.Errorf("options %d: the store was asked %d times", len(options), asked)
				}
				note(f.post("k", `{}`, as("bob"))) // another's
				note(f.post("k", `{}`, as("ann")))
				revoked = true
				note(f.post("k", `{}`, as("ann")))
			}
			if with, without := strings.Join(answers[1], "\n"), strings.Join(answers[0], "\n"); with != without {
				t.Errorf("with a cache:\n%s\nwithout:\n%s", with, without)
			}
		})
	}
}

// inBubble returns what sends one request to a guarded handler that counts its
// runs, without a network: time in a synctest bubble stands still for one.
func inBubble(t *testing.T, store idempotency.Store, ttl time.Duration) (post func() string) {
	p := idempotency.DefaultPolicy("POST /orders")
	p.TTL = ttl
	guard, err := idempotency.New(store, cached)
	if err != nil {
		t.Fatal(err)
	}
	idempotency.Register[*http.Request](guard, &p)
	runs := 0
	return func() string {
		w, r := httptest.NewRecorder(), httptest.NewRequest("POST", "/orders", nil)
		r.Header.Set("Idempotency-Key", "k")
		guard.Handle(&p, w, r, func(w http.ResponseWriter, _ *http.Request) {
			runs++
			fmt.Fprint(w, "run ", runs)
		})
		return w.Body.String()
	}
}

func expect(t *testing.T, post func() string, want string) {
	t.Helper()
	if got := post(); got != want {
		t.Fatalf("the answer is %q, want %q", got, want)
	}
}

func TestReplayCacheEndsWithTheRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newAsked()
		post := inBubble(t, store, 30*time.Second)
		expect(t, post, "run 1")
		time.Sleep(29 * time.Second)
		store.asks(t, 0, func() { expect(t, post, "run 1") })
		time.Sleep(time.Second)
		expect(t, post, "run 2")
		// One that was read late ends no later than one that was settled.
		reader := inBubble(t, store, 30*time.Second)
		time.Sleep(20 * time.Second)
		store.asks(t, 1, func() { expect(t, reader, "run 2") })
		time.Sleep(9 * time.Second)
		store.asks(t, 0, func() { expect(t, reader, "run 2") })
		time.Sleep(time.Second)
		expect(t, reader, "run 1") // its own first
		expect(t, post, "run 1")
	})
}

// A store's clock is not this process's: what counts is how long it says that a
// row still lives.
func TestReplayCacheKeepsNoTimeOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newAsked()
		post := inBubble(t, store, time.Hour)
		expect(t, post, "run 1")
		store.change = func(row *idempotency.Row) { row.ExpiresIn -= time.Hour - 10*time.Second } // its clock was set
		reader := inBubble(t, store, time.Hour)
		store.asks(t, 1, func() { expect(t, reader, "run 1") })
		time.Sleep(9 * time.Second)
		store.asks(t, 0, func() { expect(t, reader, "run 1") })
		time.Sleep(time.Second)
		store.asks(t, 1, func() { expect(t, reader, "run 1") })
	})
}

// A row that changes before it expires, because an operator overruled it or the
// store's clock was set, is heeded within a minute.
func TestReplayCacheHeedsOperators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newAsked()
		post := inBubble(t, store, time.Hour)
		expect(t, post, "run 1")
		store.change = func(row *idempotency.Row) { row.Outcome.Body = []byte("overruled") }
		time.Sleep(59 * time.Second)
		store.asks(t, 0, func() { expect(t, post, "run 1") })
		time.Sleep(time.Second)
		store.asks(t, 1, func() { expect(t, post, "overruled") })
		store.asks(t, 0, func() { expect(t, post, "overruled") })
	})
}

func TestReplayCacheHoldsOnlyWhatCanBeReplayed(t *testing.T) {
	for _, test := range []struct {
		name    string
		policy  func(*idempotency.Policy)
		change  func(*idempotency.Row)
		handler http.HandlerFunc
	}{
		{"no replay", func(p *idempotency.Policy) { p.Replay.None = true }, nil, created},
		{"flushed", nil, nil, func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() }},
		{"freed", nil, nil, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }},
		{"larger than the cache", func(p *idempotency.Policy) { p.MaxRecordedBody = 2 << 20 }, nil, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 1<<20))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := newAsked()
			f := serve(t, setup{store: store, policy: test.policy, options: []idempotency.Option{cached}}, test.handler)
			f.post("k", `{}`)
			for range 2 {
				before := store.calls.Load()
				f.post("k", `{}`)
				if store.calls.Load() == before {
					t.Error("the store was not asked")
				}
			}
		})
	}
	// The store does not say how long the row lives.
	store := newAsked()
	store.change = func(row *idempotency.Row) { row.ExpiresIn = 0 }
	serve(t, setup{store: store}, created).post("k", `{}`)
	f := serve(t, setup{store: store, options: []idempotency.Option{cached}}, created)
	for range 2 {
		store.asks(t, 1, func() { f.post("k", `{}`).replayed(t, true) })
	}
}

// A countingSealer counts what it opens.
type countingSealer struct {
	idempotency.Sealer
	opened atomic.Int64
}

func (s *countingSealer) Open(sealed, associated []byte) ([]byte, error) {
	s.opened.Add(1)
	return s.Sealer.Open(sealed, associated)
}

func TestReplayCacheKeepsSealedAnswersSealed(t *testing.T) {
	sealer, err := idempotency.NewSealer(idempotency.Secret{ID: "1", Key: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	counting, store := &countingSealer{Sealer: sealer}, newAsked()
	f := serve(t, setup{store: store, options: []idempotency.Option{cached, idempotency.WithSealer(counting)}}, created)
	f.post("k", `{}`)
	for n := int64(1); n <= 2; n++ {
		store.asks(t, 0, func() { f.post("k", `{}`).is(t, 201, `{"id":1}`) })
		if opened := counting.opened.Load(); opened != 2*n { // header and body
			t.Errorf("%d replays opened %d seals", n, opened)
		}
	}
}

// A forgetful store takes every claim and keeps nothing.
type forgetful struct{ idempotency.Store }

func (forgetful) Claim(_ context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	return idempotency.Row{Won: true, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1}, nil
}

func (forgetful) Settle(_ context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	return idempotency.Row{Won: true, State: o.State, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1, ExpiresIn: c.TTL, Outcome: o}, nil
}

// TestReplayCacheIsBounded has ten thousand answers, each a large part of the
// cache, pass through it and looks at what is held. What was used of late is kept.
func TestReplayCacheIsBounded(t *testing.T) {
	const size, limit = 31 << 10, 1 << 20
	body := make([]byte, size)
	handler := behindStore(t, forgetful{}, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }, idempotency.WithReplayCache(limit))
	send := func(key string) (replayed bool) {
		w, r := &discarded{header: http.Header{}}, httptest.NewRequest("POST", "/orders", nil)
		r.Header.Set("Idempotency-Key", key)
		handler.ServeHTTP(w, r)
		if w.status != 200 || w.size != size {
			t.Errorf("key %s: %d with %d bytes", key, w.status, w.size)
		}
		return w.header.Get("Idempotent-Replayed") != ""
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var wg sync.WaitGroup
	for sender := range 10 {
		wg.Go(func() {
			for n := range 1000 {
				send(fmt.Sprint(sender, "-", n))
				send("favourite")
			}
		})
	}
	wg.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	if held := int64(after.HeapAlloc) - int64(before.HeapAlloc); held > limit+limit/2 {
		t.Errorf("%d bytes are held, of a limit of %d", held, limit)
	}
	send("favourite")
	for n := range 100 {
		send(fmt.Sprint(n))
		if !send("favourite") {
			t.Fatal("what is used all the time has made room")
		}
	}
	if !send("99") || send("0") {
		t.Error("the cache holds other than what was used last")
	}
}

func TestReplayCacheOfNothing(t *testing.T) {
	if _, err := idempotency.New(memorystore.New(), idempotency.WithReplayCache(0)); err == nil || !strings.Contains(err.Error(), "WithReplayCache") {
		t.Errorf("got %v, want an error that says what to do", err)
	}
}
