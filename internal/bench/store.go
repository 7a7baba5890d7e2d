package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// A way is one of the ways to have a store in PostgreSQL.
type way struct {
	name string
	open func(ctx context.Context, dsn string, clients int, opts ...sqlstore.Option) (*sqlstore.Store, func() error, error)
}

var (
	// newPostgres is a store on the application's pool.
	newPostgres = way{"NewPostgres", func(ctx context.Context, dsn string, clients int, opts ...sqlstore.Option) (*sqlstore.Store, func() error, error) {
		db, err := open(ctx, dsn, clients)
		if err != nil {
			return nil, nil, err
		}
		store, err := sqlstore.NewPostgres(db, opts...)
		return store, db.Close, err
	}}
	// grouped is a store with a pool of its own, as it comes.
	grouped = way{"OpenPostgres", func(_ context.Context, dsn string, _ int, opts ...sqlstore.Option) (*sqlstore.Store, func() error, error) {
		store, err := sqlstore.OpenPostgres(dsn, opts...)
		if err != nil {
			return nil, nil, err
		}
		return store, store.Close, nil
	}}
	// ungrouped has a connection for each client, so that the server can let
	// their commits share what they wait for.
	ungrouped = way{"ungrouped", func(ctx context.Context, dsn string, clients int, opts ...sqlstore.Option) (*sqlstore.Store, func() error, error) {
		return grouped.open(ctx, dsn, clients, append(opts, sqlstore.WithoutGrouping(), sqlstore.WithMaxConns(clients))...)
	}}
)

const (
	stepTimeout = idempotency.DefaultStoreTimeout // which the guard gives each call
	operation   = "POST /payments"
	requestBody = `{"amount":250,"currency":"EUR","account":"DE02120300000000202051","reference":"order 17"}`
	answerBody  = `{"id":"pay_01J8ZC3Q7V","amount":250,"currency":"EUR","state":"accepted","paid_at":"2026-03-01T12:00:00Z"}` + "\n"
)

var (
	fingerprintOf = append([]byte{1, 0}, make([]byte, 32)...)
	answer        = must(idempotency.EncodeOutcome(&idempotency.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}, "Location": {"/payments/pay_01J8ZC3Q7V"}},
		Body:   []byte(answerBody),
	}))
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func claimOf(key int64) *idempotency.Claim {
	return &idempotency.Claim{
		ID: claimID(), Hash: hashOf(key), Operation: operation, Key: uuid(), Fingerprint: fingerprintOf,
		Lease: 30 * time.Second, TTL: 24 * time.Hour, Attempt: 1,
	}
}

// uuid returns a random key as clients send it.
func uuid() string {
	return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", rand.Uint32(), rand.N(1<<16), rand.N(1<<12), rand.N(1<<12), rand.Int64N(1<<48))
}

// claimAndSettle does what a guard does for a key that it has not seen.
func claimAndSettle(ctx context.Context, store idempotency.Store) error {
	c := claimOf(freshKey())
	row, err := claim(ctx, store, c)
	if err == nil && !row.Won {
		err = errors.New("a random key was there already")
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	row, err = store.Settle(ctx, c, answer)
	if err == nil && !row.Won {
		err = errors.New("the lease was lost")
	}
	return err
}

func claim(ctx context.Context, store idempotency.Store, c *idempotency.Claim) (idempotency.Row, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	return store.Claim(ctx, c)
}

func claimingFresh(store *sqlstore.Store) func(context.Context) error {
	return func(ctx context.Context) error { return claimAndSettle(ctx, store) }
}

// claimingExisting claims one of the first rows, which are in the state given.
func claimingExisting(rows int, state idempotency.State) func(*sqlstore.Store) func(context.Context) error {
	return func(store *sqlstore.Store) func(context.Context) error {
		return func(ctx context.Context) error {
			row, err := claim(ctx, store, claimOf(firstKey+rand.Int64N(int64(rows))))
			if err == nil && (row.Won || row.State != state) {
				err = fmt.Errorf("a row that is there was claimed, or is in state %d", row.State)
			}
			return err
		}
	}
}

// stored makes the side that opens a store for each round, and has clients do
// what ready returns for it.
func (b *bench) stored(c *cluster, dsn, name string, clients int, w way, ready func(*sqlstore.Store) func(context.Context) error, opts ...sqlstore.Option) side {
	return side{name, c.counted(func(d time.Duration) (sample, int64, error) {
		store, closeStore, err := w.open(b.ctx, dsn, clients, opts...)
		if err != nil {
			return sample{}, 0, err
		}
		op := ready(store)
		call := func(int) error { return op(b.ctx) }
		warm, err := b.drive(clients, d/20, call)
		if err != nil {
			return sample{}, 0, errors.Join(err, closeStore())
		}
		s, err := b.drive(clients, d, call)
		return s, warm.ops + s.ops, errors.Join(err, closeStore())
	})}
}

// table makes a table of rows that were answered, and are what later claims
// of their keys find.
func (b *bench) table(dsn, name string, rows int) error {
	db, err := open(b.ctx, dsn, 1)
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := sqlstore.NewPostgres(db, sqlstore.WithTable(name))
	if err != nil {
		return err
	}
	if err := store.Migrate(b.ctx); err != nil {
		return err
	}
	// The index is built behind the rows: a tenth of the time, and the same index.
	for _, statement := range []string{
		fmt.Sprintf("ALTER TABLE %s DROP CONSTRAINT %[1]s_pkey", name),
		fmt.Sprintf(`INSERT INTO %s (key_hash, claim_id, owner, fingerprint, state, lease_until, expires_at, operation, key, status, headers, body)
SELECT convert_to(n || '%s', 'UTF8'), convert_to((%d + n %% 1000)::text, 'UTF8'), decode('%064x', 'hex'), decode('%x', 'hex'), 1,
now(), now() + interval '1 day', '%s', gen_random_uuid(), %d, decode('%x', 'hex'), decode('%x', 'hex')
FROM generate_series(%d, %d) AS n`,
			name, filling, firstClaim, 0, fingerprintOf, operation, answer.Status, answer.Header, answer.Body, firstKey, firstKey+rows-1),
		fmt.Sprintf("ALTER TABLE %s ADD PRIMARY KEY (key_hash)", name),
	} {
		if _, err := db.ExecContext(b.ctx, statement); err != nil {
			return err
		}
	}
	return settle(db)
}

const defaultTable = "idempotency_keys"

// recorded returns the statements that an ungrouped store sends for what do
// does, as a script of pgbench's.
func (b *bench) recorded(dsn, keys string, do func(store *sqlstore.Store, c *idempotency.Claim, sent func() error) error) (*script, error) {
	t, through, err := b.listen(dsn)
	if err != nil {
		return nil, err
	}
	store, closeStore, err := ungrouped.open(b.ctx, through, 1)
	if err != nil {
		return nil, err
	}
	defer closeStore()
	if err := claimAndSettle(b.ctx, store); err != nil { // after which no connection begins
		return nil, err
	}
	s, c := &script{keys: keys}, claimOf(freshKey())
	t.reset()
	return s, do(store, c, func() error {
		statement, err := t.one()
		t.reset()
		if err != nil {
			return err
		}
		return s.add(statement, c.Hash, c.ID)
	})
}

// claimScript is what a store sends for a claim.
func claimScript(ctx context.Context) func(*sqlstore.Store, *idempotency.Claim, func() error) error {
	return func(store *sqlstore.Store, c *idempotency.Claim, sent func() error) error {
		if _, err := claim(ctx, store, c); err != nil {
			return err
		}
		return sent()
	}
}

// freshScript is what a store sends for a claim and for the answer after it.
func freshScript(ctx context.Context) func(*sqlstore.Store, *idempotency.Claim, func() error) error {
	return func(store *sqlstore.Store, c *idempotency.Claim, sent func() error) error {
		if err := claimScript(ctx)(store, c, sent); err != nil {
			return err
		}
		if _, err := store.Settle(ctx, c, answer); err != nil {
			return err
		}
		return sent()
	}
}

func fresh(clients int) func(*bench, string) (*contest, error) {
	return func(b *bench, name string) (*contest, error) {
		c, dsn, err := b.database()
		if err != nil {
			return nil, err
		}
		if err := b.table(dsn, defaultTable, b.fewRows); err != nil {
			return nil, err
		}
		script, err := b.recorded(dsn, freshKeys, freshScript(b.ctx))
		if err != nil {
			return nil, err
		}
		floor, err := b.pgbench("pgbench", c, dsn, clients, script)
		if err != nil {
			return nil, err
		}
		contest := &contest{name: name, sides: []side{floor}}
		for _, w := range []way{ungrouped, grouped, newPostgres} {
			contest.sides = append(contest.sides, b.stored(c, dsn, w.name, clients, w, claimingFresh))
		}
		var one, alone, many, syncs target
		switch clients {
		case 1:
			one = atLeast(0.95)
		case 8:
			alone = atLeast(0.80)
		case 64:
			many, syncs = atLeast(2.5), atMost(0.12)
		}
		contest.figures = []figure{
			speed(ungrouped.name, floor.name, alone),
			speed(grouped.name, floor.name, many),
			speed(grouped.name, ungrouped.name, one),
			speed(newPostgres.name, floor.name, target{}),
			measure(grouped.name, "fsyncs/op", syncs),
		}
		return contest, nil
	}
}

const repeatClients = 8

// replay measures claims of keys that were answered, also by the store alone.
func replay(b *bench, name string) (*contest, error) {
	c, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	contest, keys, err := b.repeated(c, dsn, name, requestBody, http.StatusCreated, idempotency.Completed)
	if err != nil {
		return nil, err
	}
	bare, err := b.pgbench("select", c, dsn, repeatClients, &script{keys: existingKeys(b.fewRows), statements: []string{
		"SELECT claim_id, owner, fingerprint, state, expires_at <= now(), status, headers, body FROM " + defaultTable + " WHERE key_hash = " + sqlHash,
	}})
	if err != nil {
		return nil, err
	}
	store := b.stored(c, dsn, grouped.name, repeatClients, grouped, claimingExisting(b.fewRows, idempotency.Completed))
	cached := b.asking(c, dsn, "cached", keys, requestBody, http.StatusCreated, idempotency.WithReplayCache(16<<20))
	contest.sides = append(contest.sides, store, bare, cached)
	contest.figures = append(contest.figures,
		speed(store.name, "pgbench", atLeast(0.65)),
		speed(store.name, bare.name, target{}),
		speed(cached.name, "pgbench", target{}),
		measure(store.name, "WAL-B/op", lessThanOne))
	return contest, nil
}

func inFlight(b *bench, name string) (*contest, error) {
	c, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	contest, _, err := b.repeated(c, dsn, name, requestBody, http.StatusConflict, idempotency.Processing)
	return contest, err
}

func mismatch(b *bench, name string) (*contest, error) {
	c, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	contest, _, err := b.repeated(c, dsn, name, `{"amount":1}`, http.StatusUnprocessableEntity, idempotency.Completed)
	return contest, err
}

// repeated measures requests whose keys are there, in the state given, and that
// a guard answers with the status. It returns the keys.
func (b *bench) repeated(c *cluster, dsn, name, body string, status int, state idempotency.State) (*contest, []string, error) {
	if err := b.table(dsn, defaultTable, b.fewRows); err != nil {
		return nil, nil, err
	}
	keys, err := b.answered(dsn, 1000)
	if err != nil {
		return nil, nil, err
	}
	script, err := b.recorded(dsn, existingKeys(b.fewRows), claimScript(b.ctx))
	if err != nil {
		return nil, nil, err
	}
	db, err := open(b.ctx, dsn, 1)
	if err != nil {
		return nil, nil, err
	}
	defer db.Close()
	if state == idempotency.Processing {
		if _, err := db.Exec("UPDATE " + defaultTable + " SET state = 0, lease_until = now() + interval '1 day', status = NULL, headers = NULL, body = NULL"); err != nil {
			return nil, nil, err
		}
	}
	if err := settle(db); err != nil {
		return nil, nil, err
	}
	floor, err := b.pgbench("pgbench", c, dsn, repeatClients, script)
	if err != nil {
		return nil, nil, err
	}
	guarded := b.asking(c, dsn, "guard", keys, body, status)
	return &contest{
		name:  name,
		sides: []side{floor, guarded},
		figures: []figure{
			speed(guarded.name, floor.name, target{}),
			measure(guarded.name, "WAL-B/op", lessThanOne),
		},
	}, keys, nil
}

// asking makes the side that sends requests with keys that are there.
func (b *bench) asking(c *cluster, dsn, name string, keys []string, body string, status int, opts ...idempotency.Option) side {
	return b.stored(c, dsn, name, repeatClients, grouped, func(store *sqlstore.Store) func(context.Context) error {
		g := newGuarded(store, idempotency.AtLeastOnce, opts...)
		return func(ctx context.Context) error { return g.do(ctx, keys[rand.N(len(keys))], body, status, nothing) }
	})
}

// lessThanOne stands for none: the server's own processes write now and then.
var lessThanOne = atMost(0.99)

// answered returns keys that a guard has recorded answers for.
func (b *bench) answered(dsn string, n int) ([]string, error) {
	store, closeStore, err := grouped.open(b.ctx, dsn, repeatClients)
	if err != nil {
		return nil, err
	}
	defer closeStore()
	g := newGuarded(store, idempotency.AtLeastOnce)
	var keys []string
	for range n {
		key := uuid()
		if err := g.do(b.ctx, key, requestBody, http.StatusCreated, pay); err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// A guarded is one operation behind a guard.
type guarded struct {
	guard  *idempotency.Guard
	policy *idempotency.Policy
}

func newGuarded(store idempotency.Store, guarantee idempotency.Guarantee, opts ...idempotency.Option) guarded {
	p := idempotency.DefaultPolicy(operation)
	p.Guarantee = guarantee
	g := guarded{must(idempotency.New(store, opts...)), &p}
	idempotency.Register[*http.Request](g.guard, g.policy)
	return g
}

// do makes one request, for which run is the handler.
func (g guarded) do(ctx context.Context, key, body string, status int, run func(context.Context) (*idempotency.Response, error)) error {
	resp, err := g.guard.Do(ctx, g.policy, &idempotency.Request{
		Method: http.MethodPost, Path: "/payments",
		Header: http.Header{"Idempotency-Key": {key}, "Content-Type": {"application/json"}},
		Body:   func(int64) ([]byte, error) { return []byte(body), nil },
	}, run)
	if err == nil && resp.Status != status {
		err = fmt.Errorf("the answer is %d, not %d: %s", resp.Status, status, resp.Body)
	}
	return err
}

// pay is a handler with nothing to do.
func pay(context.Context) (*idempotency.Response, error) {
	return &idempotency.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}, "Location": {"/payments/pay_01J8ZC3Q7V"}},
		Body:   []byte(answerBody),
	}, nil
}

// nothing is a handler that is not to run.
func nothing(context.Context) (*idempotency.Response, error) {
	return nil, errors.New("the handler ran again")
}

const insertOrder = "INSERT INTO orders (item, quantity) VALUES ('tea', 250)"

func transaction(b *bench, name string) (*contest, error) {
	c, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	if err := b.table(dsn, defaultTable, b.fewRows); err != nil {
		return nil, err
	}
	if err := createOrders(b.ctx, dsn); err != nil {
		return nil, err
	}
	const clients = 8
	// Half of the pool's connections hold transactions.
	pooled := func(op func(context.Context, *sql.DB) func(int) error) func(time.Duration) (sample, error) {
		return c.counted(func(d time.Duration) (sample, int64, error) {
			db, err := open(b.ctx, dsn, 2*clients)
			if err != nil {
				return sample{}, 0, err
			}
			s, err := b.drive(clients, d, op(b.ctx, db))
			return s, s.ops, errors.Join(err, db.Close())
		})
	}
	bare := side{"bare", pooled(func(ctx context.Context, db *sql.DB) func(int) error {
		return func(int) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, insertOrder); err != nil {
				return errors.Join(err, tx.Rollback())
			}
			return tx.Commit()
		}
	})}
	transacted := func(name string, opts ...sqlstore.Option) side {
		return side{name, pooled(func(ctx context.Context, db *sql.DB) func(int) error {
			// Transactions are all that is sent, and they go through the application's pool.
			g := newGuarded(must(sqlstore.NewPostgres(db, opts...)), idempotency.Transaction)
			return func(int) error { return g.do(ctx, uuid(), requestBody, http.StatusCreated, order) }
		})}
	}
	prepared := transacted("prepared", sqlstore.WithPreparedStatements())
	unprepared := transacted("unprepared")
	return &contest{
		name:  name,
		sides: []side{bare, prepared, unprepared},
		figures: []figure{
			speed(prepared.name, bare.name, atLeast(0.60)),
			speed(unprepared.name, bare.name, target{}),
		},
	}, nil
}

func createOrders(ctx context.Context, dsn string) error {
	db, err := open(ctx, dsn, 1)
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.ExecContext(ctx, "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item text NOT NULL, quantity int NOT NULL)")
	return err
}

// order is a handler that writes in the guard's transaction.
func order(ctx context.Context) (*idempotency.Response, error) {
	tx, ok := sqlstore.Tx(ctx)
	if !ok {
		return nil, errors.New("there is no transaction")
	}
	if _, err := tx.ExecContext(ctx, insertOrder); err != nil {
		return nil, err
	}
	return pay(ctx)
}

// What a row of ten million needs on the disk, its part of the index and of the
// write-ahead log included, and at most what the rounds add to it.
const (
	bytesOfRow = 1100
	bytesOfRun = 17 << 30
)

func rows(b *bench, name string) (*contest, error) {
	c, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(b.progress, "%s: needs %d GB of disk in %s, and minutes to fill them\n", name, (b.manyRows*bytesOfRow+bytesOfRun)>>30, c.server.SocketDir())
	contest := &contest{name: name}
	const clients = 8
	for _, t := range []struct {
		name string
		rows int
	}{{"few", b.fewRows}, {"many", b.manyRows}} {
		if err := b.table(dsn, t.name, t.rows); err != nil {
			return nil, err
		}
		contest.sides = append(contest.sides,
			b.stored(c, dsn, "fresh-"+t.name, clients, grouped, claimingFresh, sqlstore.WithTable(t.name)),
			b.stored(c, dsn, "replay-"+t.name, clients, grouped, claimingExisting(t.rows, idempotency.Completed), sqlstore.WithTable(t.name)))
	}
	contest.figures = []figure{
		speed("fresh-many", "fresh-few", atLeast(0.8)),
		speed("replay-many", "replay-few", atLeast(0.5)),
	}
	return contest, nil
}
