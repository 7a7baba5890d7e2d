package sqlstore_test

import (
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// A gate lets handlers say that they have begun, and wait until they may end,
// or the test does.
type gate struct {
	began, open chan struct{}
	ended       <-chan struct{}
}

func newGate(t *testing.T) gate {
	return gate{make(chan struct{}, 100), make(chan struct{}), t.Context().Done()}
}

func (g gate) then(next txHandler) txHandler {
	return func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		g.began <- struct{}{}
		select {
		case <-g.open:
		case <-g.ended:
		}
		next(w, r, tx)
	}
}

// post starts a request and returns when its handler has begun.
func (g gate) post(f *txShop, key, item string) <-chan txAnswer {
	f.t.Helper()
	answer := later(f, key, item)
	select {
	case <-g.began:
	case a := <-answer:
		f.t.Fatalf("the handler did not begin: %+v", a)
	}
	return answer
}

func later(f *txShop, key, item string) <-chan txAnswer {
	answer := make(chan txAnswer, 1)
	go func() { answer <- f.post(key, item) }()
	return answer
}

// atOnce fails if what is done takes as long as waiting for somebody would.
func atOnce(t *testing.T, do func() txAnswer) txAnswer {
	t.Helper()
	began := time.Now()
	a := do()
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the answer took %v", took)
	}
	return a
}

func TestTxInFlight(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		g := newGate(t)
		f := b.serve(t, txSetup{}, ordering(g.then(answering(201))))
		first := g.post(f, "k", "tea")
		for range 20 {
			atOnce(t, func() txAnswer { return f.post("k", "tea") }).refused(t, 409, "idempotency-in-flight")
		}
		// What the first request is cannot be seen yet.
		atOnce(t, func() txAnswer { return f.post("k", "coffee") }).refused(t, 409, "idempotency-in-flight")
		f.ran(1)
		close(g.open)
		(<-first).is(t, 201, "made")
		f.post("k", "tea").replays(t, 201, "made")
		f.post("k", "coffee").refused(t, 422, "idempotency-key-reused")
		f.ran(1)
		f.idle()
	})
}

// Processes on one PostgreSQL see each other's transactions by their locks.
func TestTxInFlightElsewhere(t *testing.T) {
	b := txPostgres(t)
	g := newGate(t)
	handler := ordering(g.then(answering(201)))
	f, other := b.serve(t, txSetup{pool: 4}, handler), b.serve(t, txSetup{pool: 4}, handler)
	first, second := g.post(f, "k1", "tea"), g.post(f, "k2", "coffee")
	// All that the pool of f has room for are under way.
	for _, server := range []*txShop{other, f} {
		for range 10 {
			atOnce(t, func() txAnswer { return server.post("k1", "tea") }).refused(t, 409, "idempotency-in-flight")
		}
		atOnce(t, func() txAnswer { return server.post("k2", "tea") }).refused(t, 409, "idempotency-in-flight")
	}
	third := g.post(other, "k3", "milk")
	f.ran(2)
	other.ran(1)
	close(g.open)
	for _, a := range []<-chan txAnswer{first, second, third} {
		(<-a).is(t, 201, "made")
	}
	other.post("k1", "tea").replays(t, 201, "made")
	f.holds("coffee", "milk", "tea")
	f.keys(made, made, made)
	f.idle()
	other.idle()
}

// SQLite has one writer: another process waits for it, and so does another key.
func TestTxSQLiteIsSerial(t *testing.T) {
	b := txSQLite(t)
	g := newGate(t)
	handler := ordering(g.then(answering(201)))
	f, other := b.serve(t, txSetup{}, handler), b.serve(t, txSetup{}, handler)
	hasty := b.serve(t, txSetup{timeout: 100 * time.Millisecond}, handler)
	first := g.post(f, "k", "tea")
	hasty.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
	duplicate, elsewhere, here := later(other, "k", "tea"), later(other, "k2", "coffee"), later(f, "k3", "milk")
	close(g.open)
	(<-first).is(t, 201, "made")
	if a := <-duplicate; a.status == 409 {
		a.refused(t, 409, "idempotency-in-flight")
	} else {
		a.replays(t, 201, "made")
	}
	(<-elsewhere).is(t, 201, "made")
	(<-here).is(t, 201, "made")
	f.holds("coffee", "milk", "tea")
	other.post("k", "tea").replays(t, 201, "made")
	hasty.ran(0)
}

func TestTxWaitsForTheWinner(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		g := newGate(t)
		handler := ordering(g.then(answering(201)))
		setup := txSetup{policy: func(p *idempotency.Policy) { p.WaitFor = 20 * time.Second }}
		f, other := b.serve(t, setup, handler), b.serve(t, setup, handler)
		first := g.post(f, "k", "tea")
		same, elsewhere := later(f, "k", "tea"), later(other, "k", "tea")
		select {
		case a := <-same:
			t.Errorf("a duplicate did not wait: %+v", a)
		case a := <-elsewhere:
			t.Errorf("a duplicate elsewhere did not wait: %+v", a)
		case <-time.After(50 * time.Millisecond):
		}
		close(g.open)
		(<-first).is(t, 201, "made")
		(<-same).replays(t, 201, "made")
		(<-elsewhere).replays(t, 201, "made")
		f.ran(1)
		other.ran(0)
	})
}

// A replay does not wait for transactions that are none of its business.
func TestTxReplayWhileAllSlotsAreTaken(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		g := newGate(t)
		f := b.serve(t, txSetup{pool: 2}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			if r.Header.Get("Idempotency-Key") == "slow" {
				g.then(answering(201))(w, r, tx)
				return
			}
			answering(201)(w, r, tx)
		}))
		f.post("k", "tea").is(t, 201, "made")
		slow := g.post(f, "slow", "coffee")
		atOnce(t, func() txAnswer { return f.post("k", "tea") }).replays(t, 201, "made")
		atOnce(t, func() txAnswer { return f.post("k", "milk") }).refused(t, 422, "idempotency-key-reused")
		close(g.open)
		(<-slow).is(t, 201, "made")
		f.holds("coffee", "tea")
	})
}

func TestTxRace(t *testing.T) {
	onEachDatabase(t, race)
}

// A DSN that says nothing of transactions changes nothing either.
func TestTxRaceSQLiteDeferred(t *testing.T) {
	b := txSQLite(t)
	b.dsn = strings.Replace(b.dsn, "&_txlock=immediate", "", 1)
	race(t, b)
}

// The isolation that a database has by default changes nothing.
func TestTxRaceIsolated(t *testing.T) {
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			b := txPostgres(t)
			isolate(t, open(t, b.driver, b.dsn), level)
			f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
				var got string
				if err := tx.GetContext(r.Context(), &got, "SHOW transaction_isolation"); err != nil || got != "read committed" {
					t.Errorf("the handler runs under %s, %v", got, err)
				}
				answering(201)(w, r, tx)
			}))
			f.post("k", "tea").is(t, 201, "made")
			if _, err := f.look.Exec("DELETE FROM orders; DELETE FROM idempotency_keys"); err != nil {
				t.Fatal(err)
			}
			race(t, b)
		})
	}
}

func race(t *testing.T, b txBackend) {
	const rounds, racers = 3, 50
	for _, waitFor := range []time.Duration{0, 20 * time.Second} {
		setup := txSetup{policy: func(p *idempotency.Policy) { p.WaitFor = waitFor }}
		handler := ordering(answering(201))
		shops := []*txShop{b.serve(t, setup, handler), b.serve(t, setup, handler)}
		for round := range rounds {
			name := fmt.Sprintf("%v-%d", waitFor, round)
			var wg sync.WaitGroup
			answers := make(chan txAnswer, racers)
			for i := range racers {
				wg.Go(func() { answers <- shops[i%2].post(name, name) })
			}
			wg.Wait()
			close(answers)
			ran := 0
			for a := range answers {
				switch {
				case a.status == 201 && a.replayed:
					a.replays(t, 201, "made")
				case a.status == 201:
					a.is(t, 201, "made")
					ran++
				case waitFor > 0:
					t.Errorf("who waits gets %+v", a)
				default:
					a.refused(t, 409, "idempotency-in-flight")
				}
			}
			if ran != 1 {
				t.Fatalf("%d of %d requests ran", ran, racers)
			}
			if runs := shops[0].runs.Load() + shops[1].runs.Load(); runs != int64(round)+1 {
				t.Fatalf("handlers ran %d times in %d rounds", runs, round+1)
			}
		}
		for _, f := range shops {
			f.idle()
		}
	}
	var orders, keys int
	db := open(t, b.driver, b.dsn)
	if err := db.QueryRow("SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM idempotency_keys WHERE state = 1)").Scan(&orders, &keys); err != nil {
		t.Fatal(err)
	}
	if orders != 2*rounds || keys != 2*rounds {
		t.Errorf("there are %d orders and %d records, want %d of each", orders, keys, 2*rounds)
	}
}

// Of many duplicates of a run that died one takes over, and no claim of theirs
// is left to hold the key.
func TestTxTakeoverRace(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		handler := ordering(answering(201))
		f, other := b.serve(t, txSetup{}, handler), b.serve(t, txSetup{}, handler)
		f.lapsed("k", "tea")
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				a := []*txShop{f, other}[i%2].post("k", "tea")
				if a.err != nil || a.status != 201 && a.problem != "idempotency-in-flight" {
					t.Errorf("the answer is %+v", a)
				}
			})
		}
		wg.Wait()
		if a := f.post("k", "tea"); a.status != 201 {
			t.Fatalf("the answer is %+v", a)
		}
		f.holds("tea")
		if runs := f.runs.Load() + other.runs.Load(); runs != 1 {
			t.Errorf("handlers ran %d times", runs)
		}
	})
}

// Handlers that use the pool beside their transaction do not lock each other
// out.
func TestTxPoolBesideTheTransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		var f *txShop
		f = b.serve(t, txSetup{pool: 4}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			var n int
			if err := f.db.QueryRowContext(r.Context(), "SELECT count(*) FROM orders").Scan(&n); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			answering(201)(w, r, tx)
		}))
		const keys = 40
		answers := make(chan txAnswer, keys)
		for i := range keys {
			key := fmt.Sprint("k", i)
			go func() { answers <- f.post(key, key) }()
		}
		created := 0
		for range keys {
			if a := <-answers; a.status == 201 {
				a.is(t, 201, "made")
				created++
			} else {
				a.refused(t, 503, "idempotency-store-unavailable")
			}
		}
		if created == 0 {
			t.Error("none got through")
		}
		var orders int
		if err := f.look.QueryRow("SELECT count(*) FROM orders").Scan(&orders); err != nil {
			t.Fatal(err)
		}
		if orders != created {
			t.Errorf("%d orders of %d answers 201", orders, created)
		}
		f.idle()
	})
}

// A request that finds no room within the store's deadline did nothing.
func TestTxNoSlot(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		g := newGate(t)
		f := b.serve(t, txSetup{pool: 2, timeout: 500 * time.Millisecond}, ordering(g.then(answering(201))))
		slow := g.post(f, "slow", "coffee")
		f.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
		close(g.open)
		(<-slow).is(t, 201, "made")
		f.post("k", "tea").is(t, 201, "made")
		f.holds("coffee", "tea")
	})
}

// On SQLite a handler that writes past its transaction would wait for itself:
// it fails when the busy timeout ends.
func TestTxSQLiteWriteBeside(t *testing.T) {
	b := txSQLite(t)
	var f *txShop
	f = b.serve(t, txSetup{dsn: strings.Replace(b.dsn, "busy_timeout(5000)", "busy_timeout(100)", 1)}, ordering(func(w http.ResponseWriter, r *http.Request, _ *sqlx.Tx) {
		if _, err := f.db.ExecContext(r.Context(), "INSERT INTO orders (item) VALUES ('beside')"); err != nil {
			w.WriteHeader(500)
			_, _ = io.WriteString(w, err.Error())
			return
		}
		t.Error("two write at the same time")
	}))
	atOnce(t, func() txAnswer { return f.post("k", "tea") }).is(t, 500, "database is locked (5) (SQLITE_BUSY)")
	f.holds()
	f.keys()
}

// isolate sets a database's default isolation, for connections to come.
func isolate(t *testing.T, db *sql.DB, level string) {
	t.Helper()
	if _, err := db.Exec(fmt.Sprintf(
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET default_transaction_isolation = %%L', current_database(), '%s'); END $$`, level)); err != nil {
		t.Fatal(err)
	}
}
