//go:build unix

package faulttest

import (
	"fmt"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// onEachCluster runs a test on a PostgreSQL of its own, for each way to reach it,
// in parallel.
func onEachCluster(t *testing.T, test func(*testing.T, *pgtest.Server, database, effects)) {
	for name, direct := range map[string]bool{"postgres": false, "direct": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := pgtest.Start(t)
			d := database{Driver: "postgres", DSN: cluster.DSN(t)}
			if direct {
				d.Direct = d.DSN
			}
			test(t, cluster, d, migrate(t, d))
		})
	}
}

// outages are the ways in which PostgreSQL stops.
var outages = []struct {
	name string
	stop func(*pgtest.Server, testing.TB)
}{
	{"fast", (*pgtest.Server).Stop},
	{"immediate", (*pgtest.Server).Crash},
}

// One server lives through every outage.
func TestPostgresStopped(t *testing.T) {
	t.Parallel()
	onEachCluster(t, postgresStopped)
}

func postgresStopped(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	c := newConfig(d, 30*time.Second)
	c.StoreTimeout = time.Second
	one := start(t, c)
	for _, outage := range outages {
		t.Run(outage.name, func(t *testing.T) {
			before := one.post(atLeastOnce, outage.name+"-before", "effect")
			want(t, "before", before, created)
			// Every connection of the pool is one that breaks.
			for _, a := range answers(20, func(i int) answer {
				return one.post(atLeastOnce, fmt.Sprintf("%s-warm-%d", outage.name, i), "effect,sleep=50ms")
			}) {
				want(t, "before, many at once", a, created)
			}
			outage.stop(cluster, t)
			for range 3 {
				for _, a := range answers(10, func(i int) answer {
					return one.post(atLeastOnce, fmt.Sprintf("%s-%d", outage.name, i), "effect")
				}) {
					want(t, "while it is down", a, storeUnavailable)
					if a.took > c.StoreTimeout+time.Second {
						t.Errorf("answered after %v, the store's deadline is %v", a.took, c.StoreTimeout)
					}
				}
			}
			want(t, "a replay while it is down", one.post(atLeastOnce, outage.name+"-before", "effect"), storeUnavailable)
			cluster.Restart(t)
			for i := range 10 {
				key := fmt.Sprintf("%s-%d", outage.name, i)
				if ran := e.of(t)[key]; len(ran) > 0 {
					t.Fatalf("%s ran %v (process, attempt) without a store", key, ran)
				}
				want(t, "when it is up again", one.post(atLeastOnce, key, "effect"), created)
				e.want(t, key, effect{1, 1})
			}
			wantReplay(t, one, atLeastOnce, outage.name+"-before", before)
		})
	}
}

// PostgreSQL comes back within the lease: the answer is late, true and
// durable, and nothing ran twice.
func TestPostgresStoppedWhileAHandlerRuns(t *testing.T) {
	t.Parallel()
	onEachCluster(t, postgresStoppedWhileAHandlerRuns)
}

func postgresStoppedWhileAHandlerRuns(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	c := newConfig(d, 8*time.Second)
	c.StoreTimeout = time.Second
	one, two := pair(t, c)
	for _, outage := range outages {
		t.Run(outage.name, func(t *testing.T) {
			keys := map[string]string{outage.name: atLeastOnce, outage.name + "-at-most-once": atMostOnce}
			held := map[string]<-chan answer{}
			for key, path := range keys {
				held[key] = one.hold(t, path, key, "effect,hold")
			}
			outage.stop(cluster, t)
			for key := range keys {
				one.release(t, key)
			}
			stretch(time.Now(), time.Second, func() {
				for key, path := range keys {
					want(t, "a duplicate while it is down", two.post(path, key, "effect"), storeUnavailable)
				}
			})
			for key := range keys {
				select {
				case a := <-held[key]:
					t.Fatalf("answered %s before it was recorded", a.kind)
				default:
				}
			}
			cluster.Restart(t)
			for key, path := range keys {
				again := two.until(t, path, key, "effect", inFlight)
				want(t, "a duplicate when it is up again", again, replayed)
				first := receive(t, held[key])
				want(t, "the request whose handler ran", first, created)
				if first.body != again.body {
					t.Errorf("replay of %q is %q", first.body, again.body)
				}
				e.want(t, key, effect{1, 1})
			}
		})
	}
}

// PostgreSQL stays away for longer than the lease: nobody can know what will be
// found, and nobody is told that it is recorded.
func TestPostgresStoppedForALease(t *testing.T) {
	t.Parallel()
	onEachCluster(t, postgresStoppedForALease)
}

func postgresStoppedForALease(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	const lease = 3 * time.Second
	c := newConfig(d, lease)
	c.StoreTimeout = time.Second
	one, two := pair(t, c)
	for _, outage := range outages {
		t.Run(outage.name, func(t *testing.T) {
			lost, once := outage.name, outage.name+"-at-most-once"
			heldLost := one.hold(t, atLeastOnce, lost, "effect,hold")
			heldOnce := one.hold(t, atMostOnce, once, "effect,hold")
			outage.stop(cluster, t)
			down := time.Now()
			one.release(t, lost)
			one.release(t, once)
			for _, held := range []<-chan answer{heldLost, heldOnce} {
				want(t, "the request whose handler ran", receive(t, held), unsettled)
				if after := time.Since(down); after > lease+2*c.StoreTimeout {
					t.Errorf("answered after %v, with a lease of %v", after, lease)
				}
			}
			stretch(down, lease, func() {
				want(t, "while it is down", two.post(atLeastOnce, lost, "effect"), storeUnavailable)
			})
			cluster.Restart(t)
			first := two.post(atLeastOnce, lost, "effect")
			want(t, "the retry", first, created)
			wantReplay(t, one, atLeastOnce, lost, first)
			e.want(t, lost, effect{1, 1}, effect{2, 2})
			want(t, "the retry, at most once", two.post(atMostOnce, once, "effect"), unknown)
			e.want(t, once, effect{1, 1})
		})
	}
}

func TestSilentConnections(t *testing.T) {
	t.Parallel()
	onEachCluster(t, silentConnections)
}

func silentConnections(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	p := newProxy(t, cluster.Addr())
	d.DSN = p.dsn(t, d.DSN)
	if d.Direct != "" {
		d.Direct = d.DSN
	}
	c := newConfig(d, 30*time.Second)
	c.StoreTimeout = time.Second
	c.MaxOpenConns = 4
	one := start(t, c)

	refused := func(t *testing.T, prefix string) {
		t.Helper()
		for _, a := range answers(10, func(i int) answer {
			return one.post(atLeastOnce, fmt.Sprint(prefix, i), "effect")
		}) {
			want(t, "while it is silent", a, storeUnavailable)
			if a.took > c.StoreTimeout+time.Second {
				t.Errorf("answered after %v, the store's deadline is %v", a.took, c.StoreTimeout)
			}
		}
	}
	// The keys are free long before a lease has ended: what was sent into the
	// silence and arrives after all is taken back.
	served := func(t *testing.T, prefix string) {
		t.Helper()
		heard := time.Now()
		for i := range 10 {
			key := fmt.Sprint(prefix, i)
			a := one.until(t, atLeastOnce, key, "effect", inFlight, storeUnavailable)
			want(t, "when it is not silent any more", a, created)
			e.want(t, key, effect{1, 1})
		}
		if after := time.Since(heard); after > 10*time.Second {
			t.Errorf("served after %v", after)
		}
	}

	t.Run("idle", func(t *testing.T) {
		first := one.post(atLeastOnce, "before", "effect")
		want(t, "before", first, created)
		p.silence()
		refused(t, "idle-")
		p.speak()
		served(t, "idle-")
		wantReplay(t, one, atLeastOnce, "before", first)
	})
	t.Run("while a handler runs", func(t *testing.T) {
		held := one.hold(t, atLeastOnce, "running", "effect,hold")
		p.silence()
		one.release(t, "running")
		refused(t, "meanwhile-")
		select {
		case a := <-held:
			t.Fatalf("answered %s before it was recorded", a.kind)
		default:
		}
		p.speak()
		first := receive(t, held)
		want(t, "the request whose handler ran", first, created)
		wantReplay(t, one, atLeastOnce, "running", first)
		e.want(t, "running", effect{1, 1})
		served(t, "meanwhile-")
	})
}

// Connections that a firewall forgot stay silent for ever; new ones work. In an
// application's pool a call that was abandoned keeps its connection, so it must
// have some to spare; a pool of the store's own may have lost all.
func TestForgottenConnections(t *testing.T) {
	t.Parallel()
	onEachCluster(t, forgottenConnections)
}

func forgottenConnections(t *testing.T, cluster *pgtest.Server, d database, e effects) {
	p := newProxy(t, cluster.Addr())
	c := newConfig(d, 30*time.Second)
	if d.Direct != "" {
		c.Database.Direct, c.MaxOpenConns = p.dsn(t, d.DSN), 2
	} else {
		c.Database.DSN = p.dsn(t, d.DSN)
	}
	c.StoreTimeout = time.Second
	one := start(t, c)
	for _, a := range answers(4, func(i int) answer {
		return one.post(atLeastOnce, fmt.Sprint("before-", i), "effect,sleep=50ms")
	}) {
		want(t, "before", a, created)
	}
	p.forget()
	for i := range 10 {
		key := fmt.Sprint("after-", i)
		// A claim that a busy machine answered late is taken back soon.
		a := one.until(t, atLeastOnce, key, "effect", inFlight, storeUnavailable)
		want(t, "over a new connection", a, created)
		e.want(t, key, effect{1, 1})
	}
}

// A database that ends the sessions of transactions that idle undoes what their
// handlers did, and does nothing to those that have no transaction.
func TestIdleTransactionsAreEnded(t *testing.T) {
	t.Parallel()
	d := database{Driver: "postgres", DSN: pgtest.DSN(t)}
	e := migrate(t, d)
	if _, err := e.db.Exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET idle_in_transaction_session_timeout = 100', current_database()); END $$`); err != nil {
		t.Fatal(err)
	}
	one, two := pair(t, newConfig(d, 30*time.Second))
	held := map[string]<-chan answer{}
	for _, path := range paths {
		held[path] = one.hold(t, path, "idles"+path[1:], "effect,hold")
	}
	for deadline, idles := time.Now().Add(patience), true; idles; time.Sleep(pause) {
		err := e.db.QueryRow("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')").Scan(&idles)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("a transaction idles on: %v", err)
		}
	}
	for _, path := range paths {
		key := "idles" + path[1:]
		one.release(t, key)
		a := receive(t, held[path])
		if path == transaction {
			want(t, "the transaction that idled", a, storeUnavailable)
			e.want(t, key)
			a = two.post(path, key, "effect")
		}
		want(t, path, a, created)
		wantReplay(t, two, path, key, a)
		if ran := e.of(t)[key]; len(ran) != 1 {
			t.Errorf("%s had the effects (process, attempt) %v", key, ran)
		}
	}
}
