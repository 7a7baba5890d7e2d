package sqlstore_test

import (
	"bufio"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A commitPool counts the commits of its connections, and can hold them up.
type commitPool struct {
	*sql.DB
	commits atomic.Int64
	hold    atomic.Pointer[chan struct{}] // commits wait until it is closed
	driver  sqlite.Driver
	dsn     string
}

func newCommitPool(t *testing.T, params string) *commitPool {
	t.Helper()
	p := &commitPool{dsn: sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "keys.db")) + params}
	p.driver.RegisterConnectionHook(func(conn sqlite.ExecQuerierContext, _ string) error {
		conn.(sqlite.HookRegisterer).RegisterCommitHook(func() int32 {
			p.commits.Add(1)
			if hold := p.hold.Load(); hold != nil {
				<-*hold
			}
			return 0
		})
		return nil
	})
	p.DB = sql.OpenDB(p)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *commitPool) Driver() driver.Driver { return &p.driver }

func (p *commitPool) Connect(context.Context) (driver.Conn, error) { return p.driver.Open(p.dsn) }

// holdCommits holds up the commits from now on, until release is called.
func (p *commitPool) holdCommits() (release func()) {
	hold := make(chan struct{})
	p.hold.Store(&hold)
	return func() {
		p.hold.CompareAndSwap(&hold, nil)
		close(hold)
	}
}

// committing waits until n commits have begun.
func (p *commitPool) committing(t *testing.T, n int64) {
	t.Helper()
	eventually(t, func() error {
		if got := p.commits.Load(); got < n {
			return fmt.Errorf("%d commits have begun, want %d", got, n)
		}
		return nil
	})
}

// fresh claims a key and settles it.
func fresh(ctx context.Context, store idempotency.Store, c *idempotency.Claim) error {
	row, err := store.Claim(ctx, c)
	if err == nil && !row.Won {
		err = fmt.Errorf("the claim did not win: %+v", row)
	}
	if err != nil {
		return err
	}
	row, err = store.Settle(ctx, c, idempotency.Outcome{State: idempotency.Completed, Status: 201, Body: []byte("made")})
	if err == nil && !row.Won {
		err = fmt.Errorf("it was not settled: %+v", row)
	}
	return err
}

// inParallel calls for each of n at once.
func inParallel(n int, call func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { call(i) })
	}
	wg.Wait()
}

func TestSQLiteSharesCommits(t *testing.T) {
	const clients, each = 32, 10
	for name, test := range map[string]struct {
		opts   []sqlstore.Option
		shared bool
	}{
		"shared":           {nil, true},
		"without grouping": {[]sqlstore.Option{sqlstore.WithoutGrouping()}, false},
	} {
		t.Run(name, func(t *testing.T) {
			db := newCommitPool(t, "")
			store := newSQLite(t, db.DB, test.opts...)
			before := db.commits.Load()
			inParallel(clients, func(int) {
				for range each {
					if err := fresh(t.Context(), store, newClaim()); err != nil {
						t.Error(err)
					}
				}
			})
			const writes = 2 * clients * each
			if n := db.commits.Load() - before; n < writes != test.shared {
				t.Errorf("%d writes were %d commits", writes, n)
			}
			var settled int
			if err := db.QueryRow("SELECT count(*) FROM idempotency_keys WHERE state = 1").Scan(&settled); err != nil || settled != clients*each {
				t.Errorf("%d keys are settled, %v", settled, err)
			}
		})
	}
}

// What fails in company fails alone: by a constraint, at the commit, by its size,
// and where SQLite undoes the whole transaction, as it does when the disk is full.
func TestSQLiteFailsAlone(t *testing.T) {
	for name, ddl := range map[string]string{
		"a statement": "CREATE TRIGGER bad BEFORE INSERT ON idempotency_keys WHEN NEW.key LIKE 'bad%' BEGIN SELECT RAISE(ABORT, 'bad'); END",
		"a statement that undoes the transaction": "CREATE TRIGGER bad AFTER INSERT ON idempotency_keys WHEN NEW.key LIKE 'bad%' BEGIN SELECT RAISE(ROLLBACK, 'bad'); END",
		"the commit": `CREATE TABLE good (key TEXT PRIMARY KEY);
CREATE TABLE children (key TEXT REFERENCES good (key) DEFERRABLE INITIALLY DEFERRED);
CREATE TRIGGER bad AFTER INSERT ON idempotency_keys WHEN NEW.key LIKE 'bad%' BEGIN INSERT INTO children VALUES (NEW.key); END`,
		"too large": "",
	} {
		t.Run(name, func(t *testing.T) {
			db := newCommitPool(t, "&_pragma=foreign_keys(1)")
			db.SetMaxOpenConns(4)
			db.SetMaxIdleConns(4)
			store := newSQLite(t, db.DB)
			bad := "bad"
			if ddl == "" {
				bad = strings.Repeat("bad", 10_000)
				limitLength(t, db.DB, 4, len(bad)-1)
			} else if _, err := db.Exec(ddl); err != nil {
				t.Fatal(err)
			}
			const clients, each = 16, 20
			before := db.commits.Load()
			var good atomic.Int64
			inParallel(clients, func(client int) {
				for i := range each {
					c := newClaim()
					if (client+i)%4 > 0 {
						if err := fresh(t.Context(), store, c); err != nil {
							t.Errorf("another's failure: %v", err)
						}
						good.Add(1)
						continue
					}
					c.Key = bad
					if row, err := store.Claim(t.Context(), c); err == nil || errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("the bad claim: %+v, %v", row, err)
					}
				}
			})
			var n, settled int64
			if err := db.QueryRow("SELECT count(*), count(*) FILTER (WHERE state = 1) FROM idempotency_keys").Scan(&n, &settled); err != nil || n != good.Load() || settled != n {
				t.Errorf("there are %d rows, %d settled, %v; want %d", n, settled, err, good.Load())
			}
			// Where the transaction is undone, all of it is done again.
			if n := db.commits.Load() - before; n >= 2*good.Load() && (name == "a statement" || name == "too large") {
				t.Errorf("%d writes were %d commits", 2*good.Load(), n)
			}
		})
	}
}

// limitLength limits the length of values on all of the pool's connections.
func limitLength(t *testing.T, db *sql.DB, pool, length int) {
	t.Helper()
	for range pool {
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := sqlite.Limit(conn, sqlite3.SQLITE_LIMIT_LENGTH, length); err != nil {
			t.Fatal(err)
		}
	}
}

// Whoever leaves a group does so at once, and harms nobody; and readers wait for
// no group.
func TestSQLiteLeavesGroup(t *testing.T) {
	db := newCommitPool(t, "")
	store := newSQLite(t, db.DB)
	done := newClaim()
	if err := fresh(t.Context(), store, done); err != nil {
		t.Fatal(err)
	}
	began := db.commits.Load()

	claims := [...]*idempotency.Claim{newClaim(), newClaim(), newClaim(), newClaim()}
	var leave [len(claims)]context.CancelFunc
	var errs [len(claims)]chan error
	claim := func(i int) {
		var ctx context.Context
		ctx, leave[i] = context.WithCancel(t.Context())
		errs[i] = make(chan error, 1)
		go func() {
			row, err := store.Claim(ctx, claims[i])
			if err == nil && !row.Won {
				err = fmt.Errorf("the claim did not win: %+v", row)
			}
			errs[i] <- err
		}()
	}
	left := func(i int) {
		t.Helper()
		leave[i]()
		if err := <-errs[i]; !errors.Is(err, context.Canceled) {
			t.Errorf("claim %d returned %v", i, err)
		}
	}
	replayed := func() {
		t.Helper()
		if row, err := store.Claim(t.Context(), rival(done)); err != nil || row.State != idempotency.Completed {
			t.Errorf("a replay: %+v, %v", row, err)
		}
	}

	first := db.holdCommits()
	claim(0)
	db.committing(t, began+1)
	for i := 1; i < len(claims); i++ {
		claim(i)
	}
	left(1) // in the queue, or on its way there
	replayed()

	// The first is done, and what has queued begins.
	second := db.holdCommits()
	first()
	if err := <-errs[0]; err != nil {
		t.Error(err)
	}
	db.committing(t, began+2)
	left(2)
	replayed()
	second()
	if err := <-errs[3]; err != nil {
		t.Errorf("who stayed: %v", err)
	}
	for _, i := range []int{1, 2} {
		eventually(t, func() error {
			row, err := store.Claim(t.Context(), rival(claims[i]))
			if err == nil && !row.Won {
				err = fmt.Errorf("a claim that was left holds its key: %+v", row)
			}
			return err
		})
	}
	leave[0]()
	leave[3]()
}

// While a handler runs in its transaction other claims wait, and leave when their
// context ends; the handler's own fail at once.
func TestSQLiteWritesBesideTx(t *testing.T) {
	db := sqliteDB(t)
	store := newSQLite(t, db)
	done, waiting := newClaim(), newClaim()
	if err := fresh(t.Context(), store, done); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	c := newClaim()
	c.StepTimeout = time.Minute
	row, err := store.InTx(t.Context(), c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		go func() { waited <- fresh(t.Context(), store, waiting) }()
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := store.Claim(short, newClaim()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a claim beside the transaction: %v", err)
		}
		if row, err := store.Claim(ctx, rival(done)); err != nil || row.State != idempotency.Completed {
			t.Errorf("a replay in the transaction: %+v, %v", row, err)
		}
		_, err := store.Claim(ctx, newClaim())
		pastTx(t, "the handler's own claim", err)
		_, err = store.InTx(ctx, newClaim(), nil)
		pastTx(t, "the handler's own transaction", err)
		select {
		case err := <-waited:
			t.Errorf("a claim did not wait for the writer: %v", err)
		default:
		}
		return idempotency.Outcome{State: idempotency.Completed, Status: 201}, true, nil
	})
	if err != nil || !row.Won {
		t.Errorf("the transaction did not commit: %+v, %v", row, err)
	}
	if err := <-waited; err != nil {
		t.Errorf("a claim that waited: %v", err)
	}
}

// Where transactions begin without becoming the writer, and where readers hold up
// commits, every promise is kept too.
func TestSQLiteDeferred(t *testing.T) {
	for _, journal := range []string{"WAL", "DELETE"} {
		t.Run(journal, func(t *testing.T) {
			dsn := func(t *testing.T) string {
				return "file:" + filepath.Join(t.TempDir(), "keys.db") + "?_pragma=busy_timeout(5000)&_pragma=synchronous(FULL)&_pragma=journal_mode(" + journal + ")"
			}
			storetest.Run(t, func(t *testing.T) idempotency.Store { return newSQLite(t, open(t, "sqlite", dsn(t))) })

			// Two processes' groups meet.
			dsn2 := dsn(t)
			stores := [2]*sqlstore.Store{newSQLite(t, open(t, "sqlite", dsn2)), newSQLite(t, open(t, "sqlite", dsn2))}
			inParallel(16, func(i int) {
				for range 5 {
					if err := fresh(t.Context(), stores[i%2], newClaim()); err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

// sqliteClientEnv has the test's binary be a client of the database that it names.
const sqliteClientEnv = "OAPI_IDEMPOTENT_SQLITE_CLIENT"

func init() {
	if dsn := os.Getenv(sqliteClientEnv); dsn != "" {
		fmt.Fprintln(os.Stderr, sqliteClient(dsn))
		os.Exit(1)
	}
}

// sqliteClient writes with many clients until it is killed. What was answered it
// prints.
func sqliteClient(dsn string) error {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return err
	}
	store, err := sqlstore.NewSQLite(db)
	if err != nil {
		return err
	}
	failed := make(chan error)
	for range 16 {
		go func() {
			for {
				c := newClaim()
				row, err := store.Claim(context.Background(), c)
				if err != nil || !row.Won {
					failed <- fmt.Errorf("claim: %+v, %v", row, err)
				}
				fmt.Printf("claimed %x\n", c.Hash)
				row, err = store.Settle(context.Background(), c, idempotency.Outcome{State: idempotency.Completed, Body: []byte("made")})
				if err != nil || !row.Won {
					failed <- fmt.Errorf("settle: %+v, %v", row, err)
				}
				fmt.Printf("settled %x\n", c.Hash)
			}
		}()
	}
	return <-failed
}

// TestSQLiteKilled kills a process under load, again and again: what it answered
// is there.
func TestSQLiteKilled(t *testing.T) {
	dsn := sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "keys.db"))
	store := newSQLite(t, open(t, "sqlite", dsn))
	answers := 0
	for range 10 {
		lines := killedAfter(t, dsn, 1+rand.IntN(300))
		answers += len(lines)
		settled := map[string]bool{}
		for _, line := range lines {
			what, key, _ := strings.Cut(line, " ")
			settled[key] = settled[key] || what == "settled"
		}
		for key, settled := range settled {
			c := newClaim()
			if _, err := hex.Decode(c.Hash[:], []byte(key)); err != nil {
				t.Fatalf("the client printed %q", key)
			}
			row, err := store.Claim(t.Context(), c)
			switch {
			case err != nil || row.Won:
				t.Errorf("a claim that was won is lost: %+v, %v", row, err)
			case settled && (row.State != idempotency.Completed || string(row.Outcome.Body) != "made"):
				t.Errorf("what was settled is lost: %+v", row)
			}
		}
	}
	if answers < 10 {
		t.Errorf("the clients answered %d times", answers)
	}
}

// killedAfter starts a client, kills it when it has answered so often, and returns
// all that it answered.
func killedAfter(t *testing.T, dsn string, answers int) (lines []string) {
	t.Helper()
	client := exec.Command(os.Args[0])
	client.Env = append(os.Environ(), sqliteClientEnv+"="+dsn)
	client.Stderr = os.Stderr
	out, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	scanner := bufio.NewScanner(out)
	for scanner.Scan() {
		if lines = append(lines, scanner.Text()); len(lines) == answers {
			if err := client.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
	}
	if err := client.Wait(); err == nil || len(lines) < answers {
		t.Errorf("the client ended by itself: %v, after %d answers", err, len(lines))
	}
	return lines
}
