package sqlstore_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// postgresDB returns a pool on a fresh database.
func postgresDB(t *testing.T) *sql.DB {
	t.Helper()
	db := open(t, "postgres", pgtest.DSN(t))
	db.SetMaxOpenConns(20)
	db.SetMaxIdleConns(20)
	return db
}

// newPostgres returns a store whose table exists.
func newPostgres(t *testing.T, db *sql.DB, opts ...sqlstore.Option) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.NewPostgres(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return migrated(t, store)
}

func newSQLite(t *testing.T, db *sql.DB, opts ...sqlstore.Option) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.NewSQLite(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return migrated(t, store)
}

func migrated(t *testing.T, store *sqlstore.Store) *sqlstore.Store {
	t.Helper()
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store
}

// newClaim returns a fresh claim of a fresh key.
func newClaim() *idempotency.Claim {
	c := &idempotency.Claim{
		Operation: "POST /orders", Key: "k", Fingerprint: []byte("f"), Lease: time.Hour, TTL: time.Hour, Attempt: 1,
	}
	rand.Read(c.ID[:])
	rand.Read(c.Hash[:])
	return c
}

// rival returns another claim of c's key.
func rival(c *idempotency.Claim) *idempotency.Claim {
	r := newClaim()
	r.Hash = c.Hash
	return r
}

func mustWin(t *testing.T, store idempotency.Store, c *idempotency.Claim) {
	t.Helper()
	row, err := store.Claim(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if !row.Won {
		t.Fatalf("the claim did not win: %+v", row)
	}
}

// eventually calls ok until it returns nil.
func eventually(t *testing.T, ok func() error) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// tables returns a function that makes stores with a table each.
func tables(t *testing.T, db *sql.DB, opts ...sqlstore.Option) func(*testing.T) idempotency.Store {
	var n atomic.Int64
	return func(t *testing.T) idempotency.Store {
		return newPostgres(t, db, append(opts, sqlstore.WithTable(fmt.Sprintf("keys_%d", n.Add(1))))...)
	}
}

func TestPostgres(t *testing.T) {
	storetest.Run(t, tables(t, postgresDB(t)))
}

func TestPostgresPrepared(t *testing.T) {
	storetest.Run(t, tables(t, postgresDB(t), sqlstore.WithPreparedStatements()))
}

func TestPostgresRepeatableRead(t *testing.T) {
	storetest.Run(t, tables(t, isolatedDB(t, "repeatable read")))
}

func TestPostgresSerializable(t *testing.T) {
	storetest.Run(t, tables(t, isolatedDB(t, "serializable")))
}

// isolatedDB returns a pool on a database with another default isolation.
func isolatedDB(t *testing.T, level string) *sql.DB {
	t.Helper()
	dsn := pgtest.DSN(t)
	if _, err := open(t, "postgres", dsn).Exec(fmt.Sprintf(
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET default_transaction_isolation = %%L', current_database(), '%s'); END $$`, level)); err != nil {
		t.Fatal(err)
	}
	db := open(t, "postgres", dsn)
	db.SetMaxOpenConns(20)
	db.SetMaxIdleConns(20)
	var got string
	if err := db.QueryRow("SHOW transaction_isolation").Scan(&got); err != nil || got != level {
		t.Fatalf("isolation is %q, %v", got, err)
	}
	return db
}

// sqliteDB returns a pool on a new file.
func sqliteDB(t *testing.T) *sql.DB {
	t.Helper()
	db := open(t, "sqlite", sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "a file with ? # % and spaces.db")))
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8)
	return db
}

func TestSQLite(t *testing.T) {
	storetest.Run(t, func(t *testing.T) idempotency.Store { return newSQLite(t, sqliteDB(t)) })
}
