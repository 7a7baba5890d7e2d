package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A journalDB is a database with a journal's table.
type journalDB struct {
	*sql.DB
	open func(*sql.DB, sqlstore.JournalConfig) (*sqlstore.Journal, error)
}

func (db journalDB) journal(t *testing.T, cfg sqlstore.JournalConfig) *sqlstore.Journal {
	t.Helper()
	j, err := db.open(db.DB, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return j
}

// onJournals runs a test on a fresh database of each kind.
func onJournals(t *testing.T, test func(*testing.T, journalDB)) {
	t.Run("PostgreSQL", func(t *testing.T) { test(t, journalDB{postgresDB(t), sqlstore.NewPostgresJournal}) })
	// Where a statement fails whose snapshot is older than another's commit.
	t.Run("PostgreSQL, repeatable read", func(t *testing.T) {
		dsn := pgtest.DSN(t)
		_, err := open(t, "postgres", dsn).Exec(`DO $$ BEGIN
			EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = "repeatable read"', current_database());
		END $$`)
		ok(t, err)
		db := open(t, "postgres", dsn)
		db.SetMaxOpenConns(20)
		test(t, journalDB{db, sqlstore.NewPostgresJournal})
	})
	t.Run("SQLite", func(t *testing.T) {
		dsn := sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "journal.db"))
		test(t, journalDB{open(t, "sqlite", dsn), sqlstore.NewSQLiteJournal})
	})
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
		tea, coffee := begun(t, j, "charge tea"), begun(t, j, odd)
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
		if begun(t, j, odd) == coffee {
			t.Fatal("a call begun after Done has the key of the one before")
		}
	})
}

func TestJournalIsPartOfTheApplicationsTransaction(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		j := db.journal(t, sqlstore.JournalConfig{})
		within := func(end func(*sql.Tx) error, do func(*sql.Tx) error) {
			t.Helper()
			tx, err := db.BeginTx(t.Context(), nil)
			ok(t, err)
			ok(t, do(tx))
			ok(t, end(tx))
		}
		add := func(tx *sql.Tx) error { return j.Add(t.Context(), tx, "charge tea") }
		done := func(tx *sql.Tx) error { return j.Done(t.Context(), tx, "charge tea") }

		within((*sql.Tx).Rollback, add)
		if names := pending(t, j); names != "" {
			t.Fatalf("after a rollback pending are %q", names)
		}
		within((*sql.Tx).Commit, add)
		calls, err := j.Pending(t.Context())
		ok(t, err)
		if len(calls) != 1 || calls[0] != (idempotentclient.PendingCall{Name: "charge tea"}) {
			t.Fatalf("pending are %+v", calls)
		}
		key := begun(t, j, "charge tea")
		within((*sql.Tx).Commit, add) // what is pending stays so
		within((*sql.Tx).Rollback, done)
		if again := begun(t, j, "charge tea"); again != key {
			t.Fatal("the key changed")
		}
		within((*sql.Tx).Commit, done)
		if names := pending(t, j); names != "" {
			t.Fatalf("pending are %q", names)
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
			wg.Go(func() { keys[i] = begun(t, j, fmt.Sprint("charge ", i/8)) })
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
		if _, err := db.open(db.DB, sqlstore.JournalConfig{Table: "calls; --"}); err == nil {
			t.Error("a table that is no name was taken")
		}
		j := db.journal(t, sqlstore.JournalConfig{Table: "calls"})
		if _, err := j.Begin(t.Context(), ""); err == nil {
			t.Error("a call without a name was begun")
		}
		if err := j.Add(t.Context(), db, ""); err == nil {
			t.Error("a call without a name was added")
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := j.Begin(ended, "charge tea"); !errors.Is(err, context.Canceled) {
			t.Errorf("a call was begun after its context ended: %v", err)
		}
		if names := pending(t, j); names != "" {
			t.Errorf("pending are %q", names)
		}
		_, err := db.Exec("CREATE TABLE others (name text)")
		ok(t, err)
		foreign, err := db.open(db.DB, sqlstore.JournalConfig{Table: "others"})
		ok(t, err)
		if err := foreign.Migrate(t.Context()); err == nil || !strings.Contains(err.Error(), "not a journal's") {
			t.Errorf("another's table was taken: %v", err)
		}
	})
	if _, err := sqlstore.NewSQLiteJournal(open(t, "sqlite", filepath.Join(t.TempDir(), "lazy.db")+"?_pragma=synchronous(OFF)"), sqlstore.JournalConfig{}); err == nil {
		t.Error("a pool that does not wait for the disk was taken")
	}
}

func TestJournalMigratesFromManyProcesses(t *testing.T) {
	onJournals(t, func(t *testing.T, db journalDB) {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				j, err := db.open(db.DB, sqlstore.JournalConfig{})
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
