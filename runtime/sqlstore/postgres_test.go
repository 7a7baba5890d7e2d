package sqlstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func TestMigrateManyAtOnceAndAgain(t *testing.T) {
	db := postgresDB(t)
	if _, err := db.Exec("CREATE SCHEMA ops"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"idempotency_keys", "ops.Order"} {
		store, err := sqlstore.NewPostgres(db, sqlstore.WithTable(name))
		if err != nil {
			t.Fatal(err)
		}
		errs := make(chan error, 20)
		for range cap(errs) {
			go func() { errs <- store.Migrate(t.Context()) }()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		migrated(t, store)
		mustWin(t, store, newClaim())
	}
}

func TestMigrateNeedsNoRightsOnATableThatIsThere(t *testing.T) {
	dsn := pgtest.DSN(t)
	db := open(t, "postgres", dsn)
	newPostgres(t, db)
	user := fmt.Sprintf("writer_%d", time.Now().UnixNano())
	for _, statement := range []string{
		"CREATE ROLE " + user + " LOGIN",
		"GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO " + user,
		"REVOKE CREATE ON SCHEMA public FROM public",
	} {
		if _, err := db.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if _, err := db.Exec("DROP OWNED BY " + user + "; DROP ROLE " + user); err != nil {
			t.Error(err)
		}
	})
	conn := open(t, "postgres", dsn)
	conn.SetMaxOpenConns(1)
	if _, err := conn.Exec("SET ROLE " + user); err != nil {
		t.Fatal(err)
	}
	store := newPostgres(t, conn)
	c := newClaim()
	mustWin(t, store, c)
	if err := store.Release(t.Context(), c); err != nil {
		t.Error(err)
	}
	if _, err := store.Sweep(t.Context(), 10); err != nil {
		t.Error(err)
	}
}

func TestMigrateRefusesAnotherTable(t *testing.T) {
	db := postgresDB(t)
	if _, err := db.Exec("CREATE TABLE idempotency_keys (key_hash bytea PRIMARY KEY, owner bytea, state int)"); err != nil {
		t.Fatal(err)
	}
	store, err := sqlstore.NewPostgres(db)
	if err != nil {
		t.Fatal(err)
	}
	err = store.Migrate(t.Context())
	if err == nil || !strings.Contains(err.Error(), "lacks the column claim_id, fingerprint") || !strings.Contains(err.Error(), "WithTable") {
		t.Errorf("got %v", err)
	}
}

func TestTableNames(t *testing.T) {
	db := open(t, "postgres", "postgres://127.0.0.1:1/none")
	for _, name := range []string{"", "a.b.c", ".a", "a.", `a"b`, "a b", "a;b", "1a", "ü", strings.Repeat("a", 64)} {
		if _, err := sqlstore.NewPostgres(db, sqlstore.WithTable(name)); err == nil || !strings.Contains(err.Error(), "write letters") {
			t.Errorf("WithTable(%q): %v", name, err)
		}
	}
}

// A way is how a store reaches PostgreSQL.
type way struct {
	name string
	open func(t *testing.T, dsn string, conns int) *sqlstore.Store
	// resends says that what a broken connection did not answer is sent again.
	resends bool
}

// poolWith returns a way through an application's pool.
func poolWith(opts ...sqlstore.Option) func(*testing.T, string, int) *sqlstore.Store {
	return func(t *testing.T, dsn string, conns int) *sqlstore.Store {
		db := open(t, "postgres", dsn)
		db.SetMaxOpenConns(conns)
		store, err := sqlstore.NewPostgres(db, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
}

// directWith returns a way through a pool of the store's own.
func directWith(opts ...sqlstore.Option) func(*testing.T, string, int) *sqlstore.Store {
	return func(t *testing.T, dsn string, conns int) *sqlstore.Store {
		return openDirect(t, dsn, append(opts, sqlstore.WithMaxConns(conns))...)
	}
}

var ways = []way{
	{"simple", poolWith(), false},
	{"prepared", poolWith(sqlstore.WithPreparedStatements()), false},
	{"direct", directWith(), true},
	{"direct, alone", directWith(sqlstore.WithoutGrouping()), true},
}

func onEachWay(t *testing.T, test func(*testing.T, way)) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) { test(t, way) })
	}
}

func TestTrips(t *testing.T) {
	dsn := pgtest.DSN(t)
	direct := newPostgres(t, open(t, "postgres", dsn))
	p, through := newProxy(t, dsn)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			store := way.open(t, through, 1)
			ctx := t.Context()
			// Connecting and preparing cost trips once.
			warm := newClaim()
			mustWin(t, store, warm)
			if err := store.Renew(ctx, warm); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Settle(ctx, warm, idempotency.Outcome{State: idempotency.Completed}); err != nil {
				t.Fatal(err)
			}
			if err := store.Release(ctx, newClaim()); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Takeover(ctx, warm, warm.ID); err != nil {
				t.Fatal(err)
			}

			c := newClaim()
			lapsed := newClaim()
			lapsed.Lease = time.Microsecond
			mustWin(t, direct, lapsed)
			released := newClaim()
			mustWin(t, direct, released)
			for _, call := range []struct {
				what string
				call func() error
			}{
				{"claim", func() error { _, err := store.Claim(ctx, c); return err }},
				{"in flight", func() error { _, err := store.Claim(ctx, rival(c)); return err }},
				{"renew", func() error { return store.Renew(ctx, c) }},
				{"settle", func() error {
					row, err := store.Settle(ctx, c, idempotency.Outcome{State: idempotency.Completed, Body: []byte("b")})
					if err == nil && !row.Won {
						err = errors.New("lost")
					}
					return err
				}},
				{"replay", func() error { _, err := store.Claim(ctx, rival(c)); return err }},
				{"takeover", func() error {
					row, err := store.Takeover(ctx, rival(lapsed), lapsed.ID)
					if err == nil && !row.Won {
						err = errors.New("lost")
					}
					return err
				}},
				{"release", func() error { return store.Release(ctx, released) }},
			} {
				before := p.trips.Load()
				if err := call.call(); err != nil {
					t.Fatalf("%s: %v", call.what, err)
				}
				if n := p.trips.Load() - before; n != 1 {
					t.Errorf("%s took %d trips, not 1", call.what, n)
				}
			}
		})
	}
}

// TestLostAnswers breaks the connection after the server has done what it was
// told. What the driver or the caller sends again must find its own work.
func TestLostAnswers(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			p, dsn := newProxy(t, pgtest.DSN(t))
			store := migrated(t, way.open(t, dsn, 4))
			c, outcome := newClaim(), idempotency.Outcome{State: idempotency.Completed, Status: 201, Body: []byte("b")}
			lapsed := newClaim()
			lapsed.Lease = time.Microsecond
			mustWin(t, store, lapsed)
			next := rival(lapsed)
			released := newClaim()
			mustWin(t, store, released)
			won := func(row idempotency.Row, err error) error {
				if err == nil && !row.Won {
					err = fmt.Errorf("lost to itself: %+v", row)
				}
				return err
			}
			for _, call := range []struct {
				what string
				call func() error
			}{
				{"Claim", func() error { return won(store.Claim(t.Context(), c)) }},
				{"Renew", func() error { return store.Renew(t.Context(), c) }},
				{"MarkEffect", func() error { return store.MarkEffect(t.Context(), c) }},
				{"Settle", func() error { return won(store.Settle(t.Context(), c, outcome)) }},
				{"Takeover", func() error { return won(store.Takeover(t.Context(), next, lapsed.ID)) }},
				{"Release", func() error { return store.Release(t.Context(), released) }},
			} {
				p.loseAnswer.Store(true)
				err := call.call()
				if p.loseAnswer.Load() {
					t.Fatalf("%s: no answer was lost", call.what)
				}
				if errors.Is(err, idempotency.ErrLeaseLost) {
					t.Errorf("%s: %v", call.what, err)
				} else if err != nil {
					// The driver does not send this again; its caller may.
					t.Logf("%s: %v", call.what, err)
					if err := call.call(); err != nil {
						t.Errorf("%s, sent again: %v", call.what, err)
					}
				}
			}
		})
	}
}

// TestSilentConnection holds every call to its deadline on connections that
// say nothing any more, and claims again when the network is back.
func TestSilentConnection(t *testing.T) { onEachWay(t, silentConnection) }

func silentConnection(t *testing.T, way way) {
	p, dsn := newProxy(t, pgtest.DSN(t))
	store := migrated(t, way.open(t, dsn, 8))
	held := newClaim()
	mustWin(t, store, held)

	p.silence()
	var wg sync.WaitGroup
	for what, call := range map[string]func(context.Context) error{
		"Claim":      func(ctx context.Context) error { _, err := store.Claim(ctx, newClaim()); return err },
		"Takeover":   func(ctx context.Context) error { _, err := store.Takeover(ctx, rival(held), held.ID); return err },
		"Renew":      func(ctx context.Context) error { return store.Renew(ctx, held) },
		"MarkEffect": func(ctx context.Context) error { return store.MarkEffect(ctx, held) },
		"Settle":     func(ctx context.Context) error { _, err := store.Settle(ctx, held, idempotency.Outcome{}); return err },
		"Release":    func(ctx context.Context) error { return store.Release(ctx, held) },
		"Sweep":      func(ctx context.Context) error { _, err := store.Sweep(ctx, 1); return err },
		"Migrate":    store.Migrate,
	} {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s returned %v", what, err)
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("%s took %v", what, took)
			}
		})
	}
	wg.Wait()

	// The operating system gives the connections up at last.
	p.cut()
	p.speak()
	eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		row, err := store.Claim(ctx, newClaim())
		if err == nil && !row.Won {
			err = fmt.Errorf("the claim did not win: %+v", row)
		}
		return err
	})
}

// TestAbandonedClaimIsGivenBack abandons a claim that the server makes all the
// same.
func TestAbandonedClaimIsGivenBack(t *testing.T) { onEachWay(t, abandonedClaim) }

func abandonedClaim(t *testing.T, way way) {
	dsn := pgtest.DSN(t)
	p, through := newProxy(t, dsn)
	direct := newPostgres(t, open(t, "postgres", dsn))
	store := migrated(t, way.open(t, through, 1))
	mustWin(t, store, newClaim()) // prepares

	blocker, err := open(t, "postgres", dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	// The server has the statement but does not answer it yet.
	if _, err := blocker.Exec("LOCK TABLE idempotency_keys IN SHARE MODE"); err != nil {
		t.Fatal(err)
	}
	c := newClaim()
	ctx, cancel := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	go func() {
		_, err := store.Claim(ctx, c)
		answered <- err
	}()
	watcher := open(t, "postgres", dsn)
	eventually(t, func() error {
		var waiting int
		err := watcher.QueryRow("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'idempotency_keys'::regclass").Scan(&waiting)
		if err == nil && waiting != 1 {
			err = fmt.Errorf("%d claims wait for the lock", waiting)
		}
		return err
	})
	// In this silence the driver's request to cancel the statement is lost, and
	// so is the statement's answer.
	p.silence()
	cancel()
	if err := <-answered; !errors.Is(err, context.Canceled) {
		t.Fatalf("Claim returned %v", err)
	}
	if err := blocker.Rollback(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		var made int
		err := watcher.QueryRow("SELECT count(*) FROM idempotency_keys WHERE claim_id = $1", c.ID[:]).Scan(&made)
		if err == nil && made != 1 {
			err = errors.New("the abandoned claim is not made")
		}
		return err
	})
	p.speak()
	eventually(t, func() error {
		row, err := direct.Claim(t.Context(), rival(c))
		if err == nil && !row.Won {
			err = fmt.Errorf("the abandoned claim holds the key: %+v", row)
		}
		return err
	})
}

func TestServerStoppedAndStarted(t *testing.T) { onEachWay(t, serverStoppedAndStarted) }

func serverStoppedAndStarted(t *testing.T, way way) {
	server := pgtest.Start(t)
	store := migrated(t, way.open(t, server.DSN(t), 4))
	c := newClaim()
	mustWin(t, store, c)
	for name, stop := range map[string]func(testing.TB){"Stop": server.Stop, "Crash": server.Crash} {
		stop(t)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if _, err := store.Claim(ctx, newClaim()); err == nil {
			t.Errorf("%s: a claim on a stopped server succeeded", name)
		}
		cancel()
		server.Restart(t)
		mustWin(t, store, newClaim())
		row, err := store.Claim(t.Context(), rival(c))
		if err != nil || row.ID != c.ID {
			t.Errorf("%s: the claim was forgotten: %+v, %v", name, row, err)
		}
	}

	server.Freeze(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := store.Claim(ctx, newClaim()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("on a frozen server Claim returned %v", err)
	}
	server.Thaw()
	mustWin(t, store, newClaim())
}

func TestDuplicatesDoNotStarveThePool(t *testing.T) { onEachWay(t, duplicatesDoNotStarve) }

func duplicatesDoNotStarve(t *testing.T, way way) {
	store := migrated(t, way.open(t, pgtest.DSN(t), 2))
	c := newClaim()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	errs := make(chan error, 200)
	for range cap(errs) {
		go func() {
			_, err := store.Claim(ctx, rival(c))
			errs <- err
		}()
	}
	other, err := store.Claim(ctx, newClaim())
	if err != nil || !other.Won {
		t.Errorf("another key did not get through: %+v, %v", other, err)
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// TestResetConnection loses the answer to a claim in a way in which the driver
// does not send it again: nobody runs it, and so it is given back at once. A
// direct connection's is sent again, and won.
func TestResetConnection(t *testing.T) { onEachWay(t, resetConnection) }

func resetConnection(t *testing.T, way way) {
	p, dsn := newProxy(t, pgtest.DSN(t))
	p.reset.Store(true)
	store := migrated(t, way.open(t, dsn, 4))
	mustWin(t, store, newClaim())
	for _, atMostOnce := range []bool{false, true} {
		c := newClaim()
		c.AtMostOnce = atMostOnce
		p.loseAnswer.Store(true)
		if row, err := store.Claim(t.Context(), c); way.resends {
			if err != nil || !row.Won {
				t.Errorf("the claim was not sent again: %+v, %v", row, err)
			}
			continue
		} else if err == nil {
			t.Fatalf("the driver sent it again: %+v", row)
		}
		eventually(t, func() error {
			row, err := store.Claim(t.Context(), rival(c))
			if err == nil && !row.Won {
				err = errors.New("the claim was not given back")
			}
			return err
		})
	}
}

// TestPoolerThatLosesTheServer has a pooler say that it lost the server, which has
// made the claim.
func TestPoolerThatLosesTheServer(t *testing.T) {
	dsn := pgtest.DSN(t)
	direct := newPostgres(t, open(t, "postgres", dsn))
	connector, err := pq.NewConnector(dsn)
	if err != nil {
		t.Fatal(err)
	}
	lossy := &lossyConnector{Connector: connector}
	db := sql.OpenDB(lossy)
	t.Cleanup(func() { db.Close() })
	store, err := sqlstore.NewPostgres(db)
	if err != nil {
		t.Fatal(err)
	}
	c := newClaim()
	lossy.lose.Store(true)
	if row, err := store.Claim(t.Context(), c); err == nil {
		t.Fatalf("a claim without an answer: %+v", row)
	}
	eventually(t, func() error {
		row, err := direct.Claim(t.Context(), rival(c))
		if err == nil && !row.Won {
			err = fmt.Errorf("the claim that nobody runs holds the key: %+v", row)
		}
		return err
	})
}

// A lossyConnector opens connections that answer one query with what PgBouncer
// says of a server that it lost, as pgx passes it on.
type lossyConnector struct {
	driver.Connector
	lose atomic.Bool
}

func (l *lossyConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := l.Connector.Connect(ctx)
	return lossyConn{conn, l}, err
}

type lossyConn struct {
	driver.Conn
	of *lossyConnector
}

type lostServer struct{}

func (lostServer) Error() string    { return "server conn crashed?" }
func (lostServer) SQLState() string { return "08P01" }

func (l lossyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := l.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
	if err == nil && l.of.lose.CompareAndSwap(true, false) {
		rows.Close()
		return nil, lostServer{}
	}
	return rows, err
}

// TestServerWithoutConnectionsLeft has a pool without a bound ask for more
// connections than the server has.
func TestServerWithoutConnectionsLeft(t *testing.T) { onEachWay(t, serverWithoutConnectionsLeft) }

func serverWithoutConnectionsLeft(t *testing.T, way way) {
	store := migrated(t, way.open(t, pgtest.Start(t, "max_connections=10").DSN(t), 100))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	errs := make(chan error, 100)
	for range cap(errs) {
		go func() {
			_, err := store.Claim(ctx, newClaim())
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// TestApplicationClockDoesNotCount runs applications decades behind and ahead, as
// synctest's clock can be, beside one that is not.
func TestApplicationClockDoesNotCount(t *testing.T) {
	dsn := pgtest.DSN(t)
	now := newPostgres(t, open(t, "postgres", dsn))
	for year, ahead := range map[int]time.Duration{2000: 0, 2099: 100 * 365 * 24 * time.Hour} {
		t.Run(fmt.Sprint(year), func(t *testing.T) { clockDoesNotCount(t, dsn, now, year, ahead) })
	}
}

// clockDoesNotCount shares the store now with an application whose clock, as
// that of a bubble does, began in 2000 and is that much ahead by now.
func clockDoesNotCount(t *testing.T, dsn string, now *sqlstore.Store, year int, ahead time.Duration) {
	short, held := newClaim(), newClaim()
	short.Lease = time.Microsecond
	mustWin(t, now, short)
	mustWin(t, now, held)
	theirs, took := newClaim(), rival(short)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(ahead)
		if got := time.Now().UTC().Year(); got != year {
			t.Fatalf("the application's year is %d, want %d", got, year)
		}
		then := newPostgres(t, open(t, "postgres", dsn))
		mustWin(t, then, theirs)
		row, err := then.Claim(context.Background(), rival(held))
		if err != nil || row.Lapsed || row.LeaseLeft < 50*time.Minute || row.LeaseLeft > time.Hour {
			t.Errorf("a live lease reads as %+v, %v", row, err)
		}
		if row, err = then.Takeover(context.Background(), took, short.ID); err != nil || !row.Won {
			t.Errorf("a lapsed lease was not taken over: %+v, %v", row, err)
		}
		if row, err = then.Takeover(context.Background(), rival(held), held.ID); err != nil || row.Won {
			t.Errorf("a live lease was taken over: %+v, %v", row, err)
		}
		if n, err := then.Sweep(context.Background(), 10); err != nil || n != 0 {
			t.Errorf("swept %d live rows, %v", n, err)
		}
	})
	for _, c := range []*idempotency.Claim{theirs, took} {
		row, err := now.Claim(t.Context(), rival(c))
		if err != nil || row.ID != c.ID || row.Lapsed || row.LeaseLeft < 50*time.Minute || row.LeaseLeft > time.Hour {
			t.Errorf("a lease of an application in %d reads as %+v, %v", year, row, err)
		}
	}
}

// TestPlanUsesThePrimaryKey lets the table grow under statements that were
// prepared when it was empty, and analysed when it was small, which is when the
// planner would rather read it whole. In an application's own sessions nothing
// can be done about that: what is prepared there waits for autovacuum.
func TestPlanUsesThePrimaryKey(t *testing.T) {
	for _, way := range ways {
		if way.name != "prepared" {
			t.Run(way.name, func(t *testing.T) { planUsesThePrimaryKey(t, way) })
		}
	}
}

func planUsesThePrimaryKey(t *testing.T, way way) {
	// What other sessions did is known at once.
	server := pgtest.Start(t, "autovacuum=off")
	dsn := server.DSN(t)
	db := open(t, "postgres", dsn)
	store := migrated(t, way.open(t, dsn, 2))
	statements := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				c := newClaim()
				if _, err := store.Claim(t.Context(), c); err != nil {
					t.Error(err)
				}
				if _, err := store.Claim(t.Context(), rival(c)); err != nil {
					t.Error(err)
				}
				if err := store.Renew(t.Context(), c); err != nil {
					t.Error(err)
				}
				if err := store.MarkEffect(t.Context(), c); err != nil {
					t.Error(err)
				}
				if _, err := store.Takeover(t.Context(), rival(c), c.ID); err != nil {
					t.Error(err)
				}
				if _, err := store.Settle(t.Context(), c, idempotency.Outcome{State: idempotency.Completed}); err != nil {
					t.Error(err)
				}
				if err := store.Release(t.Context(), c); !errors.Is(err, idempotency.ErrLeaseLost) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	grow := func(from, to int) {
		t.Helper()
		if _, err := db.Exec(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, lease_until, expires_at, operation, key)
SELECT sha256(n::text::bytea), '\x00', '\x00', '\x00', now(), 'infinity', '', '' FROM generate_series($1::int, $2::int) n`, from, to); err != nil {
			t.Fatal(err)
		}
	}
	analyse := func() {
		t.Helper()
		if _, err := db.Exec("ANALYZE idempotency_keys"); err != nil {
			t.Fatal(err)
		}
	}
	read := func() (sequential, byIndex int) {
		t.Helper()
		if err := db.QueryRow("SELECT coalesce(sum(seq_tup_read), 0), coalesce(sum(idx_scan), 0) FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'").
			Scan(&sequential, &byIndex); err != nil {
			t.Fatal(err)
		}
		return sequential, byIndex
	}
	statements(10)
	analyse() // of what is one page
	statements(10)
	grow(1, 20_000)
	whole, _ := read()
	statements(20)
	eventually(t, func() error {
		statements(1) // after which a session says what it did before
		sequential, byIndex := read()
		if read := sequential - whole; read >= 20_000 {
			t.Fatalf("%d rows were read without the index, of a table that has grown", read)
		}
		if byIndex < 40 {
			return fmt.Errorf("%d scans of the index are known", byIndex)
		}
		return nil
	})
}

// TestOperatorsReadKeys reads back what is there for people: any bytes.
func TestOperatorsReadKeys(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db)
	for _, key := range []string{"order-1", `it's "a" \ key; --`, "\x00\xff\xfe", "ключ"} {
		c := newClaim()
		c.Operation, c.Key = "POST /"+key, key
		mustWin(t, store, c)
		var operation, got []byte
		if err := db.QueryRow("SELECT decode(operation, 'escape'), decode(key, 'escape') FROM idempotency_keys WHERE key_hash = $1", c.Hash[:]).
			Scan(&operation, &got); err != nil {
			t.Fatal(err)
		}
		if string(got) != key || string(operation) != c.Operation {
			t.Errorf("got %q and %q, want %q", got, operation, key)
		}
	}
	var plain string
	if err := db.QueryRow("SELECT key FROM idempotency_keys WHERE key = 'order-1'").Scan(&plain); err != nil {
		t.Errorf("a plain key is not kept as it is: %v", err)
	}
}

// TestSweepCoversManyPages sweeps a table of several steps.
func TestSweepCoversManyPages(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db)
	if _, err := db.Exec(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, state, lease_until, expires_at, operation, key)
SELECT sha256(n::text::bytea), '\x00', '\x00', '\x00', 1, now(), CASE WHEN n % 10 = 0 THEN now() ELSE 'infinity' END, '', ''
FROM generate_series(1, 20000) n`); err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, max := range []int{300, 1, 0, 5000} {
		n, err := store.Sweep(t.Context(), max)
		if err != nil {
			t.Fatal(err)
		}
		if n > max {
			t.Errorf("swept %d of at most %d", n, max)
		}
		total += n
	}
	var left int
	if err := db.QueryRow("SELECT count(*) FROM idempotency_keys").Scan(&left); err != nil {
		t.Fatal(err)
	}
	if total != 2000 || left != 18000 {
		t.Errorf("swept %d, %d rows are left", total, left)
	}
}

// TestErrorsTellNothing looks for what was sent in what failed.
func TestErrorsTellNothing(t *testing.T) { onEachWay(t, errorsTellNothing) }

func errorsTellNothing(t *testing.T, way way) {
	store := way.open(t, pgtest.DSN(t), 4) // without its table
	c := newClaim()
	c.Key = "secret-key"
	_, claimErr := store.Claim(t.Context(), c)
	_, settleErr := store.Settle(t.Context(), c, idempotency.Outcome{State: idempotency.Completed, Body: bytes.Repeat([]byte("secret-body"), 10)})
	for _, err := range []error{claimErr, settleErr} {
		if err == nil {
			t.Fatal("no error without a table")
		}
		for _, leak := range []string{"secret", "7365637265", "SELECT", "UPDATE", "decode", c.ID.String()} {
			if strings.Contains(err.Error(), leak) {
				t.Errorf("%q holds %q", err, leak)
			}
		}
		if !strings.HasPrefix(err.Error(), "sqlstore: ") {
			t.Errorf("%q does not say where it comes from", err)
		}
	}
}
