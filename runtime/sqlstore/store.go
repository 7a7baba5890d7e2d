package sqlstore

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var (
	_ idempotency.Store   = (*Store)(nil)
	_ idempotency.Sweeper = (*Store)(nil)
)

// Giving back a claim that was abandoned is tried for disownTimeout, in which most
// servers that stopped are back: disownTry each time, with a random pause of at
// most disownPause in between.
const (
	disownTimeout = 30 * time.Second
	disownTry     = 5 * time.Second
	disownPause   = time.Second
)

// A Store is an [idempotency.Store] and an [idempotency.Sweeper] in one table
// of an SQL database. It is safe for concurrent use, and any number of them, in
// any number of processes, may use one table.
type Store struct {
	db       *sqlx.DB
	txDB     *sqlx.DB      // the application's, for its transactions; nil: none
	direct   *direct       // what sends the store's own statements, if the pool is its own
	writer   *sqliteWriter // what sends them to SQLite, but for those that read
	dialect  dialect
	table    table
	sql      statements
	prepared bool
	inTx     inTx
	sweepAt  atomic.Int64 // where PostgreSQL's next sweep begins, in pages
}

// A dialect is what differs between databases.
type dialect interface {
	// literals says that arguments are written into the statements.
	literals() bool
	// claims returns the statements that make a claim, with their arguments:
	// they are sent in this order until one returns a row.
	claims(s *statements, insert, read []any) []bound
	// conflict says that a statement failed because of others at the same time,
	// wrote nothing, and may be sent again; and how often at most.
	conflict(error) bool
	tries() int
	// full says that the server has no connection left for the pool.
	full(error) bool
	migrate(context.Context, *Store) error
	// slots returns how many transactions a pool has room for; 0: no bound.
	slots(pool int) int
	isolation() sql.IsolationLevel
	// way is how a transaction's statements are sent first.
	way(*Store) way
	// claimTx takes the key in a transaction and reads its row, then sets the
	// savepoint; held says that another transaction has the key.
	claimTx(context.Context, *Store, *sqlx.Tx, *idempotency.Claim, way) (row idempotency.Row, held bool, err error)
	// recordTx ends the savepoint, with what the handler wrote or without, and
	// then writes the record. It fails with sql.ErrTxDone if the handler ended
	// the transaction by itself.
	recordTx(ctx context.Context, s *Store, tx *sqlx.Tx, endSavepoint string, record query) (int64, error)
	// awaitTx waits until no other transaction holds the key.
	awaitTx(context.Context, *Store, *sqlx.Tx, *idempotency.Claim) error
	// sweep deletes at most max expired rows and counts each step in swept.
	sweep(ctx context.Context, s *Store, max int, swept *atomic.Int64) error
}

// A bound is a statement and its arguments.
type bound struct {
	statement *statement
	args      []any
}

// An Option configures a [Store].
type Option func(*options) error

type options struct {
	table    table
	prepared bool
	maxConns int
	alone    bool
	txDB     *sql.DB
}

// WithTable sets the table, "idempotency_keys" by default. The name is that of
// a table, or of a schema and a table ("ops.keys", PostgreSQL only): ASCII
// letters, digits and underscores, case significant.
func WithTable(name string) Option {
	return func(o *options) (err error) {
		o.table, err = parseTable(name)
		return err
	}
}

// WithPreparedStatements prepares each statement once per connection. That is
// faster, and wrong behind a pooler that changes the server connection between
// transactions, such as PgBouncer in transaction mode: use it only where the pool
// connects to the database directly. A plan that was made while the table was small
// stays until autovacuum has analysed it anew; [OpenPostgres], in whose own sessions
// that cannot happen, is better. With it the option speaks of the pool of
// [WithTransactions]. Transactions prepare nothing with drivers other than
// github.com/lib/pq. With SQLite it always is so.
func WithPreparedStatements() Option {
	return func(o *options) error {
		o.prepared = true
		return nil
	}
}

// errNoPool is the answer to a nil *sql.DB, which an unchecked sql.Open leaves.
var errNoPool = errors.New("sqlstore: the pool is nil; pass what sql.Open returned, and check its error first")

func newOptions(opts []Option) (options, error) {
	o := options{table: table{name: defaultTable}}
	for _, opt := range opts {
		if err := opt(&o); err != nil {
			return options{}, err
		}
	}
	return o, nil
}

// Migrate creates the table, unless it exists, and checks that it has the
// columns that the store needs. Any number of processes may call it at once. A
// table that is there needs no right to create one.
func (s *Store) Migrate(ctx context.Context) error {
	_, err := within(ctx, "migrate", func() (struct{}, error) {
		return struct{}{}, s.persist(ctx, func() (bool, error) { return true, s.dialect.migrate(ctx, s) })
	}, nil)
	return err
}

// Claim implements [idempotency.Store].
//
// When it returns an error the claim may have been made all the same. If that
// shows later it is given back, so that the key is not held by a claim that
// nobody runs: a claim's ID must not be used again after an error.
func (s *Store) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	c = keep(c)
	insert := []any{
		c.Hash[:], c.ID[:], c.Owner[:], c.Fingerprint, c.AtMostOnce, micros(c.Lease),
		c.AtMostOnce, micros(c.Lease) + micros(c.TTL), []byte(c.Operation), []byte(c.Key),
	}
	var queries []query
	for _, b := range s.dialect.claims(&s.sql, insert, []any{c.Hash[:]}) {
		queries = append(queries, s.bind(b.statement, b.args...))
	}
	inserted := idempotency.Row{
		ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, LeaseLeft: c.Lease, AtMostOnce: c.AtMostOnce, Attempt: 1,
	}
	return call(ctx, s, "claim", func() (idempotency.Row, error) {
		row := inFlight(c)
		err := s.persist(ctx, func() (bool, error) {
			for _, q := range queries {
				if q.statement == s.sql.insert {
					if n, err := s.exec(ctx, q); err != nil || n > 0 {
						row = inserted
						return n > 0, err
					}
					continue
				}
				read, found, err := s.row(ctx, q)
				if err != nil || found {
					row = read
					return found, err
				}
			}
			return false, nil
		})
		if errors.Is(err, errExhausted) {
			return inFlight(c), nil
		}
		row.Won = row.ID == c.ID && row.State == idempotency.Processing
		return row, err
	}, s.disown(c, queries...))
}

// Takeover implements [idempotency.Store]. What [Store.Claim] says of errors
// holds here too, but that a claim after an attempt that died is held until its
// lease ends.
func (s *Store) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	c = keep(c)
	takeover := s.bind(s.sql.takeover,
		c.ID[:], c.Owner[:], c.Fingerprint, c.AtMostOnce, micros(c.Lease), c.AtMostOnce, micros(c.Lease)+micros(c.TTL),
		[]byte(c.Operation), []byte(c.Key), c.Hash[:], seen[:])
	read := s.bind(s.sql.read, c.Hash[:])
	return call(ctx, s, "takeover", func() (idempotency.Row, error) {
		row, _, err := s.writeOrRead(ctx, takeover, read)
		row.Won = row.ID == c.ID && row.State == idempotency.Processing
		return row, err
	}, s.disown(c, takeover))
}

// Renew implements [idempotency.Store].
func (s *Store) Renew(ctx context.Context, c *idempotency.Claim) error {
	return s.writeHeld(ctx, "renew",
		s.bind(s.sql.renew, micros(c.Lease), micros(c.Lease)+micros(c.TTL), c.Hash[:], c.ID[:]))
}

// MarkEffect implements [idempotency.Store].
func (s *Store) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	return s.writeHeld(ctx, "mark effect", s.bind(s.sql.mark, c.Hash[:], c.ID[:]))
}

// Settle implements [idempotency.Store].
func (s *Store) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	settle := s.bind(s.sql.settle,
		int64(o.State), int64(o.Status), o.Header, o.Body, o.State == idempotency.Unknown, micros(c.TTL), c.Hash[:], c.ID[:])
	read := s.bind(s.sql.read, c.Hash[:])
	settled := idempotency.Row{
		Won: true, State: o.State, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, AtMostOnce: c.AtMostOnce, Attempt: c.Attempt, Outcome: o,
	}
	if o.State != idempotency.Unknown {
		settled.ExpiresIn = c.TTL
	}
	row, err := call(ctx, s, "settle", func() (row idempotency.Row, err error) {
		err = s.persist(ctx, func() (bool, error) {
			n, err := s.exec(ctx, settle)
			if err == nil && n == 0 {
				row, _, err = s.row(ctx, read)
			} else if err == nil {
				row = settled
			}
			return true, err
		})
		return row, err
	}, nil)
	if err != nil || row.Won {
		return row, err
	}
	// The answer to an earlier attempt of this call may have been lost.
	was := row.Outcome
	row.Won = row.ID == c.ID && was.State == o.State && was.Status == o.Status &&
		bytes.Equal(was.Header, o.Header) && bytes.Equal(was.Body, o.Body)
	return row, nil
}

// Release implements [idempotency.Store].
func (s *Store) Release(ctx context.Context, c *idempotency.Claim) error {
	release := s.bind(s.sql.release, c.Hash[:], c.ID[:])
	read := s.bind(s.sql.read, c.Hash[:])
	found, err := call(ctx, s, "release", func() (found bool, err error) {
		err = s.persist(ctx, func() (bool, error) {
			n, err := s.exec(ctx, release)
			if err == nil && n == 0 {
				_, found, err = s.row(ctx, read)
			}
			return true, err
		})
		return found, err
	}, nil)
	if err == nil && found {
		return idempotency.ErrLeaseLost
	}
	return err
}

// Sweep implements [idempotency.Sweeper]. It works in small steps, so that
// other calls are not held up, and returns with what it has done so far when a
// step fails.
func (s *Store) Sweep(ctx context.Context, max int) (int, error) {
	var swept atomic.Int64
	_, err := within(ctx, "sweep", func() (struct{}, error) {
		return struct{}{}, s.dialect.sweep(ctx, s, max, &swept)
	}, nil)
	return int(swept.Load()), err
}

// writeOrRead writes a row, or reads the one that is there if the write finds
// none that it may write.
func (s *Store) writeOrRead(ctx context.Context, write, read query) (row idempotency.Row, written bool, err error) {
	err = s.persist(ctx, func() (bool, error) {
		var err error
		row, written, err = s.row(ctx, write)
		if err == nil && !written {
			row, _, err = s.row(ctx, read)
		}
		return true, err
	})
	return row, written, err
}

// writeHeld writes a row that only its holder may write.
func (s *Store) writeHeld(ctx context.Context, what string, q query) error {
	n, err := call(ctx, s, what, func() (n int64, err error) {
		err = s.persist(ctx, func() (_ bool, err error) {
			n, err = s.exec(ctx, q)
			return true, err
		})
		return n, err
	}, nil)
	if err == nil && n == 0 {
		return idempotency.ErrLeaseLost
	}
	return err
}

// disown returns what is to be done with a claim that was abandoned or failed
// when it turns out that it was made, or nobody knows: nobody will run it.
func (s *Store) disown(c *idempotency.Claim, claim ...query) func(idempotency.Row, error) {
	return func(row idempotency.Row, err error) {
		if err == nil && !row.Won || unwritten(err) || s.dialect.conflict(err) {
			return
		}
		if err == nil {
			claim = nil
		}
		var left *leftError
		if errors.As(err, &left) {
			<-left.done
		}
		ctx, cancel := context.WithTimeout(context.Background(), disownTimeout)
		defer cancel()
		// If this fails the key is held until the lease ends, as after a crash.
		for s.giveBack(ctx, c, claim) != nil {
			select {
			case <-ctx.Done():
				return
			case <-time.After(rand.N(disownPause)):
			}
		}
	}
}

// giveBack gives back a claim that was made, or that the server may still be
// making: the queries that make it, sent again, wait for that.
func (s *Store) giveBack(ctx context.Context, c *idempotency.Claim, claim []query) error {
	ctx, cancel := context.WithTimeout(ctx, disownTry)
	defer cancel()
	for _, q := range claim {
		if _, found, err := s.row(ctx, q); err != nil {
			return err
		} else if found {
			break
		}
	}
	_, err := s.exec(ctx, s.bind(s.sql.disown, c.Hash[:], c.ID[:]))
	return err
}

// keep returns a copy of a claim for what may still be under way when its caller
// goes on.
func keep(c *idempotency.Claim) *idempotency.Claim {
	mine := *c
	mine.Fingerprint = bytes.Clone(c.Fingerprint)
	return &mine
}

// inFlight stands for a row that could not be read because others kept writing
// it: a run in flight that is as likely as not the same request's.
func inFlight(c *idempotency.Claim) idempotency.Row {
	row := idempotency.Row{
		State: idempotency.Processing, Owner: c.Owner, Fingerprint: bytes.Clone(c.Fingerprint),
		LeaseLeft: c.Lease, AtMostOnce: c.AtMostOnce, Attempt: 1,
	}
	for i := range row.ID {
		row.ID[i] = 0xff // nobody's
	}
	return row
}

// errExhausted says that others were faster as often as a call may try.
var errExhausted = errors.New("too many conflicts with others at the same time; try again")

// persist runs try until it is done or fails with more than a conflict. While
// the server has no connection left it tries for as long as ctx lets it.
func (s *Store) persist(ctx context.Context, try func() (done bool, err error)) error {
	full := false
	for n := 0; n < s.dialect.tries(); {
		if n > 1 || full {
			pause := time.Millisecond << min(n, 6)
			if full {
				pause = 100 * time.Millisecond
			}
			select {
			case <-ctx.Done():
			case <-time.After(rand.N(pause)):
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		done, err := try()
		if done && err == nil {
			return nil
		}
		full = s.dialect.full(err)
		if err != nil && !full && !s.dialect.conflict(err) {
			return err
		}
		if !full {
			n++
		}
	}
	return errExhausted
}

// call runs what sends statements of the store's own, with lost as in within. A
// direct connection ends with its call's context, and needs nobody to wait for it.
func call[T any](ctx context.Context, s *Store, what string, send func() (T, error), lost func(T, error)) (T, error) {
	if s.direct == nil {
		return within(ctx, what, send, lost)
	}
	var none T
	if err := ctx.Err(); err != nil {
		return none, failed(ctx, what, err)
	}
	value, err := send()
	if err == nil {
		return value, nil
	}
	if lost != nil {
		go lost(value, err)
	}
	return none, failed(ctx, what, err)
}

// failed returns the error of a call that failed or was abandoned.
func failed(ctx context.Context, what string, err error) error {
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	return fmt.Errorf("sqlstore: %s: %w", what, err)
}

// within runs call on a goroutine of its own and returns its result or, if ctx
// ends first, an error: a driver may wait for a silent connection for as long
// as the operating system does. Whatever an abandoned call still returns, and a
// call that failed, is passed to lost, if there is one, on a goroutine of its
// own. A call must own all that it reads.
func within[T any](ctx context.Context, what string, call func() (T, error), lost func(T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if err := ctx.Err(); err != nil {
		return none, failed(ctx, what, err)
	}
	done := make(chan result, 1)
	var decided atomic.Bool // by whoever comes first, the result or the end
	go func() {
		value, err := call()
		if decided.CompareAndSwap(false, true) {
			done <- result{value, err}
		} else if lost != nil {
			lost(value, err)
		}
	}()
	var r result
	select {
	case r = <-done:
	case <-ctx.Done():
		if decided.CompareAndSwap(false, true) {
			return none, failed(ctx, what, ctx.Err())
		}
		r = <-done
	}
	if r.err != nil {
		if lost != nil {
			go lost(r.value, r.err)
		}
		return none, failed(ctx, what, r.err)
	}
	return r.value, nil
}

// A query is a statement with its arguments, ready to be sent, and independent
// of what its caller does with them.
type query struct {
	statement *statement
	text      string
	args      []any
	exec      bool // returns no rows
}

func (s *Store) bind(st *statement, args ...any) query {
	if s.direct != nil {
		return query{statement: st, args: args} // sent before its caller goes on
	}
	if s.dialect.literals() && !s.prepared {
		return query{text: st.literal(args)}
	}
	for i, arg := range args {
		if b, ok := arg.([]byte); ok {
			// Drivers send a nil slice as NULL.
			args[i] = append([]byte{}, b...)
		}
	}
	return query{statement: st, text: st.text, args: args}
}

// row sends a query that returns one row or none.
func (s *Store) row(ctx context.Context, q query) (idempotency.Row, bool, error) {
	if run := s.runner(q); run != nil {
		a, err := run(ctx, q)
		return a.row, a.found, err
	}
	return oneRow(func(r *record) error {
		if !s.prepared {
			return s.db.GetContext(ctx, r, q.text, q.args...)
		}
		st, err := s.prepare(ctx, q.statement)
		if err != nil {
			return err
		}
		return st.GetContext(ctx, r, q.args...)
	})
}

// oneRow returns the row that get gets, or none.
func oneRow(get func(*record) error) (idempotency.Row, bool, error) {
	var r record
	err := get(&r)
	if errors.Is(err, sql.ErrNoRows) {
		return idempotency.Row{}, false, nil
	}
	if err != nil {
		return idempotency.Row{}, false, err
	}
	row, err := r.row()
	return row, err == nil, err
}

// runner returns what sends the query, if it is not simply the pool.
func (s *Store) runner(q query) func(context.Context, query) (answer, error) {
	switch {
	case s.direct != nil:
		return s.direct.run
	case s.writer != nil && q.statement != s.sql.read:
		return s.writer.run
	}
	return nil
}

// exec sends a query that returns no rows and returns how many it wrote.
func (s *Store) exec(ctx context.Context, q query) (int64, error) {
	if run := s.runner(q); run != nil {
		q.exec = true
		a, err := run(ctx, q)
		if a.found {
			return 1, err
		}
		return 0, err
	}
	var result sql.Result
	var err error
	if s.prepared {
		var st *sqlx.Stmt
		if st, err = s.prepare(ctx, q.statement); err == nil {
			result, err = st.ExecContext(ctx, q.args...)
		}
	} else {
		result, err = s.db.ExecContext(ctx, q.text, q.args...)
	}
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// prepare returns the prepared statement, which lives as long as the pool. No
// lock is held while it is prepared, for that may take for ever.
func (s *Store) prepare(ctx context.Context, st *statement) (*sqlx.Stmt, error) {
	if p := st.prepared.Load(); p != nil {
		return p, nil
	}
	p, err := s.db.PreparexContext(ctx, s.db.Rebind(st.text))
	if err != nil {
		return nil, err
	}
	if !st.prepared.CompareAndSwap(nil, p) {
		p.Close() // one of another caller's is used
	}
	return st.prepared.Load(), nil
}

var errForeignRow = errors.New("the table holds a row that was not written by this package")

// A record is a row as the statements return it.
type record struct {
	ClaimID     []byte        `db:"claim_id"`
	Owner       []byte        `db:"owner"`
	Fingerprint []byte        `db:"fingerprint"`
	State       int16         `db:"state"`
	AtMostOnce  bool          `db:"at_most_once"`
	Attempt     int           `db:"attempt"`
	LeaseUntil  float64       `db:"lease_until"` // seconds, as all times here
	ExpiresAt   float64       `db:"expires_at"`
	ReadAt      float64       `db:"read_at"` // by the database's clock
	Status      sql.NullInt16 `db:"status"`
	Headers     []byte        `db:"headers"`
	Body        []byte        `db:"body"`
}

// never is a time, in seconds, that is later than all that end.
const never = 9e12

func (r *record) row() (idempotency.Row, error) {
	row := idempotency.Row{
		State:       idempotency.State(r.State),
		Fingerprint: r.Fingerprint,
		Expired:     r.ExpiresAt <= r.ReadAt,
		AtMostOnce:  r.AtMostOnce,
		Attempt:     r.Attempt,
	}
	if row.State == idempotency.Processing {
		if row.Lapsed = r.LeaseUntil <= r.ReadAt; !row.Lapsed {
			row.LeaseLeft = until(r.LeaseUntil, r.ReadAt)
		}
	} else if !row.Expired && r.ExpiresAt < never {
		row.ExpiresIn = until(r.ExpiresAt, r.ReadAt)
	}
	if len(r.ClaimID) != len(row.ID) || len(r.Owner) != len(row.Owner) {
		return idempotency.Row{}, errForeignRow
	}
	copy(row.ID[:], r.ClaimID)
	copy(row.Owner[:], r.Owner)
	if row.State != idempotency.Processing {
		row.Outcome = idempotency.Outcome{State: row.State, Status: int(r.Status.Int16), Header: r.Headers, Body: r.Body}
	}
	return row, nil
}

// until returns how long it is from now until then, in whole microseconds.
func until(then, now float64) time.Duration {
	return time.Duration(math.Round((then-now)*1e6)) * time.Microsecond
}

// micros returns d in microseconds, rounded up: a lease of less than one is not
// over when it begins.
func micros(d time.Duration) int64 {
	return int64((d-1)/time.Microsecond) + 1
}
