//go:build unix

package faulttest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// A run that ends without an answer, with its process or by a panic, holds its
// key for one lease. What follows is the guarantee's.
func TestRunWithoutAnAnswer(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		const lease = 2 * time.Second
		c := newConfig(d, lease)
		c.Policy.TTL = lease // and what is not known does not expire
		victim, survivor := pair(t, c)
		var sent, ended sync.Map // key -> time.Time
		var held, panicked, retried sync.WaitGroup
		requests := []struct {
			path, key, steps string
			then             string
		}{
			{atLeastOnce, "killed", "effect,hold", created},
			{atMostOnce, "killed-at-most-once", "effect,hold", unknown},
			{atLeastOnce, "killed-marked", "mark,effect,hold", unknown},
			{atLeastOnce, "panicked", "effect,panic", created},
			{atMostOnce, "panicked-at-most-once", "effect,panic", unknown},
			{atLeastOnce, "panicked-marked", "mark,effect,panic", unknown},
		}
		for i, r := range requests {
			running := &held
			if i >= 3 {
				running = &panicked
			}
			running.Go(func() {
				sent.Store(r.key, time.Now())
				a := victim.post(r.path, r.key, r.steps)
				ended.Store(r.key, time.Now())
				if a.body != "" {
					t.Errorf("%s was answered %s: %s", r.key, a.kind, a.body)
				}
			})
		}
		panicked.Wait()
		for _, r := range requests[:3] {
			victim.await(t, "holding "+r.key)
		}
		want(t, "a duplicate", survivor.post(atLeastOnce, "killed", "effect"), inFlight)
		victim.kill(t)
		held.Wait()

		for _, r := range requests {
			retried.Go(func() {
				a := survivor.until(t, r.path, r.key, "effect", inFlight)
				now := time.Now()
				if a.kind != r.then {
					t.Errorf("%s: %s, want %s", r.key, a.kind, r.then)
				}
				began, _ := sent.Load(r.key)
				died, _ := ended.Load(r.key)
				if after := now.Sub(began.(time.Time)); after < lease {
					t.Errorf("%s: %s after %v, before the lease of %v had ended", r.key, a.kind, after, lease)
				}
				if after := now.Sub(died.(time.Time)); after > 2*lease {
					t.Errorf("%s: %s after %v, more than two leases of %v", r.key, a.kind, after, lease)
				}
			})
		}
		retried.Wait()
		stretch(time.Now(), c.Policy.TTL+time.Second, func() {
			for _, r := range requests {
				if r.then == unknown {
					want(t, r.key+", later", survivor.post(r.path, r.key, "effect"), unknown)
				}
			}
		})
		for _, r := range requests {
			runs := []effect{{1, 1}}
			if r.then == created {
				runs = append(runs, effect{2, 2})
			}
			e.want(t, r.key, runs...)
		}
	})
}

// What a transaction had done dies with its process, and so does its claim.
func TestTransactionKilled(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		victim, survivor := pair(t, newConfig(d, 30*time.Second))
		held := victim.hold(t, transaction, "killed", "effect,hold")
		victim.kill(t)
		if a := receive(t, held); a.body != "" {
			t.Fatalf("the server that was killed answered %s", a.kind)
		}
		first := survivor.until(t, transaction, "killed", "effect", inFlight)
		want(t, "the retry", first, created)
		wantReplay(t, survivor, transaction, "killed", first)
		e.want(t, "killed", effect{2, 1})
	})
}

// A process dies when its COMMIT has arrived and has not taken place. PostgreSQL
// still commits, unless it is stopped from that, and nobody runs before it has.
func TestKilledInCommit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		stopped bool
		kind    string
		effect  effect
	}{
		"commits":  {false, replayed, effect{1, 1}},
		"does not": {true, created, effect{2, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			d := database{Driver: "postgres", DSN: pgtest.DSN(t)}
			e := migrate(t, d)
			look, err := e.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer look.Close()
			// Every commit waits for look's lock.
			if _, err := look.ExecContext(t.Context(), `CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
				'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END';
				CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
				SELECT pg_advisory_lock(1)`); err != nil {
				t.Fatal(err)
			}
			victim, survivor := pair(t, newConfig(d, 30*time.Second))
			sent := victim.begin(transaction, "killed", "effect")
			backend := 0
			for deadline := time.Now().Add(patience); backend == 0; time.Sleep(pause) {
				err := look.QueryRowContext(t.Context(), `SELECT coalesce(max(pid), 0) FROM pg_stat_activity
					WHERE datname = current_database() AND query = 'COMMIT' AND wait_event = 'advisory'`).Scan(&backend)
				if err != nil || time.Now().After(deadline) {
					t.Fatalf("nobody commits: %v", err)
				}
			}
			victim.kill(t)
			if a := receive(t, sent); a.body != "" {
				t.Fatalf("the server that was killed answered %s", a.kind)
			}
			want(t, "while PostgreSQL commits", survivor.post(transaction, "killed", "effect"), inFlight)
			if test.stopped {
				if _, err := look.ExecContext(t.Context(), "SELECT pg_terminate_backend($1, 20000)", backend); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := look.ExecContext(t.Context(), "SELECT pg_advisory_unlock(1)"); err != nil {
				t.Fatal(err)
			}
			first := survivor.until(t, transaction, "killed", "effect", inFlight)
			want(t, "the retry", first, test.kind)
			wantReplay(t, survivor, transaction, "killed", first)
			e.want(t, "killed", test.effect)
		})
	}
}

// A zombie is a process that stood still while another took its key over.
func TestZombie(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		const lease = 1500 * time.Millisecond
		zombie, successor := pair(t, newConfig(d, lease))
		steps := map[string]string{
			"records":   "effect,hold",
			"releases":  "effect,hold,fail",
			"marks":     "hold,mark,effect",
			"overtakes": "effect,hold", // comes back while its successor runs
			"reborn":    "effect,hold", // comes back when its successor freed the key and another began anew
		}
		held := map[string]<-chan answer{}
		for key, steps := range steps {
			held[key] = zombie.hold(t, atLeastOnce, key, steps)
		}
		zombie.signal(t, syscall.SIGSTOP)
		stopped := time.Now()
		answered := map[string]answer{}
		failed := successor.until(t, atLeastOnce, "reborn", "effect,fail", inFlight)
		if !strings.HasPrefix(failed.kind, "500 ") {
			t.Fatalf("the successor that fails: %s", failed.kind)
		}
		for key := range steps {
			if key != "overtakes" {
				answered[key] = successor.until(t, atLeastOnce, key, "effect", inFlight)
				want(t, key+": the successor", answered[key], created)
			}
		}
		running := successor.hold(t, atLeastOnce, "overtakes", "effect,hold")
		stretch(stopped, 2*lease, func() {
			want(t, "while the successor runs", successor.post(atLeastOnce, "overtakes", "effect"), inFlight)
		})
		zombie.signal(t, syscall.SIGCONT)

		for key := range steps {
			zombie.release(t, key)
		}
		// The zombie's client gets what the successor's got, or the truth.
		for _, key := range []string{"records", "reborn"} {
			a := receive(t, held[key])
			want(t, "the zombie that records", a, replayed)
			if a.body != answered[key].body {
				t.Errorf("the zombie answers %q, its successor %q", a.body, answered[key].body)
			}
		}
		want(t, "the zombie that releases", receive(t, held["releases"]), unsettled)
		want(t, "the zombie that marks", receive(t, held["marks"]), unsettled)
		want(t, "the zombie whose successor runs", receive(t, held["overtakes"]), inFlight)

		want(t, "after the zombie", zombie.post(atLeastOnce, "overtakes", "effect"), inFlight)
		successor.release(t, "overtakes")
		answered["overtakes"] = receive(t, running)
		want(t, "the successor that ran meanwhile", answered["overtakes"], created)
		for key, first := range answered {
			wantReplay(t, zombie, atLeastOnce, key, first)
			wantReplay(t, successor, atLeastOnce, key, first)
			runs := []effect{{1, 1}, {2, 2}}
			switch key {
			case "marks": // it was told not to go on
				runs = runs[1:]
			case "reborn":
				runs = append(runs, effect{2, 1})
			}
			e.want(t, key, runs...)
		}
	})
}

// A transaction has no lease: a process that stands still has its keys for as
// long as its connections live, and can do nothing once they do not.
func TestZombieInATransaction(t *testing.T) {
	t.Parallel()
	d := database{Driver: "postgres", DSN: pgtest.DSN(t)}
	e := migrate(t, d)
	const lease = time.Second
	zombie, successor := pair(t, newConfig(d, lease))
	lives := zombie.hold(t, transaction, "lives", "effect,hold")
	dies := zombie.hold(t, transaction, "dies", "effect,hold")
	zombie.signal(t, syscall.SIGSTOP)
	stretch(time.Now(), 2*lease, func() {
		want(t, "while it stands still", successor.post(transaction, "lives", "effect"), inFlight)
		want(t, "while it stands still", successor.post(transaction, "dies", "effect"), inFlight)
	})
	if _, err := e.db.Exec(`SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity
		WHERE datname = current_database() AND state LIKE 'idle in transaction%' ORDER BY xact_start DESC LIMIT 1`); err != nil {
		t.Fatal(err)
	}
	first := map[string]answer{"dies": successor.until(t, transaction, "dies", "effect", inFlight)}
	want(t, "the successor", first["dies"], created)
	want(t, "while it stands still", successor.post(transaction, "lives", "effect"), inFlight)

	zombie.signal(t, syscall.SIGCONT)
	zombie.release(t, "lives")
	zombie.release(t, "dies")
	first["lives"] = receive(t, lives)
	want(t, "the zombie whose connection lives", first["lives"], created)
	want(t, "the zombie whose connection broke", receive(t, dies), storeUnavailable)
	for key, a := range first {
		wantReplay(t, zombie, transaction, key, a)
		wantReplay(t, successor, transaction, key, a)
	}
	e.want(t, "lives", effect{1, 1})
	e.want(t, "dies", effect{2, 1})
}

func TestClientHangsUp(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		one, two := pair(t, newConfig(d, 30*time.Second))
		ctx, hangUp := context.WithCancel(t.Context())
		gone := make(chan answer, 1)
		go func() { gone <- one.postUntil(ctx, atLeastOnce, "gone", "hold,effect") }()
		one.await(t, "holding gone")
		hangUp()
		if a := receive(t, gone); a.body != "" {
			t.Fatalf("the client that hung up was answered %s", a.kind)
		}
		want(t, "while the handler runs", two.post(atLeastOnce, "gone", "effect"), inFlight)
		one.release(t, "gone")
		a := two.until(t, atLeastOnce, "gone", "effect", inFlight)
		want(t, "the retry", a, replayed)
		wantReplay(t, one, atLeastOnce, "gone", a)
		e.want(t, "gone", effect{1, 1})
	})
}

func TestShutdownFinishesWhatIsInFlight(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		one, two := pair(t, newConfig(d, 30*time.Second))
		done := one.hold(t, atLeastOnce, "last", "hold,effect")
		one.signal(t, syscall.SIGTERM)
		one.await(t, "stopping")
		want(t, "while the server shuts down", two.post(atLeastOnce, "last", "effect"), inFlight)
		one.release(t, "last")
		first := receive(t, done)
		want(t, "the request in flight", first, created)
		one.awaitExit(t)
		if state := one.cmd.ProcessState; !state.Success() {
			t.Errorf("the server ended with %v", state)
		}
		wantReplay(t, two, atLeastOnce, "last", first)
		e.want(t, "last", effect{1, 1})
	})
}

// A request is sent to server after server, each of which is killed, until it
// is answered for good.
type request struct {
	path, key, steps string
	once             bool // never runs twice
	first            answer
	unknown          bool
}

func (r *request) settled() bool { return r.first.body != "" || r.unknown }

// send sends the request once and remembers what is final. It returns false
// when the server did not live to answer.
func (r *request) send(t *testing.T, p *process) bool {
	a := p.post(r.path, r.key, r.steps)
	switch {
	case a.body == "":
		return false
	case a.kind == inFlight && !r.settled():
	case a.kind == created && !r.settled():
		r.first = a
	case a.kind == replayed && !r.unknown && (r.first.body == "" || r.first.body == a.body):
		r.first = a // recorded by a server that did not live to say so
	case a.kind == unknown && r.once && r.first.body == "":
		r.unknown = true
	default:
		t.Errorf("%s: %s (%s), after %q, unknown: %t", r.key, a.kind, a.body, r.first.body, r.unknown)
	}
	return true
}

// Server after server is killed amid requests. Whatever instant that meets, an
// answer has its effect and stays, and what may happen once happens once.
func TestRandomKills(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		rounds, bound := shortOr(60, 400), 15*time.Second
		if *long {
			bound = 4 * time.Minute
		}
		window := 20 * time.Millisecond
		if d.Driver == "sqlite" { // which waits for the disk, and for its own writers
			window = 100 * time.Millisecond
		}
		kinds := []request{
			{path: atLeastOnce, key: "early", steps: "effect,sleep=5ms"},
			{path: atLeastOnce, key: "late", steps: "sleep=5ms,effect"},
			{path: atMostOnce, key: "at-most-once", steps: "effect,sleep=5ms", once: true},
			{path: atLeastOnce, key: "marked", steps: "mark,effect,sleep=5ms", once: true},
			{path: transaction, key: "transaction", steps: "effect,sleep=5ms", once: true},
		}
		// In minutes a busy machine may be late for a short lease, and a handler
		// that is then cancelled answers otherwise.
		c := newConfig(d, time.Duration(shortOr(3, 8))*time.Second)
		c.MaxOpenConns = 4
		var all []*request
		began, kills := time.Now(), 0
		for round := 0; round < rounds && time.Since(began) < bound; round++ {
			c.Process = round
			server := start(t, c)
			var mu sync.Mutex
			var wg sync.WaitGroup
			warm := make(chan struct{}, len(kinds))
			for _, r := range all {
				if !r.settled() {
					wg.Go(func() { r.send(t, server) })
				}
			}
			for _, kind := range kinds {
				wg.Go(func() { // new ones until the end
					for i := 0; ; i++ {
						r := kind
						r.key = fmt.Sprintf("%s-%d-%d", kind.key, round, i)
						mu.Lock()
						all = append(all, &r)
						mu.Unlock()
						alive := r.send(t, server)
						if i == 0 {
							warm <- struct{}{}
						}
						if !alive {
							return
						}
					}
				})
			}
			<-warm
			time.Sleep(rand.N(window))
			server.kill(t)
			kills++
			wg.Wait()
		}

		c.Process = rounds
		last := start(t, c)
		var wg sync.WaitGroup
		const senders = 8
		for sender := range senders {
			wg.Go(func() {
				for i := sender; i < len(all); i += senders {
					deadline := time.Now().Add(patience)
					for all[i].send(t, last); !all[i].settled() && !t.Failed() && time.Now().Before(deadline); all[i].send(t, last) {
						time.Sleep(pause)
					}
				}
			})
		}
		wg.Wait()
		ran := e.of(t)
		again, unknown := 0, 0
		for _, r := range all {
			runs := ran[r.key]
			attempts := map[int]bool{}
			for _, run := range runs {
				attempts[run.attempt] = true
			}
			switch {
			case !r.settled():
				t.Errorf("%s has no answer", r.key)
			case r.first.body != "" && len(runs) == 0:
				t.Errorf("%s was answered %q and had no effect", r.key, r.first.body)
			case r.once && len(runs) > 1:
				t.Errorf("%s ran more than once: %v (process, attempt)", r.key, runs)
			case len(attempts) != len(runs):
				t.Errorf("%s: one attempt ran twice: %v (process, attempt)", r.key, runs)
			}
			if len(runs) > 1 {
				again++
			}
			if r.unknown {
				unknown++
			}
		}
		t.Logf("%d kills amid %d requests: %d ran again after a kill, %d have an unknown outcome", kills, len(all), again, unknown)
		if again+unknown == 0 {
			t.Error("no kill met a handler")
		}
	})
}
