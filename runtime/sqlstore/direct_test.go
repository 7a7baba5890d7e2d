package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// openDirect returns a store with a pool of its own.
func openDirect(t *testing.T, dsn string, opts ...sqlstore.Option) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.OpenPostgres(dsn, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

func TestOpenPostgres(t *testing.T) {
	for name, opts := range map[string][]sqlstore.Option{
		"grouped":        nil,
		"alone":          {sqlstore.WithoutGrouping()},
		"one connection": {sqlstore.WithMaxConns(1)},
	} {
		t.Run(name, func(t *testing.T) {
			dsn := pgtest.DSN(t)
			var n atomic.Int64
			storetest.Run(t, func(t *testing.T) idempotency.Store {
				return migrated(t, openDirect(t, dsn, append(opts, sqlstore.WithTable(fmt.Sprintf("keys_%d", n.Add(1))))...))
			})
		})
	}
}

// A crowd is a store whose calls wait for what others hold, so that those that
// come next queue.
type crowd struct {
	*testing.T
	store *sqlstore.Store
	db    *sql.DB // the others'
	held  []*sql.Tx
	won   chan error // what became of each claim
}

// queueing calls round with crowds until the two claims that it makes have queued
// in time: on a busy machine they may be let go before.
func queueing(t *testing.T, round func(*crowd) (queued bool)) {
	const conns = 4
	for range 20 {
		dsn := pgtest.DSN(t)
		store := migrated(t, openDirect(t, dsn, sqlstore.WithMaxConns(conns)))
		c := &crowd{T: t, store: store, db: open(t, "postgres", dsn), won: make(chan error, 2*conns)}
		for range sqlstore.Singles(conns) {
			first := newClaim()
			c.held = append(c.held, c.insert(first))
			go c.claim(t.Context(), first)
		}
		c.waiting(len(c.held))
		if round(c) {
			return
		}
	}
	t.Fatal("the claims never queued")
}

// both reports whether two claims have queued, and lets those before them go.
func (c *crowd) both() bool {
	c.Helper()
	queued := false
	// They queue at once, and for no longer than the store's patience.
	for deadline := time.Now().Add(100 * time.Millisecond); !queued && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		queued = sqlstore.Queued(c.store) == 2
	}
	for _, tx := range c.held {
		if err := tx.Rollback(); err != nil {
			c.Fatal(err)
		}
	}
	c.all(len(c.held))
	return queued
}

// claim reports a claim that is not won by its own caller.
func (c *crowd) claim(ctx context.Context, claim *idempotency.Claim) {
	row, err := c.store.Claim(ctx, claim)
	if err == nil && !row.Won {
		err = fmt.Errorf("its own claim is another's to it: %+v", row)
	}
	c.won <- err
}

// all awaits n claims.
func (c *crowd) all(n int) {
	c.Helper()
	for range n {
		if err := <-c.won; err != nil {
			c.Fatal(err)
		}
	}
}

// insert inserts a key and leaves it open whether it will be there.
func (c *crowd) insert(claim *idempotency.Claim) *sql.Tx {
	c.Helper()
	return c.begin(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, lease_until, expires_at, operation, key)
VALUES ($1, '\x00', '\x00', '\x00', now(), 'infinity', '', '')`, claim)
}

func (c *crowd) begin(statement string, claim *idempotency.Claim) *sql.Tx {
	c.Helper()
	tx, err := c.db.Begin()
	if err != nil {
		c.Fatal(err)
	}
	if _, err := tx.Exec(statement, claim.Hash[:]); err != nil {
		c.Fatal(err)
	}
	return tx
}

// waiting awaits that so many statements wait for others.
func (c *crowd) waiting(n int) {
	c.Helper()
	eventually(c.T, func() error {
		if got := c.sessions("wait_event_type = 'Lock'"); got != n {
			return fmt.Errorf("%d statements wait, not %d", got, n)
		}
		return nil
	})
}

// sessions counts the database's other sessions of which the condition holds.
func (c *crowd) sessions(condition string) (n int) {
	c.Helper()
	if err := c.db.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND " + condition).Scan(&n); err != nil {
		c.Fatal(err)
	}
	return n
}

// TestGroupedClaimOfASweptKey has a row deleted while a statement for several
// claims waits for it: the statement then inserts the key, and also still reads
// the row that is gone.
func TestGroupedClaimOfASweptKey(t *testing.T) {
	queueing(t, func(c *crowd) bool {
		expired := newClaim()
		c.put(expired)
		deleted := c.begin("DELETE FROM idempotency_keys WHERE key_hash = $1", expired)
		go c.claim(t.Context(), rival(expired))
		go c.claim(t.Context(), newClaim())
		queued := c.both()
		c.waiting(1)
		if err := deleted.Commit(); err != nil {
			t.Fatal(err)
		}
		c.all(2)
		return queued
	})
}

// put has a claim be a row that has expired.
func (c *crowd) put(claim *idempotency.Claim) {
	c.Helper()
	if _, err := c.db.Exec(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, state, status, lease_until, expires_at, operation, key)
VALUES ($1, $2, $3, 'f', 1, 201, now(), now(), '', '')`, claim.Hash[:], claim.ID[:], claim.Owner[:]); err != nil {
		c.Fatal(err)
	}
}

// TestGroupMembersFailAlone has one settlement in a group that PostgreSQL
// refuses, and callers who leave.
func TestGroupMembersFailAlone(t *testing.T) {
	dsn := pgtest.DSN(t)
	store := migrated(t, openDirect(t, dsn))
	db := open(t, "postgres", dsn)
	if _, err := db.Exec("ALTER TABLE idempotency_keys ADD CHECK (status <> 599)"); err != nil {
		t.Fatal(err)
	}
	const callers = 60
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for range 20 {
				c := newClaim()
				mustWin(t, store, c)
				ctx, cancel := context.WithCancel(t.Context())
				o := idempotency.Outcome{State: idempotency.Completed, Status: 201, Body: []byte(c.ID.String())}
				switch i % 3 {
				case 1:
					o.Status = 599
				case 2:
					go cancel()
				}
				row, err := store.Settle(ctx, c, o)
				cancel()
				switch {
				case i%3 == 1 && err == nil:
					t.Errorf("what PostgreSQL refuses was settled: %+v", row)
				case i%3 == 0 && (err != nil || !row.Won):
					t.Errorf("harmed by others: %+v, %v", row, err)
				case i%3 == 2 && err != nil && !errors.Is(err, context.Canceled):
					t.Errorf("left, and got %v", err)
				case i%3 == 2:
					// Whoever has left may ask again.
					if row, err := store.Settle(t.Context(), c, o); err != nil || !row.Won {
						t.Errorf("settled again: %+v, %v", row, err)
					}
				}
			}
		})
	}
	wg.Wait()
}

// TestFailover has the server that a name leads to become a replica, and the name
// lead to another a little later. What was connected to the replica in between is
// of no use, although it is alive.
func TestFailover(t *testing.T) {
	onPrimary := func(server *pgtest.Server) string {
		u, err := url.Parse(server.DSN(t))
		if err != nil {
			t.Fatal(err)
		}
		u.Path = "/postgres"
		return u.String()
	}
	former, next := pgtest.Start(t), pgtest.Start(t)
	p, dsn := newProxy(t, onPrimary(former))
	migrated(t, openDirect(t, onPrimary(next)))
	for _, target := range []string{"", "&target_session_attrs=any"} {
		mustWin(t, migrated(t, openDirect(t, dsn+target)), newClaim())
	}
	store := openDirect(t, dsn)
	mustWin(t, store, newClaim())

	var data string
	if err := open(t, "postgres", onPrimary(former)).QueryRow("SHOW data_directory").Scan(&data); err != nil {
		t.Fatal(err)
	}
	former.Stop(t)
	if err := os.WriteFile(filepath.Join(data, "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	former.Restart(t)
	for range 5 {
		if row, err := store.Claim(t.Context(), newClaim()); err == nil {
			t.Fatalf("a replica took a claim: %+v", row)
		}
	}
	p.leadTo(next.Addr())
	for range 5 {
		mustWin(t, store, newClaim())
	}

	_, replica, err := net.SplitHostPort(former.Addr())
	if err != nil {
		t.Fatal(err)
	}
	_, primary, err := net.SplitHostPort(next.Addr())
	if err != nil {
		t.Fatal(err)
	}
	both := fmt.Sprintf("host=127.0.0.1,127.0.0.1 port=%s,%s dbname=postgres user=postgres sslmode=disable", replica, primary)
	mustWin(t, openDirect(t, both), newClaim())
}

// TestSessionsThatBecomeReadOnly has open sessions refuse to write, as some hosts
// of PostgreSQL do for a while, and new ones not.
func TestSessionsThatBecomeReadOnly(t *testing.T) {
	dsn := pgtest.DSN(t)
	store := migrated(t, openDirect(t, dsn, sqlstore.WithMaxConns(1)))
	if _, err := open(t, "postgres", dsn).Exec(`CREATE FUNCTION become_read_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY; RETURN NULL; END $$;
CREATE TRIGGER become_read_only AFTER INSERT ON idempotency_keys EXECUTE FUNCTION become_read_only()`); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		mustWin(t, store, newClaim())
	}
}

// TestLostAnswerBeforeTheServerIsGone loses the answer to a claim, and then the
// server for a while: nobody runs the claim, and so it is given back afterwards.
func TestLostAnswerBeforeTheServerIsGone(t *testing.T) {
	dsn := pgtest.DSN(t)
	p, through := newProxy(t, dsn)
	direct := newPostgres(t, open(t, "postgres", dsn))
	for name, opts := range map[string][]sqlstore.Option{"grouped": nil, "alone": {sqlstore.WithoutGrouping()}} {
		t.Run(name, func(t *testing.T) {
			store := migrated(t, openDirect(t, through, append(opts, sqlstore.WithMaxConns(1))...))
			mustWin(t, store, newClaim())
			c := newClaim()
			c.AtMostOnce = true
			p.refuse()
			p.loseAnswer.Store(true)
			row, err := store.Claim(t.Context(), c)
			p.accept(t)
			if err == nil {
				t.Fatalf("a claim without an answer: %+v", row)
			}
			eventually(t, func() error {
				row, err := direct.Claim(t.Context(), rival(c))
				if err == nil && !row.Won {
					err = fmt.Errorf("the claim that nobody runs holds the key: %+v", row)
				}
				return err
			})
		})
	}
}

// TestClaimThatLeftItsRunIsGivenBack has a claim leave a statement that it shares
// before that comes to it. What gives the claim back must not come first.
func TestClaimThatLeftItsRunIsGivenBack(t *testing.T) {
	queueing(t, func(c *crowd) bool {
		stays, leaves := newClaim(), newClaim()
		stays.Hash[0], leaves.Hash[0] = 0, 1 // the order in which one statement comes to them
		lock := c.insert(stays)
		go c.claim(t.Context(), stays)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		left := make(chan error, 1)
		go func() {
			_, err := c.store.Claim(ctx, leaves)
			left <- err
		}()
		queued := c.both()
		c.waiting(1)
		leave()
		if err := <-left; queued && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		// It would come at once, and is not to come at all: there is nothing to wait
		// for but time.
		for until := time.Now().Add(500 * time.Millisecond); queued && time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
			if c.sessions("query LIKE 'DELETE%'") > 0 {
				t.Fatal("the claim was given back before the run came to it")
			}
		}
		if err := lock.Rollback(); err != nil {
			t.Fatal(err)
		}
		c.all(1)
		if queued {
			eventually(t, func() error {
				row, err := c.store.Claim(t.Context(), rival(leaves))
				if err == nil && !row.Won {
					err = fmt.Errorf("the claim that left holds the key: %+v", row)
				}
				return err
			})
		}
		return queued
	})
}

// TestQueueBehindWhatIsStuck queues behind claims that wait for others, which do
// not end.
func TestQueueBehindWhatIsStuck(t *testing.T) {
	dsn := pgtest.DSN(t)
	const conns = 4
	store := migrated(t, openDirect(t, dsn, sqlstore.WithMaxConns(conns)))
	db := open(t, "postgres", dsn)
	ctx, cancel := context.WithCancel(t.Context())
	var stuck sync.WaitGroup
	defer stuck.Wait()
	defer cancel()
	for range sqlstore.Singles(conns) {
		c := newClaim()
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, lease_until, expires_at, operation, key)
VALUES ($1, '\x00', '\x00', '\x00', now(), 'infinity', '', '')`, c.Hash[:]); err != nil {
			t.Fatal(err)
		}
		stuck.Go(func() { _, _ = store.Claim(ctx, c) })
	}
	eventually(t, func() error {
		var n int
		err := db.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()").Scan(&n)
		if err == nil && n != sqlstore.Singles(conns) {
			err = fmt.Errorf("%d claims are stuck", n)
		}
		return err
	})
	ctx, leave := context.WithTimeout(t.Context(), 20*time.Second)
	defer leave()
	for range 2 {
		row, err := store.Claim(ctx, newClaim())
		if err != nil || !row.Won {
			t.Errorf("a claim waits behind others that are stuck: %+v, %v", row, err)
		}
	}
}

// TestSilenceHoldsNoConnection has a call end on a connection that stays silent,
// and the next open another.
func TestSilenceHoldsNoConnection(t *testing.T) {
	for what, call := range map[string]func(context.Context, *sqlstore.Store) error{
		"Claim": func(ctx context.Context, store *sqlstore.Store) error {
			_, err := store.Claim(ctx, newClaim())
			return err
		},
		"Sweep":   func(ctx context.Context, store *sqlstore.Store) error { _, err := store.Sweep(ctx, 1); return err },
		"Migrate": func(ctx context.Context, store *sqlstore.Store) error { return store.Migrate(ctx) },
	} {
		t.Run(what, func(t *testing.T) {
			p, dsn := newProxy(t, pgtest.DSN(t))
			store := migrated(t, openDirect(t, dsn, sqlstore.WithMaxConns(1)))
			p.silence()
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if err := call(ctx, store); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			p.speakToOthers()
			// What gives the claim back may be connecting.
			eventually(t, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				row, err := store.Claim(ctx, newClaim())
				if err == nil && !row.Won {
					err = fmt.Errorf("lost a fresh key: %+v", row)
				}
				return err
			})
		})
	}
}

func TestOpenPostgresRefuses(t *testing.T) {
	for dsn, opts := range map[string][]sqlstore.Option{
		"postgres://u:secret@localhost:port/db":                     nil,
		"postgres://u:secret@localhost/db?sslmode=secret":           nil,
		"postgres://u:secret@localhost/db":                          {sqlstore.WithPreparedStatements()},
		"postgres://u:secret@localhost/db?application_name=bounded": {sqlstore.WithMaxConns(0)},
		"postgres://u:secret@localhost/db?application_name=pool":    {sqlstore.WithTransactions(nil)},
	} {
		_, err := sqlstore.OpenPostgres(dsn, opts...)
		if err == nil || !strings.HasPrefix(err.Error(), "sqlstore: ") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", dsn, err)
		}
	}
	store, err := sqlstore.OpenPostgres("postgres://127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.CheckTx(); err == nil || !strings.Contains(err.Error(), "WithTransactions") {
		t.Errorf("got %v", err)
	}
}
