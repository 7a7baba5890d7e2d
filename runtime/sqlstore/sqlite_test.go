package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func TestSQLiteMigrateManyAtOnceAndAgain(t *testing.T) {
	dsn := sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "keys.db"))
	errs := make(chan error, 20)
	for range cap(errs) {
		// Pools of their own, as processes have.
		db := open(t, "sqlite", dsn)
		go func() {
			store, err := sqlstore.NewSQLite(db, sqlstore.WithTable("Order"))
			if err == nil {
				err = store.Migrate(t.Context())
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	mustWin(t, newSQLite(t, open(t, "sqlite", dsn), sqlstore.WithTable("Order")), newClaim())
}

func TestSQLiteMigrateRefusesAnotherTable(t *testing.T) {
	db := sqliteDB(t)
	if _, err := db.Exec("CREATE TABLE idempotency_keys (key_hash BLOB PRIMARY KEY, expires_at INTEGER)"); err != nil {
		t.Fatal(err)
	}
	store, err := sqlstore.NewSQLite(db)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err == nil || !strings.Contains(err.Error(), "lacks the column claim_id, owner") {
		t.Errorf("got %v", err)
	}
}

func TestSQLiteRefusesToForget(t *testing.T) {
	file := "file:" + filepath.Join(t.TempDir(), "keys.db")
	for dsn, advice := range map[string]string{
		":memory:":                             "SetMaxOpenConns(1)",
		file + "?_pragma=synchronous(NORMAL)":  "SQLiteDSN",
		file + "?_pragma=journal_mode(OFF)":    "SQLiteDSN",
		file + "?_pragma=journal_mode(MEMORY)": "SQLiteDSN",
	} {
		if _, err := sqlstore.NewSQLite(open(t, "sqlite", dsn)); err == nil || !strings.Contains(err.Error(), advice) {
			t.Errorf("%s: got %v", dsn, err)
		}
	}
	if _, err := sqlstore.NewSQLite(sqliteDB(t), sqlstore.WithTable("main.keys")); err == nil || !strings.Contains(err.Error(), "no schemas") {
		t.Errorf("a schema: got %v", err)
	}
}

func TestWrongPools(t *testing.T) {
	for name, constructor := range map[string]func(*sql.DB, ...sqlstore.Option) (*sqlstore.Store, error){
		"NewPostgres": sqlstore.NewPostgres, "NewSQLite": sqlstore.NewSQLite,
	} {
		if store, err := constructor(nil); store != nil || err == nil || !strings.Contains(err.Error(), "the pool is nil") {
			t.Errorf("%s(nil) gave %v, %v", name, store, err)
		}
	}
	_, err := sqlstore.NewSQLite(open(t, "postgres", pgtest.DSN(t)))
	if err == nil || !strings.Contains(err.Error(), "this is no SQLite") || !strings.Contains(err.Error(), "NewPostgres") {
		t.Errorf("over PostgreSQL: got %v", err)
	}
	_, err = sqlstore.NewSQLite(open(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "no", "such.db")))
	if err == nil || strings.Contains(err.Error(), "this is no SQLite") {
		t.Errorf("a file that cannot be opened: got %v", err)
	}
}

func TestSQLiteInMemory(t *testing.T) {
	db := open(t, "sqlite", ":memory:")
	db.SetMaxOpenConns(1)
	store := newSQLite(t, db)
	c := newClaim()
	mustWin(t, store, c)
	if row, err := store.Claim(t.Context(), rival(c)); err != nil || row.ID != c.ID {
		t.Errorf("got %+v, %v", row, err)
	}
}

// TestSQLiteWriterIsBusy holds calls to their deadline while another writes,
// and lets replays through.
func TestSQLiteWriterIsBusy(t *testing.T) {
	dsn := sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "keys.db"))
	store := newSQLite(t, open(t, "sqlite", dsn))
	done, running := newClaim(), newClaim()
	mustWin(t, store, done)
	mustWin(t, store, running)
	if _, err := store.Settle(t.Context(), done, idempotency.Outcome{State: idempotency.Completed}); err != nil {
		t.Fatal(err)
	}
	writer, err := open(t, "sqlite", dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if row, err := store.Claim(ctx, rival(done)); err != nil || row.State != idempotency.Completed {
		t.Errorf("a replay waits for the writer: %+v, %v", row, err)
	}
	began := time.Now()
	abandoned := newClaim()
	if _, err := store.Claim(ctx, abandoned); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Claim returned %v", err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("Claim took %v", took)
	}
	settled := make(chan error, 1)
	go func() {
		row, err := store.Settle(t.Context(), running, idempotency.Outcome{State: idempotency.Completed})
		if err == nil && !row.Won {
			err = fmt.Errorf("lost: %+v", row)
		}
		settled <- err
	}()
	if err := writer.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-settled; err != nil {
		t.Errorf("Settle did not wait for the writer: %v", err)
	}
	eventually(t, func() error {
		row, err := store.Claim(t.Context(), rival(abandoned))
		if err == nil && !row.Won {
			err = fmt.Errorf("an abandoned claim holds its key: %+v", row)
		}
		return err
	})
}

func TestDDL(t *testing.T) {
	for _, dialect := range []string{"postgres", "sqlite"} {
		ddl, err := sqlstore.DDL(dialect, "Order")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(ddl, `"Order" (`) || strings.Contains(ddl, "idempotency_keys") {
			t.Errorf("%s: the table has another name:\n%s", dialect, ddl)
		}
		// Not every database's encoding has more.
		if strings.ContainsFunc(ddl, func(r rune) bool { return r >= utf8.RuneSelf }) {
			t.Errorf("%s: not ASCII:\n%s", dialect, ddl)
		}
	}
	if _, err := sqlstore.DDL("oracle", ""); err == nil || !strings.Contains(err.Error(), `write "postgres" or "sqlite"`) {
		t.Errorf("another dialect: %v", err)
	}
	if _, err := sqlstore.DDL("sqlite", "main.keys"); err == nil || !strings.Contains(err.Error(), "no schemas") {
		t.Errorf("a schema: %v", err)
	}
	if _, err := sqlstore.DDL("postgres", "a b"); err == nil || !strings.Contains(err.Error(), "write letters") {
		t.Errorf("a wrong name: %v", err)
	}
	if _, err := sqliteDB(t).Exec(must(t, "sqlite")); err != nil {
		t.Error(err)
	}
	if _, err := postgresDB(t).Exec(must(t, "postgres")); err != nil {
		t.Error(err)
	}
}

func must(t *testing.T, dialect string) string {
	t.Helper()
	ddl, err := sqlstore.DDL(dialect, "")
	if err != nil {
		t.Fatal(err)
	}
	return ddl
}
