package sqlstore

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var _ idempotency.Transactor = (*Store)(nil)

type (
	txKey      struct{} // of the handler's context: *heldTx
	beginTxKey struct{} // of the context in which the transaction begins: the same
)

// A heldTx is what a run knows of its transaction.
type heldTx struct {
	store *Store
	tx    *sqlx.Tx
	conn  *sqliteConn // that holds it, if it is of OpenSQLite's
	over  atomic.Bool // the handler has returned
}

// Tx returns the transaction of a handler that runs under guarantee:
// transaction: what is written through it commits together with the record of
// the answer, or not at all. Its Tx field is the *sql.Tx for code that takes one,
// such as sqlc's. Tx reports false in a run that no guard runs in a transaction,
// such as one without a key where the policy lets it run.
//
// The guard commits and rolls back; handlers must do neither. One that does
// leaves its key unknown, see [idempotency.ErrTxEnded]; should its process die
// before that is written, nothing says that it ran. SQLite does not notice a
// COMMIT that is sent as text.
//
// On PostgreSQL its isolation is READ COMMITTED, whatever the database's default.
// Drivers that say READ WRITE when they begin it, as github.com/lib/pq does, have it
// write where default_transaction_read_only is on, too.
//
// What a handler writes past it, through the pool, is not part of the guarantee.
// On SQLite, which has one writer, such a write would wait for the transaction
// that waits for it. Through a pool of [OpenSQLite] it fails at once; through
// another it fails when the DSN's busy timeout ends, not with its context.
func Tx(ctx context.Context) (*sqlx.Tx, bool) {
	held, ok := idempotency.RunContext(ctx).Value(txKey{}).(*heldTx)
	if !ok {
		return nil, false
	}
	return held.tx, true
}

// CheckTx implements [idempotency.Transactor]. A pool of one connection is
// refused: a handler that used it beside its transaction would wait for itself.
func (s *Store) CheckTx() error {
	if s.txDB == nil {
		return errors.New("sqlstore: OpenPostgres has a pool of its own, and transactions are the application's; name its pool with WithTransactions")
	}
	if s.txDB.Stats().MaxOpenConnections == 1 {
		return errors.New("sqlstore: the pool has one connection, and a handler that uses it beside its transaction would wait for ever; allow at least two")
	}
	return nil
}

// inTx are the transactions of this process that are under way.
type inTx struct {
	mu    sync.Mutex
	keys  map[[32]byte]bool // whether the handler runs
	slots chan struct{}     // nil: no bound
}

// enter reports whether no transaction of this process holds the key, and takes
// it if so.
func (t *inTx) enter(hash [32]byte, slots int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys == nil {
		t.keys = map[[32]byte]bool{}
		if slots > 0 {
			t.slots = make(chan struct{}, slots)
		}
	}
	if _, there := t.keys[hash]; there {
		return false
	}
	t.keys[hash] = false
	return true
}

// runs notes that the transaction that has the key runs its handler.
func (t *inTx) runs(hash [32]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keys[hash] = true
}

// running reports whether a handler of this process runs for the key.
func (t *inTx) running(hash [32]byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keys[hash]
}

func (t *inTx) leave(hash [32]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.keys, hash)
}

// full reports whether a transaction would have to wait.
func (t *inTx) full() bool { return t.slots != nil && len(t.slots) == cap(t.slots) }

// take waits for one of the pool's connections that may hold a transaction.
func (t *inTx) take(ctx context.Context) error {
	if t.slots == nil {
		return nil
	}
	select {
	case t.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("sqlstore: all transactions that the pool has room for are under way: %w", ctx.Err())
	}
}

func (t *inTx) giveBack() {
	if t.slots != nil {
		<-t.slots
	}
}

// InTx implements [idempotency.Transactor]. At most half of the pool's
// connections hold transactions, so that handlers can use the others beside
// theirs; on SQLite, which has one writer, one does. The pool's bound is read
// at the first call.
//
// A process that dies holds its keys until PostgreSQL notices: at once where its
// connections break, else as the server's tcp_keepalives_* and
// client_connection_check_interval say.
func (s *Store) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	t := &transaction{store: s, claim: c, ctx: ctx, held: &heldTx{store: s}}
	if err := s.writer.mayWait(ctx); err != nil {
		return idempotency.Row{}, err
	}
	if !s.inTx.enter(c.Hash, s.dialect.slots(s.txDB.Stats().MaxOpenConnections)) {
		if s.inTx.running(c.Hash) {
			return inFlight(c), nil
		}
		return t.duplicate() // of one that may only be looking the key up
	}
	defer s.inTx.leave(c.Hash)
	if s.inTx.full() {
		// A duplicate of what is done need not wait for what is not.
		if row, err := t.read(); err != nil || !t.free(&row) {
			return row, err
		}
	}
	waiting, cancel := s.step(ctx, c)
	defer cancel()
	if err := s.inTx.take(waiting); err != nil {
		return idempotency.Row{}, err
	}
	defer s.inTx.giveBack()

	row, held, err := t.begin()
	if err != nil {
		return idempotency.Row{}, err
	}
	defer t.close()
	if held {
		return t.settledOr(&row), nil
	}
	if !t.free(&row) {
		return row, nil
	}
	s.inTx.runs(c.Hash)
	o, keep, err := t.run(&row, run)
	if err != nil {
		return idempotency.Row{}, err
	}
	return t.finish(&row, o, keep)
}

// duplicate answers a duplicate of whoever has the key.
func (t *transaction) duplicate() (idempotency.Row, error) {
	row, err := t.read()
	if err != nil {
		return row, err
	}
	return t.settledOr(&row), nil
}

// settledOr returns the row if it is final: whoever has the key only looks it
// up. Otherwise the key is in flight.
func (t *transaction) settledOr(row *idempotency.Row) idempotency.Row {
	if row.State != idempotency.Processing && !row.Expired {
		return *row
	}
	return inFlight(t.claim)
}

// step returns the context of one step of the store's own, which the handler's
// context neither ends nor outlives.
func (s *Store) step(ctx context.Context, c *idempotency.Claim) (context.Context, context.CancelFunc) {
	ctx = context.WithoutCancel(ctx)
	if c.StepTimeout > 0 {
		return context.WithTimeout(ctx, c.StepTimeout)
	}
	return ctx, func() {}
}

// A transaction is one guarded transaction.
type transaction struct {
	store *Store
	claim *idempotency.Claim
	ctx   context.Context // the handler's
	tx    *sqlx.Tx
	way   way
	held  *heldTx
	// end ends the transaction's own context: database/sql then rolls back what
	// is open, as soon as the connection lets it.
	end context.CancelFunc
	// over says that there is nothing more to wait for on the connection: the
	// transaction was ended, or a step took too long.
	over bool
}

// The savepoint is where the handler's writes begin.
const (
	setSavepoint        = "SAVEPOINT oapi_idempotent"
	releaseSavepoint    = "RELEASE SAVEPOINT oapi_idempotent"
	rollbackToSavepoint = "ROLLBACK TO SAVEPOINT oapi_idempotent"
)

// free reports whether the handler may run in place of row.
func (t *transaction) free(row *idempotency.Row) bool {
	return row.IsZero() || row.Expired || row.ID == t.claim.ID && row.State == idempotency.Processing
}

// begin opens the transaction and claims the key in it. The row is the one that
// is there, if there is one; held says that another transaction has the key.
func (t *transaction) begin() (row idempotency.Row, held bool, err error) {
	s, c := t.store, t.claim
	type begun struct {
		tx   *sqlx.Tx
		way  way
		end  context.CancelFunc
		row  idempotency.Row
		held bool
	}
	ctx, cancel := s.step(t.ctx, c)
	defer cancel()
	try := func(way way) (b begun, err error) {
		// The transaction outlives this step, whose end ends only the wait for
		// a connection; and the handler, whose end is not to look like a
		// rollback of its own.
		life, end := context.WithCancel(context.WithValue(context.WithoutCancel(ctx), beginTxKey{}, t.held))
		defer func() {
			if err != nil {
				end()
			}
		}()
		detach := context.AfterFunc(ctx, end)
		tx, err := s.txDB.BeginTxx(life, &sql.TxOptions{Isolation: s.dialect.isolation()})
		if err != nil {
			return b, err
		}
		if !detach() {
			return b, ctx.Err()
		}
		row, held, err := s.dialect.claimTx(ctx, s, tx, c, way)
		if err != nil {
			_ = tx.Rollback()
			return b, err
		}
		return begun{tx, way, end, row, held}, nil
	}
	b, err := within(ctx, "begin", func() (b begun, err error) {
		for way, more := s.dialect.way(s), true; more; {
			if b, err = try(way); err == nil {
				break
			}
			way, more = way.after(err)
		}
		return b, err
	}, func(b begun, err error) {
		if err == nil {
			b.end()
		}
	})
	if err != nil {
		return idempotency.Row{}, false, err
	}
	t.tx, t.way, t.end = b.tx, b.way, b.end
	return b.row, b.held, nil
}

// run runs the handler. When it fails or panics everything is rolled back.
func (t *transaction) run(seen *idempotency.Row, run func(context.Context) (idempotency.Outcome, bool, error)) (o idempotency.Outcome, keep bool, err error) {
	returned := false
	defer func() {
		if returned && err == nil {
			return
		}
		// A handler that sent COMMIT as text is known by its savepoint.
		failed := t.do("roll back", func() error {
			_, err := t.tx.ExecContext(context.WithoutCancel(t.ctx), rollbackToSavepoint)
			return err
		})
		if errors.Is(failed, context.DeadlineExceeded) {
			t.over = true
			return
		}
		if errors.Is(t.rollback(), sql.ErrTxDone) || endedByText(failed) {
			err = t.ended(seen)
		}
	}()
	defer t.held.over.Store(true)
	t.held.tx = t.tx
	o, keep, err = run(context.WithValue(t.ctx, txKey{}, t.held))
	returned = true
	return o, keep, err
}

// close rolls back what is still open.
func (t *transaction) close() {
	if !t.over {
		_ = t.rollback()
	}
	t.end()
}

func (t *transaction) rollback() error {
	t.over = true
	return t.do("roll back", t.tx.Rollback)
}

// do runs what ends the transaction.
func (t *transaction) do(what string, call func() error) error {
	ctx, cancel := t.store.step(t.ctx, t.claim)
	defer cancel()
	_, err := within(ctx, what, func() (struct{}, error) { return struct{}{}, call() }, nil)
	return err
}

// attempt is which run of the key this is, in place of seen.
func (t *transaction) attempt(seen *idempotency.Row) int {
	if seen.IsZero() || seen.Expired {
		return 1
	}
	return seen.Attempt
}

// record binds the statement that writes the outcome in place of seen, the row
// that was read, or of none.
func (t *transaction) record(way way, seen *idempotency.Row, o idempotency.Outcome) query {
	c := t.claim
	args := []any{
		c.Hash[:], c.ID[:], c.Owner[:], c.Fingerprint, int64(o.State), int64(t.attempt(seen)), o.State == idempotency.Unknown, micros(c.TTL),
		[]byte(c.Operation), []byte(c.Key), int64(o.Status), o.Header, o.Body,
	}
	if seen.IsZero() {
		return t.store.bindTx(way, t.store.sql.recordNew, args...)
	}
	return t.store.bindTx(way, t.store.sql.recordOver, append(args, seen.ID[:])...)
}

// finish records the outcome and commits.
func (t *transaction) finish(seen *idempotency.Row, o idempotency.Outcome, keep bool) (idempotency.Row, error) {
	s, c, tx := t.store, t.claim, t.tx
	write := t.record(t.way, seen, o)
	ctx, cancel := s.step(t.ctx, c)
	defer cancel()
	written, err := within(ctx, "record", func() (n int64, err error) {
		end := releaseSavepoint
		if !keep {
			end = rollbackToSavepoint
		}
		return s.dialect.recordTx(ctx, s, tx, end, write)
	}, nil)
	switch {
	case errors.Is(err, sql.ErrTxDone):
		return idempotency.Row{}, t.ended(seen)
	case err != nil:
		t.over = ctx.Err() != nil
		return idempotency.Row{}, err
	case written == 0:
		_ = t.rollback()
		return t.read()
	}
	t.over = true
	if err := t.do("commit", tx.Commit); err != nil {
		return t.resolve(err, o)
	}
	return idempotency.Row{
		Won: true, State: o.State, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: t.attempt(seen), Outcome: o,
	}, nil
}

// read reads the key's row outside the transaction.
func (t *transaction) read() (row idempotency.Row, err error) {
	s := t.store
	ctx, cancel := s.step(t.ctx, t.claim)
	defer cancel()
	read := s.bind(s.sql.read, t.claim.Hash[:])
	return within(ctx, "read", func() (idempotency.Row, error) {
		row, _, err := s.row(ctx, read)
		return row, err
	}, nil)
}

// resolve finds out whether a commit took place that failed or whose answer was
// lost. Whoever still commits holds the key's lock, so the row is read once the
// lock is there.
func (t *transaction) resolve(lost error, o idempotency.Outcome) (idempotency.Row, error) {
	s := t.store
	ctx, cancel := s.step(t.ctx, t.claim)
	defer cancel()
	read := s.bindTx(spelledOut, s.sql.read, t.claim.Hash[:])
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		row, err := within(ctx, "resolve", func() (row idempotency.Row, err error) {
			tx, err := s.txDB.BeginTxx(ctx, &sql.TxOptions{Isolation: s.dialect.isolation()})
			if err != nil {
				return row, err
			}
			defer tx.Rollback()
			if err := s.dialect.awaitTx(ctx, s, tx, t.claim); err != nil {
				return row, err
			}
			row, _, err = rowTx(ctx, tx, read)
			return row, err
		}, nil)
		switch {
		case err == nil && row.ID == t.claim.ID && row.State == o.State:
			row.Won = true
			return row, nil
		case err == nil:
			return idempotency.Row{}, lost
		}
		select {
		case <-ctx.Done():
			return idempotency.Row{}, fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, lost)
		case <-time.After(pause):
		}
	}
}

// ended records that a handler ended the transaction by itself, so that nobody
// knows what it did.
func (t *transaction) ended(seen *idempotency.Row) error {
	s := t.store
	ctx, cancel := s.step(t.ctx, t.claim)
	defer cancel()
	write := t.record(spelledOut, seen, idempotency.Outcome{State: idempotency.Unknown})
	_, err := within(ctx, "record", func() (struct{}, error) {
		return struct{}{}, s.persist(ctx, func() (bool, error) {
			_, err := s.txDB.ExecContext(ctx, write.text, write.args...) // nothing is written if another has the key by now
			return true, err
		})
	}, nil)
	return errors.Join(idempotency.ErrTxEnded, err)
}

// A way is how a transaction's statements are sent.
type way int

const (
	spelledOut way = iota // whole, with their arguments
	// asPrepared names statements that the session has prepared. Sent as SQL they
	// share a trip like others; a driver's own would each be a trip.
	asPrepared
	preparing // prepares them first, in a session that has not
)

// after returns how to go on when a transaction could not begin in this way, if
// that is why it could not: a pool does not tell which of its sessions one gets.
func (w way) after(err error) (way, bool) {
	switch {
	case w == asPrepared && hasState(err, "26000"): // invalid_sql_statement_name
		return preparing, true
	case w != spelledOut && hasState(err, "42P05", "0A000"): // duplicate_prepared_statement, or the table was changed since
		return spelledOut, true
	}
	return w, false
}

func (s *Store) bindTx(way way, st *statement, args ...any) query {
	switch {
	case !s.dialect.literals():
		return query{text: st.text, args: args}
	case way == spelledOut:
		return query{text: st.literal(args)}
	}
	return query{text: fillIn(st.execute, args)}
}

// rowTx sends a query that returns one row or none.
func rowTx(ctx context.Context, tx *sqlx.Tx, q query) (idempotency.Row, bool, error) {
	return oneRow(func(r *record) error { return tx.GetContext(ctx, r, q.text, q.args...) })
}

// What follows is PostgreSQL's; SQLite's is in sqlite_tx.go.

func (postgres) way(s *Store) way {
	if s.prepared && s.manyInOneTrip() {
		return asPrepared
	}
	return spelledOut
}

// lockOf is what tells a key's advisory lock from others of the table.
func lockOf(c *idempotency.Claim) int64 { return int64(binary.BigEndian.Uint64(c.Hash[:])) }

func (postgres) slots(pool int) int { return pool / 2 }

// isolation: under a stricter level, which may be the database's default, the
// row would be read from before the lock.
func (postgres) isolation() sql.IsolationLevel { return sql.LevelReadCommitted }

// claimTx takes the key's lock and then, in a statement of its own that sees
// what the lock's last holder committed, reads the row. lib/pq sends all in one
// trip. It would start a goroutine to watch a context that can end: the
// transaction's own has one.
func (postgres) claimTx(ctx context.Context, s *Store, tx *sqlx.Tx, c *idempotency.Claim, way way) (row idempotency.Row, held bool, err error) {
	if way == preparing {
		if _, err := tx.ExecContext(context.WithoutCancel(ctx), s.sql.prepareTx()); err != nil {
			return row, false, err
		}
	}
	lock := s.bindTx(way, s.sql.lock, lockOf(c))
	read := s.bindTx(way, s.sql.read, c.Hash[:])
	var locked bool
	if !s.manyInOneTrip() {
		if err := tx.GetContext(ctx, &locked, lock.text); err != nil {
			return row, false, err
		}
		if row, _, err = rowTx(ctx, tx, read); err != nil || !locked {
			return row, !locked, err
		}
		_, err = tx.ExecContext(ctx, setSavepoint)
		return row, false, err
	}
	rows, err := tx.QueryxContext(context.WithoutCancel(ctx), strings.Join([]string{lock.text, read.text, setSavepoint}, "; "))
	if err != nil {
		return row, false, err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(&locked); err != nil {
			return row, false, err
		}
	}
	for rows.NextResultSet() {
		for rows.Next() {
			var r record
			if err := rows.StructScan(&r); err != nil {
				return row, false, err
			}
			if row, err = r.row(); err != nil {
				return row, false, err
			}
		}
	}
	if err := rows.Err(); err != nil {
		return row, false, err
	}
	return row, !locked, rows.Close()
}

func (postgres) recordTx(ctx context.Context, s *Store, tx *sqlx.Tx, endSavepoint string, record query) (int64, error) {
	if s.manyInOneTrip() {
		record.text, endSavepoint = endSavepoint+"; "+record.text, ""
		ctx = context.WithoutCancel(ctx)
	}
	n, err := execTx(ctx, tx, endSavepoint, record)
	if endedByText(err) {
		err = sql.ErrTxDone
	}
	return n, err
}

// endedByText reports whether PostgreSQL knows no transaction, or not the
// guard's savepoint in it: the handler sent COMMIT or ROLLBACK by itself.
func endedByText(err error) bool {
	return hasState(err, "25P01", "3B001")
}

// manyInOneTrip reports whether the driver of the transactions takes several
// statements at once.
func (s *Store) manyInOneTrip() bool { return fmt.Sprintf("%T", s.txDB.Driver()) == "*pq.Driver" }

// execTx sends endSavepoint, if there is one, and then record.
func execTx(ctx context.Context, tx *sqlx.Tx, endSavepoint string, record query) (int64, error) {
	if endSavepoint != "" {
		if _, err := tx.ExecContext(ctx, endSavepoint); err != nil {
			return 0, err
		}
	}
	result, err := tx.ExecContext(ctx, record.text, record.args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (postgres) awaitTx(ctx context.Context, s *Store, tx *sqlx.Tx, c *idempotency.Claim) error {
	if deadline, ok := ctx.Deadline(); ok {
		wait := max(time.Until(deadline), time.Millisecond)
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", wait.Milliseconds()+1)); err != nil {
			return err
		}
	}
	_, err := tx.ExecContext(ctx, s.bindTx(spelledOut, s.sql.await, lockOf(c)).text)
	return err
}
