package idempotentclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A profile is a real guard of one kind, and the client that is meant for it.
type profile struct {
	name    string
	policy  func(*idempotency.Policy)
	guard   []idempotency.Option
	options []idempotentclient.Option

	replayed int    // the status of a replayed 201
	mismatch string // what becomes of another request with a used key
	failed   string // what becomes of a call whose first run ends with 500
	waits    bool   // a duplicate waits in the server
}

// profiles are the defaults, and two systems that a policy reproduces: one that
// records every status and answers in plain text, so that its two kinds of 409
// look alike, and one that replays whatever a request says.
var profiles = []profile{
	{
		name:     "default",
		policy:   func(*idempotency.Policy) {},
		replayed: 201, mismatch: "422 idempotency-key-reused", failed: "201, 2 runs",
	},
	{
		name: "PHP",
		policy: func(p *idempotency.Policy) {
			p.Scope, p.OnMissing, p.OnMismatch = idempotency.ScopeGlobal, idempotency.RunUnguarded, http.StatusConflict
			p.Fingerprint = idempotency.FingerprintRule{Body: idempotency.BodyRaw}
			p.Record = []idempotency.StatusPattern{"4XX", "5XX", "400", "401", "403", "408", "409", "413", "415", "422", "425", "429"}
		},
		guard: []idempotency.Option{idempotency.WithProblem(func(_ context.Context, _ *idempotency.Request, p idempotency.Problem) idempotency.Response {
			return idempotency.Response{Status: p.Status, Header: http.Header{"Content-Type": {"text/plain"}}, Body: []byte("Conflict")}
		})},
		options:  []idempotentclient.Option{idempotentclient.WithConflictsInFlight()},
		replayed: 201, mismatch: "409 idempotency-in-flight", failed: "500 replayed, 1 runs",
	},
	{
		name: "NENE2",
		policy: func(p *idempotency.Policy) {
			p.Scope, p.OnMissing, p.OnMismatch = idempotency.ScopeGlobal, http.StatusUnprocessableEntity, idempotency.ReplayAnyway
			p.WaitFor, p.Record, p.TTL = 5*time.Second, nil, 36500*24*time.Hour
			p.Replay.Status = http.StatusOK
		},
		replayed: 200, mismatch: "200 replayed", failed: "201, 2 runs", waits: true,
	},
}

// A guarded is a server of one profile.
type guarded struct {
	profile
	url     string
	handle  func(w http.ResponseWriter, run int32) // set before the first request
	runs    atomic.Int32
	arrived atomic.Int32 // requests
	lose    atomic.Int32 // how many answers are lost from now on
}

// onProfiles runs a test on a server of each profile, which creates orders.
func onProfiles(t *testing.T, test func(*testing.T, *guarded)) {
	for _, p := range profiles {
		t.Run(p.name, func(t *testing.T) {
			guard, err := idempotency.New(memorystore.New(), p.guard...)
			if err != nil {
				t.Fatal(err)
			}
			policy := idempotency.DefaultPolicy("POST /orders")
			p.policy(&policy)
			idempotency.Register[*http.Request](guard, &policy)
			g := &guarded{profile: p, handle: create}
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				g.arrived.Add(1)
				to := w
				lost := g.lose.Add(-1) >= 0
				if lost {
					to = httptest.NewRecorder()
				}
				guard.Handle(&policy, to, r, func(w http.ResponseWriter, _ *http.Request) { g.handle(w, g.runs.Add(1)) })
				if lost {
					panic(http.ErrAbortHandler)
				}
			}))
			server.Config.ErrorLog = quiet
			defer server.Close()
			g.url = server.URL
			test(t, g)
		})
	}
}

func create(w http.ResponseWriter, _ int32) {
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, "created")
}

// order calls with a key and fails the test unless there is an answer.
func (g *guarded) order(t *testing.T, key, body string, options ...idempotentclient.Option) *http.Response {
	t.Helper()
	c := api{Server: g.url, Client: http.DefaultClient, idempotency: idempotentclient.NewConfig(append(g.options, options...)...)}
	resp, err := c.CreateOrder(idempotentclient.WithKey(t.Context(), key), "", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	return resp
}

func (g *guarded) ran(t *testing.T, want int32) {
	t.Helper()
	if n := g.runs.Load(); n != want {
		t.Fatalf("the handler ran %d times, want %d", n, want)
	}
}

// wantReplay fails unless resp is a replay of a 201.
func (g *guarded) wantReplay(t *testing.T, resp *http.Response) {
	t.Helper()
	if resp.StatusCode != g.replayed || !idempotentclient.Replayed(resp) || idempotentclient.Check(resp) != nil {
		t.Fatalf("got %d, replayed: %v, %v; want a replayed %d", resp.StatusCode, idempotentclient.Replayed(resp), idempotentclient.Check(resp), g.replayed)
	}
}

func TestProfilesReplayLostAnswers(t *testing.T) {
	onProfiles(t, func(t *testing.T, g *guarded) {
		g.lose.Store(3)
		g.wantReplay(t, g.order(t, "lost", "order", idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 10})))
		g.ran(t, 1)
	})
}

// Whoever calls while the first call runs gets its answer.
func TestProfilesOutliveAnothersRun(t *testing.T) {
	onProfiles(t, func(t *testing.T, g *guarded) {
		began, release := make(chan struct{}), make(chan struct{})
		g.handle = func(w http.ResponseWriter, run int32) {
			close(began)
			<-release
			create(w, run)
		}
		var calls sync.WaitGroup
		calls.Go(func() { g.order(t, "raced", "order") })
		select {
		case <-began:
		case <-time.After(20 * time.Second):
			t.Fatal("the first call did not begin")
		}
		var refused atomic.Int32
		calls.Go(func() {
			g.wantReplay(t, g.order(t, "raced", "order", idempotentclient.WithObserver(func(_ context.Context, a idempotentclient.Attempt) {
				// More than a call's attempts, since these do not count.
				if a.Status == http.StatusConflict && refused.Add(1) == 6 {
					close(release)
				}
			})))
		})
		if g.waits {
			for deadline := time.Now().Add(20 * time.Second); g.arrived.Load() < 2 && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			close(release)
		}
		calls.Wait()
		g.ran(t, 1)
		if (refused.Load() > 0) == g.waits {
			t.Errorf("the second call was refused %d times", refused.Load())
		}
	})
}

func TestProfilesNeverRunAnotherRequest(t *testing.T) {
	onProfiles(t, func(t *testing.T, g *guarded) {
		g.order(t, "reused", "order")
		// A 409 that looks like one in flight is asked again until the time is over.
		resp := g.order(t, "reused", "another order", idempotentclient.WithRetry(idempotentclient.Retry{MaxElapsed: 100 * time.Millisecond}))
		if got := outcome(resp); got != g.mismatch {
			t.Errorf("got %s, want %s", got, g.mismatch)
		}
		g.ran(t, 1)
	})
}

// A failure that was recorded is the answer; one that was not frees the key.
func TestProfilesRepeatFailuresThatAreNotRecorded(t *testing.T) {
	onProfiles(t, func(t *testing.T, g *guarded) {
		g.handle = func(w http.ResponseWriter, run int32) {
			if run == 1 {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			create(w, run)
		}
		resp := g.order(t, "failed", "order")
		if got := fmt.Sprintf("%s, %d runs", outcome(resp), g.runs.Load()); got != g.failed {
			t.Errorf("got %s, want %s", got, g.failed)
		}
	})
}

// What the operation itself refuses is final, and mended under a new key.
func TestProfilesReturnRefusals(t *testing.T) {
	onProfiles(t, func(t *testing.T, g *guarded) {
		g.handle = func(w http.ResponseWriter, run int32) {
			if run == 1 {
				w.WriteHeader(http.StatusUnprocessableEntity)
				return
			}
			create(w, run)
		}
		if got := outcome(g.order(t, "refused", "order")); got != "422" {
			t.Errorf("got %s, want 422", got)
		}
		g.ran(t, 1)
		if got := outcome(g.order(t, "mended", "mended order")); got != "201" {
			t.Errorf("got %s, want 201", got)
		}
	})
}

// outcome is a status, and what the client knows of it.
func outcome(resp *http.Response) string {
	text := resp.Status[:3]
	if idempotentclient.Replayed(resp) {
		text += " replayed"
	}
	var p *idempotentclient.Problem
	if errors.As(idempotentclient.Check(resp), &p) {
		text += " " + string(p.Code)
	}
	return text
}
