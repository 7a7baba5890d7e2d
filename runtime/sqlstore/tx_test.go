package sqlstore_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A txBackend is a database with a table of orders, and how to reach it.
type txBackend struct {
	driver, dsn string
	newStore    func(*sql.DB, ...sqlstore.Option) (*sqlstore.Store, error)
}

func txPostgres(t *testing.T) txBackend {
	return newTxBackend(t, txBackend{"postgres", pgtest.DSN(t), sqlstore.NewPostgres})
}

// txPrepared is a PostgreSQL whose sessions keep what is prepared in them.
func txPrepared(t *testing.T) txBackend {
	return newTxBackend(t, txBackend{"postgres", pgtest.DSN(t), func(db *sql.DB, opts ...sqlstore.Option) (*sqlstore.Store, error) {
		return sqlstore.NewPostgres(db, append(opts, sqlstore.WithPreparedStatements())...)
	}})
}

func txSQLite(t *testing.T) txBackend {
	return newTxBackend(t, txBackend{"sqlite", sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "orders.db")), sqlstore.NewSQLite})
}

func newTxBackend(t *testing.T, b txBackend) txBackend {
	t.Helper()
	db := open(t, b.driver, b.dsn)
	store, err := b.newStore(db)
	if err != nil {
		t.Fatal(err)
	}
	migrated(t, store)
	if _, err := db.Exec("CREATE TABLE orders (item text NOT NULL UNIQUE)"); err != nil {
		t.Fatal(err)
	}
	return b
}

func onEachDatabase(t *testing.T, test func(t *testing.T, b txBackend)) {
	t.Helper()
	t.Run("PostgreSQL", func(t *testing.T) { test(t, txPostgres(t)) })
	t.Run("PostgreSQL, prepared", func(t *testing.T) { test(t, txPrepared(t)) })
	t.Run("SQLite", func(t *testing.T) { test(t, txSQLite(t)) })
}

// A txShop is a server over HTTP whose one operation runs in a transaction, and
// a look past it into its database.
type txShop struct {
	*httptest.Server
	t       *testing.T
	db      *sql.DB // the pool of the store and of the handlers
	look    *sql.DB
	runs    atomic.Int64
	mu      sync.Mutex
	events  []idempotency.Event
	backend txBackend
}

type txHandler func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx)

type txSetup struct {
	dsn     string // instead of the backend's
	pool    int    // connections; 8 by default
	policy  func(*idempotency.Policy)
	timeout time.Duration // of the store
	options []idempotency.Option
}

// serve starts a server with a pool and a store of its own, as a process has.
func (b txBackend) serve(t *testing.T, s txSetup, handler txHandler) *txShop {
	t.Helper()
	if s.dsn == "" {
		s.dsn = b.dsn
	}
	if s.pool == 0 {
		s.pool = 8
	}
	if s.timeout == 0 {
		s.timeout = idempotency.DefaultStoreTimeout
	}
	f := &txShop{t: t, db: open(t, b.driver, s.dsn), look: open(t, b.driver, b.dsn), backend: b}
	f.db.SetMaxOpenConns(s.pool)
	f.db.SetMaxIdleConns(s.pool)
	store, err := b.newStore(f.db)
	if err != nil {
		t.Fatal(err)
	}
	guard, err := idempotency.New(store, append(s.options, idempotency.WithStoreTimeout(s.timeout), idempotency.WithObserver(func(_ context.Context, e idempotency.Event) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.events = append(f.events, e)
	}))...)
	if err != nil {
		t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	policy.Guarantee = idempotency.Transaction
	if s.policy != nil {
		s.policy(&policy)
	}
	idempotency.Register[*http.Request](guard, &policy)
	f.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&policy, w, r, func(w http.ResponseWriter, r *http.Request) {
			f.runs.Add(1)
			tx, ok := sqlstore.Tx(r.Context())
			if !ok {
				t.Error("the handler has no transaction")
			}
			handler(w, r, tx)
		})
	}))
	f.Config.ErrorLog = log.New(io.Discard, "", 0) // panics are what some tests are about
	f.Start()
	t.Cleanup(f.Close)
	return f
}

// order inserts an order, or answers 500.
func order(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx, item string) bool {
	if _, err := tx.ExecContext(r.Context(), "INSERT INTO orders (item) VALUES ('"+item+"')"); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return false
	}
	return true
}

// ordering returns a handler that makes an order of the request's body, and
// then does what is left.
func ordering(then txHandler) txHandler {
	return func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		item, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		if order(w, r, tx, string(item)) {
			then(w, r, tx)
		}
	}
}

// answering returns what is left when a handler answers with the status.
func answering(status int) txHandler {
	return func(w http.ResponseWriter, _ *http.Request, _ *sqlx.Tx) {
		w.Header().Set("X-Order", "yes")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "made")
	}
}

type txAnswer struct {
	status   int
	body     string
	header   http.Header
	problem  string // what the problem's type ends in
	replayed bool
	err      error // there was no answer
}

// post orders an item under the key.
func (f *txShop) post(key, item string) txAnswer {
	req, err := http.NewRequest(http.MethodPost, f.URL+"/orders", strings.NewReader(item))
	if err != nil {
		return txAnswer{err: err}
	}
	req.Header.Set("Idempotency-Key", key)
	// Go's client sends a request with a key again by itself when a connection
	// that was used before breaks.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return txAnswer{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a := txAnswer{status: resp.StatusCode, body: string(body), header: resp.Header, err: err}
	a.replayed = resp.Header.Get("Idempotent-Replayed") == "true"
	if resp.Header.Get("Content-Type") == "application/problem+json" {
		var p struct{ Type string }
		if err := json.Unmarshal(body, &p); err != nil {
			a.err = err
		}
		a.problem = p.Type[strings.LastIndexByte(p.Type, ':')+1:]
	}
	return a
}

func (a txAnswer) is(t *testing.T, status int, body string) {
	t.Helper()
	if a.err != nil || a.status != status || a.body != body || a.replayed {
		t.Fatalf("the answer is %d %q, replayed: %v, %v; want %d %q, run", a.status, a.body, a.replayed, a.err, status, body)
	}
}

func (a txAnswer) replays(t *testing.T, status int, body string) {
	t.Helper()
	if a.err != nil || a.status != status || a.body != body || !a.replayed || a.header.Get("X-Order") != "yes" {
		t.Fatalf("the answer is %d %q %v, %v; want a replay of %d %q", a.status, a.body, a.header, a.err, status, body)
	}
}

func (a txAnswer) refused(t *testing.T, status int, problem string) {
	t.Helper()
	if a.err != nil || a.status != status || a.problem != problem {
		t.Fatalf("the answer is %d %q, %v; want the problem %d %s", a.status, a.body, a.err, status, problem)
	}
	if (status == 503 || problem == "idempotency-in-flight") && a.header.Get("Retry-After") == "" {
		t.Fatalf("the problem %d %s does not say when to try again", status, problem)
	}
}

// holds checks the whole table of orders.
func (f *txShop) holds(want ...string) {
	f.t.Helper()
	got := []string{}
	if err := sqlx.NewDb(f.look, f.backend.driver).Select(&got, "SELECT item FROM orders ORDER BY item"); err != nil {
		f.t.Error(err)
	}
	if !slices.Equal(got, want) {
		f.t.Errorf("the table holds the orders %q, want %q", got, want)
	}
}

// A keyRow is what the store's table holds of a key.
type keyRow struct {
	State   idempotency.State
	Status  int
	Attempt int
}

// keys checks the store's whole table.
func (f *txShop) keys(want ...keyRow) {
	f.t.Helper()
	got := []keyRow{}
	if err := sqlx.NewDb(f.look, f.backend.driver).Select(&got,
		"SELECT state, coalesce(status, 0) AS status, attempt FROM idempotency_keys ORDER BY state, status"); err != nil {
		f.t.Error(err)
	}
	if !slices.Equal(got, want) {
		f.t.Errorf("the store's table holds %+v, want %+v", got, want)
	}
}

func (f *txShop) ran(n int64) {
	f.t.Helper()
	if got := f.runs.Load(); got != n {
		f.t.Fatalf("the handler ran %d times, want %d", got, n)
	}
}

// saw returns the events of a kind.
func (f *txShop) saw(kind idempotency.EventKind) []idempotency.Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.events), func(e idempotency.Event) bool { return e.Kind != kind })
}

// idle checks that nothing of a transaction is left open in the pool.
func (f *txShop) idle() {
	f.t.Helper()
	eventually(f.t, func() error {
		if n := f.db.Stats().InUse; n > 0 {
			return errors.New("a connection of the pool is still in use")
		}
		return nil
	})
	if f.backend.driver == "postgres" {
		eventually(f.t, func() error {
			var open int
			err := f.look.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'").Scan(&open)
			if err == nil && open > 0 {
				err = errors.New("a transaction was left open")
			}
			return err
		})
	}
}

var made = keyRow{idempotency.Completed, 201, 1}

func TestTxCommitsTogether(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			// Nobody sees the half of it.
			f := b.serve(t, txSetup{}, nil)
			f.holds()
			f.keys()
			answering(201)(w, r, tx)
		}))
		f.post("k", "tea").is(t, 201, "made")
		f.holds("tea")
		f.keys(made)
		f.post("k", "tea").replays(t, 201, "made")
		f.ran(1)
		f.holds("tea")
		f.post("k", "coffee").refused(t, 422, "idempotency-key-reused")
		f.ran(1)
		f.idle()
		if got := f.saw(idempotency.EventRecorded); len(got) != 1 || got[0].Attempt != 1 || got[0].Status != 201 {
			t.Errorf("the observer heard %+v", got)
		}
	})
}

// What fails leaves nothing, and its key is free at once.
func TestTxRollsBack(t *testing.T) {
	for name, test := range map[string]struct {
		fail   txHandler
		status int // 0: the connection breaks
		event  idempotency.EventKind
	}{
		"5xx":             {answering(500), 500, idempotency.EventReleased},
		"unrecorded 4xx":  {answering(422), 422, idempotency.EventReleased},
		"panic":           {func(http.ResponseWriter, *http.Request, *sqlx.Tx) { panic("broken") }, 0, idempotency.EventPanicked},
		"ErrAbortHandler": {func(http.ResponseWriter, *http.Request, *sqlx.Tx) { panic(http.ErrAbortHandler) }, 0, idempotency.EventPanicked},
		"panic after an answer": {func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			answering(201)(w, r, tx)
			panic("broken")
		}, 0, idempotency.EventPanicked},
		"a failed statement": {func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			_, err := tx.ExecContext(r.Context(), "INSERT INTO nowhere VALUES (1)")
			if err == nil {
				t.Error("there is a table nowhere")
			}
			answering(500)(w, r, tx)
		}, 500, idempotency.EventReleased},
	} {
		t.Run(name, func(t *testing.T) {
			onEachDatabase(t, func(t *testing.T, b txBackend) {
				var mended atomic.Bool
				f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
					if mended.Load() {
						answering(201)(w, r, tx)
						return
					}
					test.fail(w, r, tx)
				}))
				for run := range int64(2) {
					a := f.post("k", "tea")
					if a.status != test.status || (a.err != nil) != (test.status == 0) || a.replayed {
						t.Fatalf("the answer is %+v", a)
					}
					f.ran(run + 1)
					f.holds()
					f.keys()
				}
				f.idle()
				if got := f.saw(test.event); len(got) != 2 {
					t.Errorf("the observer heard %+v", got)
				}
				mended.Store(true)
				f.post("k", "tea").is(t, 201, "made")
				f.holds("tea")
				f.keys(made)
			})
		})
	}
}

// A handler of glue that has no answer returns an error.
func TestTxReturnedError(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{}, nil)
		store, err := b.newStore(f.db)
		if err != nil {
			t.Fatal(err)
		}
		guard, err := idempotency.New(store)
		if err != nil {
			t.Fatal(err)
		}
		policy := idempotency.DefaultPolicy("POST /orders")
		policy.Guarantee = idempotency.Transaction
		idempotency.Register[*http.Request](guard, &policy)
		failed := errors.New("no answer")
		do := func(fail error) (*idempotency.Response, error) {
			r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader("tea"))
			r.Header.Set("Idempotency-Key", "k")
			return guard.Do(t.Context(), &policy, idempotency.NewRequest(r, r), func(ctx context.Context) (*idempotency.Response, error) {
				tx, _ := sqlstore.Tx(ctx)
				if _, err := tx.ExecContext(ctx, "INSERT INTO orders (item) VALUES ('tea')"); err != nil {
					return nil, err
				}
				if fail != nil {
					return nil, fail
				}
				return &idempotency.Response{Status: 201, Body: []byte("made")}, nil
			})
		}
		if resp, err := do(failed); resp != nil || !errors.Is(err, failed) {
			t.Fatalf("got %+v, %v", resp, err)
		}
		f.holds()
		f.keys()
		if resp, err := do(nil); err != nil || resp.Status != 201 {
			t.Fatalf("got %+v, %v", resp, err)
		}
		f.holds("tea")
		f.keys(made)
	})
}

// A recorded 4xx is an answer that did nothing.
func TestTxRecordedRefusal(t *testing.T) {
	for name, before := range map[string]string{
		"":                         "",
		"after a failed statement": "INSERT INTO orders (item) VALUES ('tea')",
	} {
		t.Run(name, func(t *testing.T) {
			onEachDatabase(t, func(t *testing.T, b txBackend) {
				f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
					if before != "" {
						if _, err := tx.ExecContext(r.Context(), before); err == nil {
							t.Error("the statement did not fail")
						}
						_, err := tx.ExecContext(r.Context(), "SELECT 1")
						if aborted := err != nil && strings.Contains(err.Error(), "25P02"); aborted != (b.driver == "postgres") {
							t.Errorf("the next statement: %v", err)
						}
					}
					answering(404)(w, r, tx)
				}))
				f.post("k", "tea").is(t, 404, "made")
				f.holds()
				f.keys(keyRow{idempotency.Completed, 404, 1})
				f.post("k", "tea").replays(t, 404, "made")
				f.ran(1)
				f.idle()
			})
		})
	}
}

// A handler that answers 201 although its transaction is broken has done
// nothing.
func TestTxSuccessInABrokenTransaction(t *testing.T) {
	b := txPostgres(t)
	f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
		_, _ = tx.ExecContext(r.Context(), "INSERT INTO nowhere VALUES (1)")
		answering(201)(w, r, tx)
	}))
	f.post("k", "tea").refused(t, 503, "idempotency-store-unavailable")
	f.holds()
	f.keys()
	f.idle()
}

func TestTxAnswerIsWhole(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, _ *sqlx.Tx) {
			w.Header().Set("X-Order", "yes")
			for _, part := range []string{"ma", "de"} {
				_, _ = io.WriteString(w, part)
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Errorf("Flush: %v", err)
				}
			}
			if _, _, err := http.NewResponseController(w).Hijack(); !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("Hijack: %v", err)
			}
		}))
		a := f.post("k", "tea")
		a.is(t, 200, "made")
		if got := a.header.Get("Content-Length"); got != "4" {
			t.Errorf("the answer left in pieces: its length is %q", got)
		}
		f.post("k", "tea").replays(t, 200, "made")
		f.holds("tea")
	})
}

func TestTxAnswerTooLarge(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		body := "123456789"
		f := b.serve(t, txSetup{policy: func(p *idempotency.Policy) { p.MaxRecordedBody = 8 }},
			ordering(func(w http.ResponseWriter, _ *http.Request, _ *sqlx.Tx) {
				w.WriteHeader(201)
				_, _ = io.WriteString(w, body)
			}))
		for range 2 {
			f.post("k", "tea").refused(t, 500, "response-too-large")
			f.holds()
			f.keys()
		}
		f.ran(2)
		body = body[:8]
		f.post("k", "tea").is(t, 201, body)
		f.holds("tea")
		f.keys(made)
	})
}

func TestTxReplayNone(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{policy: func(p *idempotency.Policy) { p.Replay = idempotency.ReplayRule{None: true} }}, ordering(answering(201)))
		f.post("k", "tea").is(t, 201, "made")
		f.holds("tea")
		f.keys(keyRow{idempotency.NotReplayable, 201, 1})
		f.post("k", "tea").refused(t, 409, "idempotency-not-replayable")
		f.ran(1)
	})
}

// What cannot be sealed has happened all the same, and is not recorded in clear.
func TestTxSealingFails(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{options: []idempotency.Option{idempotency.WithSealer(noSealer{})}}, ordering(answering(201)))
		f.post("k", "tea").is(t, 201, "made")
		f.holds("tea")
		f.keys(keyRow{idempotency.NotReplayable, 201, 1})
		f.post("k", "tea").refused(t, 409, "idempotency-not-replayable")
		f.ran(1)
	})
}

type noSealer struct{}

func (noSealer) Seal(_, _ []byte) ([]byte, error) { return nil, errors.New("no key") }
func (noSealer) Open(_, _ []byte) ([]byte, error) { return nil, errors.New("no key") }

func TestTxMarkEffect(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
			if err := idempotency.MarkEffect(r.Context()); err == nil || !strings.Contains(err.Error(), "guarantee: transaction") {
				t.Errorf("MarkEffect: %v", err)
			}
			if n := idempotency.Attempt(r.Context()); n != 1 {
				t.Errorf("this is attempt %d", n)
			}
			answering(201)(w, r, tx)
		}))
		f.post("k", "tea").is(t, 201, "made")
		f.keys(made)
	})
}

func TestTxExpiredRowRunsAnew(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, b txBackend) {
		f := b.serve(t, txSetup{}, ordering(answering(201)))
		f.post("k", "tea").is(t, 201, "made")
		expire := "UPDATE idempotency_keys SET attempt = 3, expires_at = "
		if b.driver == "postgres" {
			expire += "now() - interval '1 s'"
		} else {
			expire += "1"
		}
		if _, err := f.look.Exec(expire); err != nil {
			t.Fatal(err)
		}
		f.post("k", "coffee").is(t, 201, "made")
		f.holds("coffee", "tea")
		f.keys(made)
		f.post("k", "coffee").replays(t, 201, "made")
	})
}

// A row that a run under another guarantee left behind when it died is taken
// over, and does not hold the key when this run fails.
func TestTxTakesOver(t *testing.T) {
	for name, fail := range map[string]txHandler{
		"answer": answering(500),
		"panic":  func(http.ResponseWriter, *http.Request, *sqlx.Tx) { panic("broken") },
	} {
		t.Run(name, func(t *testing.T) {
			onEachDatabase(t, func(t *testing.T, b txBackend) {
				attempts := make(chan int, 2)
				mended := false
				handler := ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
					attempts <- idempotency.Attempt(r.Context())
					if mended {
						answering(201)(w, r, tx)
						return
					}
					fail(w, r, tx)
				})
				f := b.serve(t, txSetup{}, handler)
				f.lapsed("k", "tea")
				if a := f.post("k", "tea"); a.err == nil && a.status != 500 {
					t.Fatalf("the answer is %+v", a)
				}
				if n := <-attempts; n != 2 {
					t.Errorf("it was attempt %d", n)
				}
				f.holds()
				f.keys()
				mended = true
				f.lapsed("k2", "tea")
				f.post("k2", "tea").is(t, 201, "made")
				if n := <-attempts; n != 2 {
					t.Errorf("it was attempt %d", n)
				}
				f.holds("tea")
				f.keys(keyRow{idempotency.Completed, 201, 2})
				f.post("k2", "tea").replays(t, 201, "made")
			})
		})
	}
}

// lapsed leaves the row of a run at least once that died, and whose lease has
// ended.
func (f *txShop) lapsed(key, item string) {
	f.t.Helper()
	store, err := f.backend.newStore(f.look)
	if err != nil {
		f.t.Fatal(err)
	}
	guard, err := idempotency.New(died{store})
	if err != nil {
		f.t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	policy.Lease = 100 * time.Millisecond
	idempotency.Register[*http.Request](guard, &policy)
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(item))
	r.Header.Set("Idempotency-Key", key)
	guard.Handle(&policy, httptest.NewRecorder(), r, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
	eventually(f.t, func() error {
		c := newClaim()
		if err := f.look.QueryRow("SELECT key_hash FROM idempotency_keys WHERE state = 0").Scan((*hash)(&c.Hash)); err != nil {
			return err
		}
		if row, err := store.Claim(f.t.Context(), c); err != nil || !row.Lapsed {
			return errors.Join(errors.New("the lease has not ended"), err)
		}
		return nil
	})
}

// hash scans 32 bytes.
type hash [32]byte

func (h *hash) Scan(v any) error {
	copy(h[:], v.([]byte))
	return nil
}

// A died store is that of a process that died before it could release.
type died struct{ idempotency.Store }

func (died) Release(context.Context, *idempotency.Claim) error { return nil }

func TestTxRefusedAtRegistration(t *testing.T) {
	one := open(t, "postgres", "postgres://127.0.0.1:1/none")
	one.SetMaxOpenConns(1)
	small, err := sqlstore.NewPostgres(one)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		store idempotency.Store
		want  []string
	}{
		"a pool of one": {small, []string{"POST /orders", "one connection", "allow at least two"}},
		"memorystore":   {memorystore.New(), []string{"POST /orders", "guarantee: transaction", "memorystore", "use a sqlstore"}},
	} {
		t.Run(name, func(t *testing.T) {
			guard, err := idempotency.New(test.store)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				text, _ := recover().(string)
				for _, want := range test.want {
					if !strings.Contains(text, want) {
						t.Errorf("the panic %q does not say %q", text, want)
					}
				}
			}()
			policy := idempotency.DefaultPolicy("POST /orders")
			policy.Guarantee = idempotency.Transaction
			idempotency.Register[*http.Request](guard, &policy)
			t.Error("it was registered")
		})
	}
}

// What a session has prepared may be gone, be there in part, or be of a table
// that was changed since.
func TestTxPreparedSessions(t *testing.T) {
	for name, test := range map[string]struct {
		meanwhile string
		status    int // of the request in which it happens
	}{
		"nothing":    {"SELECT 1", http.StatusCreated},
		"all gone":   {"DEALLOCATE ALL", http.StatusServiceUnavailable},
		"one gone":   {`DO $$ BEGIN EXECUTE 'DEALLOCATE ' || (SELECT name FROM pg_prepared_statements WHERE parameter_types = '{bigint}'); END $$`, http.StatusCreated},
		"other type": {"ALTER TABLE idempotency_keys ALTER COLUMN attempt TYPE bigint", http.StatusCreated},
	} {
		t.Run(name, func(t *testing.T) {
			b := txPrepared(t)
			happens := test.meanwhile
			f := b.serve(t, txSetup{pool: 2}, ordering(func(w http.ResponseWriter, r *http.Request, tx *sqlx.Tx) {
				var prepared int
				if err := tx.GetContext(r.Context(), &prepared, "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'oapi\\_idempotent\\_%'"); err != nil || prepared == 0 {
					t.Errorf("%d statements are prepared: %v", prepared, err)
				}
				if _, err := tx.ExecContext(r.Context(), happens); err != nil {
					t.Error(err)
				}
				w.Header().Set("X-Order", "yes")
				w.WriteHeader(http.StatusCreated)
			}))
			got := f.post("first", "tea")
			if got.err != nil || got.status != test.status {
				t.Fatalf("got %+v, want %d", got, test.status)
			}
			if happens = "SELECT 1"; test.status != http.StatusCreated {
				f.holds()
			} else {
				f.post("first", "tea").replays(t, http.StatusCreated, "")
			}
			for _, item := range []string{"coffee", "milk"} {
				f.post(item, item).is(t, http.StatusCreated, "")
				f.post(item, item).replays(t, http.StatusCreated, "")
			}
		})
	}
}
