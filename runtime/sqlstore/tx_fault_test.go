package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A handler that ends the transaction by itself leaves its key unknown: nobody
// can tell what it did.
func TestTxEndedByTheHandler(t *testing.T) {
	ends := map[string]struct {
		end  func(*sqlx.Tx) error
		left []string
	}{
		"commit":        {(*sqlx.Tx).Commit, []string{"tea"}},
		"COMMIT":        {func(tx *sqlx.Tx) error { _, err := tx.Exec("COMMIT"); return err }, []string{"tea"}},
		"COMMIT, BEGIN": {func(tx *sqlx.Tx) error { _, err := tx.Exec("COMMIT; BEGIN"); return err }, []string{"tea"}},
		"ROLLBACK":      {func(tx *sqlx.Tx) error { _, err := tx.Exec("ROLLBACK"); return err }, nil},
		"rollback":      {(*sqlx.Tx).Rollback, nil},
	}
	thens := map[string]txHandler{
		"201":   answering(201),
		"404":   answering(404),
		"500":   answering(500),
		"panic": func(http.ResponseWriter, *http.Request, *sqlx.Tx) { panic("broken") },
	}
	for name, end := range ends {
		for answer, then := range thens {
			t.Run(name+" and "+answer, func(t *testing.T) {
				onEachDatabase(t, func(t *testing.T, b txBackend) {
					if b.driver == "sqlite" && strings.ToUpper(name) == name {
						return // SQLite says of that what it says of a rollback of its own
					}
					f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
						if err := end.end(tx); err != nil {
							t.Error(err)
						}
						then(w, r, tx)
					}))
					a := f.post("k", "tea")
					if answer == "panic" {
						if a.err == nil {
							t.Errorf("the panic did not go on: %+v", a)
						}
					} else {
						a.refused(t, 500, "idempotency-outcome-unknown")
						if got := f.saw(idempotency.EventUnknown); len(got) != 1 || !errors.Is(got[0].Err, idempotency.ErrTxEnded) {
							t.Errorf("the observer heard %+v", got)
						}
					}
					f.holds(end.left...)
					f.keys(keyRow{State: idempotency.Unknown, Attempt: 1})
					f.post("k", "tea").refused(t, 409, "idempotency-outcome-unknown")
					f.ran(1)
					f.idle()
				})
			})
		}
	}
}

// Whatever becomes of a COMMIT and of its answer, the guard says what is true.
func TestTxLostCommit(t *testing.T) {
	const inTime, hasty = 20 * time.Second, time.Second
	for name, test := range map[string]struct {
		timeout   time.Duration
		arrives   bool // the COMMIT, at the server
		slow      bool // the server takes its time to commit
		down      bool // nobody is there to be asked
		committed bool
		want      func(*testing.T, txAnswer)
	}{
		"committed": {timeout: inTime, arrives: true, committed: true,
			want: func(t *testing.T, a txAnswer) { a.is(t, 201, "made") }},
		"still being committed": {timeout: inTime, arrives: true, slow: true, committed: true,
			want: func(t *testing.T, a txAnswer) { a.is(t, 201, "made") }},
		"not committed": {timeout: inTime,
			want: func(t *testing.T, a txAnswer) { a.refused(t, 503, "idempotency-store-unavailable") }},
		"committed, unreachable": {timeout: hasty, arrives: true, down: true, committed: true,
			want: func(t *testing.T, a txAnswer) { a.refused(t, 503, "idempotency-outcome-unknown") }},
		"still being committed, hasty": {timeout: hasty, arrives: true, slow: true, committed: true,
			want: func(t *testing.T, a txAnswer) { a.refused(t, 503, "idempotency-outcome-unknown") }},
		"not committed, unreachable": {timeout: hasty, down: true,
			want: func(t *testing.T, a txAnswer) { a.refused(t, 503, "idempotency-outcome-unknown") }},
	} {
		t.Run(name, func(t *testing.T) {
			b := txPostgres(t)
			if test.slow {
				if _, err := open(t, b.driver, b.dsn).Exec(`
					CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(3); RETURN NULL; END';
					CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slowly()`); err != nil {
					t.Fatal(err)
				}
			}
			p, through := newProxy(t, b.dsn)
			f := b.serve(t, txSetup{dsn: through, timeout: test.timeout}, ordering(answering(201)))
			var lost atomic.Int64
			lose := func(text string) (pass, cut bool) {
				if text != "COMMIT" {
					return true, false
				}
				lost.Add(1)
				if test.down {
					p.listener.Close()
				}
				return test.arrives, true
			}
			p.onQuery.Store(&lose)
			test.want(t, f.post("k", "tea"))
			if lost.Load() != 1 {
				t.Fatalf("%d commits were lost", lost.Load())
			}

			// Another process, whose network is well.
			other := b.serve(t, txSetup{}, ordering(answering(201)))
			eventually(t, func() error { // while the server still commits
				if a := other.post("k", "tea"); a.status != 201 || a.replayed != test.committed {
					return fmt.Errorf("the retry gets %+v", a)
				}
				return nil
			})
			other.holds("tea")
			other.keys(made)
			f.ran(1)
		})
	}
}

// A COMMIT that is under way in a silent network may arrive after its request
// was answered.
func TestTxCommitArrivesLate(t *testing.T) {
	b := txPostgres(t)
	p, through := newProxy(t, b.dsn)
	f := b.serve(t, txSetup{dsn: through, timeout: time.Second}, ordering(answering(201)))
	silence := func(text string) (pass, cut bool) {
		if text == "COMMIT" {
			p.silence()
		}
		return true, false
	}
	p.onQuery.Store(&silence)
	f.post("k", "tea").refused(t, 503, "idempotency-outcome-unknown")
	other := b.serve(t, txSetup{}, ordering(answering(201)))
	other.holds()
	other.post("k", "tea").refused(t, 409, "idempotency-in-flight")
	p.onQuery.Store(nil)
	p.speak()
	eventually(t, func() error {
		if a := other.post("k", "tea"); a.status != 201 || !a.replayed {
			return fmt.Errorf("the retry gets %+v", a)
		}
		return nil
	})
	other.holds("tea")
	other.ran(0)
	f.idle()
}

// What the database refuses at the end did not happen.
func TestTxCommitRefused(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		if _, err := open(t, b.driver, b.dsn).Exec("CREATE TABLE lines (item text REFERENCES orders (item) DEFERRABLE INITIALLY DEFERRED)"); err != nil {
			t.Fatal(err)
		}
		setup, line := txSetup{}, "nothing"
		if b.driver == "sqlite" {
			setup.dsn = b.dsn + "&_pragma=foreign_keys(1)"
		}
		f := b.serve(t, setup, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			if _, err := tx.ExecContext(r.Context(), "INSERT INTO lines VALUES ('"+line+"')"); err != nil {
				t.Error(err)
			}
			answering(201)(w, r, tx)
		}))
		f.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
		f.holds()
		f.keys()
		f.idle()
		line = "tea"
		f.post("k", "tea").is(t, 201, "made")
		f.holds("tea")
	})
}

// A server that ends the session of a transaction that idles ends all of it.
func TestTxIdleTimeout(t *testing.T) {
	b := txPostgres(t)
	look := open(t, b.driver, b.dsn)
	idle := true
	f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		if idle {
			var pid int
			if err := tx.GetContext(r.Context(), &pid, "SELECT pg_backend_pid()"); err != nil {
				t.Error(err)
			}
			if _, err := tx.ExecContext(r.Context(), "SET LOCAL idle_in_transaction_session_timeout = 50"); err != nil {
				t.Error(err)
			}
			for there := true; there && r.Context().Err() == nil; {
				if err := look.QueryRow("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid).Scan(&there); err != nil {
					t.Error(err)
				}
			}
		}
		answering(201)(w, r, tx)
	}))
	f.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
	f.holds()
	f.keys()
	idle = false
	f.post("k", "tea").is(t, 201, "made")
	f.holds("tea")
	f.keys(made)
}

func TestTxServerCrashes(t *testing.T) {
	server := pgtest.Start(t)
	b := newTxBackend(t, txBackend{"postgres", server.DSN(t), sqlstore.NewPostgres})
	g := newGate(t)
	f := b.serve(t, txSetup{timeout: 2 * time.Second}, ordering(g.then(answering(201))))
	// So that the pool holds connections that the crash breaks.
	first, second := g.post(f, "k1", "tea"), g.post(f, "k2", "coffee")
	g.open <- struct{}{}
	g.open <- struct{}{}
	(<-first).is(t, 201, "made")
	(<-second).is(t, 201, "made")

	broken := g.post(f, "k3", "milk")
	server.Crash(t)
	g.open <- struct{}{}
	(<-broken).refused(t, 503, "idempotency-store-unavailable")
	f.post("k4", "water").refused(t, 503, "idempotency-store-unavailable")
	f.ran(3)

	server.Restart(t)
	close(g.open)
	f.holds("coffee", "tea")
	f.post("k3", "milk").is(t, 201, "made")
	f.post("k4", "water").is(t, 201, "made")
	f.post("k1", "tea").replays(t, 201, "made")
	f.holds("coffee", "milk", "tea", "water")
	f.idle()
}

// Connections that broke while nobody used them cost no request.
func TestTxStaleConnections(t *testing.T) {
	b := txPostgres(t)
	g := newGate(t)
	f := b.serve(t, txSetup{}, ordering(g.then(answering(201))))
	var answers []<-chan txAnswer
	for i := range 4 {
		answers = append(answers, g.post(f, fmt.Sprint("k", i), fmt.Sprint(i)))
	}
	close(g.open)
	for _, a := range answers {
		(<-a).is(t, 201, "made")
	}
	f.idle()
	if _, err := f.look.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"); err != nil {
		t.Fatal(err)
	}
	f.post("k", "tea").is(t, 201, "made")
	f.holds("0", "1", "2", "3", "tea")
}

// The policy's timeout cancels the handler, and what it did is undone.
func TestTxTimeout(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		endless := "SELECT pg_sleep(60)"
		if b.driver == "sqlite" {
			endless = endlessInsert
		}
		f := b.serve(t, txSetup{policy: func(p *idempotency.Policy) { p.Timeout = 500 * time.Millisecond }},
			ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
				if _, err := tx.ExecContext(r.Context(), endless); err == nil || r.Context().Err() == nil {
					t.Errorf("the statement ended with %v, the context with %v", err, r.Context().Err())
				}
				answering(500)(w, r, tx)
			}))
		atOnce(t, func() txAnswer { return f.post("k", "tea") }).is(t, 500, "made")
		f.holds()
		f.keys()
		f.idle()
		fine := b.serve(t, txSetup{}, ordering(answering(201)))
		fine.post("k", "tea").is(t, 201, "made")
	})
}

// endlessInsert writes until it is interrupted.
const endlessInsert = "INSERT INTO orders SELECT 'endless' || n FROM (WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c)"

// SQLite rolls the whole transaction back when it interrupts a statement that
// writes. A handler that goes on as if nothing had happened has done nothing.
func TestTxSQLiteInterrupted(t *testing.T) {
	for _, status := range []int{201, 404} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			b := txSQLite(t)
			f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
				ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
				defer cancel()
				if _, err := tx.ExecContext(ctx, endlessInsert); err == nil {
					t.Error("the statement was not interrupted")
				}
				answering(status)(w, r, tx)
			}))
			f.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
			f.holds()
			f.keys()
			f.idle()
		})
	}
}

// On a connection that has gone silent a request is answered one step after its
// handler.
func TestTxSilentConnection(t *testing.T) {
	for name, test := range map[string]struct {
		then   txHandler
		status int
	}{"201": {answering(201), 503}, "500": {answering(500), 500}} {
		t.Run(name, func(t *testing.T) {
			b := txPostgres(t)
			p, through := newProxy(t, b.dsn)
			g := newGate(t)
			const step = 2 * time.Second
			f := b.serve(t, txSetup{dsn: through, pool: 4, timeout: step}, ordering(g.then(test.then)))
			answer := g.post(f, "k", "tea")
			p.silence()
			began := time.Now()
			close(g.open)
			if a := <-answer; a.status != test.status {
				t.Errorf("the answer is %+v", a)
			}
			if took := time.Since(began); took > step*19/10 {
				t.Errorf("the answer took %v after its handler", took)
			}
			// The operating system gives the connection up at last.
			p.cut()
			p.speak()
			f.idle()
			f.holds()
			f.keys()
			var wg sync.WaitGroup
			for i := range 8 {
				key := fmt.Sprint("k", i)
				wg.Go(func() {
					if a := f.post(key, key); a.status != test.then.status() {
						t.Errorf("afterwards the answer is %+v", a)
					}
				})
			}
			wg.Wait()
		})
	}
}

// A network that is silent from the beginning lets no handler run.
func TestTxSilentBeforeTheHandler(t *testing.T) {
	b := txPostgres(t)
	p, through := newProxy(t, b.dsn)
	const step = time.Second
	f := b.serve(t, txSetup{dsn: through, timeout: step}, ordering(answering(201)))
	f.post("k1", "tea").is(t, 201, "made") // so that the pool has a connection
	p.silence()
	began := time.Now()
	f.post("k2", "coffee").refused(t, 503, "idempotency-store-unavailable")
	if took := time.Since(began); took > step*19/10 {
		t.Errorf("the answer took %v", took)
	}
	f.ran(1)
	p.cut()
	p.speak()
	f.idle()
	eventually(t, func() error { // PostgreSQL may have got the claim
		if a := f.post("k2", "coffee"); a.status != 201 {
			return fmt.Errorf("afterwards the answer is %+v", a)
		}
		return nil
	})
	f.holds("coffee", "tea")
}

// status is what the handler answers by itself.
func (h txHandler) status() int {
	w := httptest.NewRecorder()
	h(w, nil, nil)
	return w.Code
}

// Another guarantee's run on the same key, from before the policy changed or in
// a process that has the old one, may come in between.
func TestTxOvertaken(t *testing.T) {
	b := txPostgres(t)
	var overtake func()
	f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		overtake()
		answering(201)(w, r, tx)
	}))
	store, err := b.newStore(f.look)
	if err != nil {
		t.Fatal(err)
	}
	guard, err := idempotency.New(store)
	if err != nil {
		t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[*http.Request](guard, &policy)
	serve := func(key, item string, handler http.HandlerFunc) {
		r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(item))
		r.Header.Set("Idempotency-Key", key)
		guard.Handle(&policy, httptest.NewRecorder(), r, handler)
	}
	overtake = func() {
		serve("k1", "tea", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Order", "yes")
			_, _ = w.Write([]byte("other"))
		})
	}
	f.post("k1", "tea").replays(t, 200, "other")
	f.holds()
	f.keys(keyRow{idempotency.Completed, 200, 1})

	began, end := make(chan struct{}), make(chan struct{})
	overtake = func() {
		go serve("k2", "tea", func(http.ResponseWriter, *http.Request) {
			close(began)
			<-end
		})
		<-began
	}
	f.post("k2", "tea").refused(t, 409, "idempotency-in-flight")
	close(end)
	f.holds()
	f.idle()
}

// A run under another guarantee that counts as dead, for as long as its key is
// kept, may answer after all while a transaction runs in its place.
func TestTxExpiredRunAnswersAfterAll(t *testing.T) {
	b := txPostgres(t)
	began, end, answered := make(chan struct{}), make(chan struct{}), make(chan struct{})
	f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		close(end)
		<-answered
		answering(201)(w, r, tx)
	}))
	store, err := b.newStore(f.look)
	if err != nil {
		t.Fatal(err)
	}
	guard, err := idempotency.New(mute{store})
	if err != nil {
		t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[*http.Request](guard, &policy)
	go func() {
		defer close(answered)
		r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader("tea"))
		r.Header.Set("Idempotency-Key", "k")
		w := httptest.NewRecorder()
		guard.Handle(&policy, w, r, func(w http.ResponseWriter, _ *http.Request) {
			close(began)
			<-end
			w.Header().Set("X-Order", "yes")
			_, _ = w.Write([]byte("other"))
		})
		if w.Code != 200 {
			t.Errorf("the run that counted as dead is answered %d %s", w.Code, w.Body)
		}
	}()
	<-began
	if _, err := f.look.Exec("UPDATE idempotency_keys SET lease_until = now(), expires_at = now()"); err != nil {
		t.Fatal(err)
	}
	f.post("k", "tea").replays(t, 200, "other")
	f.ran(1)
	f.holds()
	f.keys(keyRow{idempotency.Completed, 200, 1})
	f.idle()
}

// A mute store is that of a process that cannot renew.
type mute struct{ idempotency.Store }

func (mute) Renew(context.Context, *idempotency.Claim) error { return errors.New("mute") }

// One table has one lock for each key, however it is named.
func TestTxTableByTwoNames(t *testing.T) {
	b := txPostgres(t)
	g := newGate(t)
	handler := ordering(g.then(answering(201)))
	f := b.serve(t, txSetup{}, handler)
	b.newStore = func(db *sql.DB, _ ...sqlstore.Option) (*sqlstore.Store, error) {
		return sqlstore.NewPostgres(db, sqlstore.WithTable("public.idempotency_keys"))
	}
	other := b.serve(t, txSetup{}, handler)
	first := g.post(f, "k", "tea")
	atOnce(t, func() txAnswer { return other.post("k", "tea") }).refused(t, 409, "idempotency-in-flight")
	close(g.open)
	(<-first).is(t, 201, "made")
	other.post("k", "tea").replays(t, 201, "made")
}

// A wrapped driver, as those that trace are.
type wrapped struct{ driver.Driver }

func init() { sql.Register("wrapped", wrapped{&pq.Driver{}}) }

func TestTxTrips(t *testing.T) {
	for name, test := range map[string]struct {
		driver                string
		fresh, failed, replay int64
	}{
		"lib/pq":         {"postgres", 5, 5, 3},
		"another driver": {"wrapped", 8, 7, 5},
	} {
		t.Run(name, func(t *testing.T) {
			b := txPostgres(t)
			p, through := newProxy(t, b.dsn)
			b.driver = test.driver
			status := 201
			f := b.serve(t, txSetup{dsn: through, pool: 2}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
				answering(status)(w, r, tx)
			}))
			f.post("warm", "water").is(t, 201, "made") // connecting costs trips once
			trips := func(what string, want int64, key, item string, wantStatus int) {
				t.Helper()
				before := p.trips.Load()
				if a := f.post(key, item); a.status != wantStatus {
					t.Fatalf("%s: %+v", what, a)
				}
				if got := p.trips.Load() - before; got != want {
					t.Errorf("%s took %d trips, want %d", what, got, want)
				}
			}
			trips("a fresh request", test.fresh, "k", "tea", 201)
			trips("a replay", test.replay, "k", "tea", 201)
			status = 500
			trips("a request that fails", test.failed, "k2", "coffee", 500)
			f.holds("tea", "water")
		})
	}
}
