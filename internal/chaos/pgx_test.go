//go:build unix

package chaos

import (
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// pgxModes are pgx's default and what a pooler demands, as values of its
// parameter default_query_exec_mode.
var pgxModes = map[string]pgx.QueryExecMode{
	"cache_statement": pgx.QueryExecModeCacheStatement,
	"simple_protocol": pgx.QueryExecModeSimpleProtocol,
}

// openPgx returns a pool of pgx's stdlib package.
func openPgx(t *testing.T, dsn string, mode pgx.QueryExecMode) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = mode
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	return db
}

func newPgxStore(t *testing.T, db *sql.DB, opts ...sqlstore.Option) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.NewPostgres(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store
}

// TestPgxStore holds every promise of a store over pgx.
func TestPgxStore(t *testing.T) {
	run := func(name string, mode pgx.QueryExecMode, opts ...sqlstore.Option) {
		t.Run(name, func(t *testing.T) {
			db := openPgx(t, pgtest.DSN(t), mode)
			var n atomic.Int64
			storetest.Run(t, func(t *testing.T) idempotency.Store {
				return newPgxStore(t, db, append(opts, sqlstore.WithTable(fmt.Sprintf("keys_%d", n.Add(1))))...)
			})
		})
	}
	for name, mode := range pgxModes {
		run(name, mode)
	}
	run("prepared", pgx.QueryExecModeCacheStatement, sqlstore.WithPreparedStatements())
}

// A pgxShop takes orders in transactions, through as many processes as it is
// asked to start: each has a pool, a store and a guard of its own.
type pgxShop struct {
	t    *testing.T
	dsn  string
	mode pgx.QueryExecMode
	// direct says that the stores have a pool of lib/pq of their own, and that
	// the transactions alone are pgx's.
	direct bool
	look   *sql.DB
	runs   atomic.Int64
}

func onPgx(t *testing.T, test func(t *testing.T, s *pgxShop)) {
	t.Helper()
	for name, mode := range pgxModes {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s direct %v", name, direct), func(t *testing.T) {
				s := &pgxShop{t: t, dsn: pgtest.DSN(t), mode: mode, direct: direct}
				s.look = openPgx(t, s.dsn, mode)
				if _, err := s.look.Exec("CREATE TABLE orders (item text NOT NULL)"); err != nil {
					t.Fatal(err)
				}
				test(t, s)
			})
		}
	}
}

func (s *pgxShop) store() *sqlstore.Store {
	s.t.Helper()
	db := openPgx(s.t, s.dsn, s.mode)
	if !s.direct {
		return newPgxStore(s.t, db)
	}
	store, err := sqlstore.OpenPostgres(s.dsn, sqlstore.WithTransactions(db))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { store.Close() })
	if err := store.Migrate(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	return store
}

// process starts one. Its handler inserts the body into orders, and then
// answers as then does.
func (s *pgxShop) process(then http.HandlerFunc) http.Handler {
	s.t.Helper()
	guard, err := idempotency.New(s.store())
	if err != nil {
		s.t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	policy.Guarantee = idempotency.Transaction
	idempotency.Register[*http.Request](guard, &policy)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&policy, w, r, func(w http.ResponseWriter, r *http.Request) {
			s.runs.Add(1)
			item, err := io.ReadAll(r.Body)
			if err != nil {
				s.t.Error(err)
			}
			tx, ok := sqlstore.Tx(r.Context())
			if !ok {
				s.t.Error("the handler has no transaction")
				return
			}
			if _, err := tx.ExecContext(r.Context(), "INSERT INTO orders (item) VALUES ($1)", string(item)); err != nil {
				s.t.Error(err)
			}
			then(w, r)
		})
	})
}

func answering(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "\x00made")
	}
}

func order(process http.Handler, item string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(item))
	r.Header.Set(wire.HeaderKey, "k")
	w := httptest.NewRecorder()
	process.ServeHTTP(w, r)
	return w
}

// made checks that an answer is that of the one run, or its replay.
func (s *pgxShop) made(w *httptest.ResponseRecorder, replayed bool) {
	s.t.Helper()
	if w.Code != 201 || w.Body.String() != "\x00made" || (w.Header().Get(wire.HeaderReplayed) == "true") != replayed {
		s.t.Errorf("the answer is %d %q %v, want 201, replayed: %v", w.Code, w.Body, w.Header(), replayed)
	}
}

func (s *pgxShop) refused(w *httptest.ResponseRecorder, status int, problem string) {
	s.t.Helper()
	if w.Code != status || !strings.Contains(w.Body.String(), problem) {
		s.t.Errorf("the answer is %d %q, want %d %s", w.Code, w.Body, status, problem)
	}
}

// holds checks how many orders and keys there are, and how often the handler ran.
func (s *pgxShop) holds(orders, keys int, runs int64) {
	s.t.Helper()
	var got struct{ Orders, Keys int }
	err := sqlx.NewDb(s.look, "pgx").Get(&got, "SELECT (SELECT count(*) FROM orders) AS orders, (SELECT count(*) FROM idempotency_keys) AS keys")
	if err != nil {
		s.t.Fatal(err)
	}
	if got.Orders != orders || got.Keys != keys || s.runs.Load() != runs {
		s.t.Errorf("%d orders, %d keys, %d runs; want %d, %d, %d", got.Orders, got.Keys, s.runs.Load(), orders, keys, runs)
	}
}

func TestPgxCommitsTogether(t *testing.T) {
	onPgx(t, func(t *testing.T, s *pgxShop) {
		process := s.process(func(w http.ResponseWriter, r *http.Request) {
			s.holds(0, 0, 1) // nobody sees the half of it
			answering(201)(w, r)
		})
		s.made(order(process, "tea"), false)
		s.holds(1, 1, 1)
		s.made(order(process, "tea"), true)
		s.made(order(s.process(answering(500)), "tea"), true)
		s.refused(order(process, "coffee"), 422, wire.KeyReused)
		s.holds(1, 1, 1)
	})
}

func TestPgxRollsBack(t *testing.T) {
	onPgx(t, func(t *testing.T, s *pgxShop) {
		if w := order(s.process(answering(500)), "tea"); w.Code != 500 {
			t.Errorf("the answer is %d %q", w.Code, w.Body)
		}
		s.holds(0, 0, 1)
		s.made(order(s.process(answering(201)), "tea"), false)
		s.holds(1, 1, 2)
	})
}

// A recorded 4xx keeps its record, and none of the handler's writes.
func TestPgxRecordsRefusals(t *testing.T) {
	onPgx(t, func(t *testing.T, s *pgxShop) {
		process := s.process(answering(404))
		for range 2 {
			if w := order(process, "tea"); w.Code != 404 {
				t.Errorf("the answer is %d %q", w.Code, w.Body)
			}
			s.holds(0, 1, 1)
		}
	})
}

func TestPgxRace(t *testing.T) {
	onPgx(t, func(t *testing.T, s *pgxShop) {
		processes := []http.Handler{s.process(answering(201)), s.process(answering(201))}
		answers := make([]*httptest.ResponseRecorder, 50)
		var group sync.WaitGroup
		for i := range answers {
			group.Go(func() { answers[i] = order(processes[i%2], "tea") })
		}
		group.Wait()
		ran := 0
		for _, w := range answers {
			switch {
			case w.Code == http.StatusConflict:
				s.refused(w, 409, wire.InFlight)
			case w.Header().Get(wire.HeaderReplayed) == "":
				ran++
				s.made(w, false)
			default:
				s.made(w, true)
			}
		}
		if ran != 1 {
			t.Errorf("%d answers are of a run, want 1", ran)
		}
		s.holds(1, 1, 1)
	})
}

func TestPgxInFlight(t *testing.T) {
	onPgx(t, func(t *testing.T, s *pgxShop) {
		other := s.process(answering(201))
		var process http.Handler
		process = s.process(func(w http.ResponseWriter, r *http.Request) {
			for _, duplicate := range []http.Handler{process, other} {
				answer := order(duplicate, "tea")
				s.refused(answer, 409, wire.InFlight)
				if answer.Header().Get("Retry-After") == "" {
					t.Error("the answer does not say when to try again")
				}
			}
			answering(201)(w, r)
		})
		s.made(order(process, "tea"), false)
		s.made(order(other, "tea"), true)
		s.holds(1, 1, 1)
	})
}
