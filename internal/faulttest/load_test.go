//go:build unix

package faulttest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// A load sends the requests of many keys and holds every answer against the
// answers before it, and in the end against the effects.
type load struct {
	t     *testing.T
	e     effects
	lease time.Duration
	// faulty says that the database fails, and with it the store and handlers.
	faulty bool
	// zombies says that servers stand still, so that leases end under them.
	zombies bool

	mu    sync.Mutex
	calls []*call
	seen  map[string]int // how often each kind of answer was given
}

// A call is one key and what is known of it.
type call struct {
	path, key, steps string

	mu      sync.Mutex
	sent    time.Time // when its first request was
	body    string    // of the answer that is recorded, once a client has it
	created int       // how many clients were told that it was theirs
	freed   int       // how often the handler failed, so that the key was free
	unknown bool
	refused []string // the requests of which clients were told that none ran
}

var paths = []string{atLeastOnce, atMostOnce, transaction}

// call returns the call of a new key.
func (l *load) call(name, path, steps string) *call {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &call{path: path, key: fmt.Sprintf("%s-%d", name, len(l.calls)), steps: steps}
	l.calls = append(l.calls, c)
	return c
}

// post sends one request of a call and reports whether its answer is final.
func (l *load) post(p *process, c *call) bool {
	c.mu.Lock()
	if c.sent.IsZero() {
		c.sent = time.Now()
	}
	before := c.body
	c.mu.Unlock()
	a := p.post(c.path, c.key, c.steps)
	l.mu.Lock()
	kind, _, _ := strings.Cut(a.kind, ":") // what a handler or the network says is of many kinds
	if l.seen == nil {
		l.seen = map[string]int{}
	}
	if a.body == "" {
		kind = "nothing"
	}
	l.seen[kind]++
	l.mu.Unlock()

	c.mu.Lock()
	defer c.mu.Unlock()
	failed := strings.HasPrefix(a.kind, "500 ") && (l.faulty || l.zombies) // whose handlers are cancelled
	wrong := false
	switch {
	case a.body == "": // the connection broke, or nothing came in time
		wrong = !l.zombies
	case a.kind == created || a.kind == replayed || failed && c.path == atMostOnce: // which is recorded too
		if a.kind == created {
			c.created++
		}
		wrong = c.created > 1 || c.body != "" && c.body != a.body
		c.body = a.body
	case a.kind == storeUnavailable:
		c.refused = append(c.refused, a.request)
		wrong = !l.faulty && !l.zombies // whose deadlines pass while they stand still
	case before != "":
		wrong = true
	case a.kind == inFlight:
	case a.kind == unsettled:
		wrong = !l.faulty && !l.zombies
	case a.kind == unknown:
		c.unknown = true
		wrong = c.path != atMostOnce || !l.faulty && !l.zombies
	case failed:
		c.freed++
	default:
		wrong = true
	}
	if wrong {
		l.t.Errorf("%s %s is answered %s (%s), and was answered %q before, %d times for the first time", c.path, c.key, a.kind, a.body, before, c.created)
	}
	return c.body != "" || c.unknown
}

// check asks once more for each key until it is answered for good, and then
// counts what the handlers did.
func (l *load) check(p *process) {
	l.t.Helper()
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 8 {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(l.calls); i = int(next.Add(1)) - 1 {
				for deadline := time.Now().Add(patience); !l.post(p, l.calls[i]); time.Sleep(pause) {
					if time.Now().After(deadline) {
						l.t.Errorf("%s is not answered for good", l.calls[i].key)
						break
					}
				}
				l.post(p, l.calls[i]) // and it stays
			}
		})
	}
	wg.Wait()

	ran := l.e.runs(l.t)
	again, unknown := 0, 0
	for _, c := range l.calls {
		runs := ran[c.key]
		switch {
		case strings.HasPrefix(c.body, "process ") && !isOf(c.body, runs):
			l.t.Errorf("%s was answered %q, a run without an effect: %v", c.key, c.body, runs)
		case len(runs) > 1 && c.path != atLeastOnce:
			l.t.Errorf("%s %s ran more than once: %v", c.path, c.key, runs)
		case len(runs) > 1:
			again++
			most := 1 + c.freed + int(runs[len(runs)-1].at.Sub(c.sent)/l.lease)
			if len(runs) > most {
				l.t.Errorf("%s ran %d times, its leases allow %d: %v", c.key, len(runs), most, runs)
			}
		}
		for _, r := range runs {
			if slices.Contains(c.refused, r.request) {
				l.t.Errorf("%s %s: a request ran that was answered %s: %v", c.path, c.key, storeUnavailable, r)
			}
		}
		if c.unknown && c.body == "" {
			unknown++
		}
	}
	l.t.Logf("%d keys, answers %v; %d ran again after a lease or a failure, %d have an unknown outcome", len(l.calls), l.seen, again, unknown)
}

// isOf reports whether one of the runs gave the answer with that body.
func isOf(body string, runs []run) bool {
	return slices.ContainsFunc(runs, func(r run) bool { return strings.Contains(body, ", run "+r.id) })
}

// atOnce calls f in n goroutines, and returns when all have returned.
func atOnce(n int, f func(worker int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// Two and four processes share many keys with many duplicates each. Some
// handlers are slower than the lease, and some servers stand still for two.
func TestManyProcesses(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d processes", n), func(t *testing.T) {
			d := database{Driver: "postgres", DSN: pgtest.DSN(t)}
			if n == 4 {
				d.Direct = d.DSN
			}
			l := &load{t: t, e: migrate(t, d), lease: 3 * time.Second, zombies: true}
			c := newConfig(d, l.lease)
			var servers []*process
			for range n {
				servers = append(servers, start(t, c))
				c.Process++
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			stopped := shortOr(1, 5)
			var over atomic.Bool
			go func() {
				defer over.Store(true)
				for range stopped {
					time.Sleep(l.lease / 2)
					zombie := servers[rand.N(n)]
					_ = zombie.cmd.Process.Signal(syscall.SIGSTOP)
					time.Sleep(2 * l.lease)
					_ = zombie.cmd.Process.Signal(syscall.SIGCONT)
				}
			}()
			keys, slow := shortOr(100, 10_000), shortOr(40, 100)
			var next, requests atomic.Int64
			atOnce(8, func(int) {
				for i := int(next.Add(1)); (i <= keys || !over.Load()) && ctx.Err() == nil && !t.Failed(); i = int(next.Add(1)) {
					steps := "effect,sleep=5ms"
					switch {
					case i%slow == 7:
						steps = fmt.Sprintf("effect,sleep=%v", l.lease*4/3)
					case !over.Load(): // so that one that stands still has work in hand
						steps = "effect,sleep=200ms"
					}
					c := l.call("shared", paths[i%len(paths)], steps)
					atOnce(1+rand.N(1+rand.N(50)), func(int) {
						server := servers[rand.N(n)]
						for requests.Add(1); !l.post(server, c) && !over.Load(); requests.Add(1) {
							time.Sleep(pause) // until what one that stands still holds is taken over
						}
					})
				}
			})
			l.check(servers[0])
			t.Logf("%d processes, of which one stood still %d times; %d requests for %d keys of %d", n, stopped, requests.Load(), len(l.calls), keys)
			if len(l.calls) < keys {
				t.Errorf("there was time for %d keys, want %d", len(l.calls), keys)
			}
		})
	}
}

// PostgreSQL crashes again and again under load. What was acknowledged is there
// afterwards, and no answer was untrue.
func TestPostgresCrashesUnderLoad(t *testing.T) {
	t.Parallel()
	onEachCluster(t, postgresCrashesUnderLoad)
}

func postgresCrashesUnderLoad(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	l := &load{t: t, e: e, lease: 3 * time.Second, faulty: true}
	c := newConfig(d, l.lease)
	c.StoreTimeout = time.Second
	one, two := pair(t, c)
	servers := []*process{one, two}
	crashes := shortOr(3, 25)
	var over atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		atOnce(12, func(worker int) {
			for i := 0; !over.Load() && !t.Failed(); i++ {
				c := l.call("amid", paths[(worker+i)%len(paths)], "effect,sleep=10ms")
				for try := 0; try < 5 && !l.post(servers[rand.N(2)], c) && !over.Load(); try++ {
					time.Sleep(pause)
				}
			}
		})
	})
	for crash := range crashes {
		time.Sleep(300*time.Millisecond + rand.N(500*time.Millisecond)) // any instant
		cluster.Crash(t)
		if crash%5 == 2 { // for longer than a lease
			time.Sleep(l.lease)
		}
		cluster.Restart(t)
	}
	time.Sleep(time.Second) // the load goes on when it is up again
	over.Store(true)
	wg.Wait()
	l.check(one)
	t.Logf("%d crashes", crashes)
	for _, kind := range []string{created, storeUnavailable} {
		if l.seen[kind] == 0 {
			t.Errorf("nothing was answered %s", kind)
		}
	}
}
