package sqlstore_test

import (
	"context"
	crand "crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A journalDB is a database with a journal's table.
type journalDB struct {
	*sql.DB
	driver, dsn string
}

// journal returns the journal of the pool, with its table.
func (db journalDB) journal(t *testing.T, cfg sqlstore.JournalConfig) *sqlstore.Journal {
	t.Helper()
	j, err := db.open(cfg)
	ok(t, err)
	ok(t, j.Migrate(t.Context()))
	return j
}

func (db journalDB) open(cfg sqlstore.JournalConfig) (*sqlstore.Journal, error) {
	if db.driver == "postgres" {
		return sqlstore.NewPostgresJournal(db.DB, cfg)
	}
	return sqlstore.NewSQLiteJournal(db.DB, cfg)
}

// again returns the database with a pool of its own.
func (db journalDB) again(t *testing.T) journalDB {
	db.DB = open(t, db.driver, db.dsn)
	db.SetMaxOpenConns(20)
	return db
}

// onJournals runs a test on a fresh database of each kind.
func onJournals(t *testing.T, test func(*testing.T, journalDB)) {
	onPostgresJournals(t, test)
	t.Run("SQLite", func(t *testing.T) {
		test(t, journalDB{driver: "sqlite", dsn: sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "journal.db"))}.again(t))
	})
}

func onPostgresJournals(t *testing.T, test func(*testing.T, journalDB)) {
	t.Run("PostgreSQL", func(t *testing.T) { test(t, journalDB{driver: "postgres", dsn: pgtest.DSN(t)}.again(t)) })
	// Where a statement fails whose snapshot is older than another's commit.
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run("PostgreSQL, "+level, func(t *testing.T) {
			dsn := pgtest.DSN(t)
			_, err := open(t, "postgres", dsn).Exec(`DO $$ BEGIN
				EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = "` + level + `"', current_database());
			END $$`)
			ok(t, err)
			test(t, journalDB{driver: "postgres", dsn: dsn}.again(t))
		})
	}
}

// within calls do in a transaction and ends that.
func (db journalDB) within(t *testing.T, end func(*sql.Tx) error, do func(*sql.Tx) error) {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	ok(t, err)
	ok(t, do(tx))
	ok(t, end(tx))
}

// added begins a call as begun does, once it is added.
func added(t *testing.T, db journalDB, j *sqlstore.Journal, name string) (key string) {
	t.Helper()
	ok(t, j.Add(t.Context(), db, name))
	return begun(t, j, name)
}

// begun begins a call and returns the key with which a request is sent.
func begun(t *testing.T, j *sqlstore.Journal, name string) (key string) {
	t.Helper()
	call, err := j.Begin(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { key = r.Header.Get("Idempotency-Key") }))
	defer server.Close()
	req, err := http.NewRequestWithContext(call, http.MethodPost, server.URL, strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: &idempotentclient.Transport{Base: server.Client().Transport}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return key
}

func pending(t *testing.T, j *sqlstore.Journal) string {
	t.Helper()
	calls, err := j.Pending(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, call := range calls {
		names = append(names, call.Name)
	}
	return strings.Join(names, "; ")
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestJournalKeepsTheKeyOfANameUntilItIsDone(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		const odd = `charge ☕ '; \ ? -- "`
		tea, coffee := added(t, db, j, "charge tea"), added(t, db, j, odd)
		if tea == coffee {
			t.Fatal("two calls have one key")
		}
		other := db.journal(t, sqlstore.JournalConfig{}) // another process
		if begun(t, other, "charge tea") != tea || begun(t, other, odd) != coffee {
			t.Fatal("the keys changed")
		}
		calls, err := other.Pending(t.Context())
		ok(t, err)
		if len(calls) != 2 || calls[0].Name != "charge tea" || calls[0].Key != tea || calls[1].Name != odd || calls[1].Key != coffee ||
			time.Since(calls[0].Begun).Abs() > time.Minute {
			t.Fatalf("pending are %+v", calls)
		}
		for range 2 { // what is done stays done
			ok(t, other.Done(t.Context(), db, odd))
		}
		if names := pending(t, j); names != "charge tea" {
			t.Fatalf("pending are %q", names)
		}
		if _, err := j.Begin(t.Context(), odd); !errors.Is(err, sqlstore.ErrNotPending) {
			t.Fatalf("a call that is done was begun: %v", err)
		}
	})
}

func TestJournalIsPartOfTheApplicationsTransaction(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		add := func(tx *sql.Tx) error { return j.Add(t.Context(), tx, "charge tea") }
		done := func(tx *sql.Tx) error { return j.Done(t.Context(), tx, "charge tea") }
		notPending := func(when string) {
			t.Helper()
			if names := pending(t, j); names != "" {
				t.Fatalf("%s pending are %q", when, names)
			}
			if _, err := j.Begin(t.Context(), "charge tea"); !errors.Is(err, sqlstore.ErrNotPending) || !strings.Contains(err.Error(), "charge tea") {
				t.Fatalf("%s: %v", when, err)
			}
		}

		notPending("before Add")
		db.within(t, (*sql.Tx).Rollback, add)
		notPending("after a rollback")
		db.within(t, (*sql.Tx).Commit, add)
		calls, err := j.Pending(t.Context())
		ok(t, err)
		if len(calls) != 1 || calls[0].Name != "charge tea" || calls[0].Key == "" || !calls[0].Begun.IsZero() {
			t.Fatalf("pending are %+v", calls)
		}
		key := begun(t, j, "charge tea")
		if key != calls[0].Key {
			t.Fatalf("pending was %+v, and the key is %q", calls, key)
		}
		db.within(t, (*sql.Tx).Commit, add) // what is pending stays so
		db.within(t, (*sql.Tx).Rollback, done)
		if again := begun(t, j, "charge tea"); again != key {
			t.Fatal("the key changed")
		}
		db.within(t, (*sql.Tx).Commit, done)
		notPending("after Done")
	})
}

// A worker that was killed may have its commit still under way.
func TestJournalBeginWaitsForADoneUnderWay(t *testing.T) {
	onPostgresJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		key := added(t, db, j, "charge tea")
		for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
			tx, err := db.BeginTx(t.Context(), nil)
			ok(t, err)
			ok(t, j.Done(t.Context(), tx, "charge tea"))
			if names := pending(t, j); names != "charge tea" {
				t.Fatalf("pending are %q", names)
			}
			begins := make(chan error, 1)
			go func() {
				_, err := j.Begin(t.Context(), "charge tea")
				begins <- err
			}()
			eventually(t, func() error {
				var waiting int
				err := db.QueryRow(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
				if err == nil && waiting == 0 {
					err = errors.New("Begin does not wait")
				}
				return err
			})
			ok(t, end(tx))
			err = <-begins
			if calls, _ := j.Pending(t.Context()); len(calls) == 0 && !errors.Is(err, sqlstore.ErrNotPending) {
				t.Fatalf("after Done: %v", err)
			} else if len(calls) == 1 && (err != nil || calls[0].Key != key) {
				t.Fatalf("after a rollback: %v, and pending are %+v", err, calls)
			}
		}
	})
}

// A call may wait in the outbox as long as it must: its key is as old as Begin.
func TestJournalDoesNotResumeWhatTheServerMayHaveForgotten(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		ok(t, j.Add(t.Context(), db, "charge tea"))
		age := func(column string) {
			_, err := db.Exec("UPDATE idempotent_calls SET " + column + " = " + column + " - 82801000000") // 23 h and 1 s
			ok(t, err)
		}
		age("added_at")
		begun(t, j, "charge tea")
		begun(t, j, "charge tea")
		age("begun_at")
		if _, err := j.Begin(t.Context(), "charge tea"); !errors.Is(err, idempotentclient.ErrStale) {
			t.Fatalf("got %v", err)
		}
		begun(t, db.journal(t, sqlstore.JournalConfig{KeyAge: 24 * time.Hour}), "charge tea")
	})
}

func TestJournalGivesOneKeyToAllThatBeginOneCall(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		keys := make([]string, 32)
		var wg sync.WaitGroup
		for i := range keys {
			wg.Go(func() {
				name := fmt.Sprint("charge ", i/8)
				for { // as in a transaction of stricter levels
					err := j.Add(t.Context(), db, name)
					if err == nil {
						break
					}
					if !conflict(err) {
						t.Error(err)
						return
					}
				}
				keys[i] = begun(t, j, name)
			})
		}
		wg.Wait()
		for i, key := range keys {
			if key == "" || key != keys[i/8*8] {
				t.Errorf("call %d has the keys %q and %q", i/8, key, keys[i/8*8])
			}
		}
	})
}

func TestJournalRefuses(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		if _, err := db.open(sqlstore.JournalConfig{Table: "calls; --"}); err == nil {
			t.Error("a table that is no name was taken")
		}
		j := db.journal(t, sqlstore.JournalConfig{Table: "calls"})
		long := strings.Repeat("tea", 1<<20)
		for _, name := range []string{"", "tea\xff", "tea\xc3", "tea\uffff", long[:601], long} {
			_, begin := j.Begin(t.Context(), name)
			for what, err := range map[string]error{"begun": begin, "added": j.Add(t.Context(), db, name), "done": j.Done(t.Context(), db, name)} {
				if err == nil || errors.Is(err, sqlstore.ErrNotPending) || len(err.Error()) > 300 {
					t.Errorf("a call of %d bytes, %.10q, was %s: %.400v", len(name), name, what, err)
				}
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		ok(t, j.Add(t.Context(), db, "charge tea"))
		if _, err := j.Begin(ended, "charge tea"); !errors.Is(err, context.Canceled) {
			t.Errorf("a call was begun after its context ended: %v", err)
		}
		ok(t, j.Done(t.Context(), db, "charge tea"))
		if names := pending(t, j); names != "" {
			t.Errorf("pending are %q", names)
		}
		for table, columns := range map[string]string{
			"others":     "name text",
			"keyless":    "name text PRIMARY KEY, added_at bigint, begun_at bigint",
			"repetitive": "name text NOT NULL, added_at bigint NOT NULL, key text NOT NULL, begun_at bigint",
		} {
			_, err := db.Exec("CREATE TABLE " + table + " (" + columns + ")")
			ok(t, err)
			foreign, err := db.open(sqlstore.JournalConfig{Table: table})
			ok(t, err)
			if err := foreign.Migrate(t.Context()); err == nil || !strings.Contains(err.Error(), "not a journal's") {
				t.Errorf("the table %s was taken: %v", table, err)
			}
		}
		_, err := db.Exec("CREATE UNIQUE INDEX unique_names ON repetitive (name)")
		ok(t, err)
		db.journal(t, sqlstore.JournalConfig{Table: "repetitive"})
	})
	if _, err := sqlstore.NewSQLiteJournal(open(t, "sqlite", filepath.Join(t.TempDir(), "lazy.db")+"?_pragma=synchronous(OFF)"), sqlstore.JournalConfig{}); err == nil {
		t.Error("a pool that does not wait for the disk was taken")
	}
}

// Each name is another call, in whatever encoding and compression the database
// stores it.
func TestJournalKeepsNamesApart(t *testing.T) {
	names := []string{"tea", "tea ", "Tea", "tea\n", "tea\x00", "tea\x00x", "tea\\", `tea\\`, `tea\000`, "t\u00e9a", "te\u0301a", "tea\ufffd", "\ufefftea", "☕", "tea 1", "tea 17"}
	for _, first := range []rune{'!', 0x80, 0x4e00, 0x10000} { // hardly to be compressed
		var long []rune
		for room := 600 - utf8.RuneLen(first); room >= 0; room -= utf8.RuneLen(first) {
			long = append(long, first+rand.N[rune](90))
		}
		names = append(names, string(long))
	}
	keep := func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		keys := map[string]string{}
		for _, name := range names {
			keys[added(t, db, j, name)] = name
		}
		calls, err := j.Pending(t.Context())
		ok(t, err)
		if len(keys) != len(names) || len(calls) != len(names) {
			t.Fatalf("%d names have %d keys, and %d are pending", len(names), len(keys), len(calls))
		}
		for _, call := range calls {
			if keys[call.Key] != call.Name {
				t.Errorf("%q is pending as %q", keys[call.Key], call.Name)
			}
			ok(t, j.Done(t.Context(), db, call.Name))
			if _, err := j.Begin(t.Context(), call.Name); !errors.Is(err, sqlstore.ErrNotPending) {
				t.Errorf("%q is done, and Begin says %v", call.Name, err)
			}
		}
		if names := pending(t, j); names != "" {
			t.Errorf("pending are %q", names)
		}
	}
	onJournals(t, keep)
	t.Run("SQLite in UTF-16", func(t *testing.T) {
		db := journalDB{driver: "sqlite", dsn: sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "journal.db"))}.again(t)
		db.SetMaxOpenConns(1)
		_, err := db.Exec("PRAGMA encoding = 'UTF-16le'; CREATE TABLE orders (id integer)")
		ok(t, err)
		keep(t, db)
	})
	t.Run("PostgreSQL with lz4", func(t *testing.T) {
		db := journalDB{driver: "postgres", dsn: pgtest.DSN(t)}.again(t)
		db.SetMaxOpenConns(1)
		_, err := db.Exec("SET default_toast_compression = lz4")
		ok(t, err)
		keep(t, db)
	})
	t.Run("PostgreSQL in Latin-1", func(t *testing.T) {
		dsn := pgtest.DSN(t)
		admin := open(t, "postgres", dsn)
		name := "latin_" + strings.ToLower(crand.Text())
		_, err := admin.Exec("CREATE DATABASE " + name + " ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
		ok(t, err)
		t.Cleanup(func() {
			_, err := admin.Exec("DROP DATABASE " + name + " WITH (FORCE)")
			ok(t, err)
		})
		u, err := url.Parse(dsn)
		ok(t, err)
		u.Path = name
		keep(t, journalDB{driver: "postgres", dsn: u.String()}.again(t))
	})
}

func TestJournalMigratesFromManyProcesses(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				j, err := db.open(sqlstore.JournalConfig{})
				if err == nil {
					err = j.Migrate(t.Context())
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}
