//go:build unix

package faulttest

import (
	"database/sql"
	"path/filepath"
	"slices"
	"testing"
	"time"

	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A database is where servers keep keys and effects.
type database struct {
	Driver, DSN string
	Direct      string // the DSN of the store's own pool, if it has one
}

// open opens a pool of at most so many connections, and the store. A store's own
// pool is not larger.
func (d database) open(conns int) (*sql.DB, *sqlstore.Store, error) {
	db, err := sql.Open(d.Driver, d.DSN)
	if err != nil {
		return nil, nil, err
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	var store *sqlstore.Store
	switch {
	case d.Direct != "":
		store, err = sqlstore.OpenPostgres(d.Direct, sqlstore.WithTransactions(db), sqlstore.WithPreparedStatements(), sqlstore.WithMaxConns(conns))
	case d.Driver == "sqlite":
		store, err = sqlstore.NewSQLite(db)
	default:
		store, err = sqlstore.NewPostgres(db)
	}
	return db, store, err
}

// insert returns the statement that writes an effect, which a driver may send
// twice: the one of each run is written once.
func (d database) insert() string {
	if d.Driver == "sqlite" {
		return "INSERT INTO effects (run, request, key, process, attempt, at) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
	}
	return "INSERT INTO effects (run, request, key, process, attempt, at) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING"
}

// An effect is what one run of a handler did.
type effect struct {
	process, attempt int
}

// effects is the test's own view of a database.
type effects struct{ db *sql.DB }

// migrate makes the tables of a database.
func migrate(t *testing.T, d database) effects {
	t.Helper()
	db, store, err := d.open(2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		store.Close()
		db.Close()
	})
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec("CREATE TABLE effects (run text PRIMARY KEY, request text, key text, process int, attempt int, at timestamp)"); err != nil {
		t.Fatal(err)
	}
	return effects{db}
}

// A run is what the handler of one request did.
type run struct {
	effect
	id, request string
	at          time.Time
}

// runs returns the runs of each key that had an effect, in their order.
func (e effects) runs(t *testing.T) map[string][]run {
	t.Helper()
	rows, err := e.db.Query("SELECT key, process, attempt, run, request, at FROM effects ORDER BY at")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	all := map[string][]run{}
	for rows.Next() {
		var key string
		var r run
		if err := rows.Scan(&key, &r.process, &r.attempt, &r.id, &r.request, &r.at); err != nil {
			t.Fatal(err)
		}
		all[key] = append(all[key], r)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// of returns the effects of each key, in the order in which they came about.
func (e effects) of(t *testing.T) map[string][]effect {
	t.Helper()
	all := map[string][]effect{}
	for key, runs := range e.runs(t) {
		for _, r := range runs {
			all[key] = append(all[key], r.effect)
		}
	}
	return all
}

func (e effects) want(t *testing.T, key string, want ...effect) {
	t.Helper()
	if got := e.of(t)[key]; !slices.Equal(got, want) {
		t.Fatalf("%s had the effects (process, attempt) %v, want %v", key, got, want)
	}
}

// onEach runs a test on each kind of database, in parallel.
func onEach(t *testing.T, test func(*testing.T, database, effects)) {
	for name, d := range map[string]database{
		"postgres": {Driver: "postgres"},
		"direct":   {Driver: "postgres", Direct: "own"},
		"sqlite":   {Driver: "sqlite"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if d.Driver == "sqlite" {
				d.DSN = sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "faults.db"))
			} else {
				d.DSN = pgtest.DSN(t)
			}
			if d.Direct != "" {
				d.Direct = d.DSN
			}
			test(t, d, migrate(t, d))
		})
	}
}

// pair starts two servers with one config.
func pair(t *testing.T, c config) (*process, *process) {
	t.Helper()
	second := c
	second.Process = c.Process + 1
	return start(t, c), start(t, second)
}

// stretch calls f, which takes a while, until d has passed since start.
func stretch(start time.Time, d time.Duration, f func()) {
	for time.Since(start) < d {
		f()
	}
}
