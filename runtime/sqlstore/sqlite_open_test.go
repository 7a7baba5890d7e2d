package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func openSQLite(t *testing.T, path string, params ...string) *sql.DB {
	t.Helper()
	db, err := sqlstore.OpenSQLite(path, params...)
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

func TestOpenSQLite(t *testing.T) {
	storetest.Run(t, func(t *testing.T) idempotency.Store {
		return newSQLite(t, openSQLite(t, filepath.Join(t.TempDir(), "a file with ? # % and spaces.db")))
	})
}

func TestOpenSQLiteParams(t *testing.T) {
	db := openSQLite(t, filepath.Join(t.TempDir(), "keys.db"), "_pragma=foreign_keys(1)", "_pragma=cache_size(-4000)")
	for pragma, want := range map[string]string{"foreign_keys": "1", "cache_size": "-4000", "journal_mode": "wal", "synchronous": "2"} {
		var got string
		if err := db.QueryRow("PRAGMA " + pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", pragma, got, err, want)
		}
	}
}

func TestOpenSQLiteFails(t *testing.T) {
	if _, err := sqlstore.OpenSQLite(filepath.Join(t.TempDir(), "no", "such.db")); err == nil || !strings.Contains(err.Error(), "OpenSQLite: unable to open database file") {
		t.Errorf("got %v", err)
	}
}

// inSQLiteTx runs the handler in a guarded transaction that has written an order.
func inSQLiteTx(t *testing.T, db *sql.DB, handler func(ctx context.Context)) {
	t.Helper()
	c := newClaim()
	c.StepTimeout = time.Minute
	row, err := newSQLite(t, db).InTx(t.Context(), c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		tx, _ := sqlstore.Tx(ctx)
		if _, err := tx.ExecContext(ctx, insertOrder, "tea"); err != nil {
			t.Error(err)
		}
		handler(ctx)
		return idempotency.Outcome{State: idempotency.Completed, Status: 201}, true, nil
	})
	if err != nil || !row.Won {
		t.Fatalf("the transaction did not commit: %+v, %v", row, err)
	}
}

const insertOrder = "INSERT INTO orders (item) VALUES (?)"

// orderPool returns a pool on a new file with a table of orders.
func orderPool(t *testing.T, path string) *sql.DB {
	t.Helper()
	db := openSQLite(t, path)
	if _, err := db.Exec("CREATE TABLE orders (item text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	return db
}

func countOrders(t *testing.T, db *sql.DB, want int) {
	t.Helper()
	var n int
	if err := db.QueryRow("SELECT count(*) FROM orders").Scan(&n); err != nil || n != want {
		t.Errorf("there are %d orders, %v; want %d", n, err, want)
	}
}

// routerContext finds the run by name only, as a router's own context does.
type routerContext struct {
	context.Context
	run context.Context
}

func (c routerContext) Value(key any) any {
	if key == idempotency.RunContextKey {
		return c.run
	}
	return nil
}

// pastTx checks the error of a write that would have waited for itself.
func pastTx(t *testing.T, what string, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), "write through sqlstore.Tx(ctx)") {
		t.Errorf("%s: got %v", what, err)
	}
	var busy interface{ Code() int }
	if errors.As(err, &busy) {
		t.Errorf("%s: the error invites to try again: %v", what, err)
	}
}

// A handler's write past its transaction fails at once, however it is sent.
func TestSQLiteWritePastTx(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "orders.db")
	db := orderPool(t, file)
	link := filepath.Join(dir, "link.db")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	another := openSQLite(t, link)
	prepared, err := db.Prepare(insertOrder)
	if err != nil {
		t.Fatal(err)
	}
	defer prepared.Close()
	before, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	other := newSQLite(t, another)

	inSQLiteTx(t, db, func(ctx context.Context) {
		refused := func(what string, err error) {
			t.Helper()
			pastTx(t, what, err)
		}
		exec := func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, insertOrder, "past")
			return err
		}
		refused("Exec", exec(ctx, db))
		var rowid int
		refused("RETURNING", db.QueryRowContext(ctx, insertOrder+" RETURNING rowid", "past").Scan(&rowid))
		_, err := prepared.ExecContext(ctx, "past")
		refused("a prepared statement", err)
		refused("a prepared query", prepared.QueryRowContext(ctx, "past").Scan(&rowid))
		_, err = before.ExecContext(ctx, insertOrder, "past")
		refused("a connection from before", err)
		_, err = db.BeginTx(ctx, nil)
		refused("a transaction", err)
		refused("another pool, by another name of the file", exec(ctx, another))
		derived, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		refused("a derived context", exec(derived, db))
		refused("a router's context", exec(routerContext{t.Context(), ctx}, db))
		_, err = other.Claim(ctx, newClaim())
		refused("a claim of another store", err)

		// Reads see what was there before.
		countOrders(t, db, 0)
		read, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		var n int
		if err := read.QueryRowContext(ctx, "SELECT count(*) FROM orders").Scan(&n); err != nil || n != 0 {
			t.Errorf("a read: %d, %v", n, err)
		}
		_, err = read.ExecContext(ctx, insertOrder, "past")
		refused("a write in a transaction that reads", err)
		if err := read.Rollback(); err != nil {
			t.Error(err)
		}
		tx, _ := sqlstore.Tx(ctx)
		if _, err := tx.ExecContext(ctx, insertOrder, "coffee"); err != nil {
			t.Errorf("a write through the transaction: %v", err)
		}
	})
	countOrders(t, db, 2)
}

// Every other write waits for its turn, as it does without guarded transactions.
func TestSQLiteOtherWritesWait(t *testing.T) {
	file := filepath.Join(t.TempDir(), "orders.db")
	db := orderPool(t, file)
	another := orderPool(t, filepath.Join(t.TempDir(), "another.db"))

	// waits checks that the write waits for what the release ends.
	waits := func(ctx context.Context, db *sql.DB, release func()) {
		t.Helper()
		inUse := db.Stats().InUse
		done := make(chan error, 1)
		go func() {
			_, err := db.ExecContext(ctx, insertOrder, "patient")
			done <- err
		}()
		eventually(t, func() error {
			if db.Stats().InUse == inUse {
				return errors.New("the write has not begun")
			}
			return nil
		})
		select {
		case err := <-done:
			t.Fatalf("a write did not wait: %v", err)
		case <-time.After(100 * time.Millisecond): // a write that does not wait would have failed
		}
		release()
		if err := <-done; err != nil {
			t.Errorf("a write that waited: %v", err)
		}
	}
	writer := func(db *sql.DB) (release func()) {
		t.Helper()
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
		}
	}

	var run context.Context
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		inSQLiteTx(t, db, func(ctx context.Context) {
			run = ctx
			if _, err := db.ExecContext(ctx, insertOrder, "past"); err == nil {
				t.Error("a write past the transaction did not fail")
			}
			end <- struct{}{}
			<-end
		})
	}()
	<-end
	waits(run, another, writer(another)) // the handler's, elsewhere
	waits(t.Context(), db, func() { close(end); <-ended })
	waits(run, openSQLite(t, file), writer(db)) // of what the handler left running
	countOrders(t, db, 3)
	countOrders(t, another, 1)
}
