package sqlstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var _ idempotency.Transactor = (*Store)(nil)

type txKey struct{}

// Tx returns the transaction of a handler that runs under guarantee:
// transaction: what is written through it commits together with the record of
// the answer, or not at all. Its Tx field is the *sql.Tx for code that takes one,
// such as sqlc's. The guard commits and rolls back; handlers must do neither.
// What a handler writes past it, through the pool, is not part of the guarantee,
// and on SQLite it waits for the transaction until it times out.
func Tx(ctx context.Context) (*sqlx.Tx, bool) {
	tx, ok := ctx.Value(txKey{}).(*sqlx.Tx)
	return tx, ok
}

// CheckTx implements [idempotency.Transactor]. A pool of one connection is
// refused: a handler that used it beside its transaction would wait for itself.
func (s *Store) CheckTx() error {
	if s.db.Stats().MaxOpenConnections == 1 {
		return errors.New("sqlstore: the pool has one connection, and a handler that uses it beside its transaction would wait for ever; allow at least two")
	}
	return nil
}

// inTx are the transactions of this process that are under way.
type inTx struct {
	mu    sync.Mutex
	keys  map[[32]byte]bool
	slots chan struct{} // nil: no bound
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
	if t.keys[hash] {
		return false
	}
	t.keys[hash] = true
	return true
}

func (t *inTx) leave(hash [32]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.keys, hash)
}

// take waits for one of the pool's connections that may hold a transaction.
func (t *inTx) take(ctx context.Context) (func(), error) {
	if t.slots == nil {
		return func() {}, nil
	}
	select {
	case t.slots <- struct{}{}:
		return func() { <-t.slots }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("sqlstore: all transactions that the pool has room for are under way: %w", ctx.Err())
	}
}

// InTx implements [idempotency.Transactor]. At most half of the pool's
// connections hold transactions, so that handlers can use the others beside
// theirs; on SQLite, which has one writer, one does. The pool's bound is read
// at the first call.
func (s *Store) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	if !s.inTx.enter(c.Hash, s.dialect.slots(s.db.Stats().MaxOpenConnections)) {
		return inFlight(c), nil
	}
	defer s.inTx.leave(c.Hash)
	waiting, cancel := s.step(ctx, c)
	defer cancel()
	giveBack, err := s.inTx.take(waiting)
	if err != nil {
		return idempotency.Row{}, err
	}
	defer giveBack()

	t := &transaction{store: s, claim: c, ctx: ctx}
	row, free, err := t.begin()
	if err != nil {
		return idempotency.Row{}, err
	}
	defer t.close()
	if !free {
		return row, nil
	}
	o, keep, err := run(context.WithValue(ctx, txKey{}, t.tx))
	if err != nil {
		if errors.Is(t.rollback(), sql.ErrTxDone) {
			return idempotency.Row{}, t.ended(&row)
		}
		return idempotency.Row{}, err
	}
	return t.finish(&row, o, keep)
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
	conn  *sqlx.Conn
	tx    *sqlx.Tx

	committed bool
}

// savepoint is where the handler's writes begin.
const savepoint = "oapi_idempotent"

// begin opens the transaction and claims the key in it. The row is the one that
// is there, if there is one; free says that the handler may run.
func (t *transaction) begin() (row idempotency.Row, free bool, err error) {
	s, c := t.store, t.claim
	type begun struct {
		conn *sqlx.Conn
		tx   *sqlx.Tx
		row  idempotency.Row
		free bool
	}
	ctx, cancel := s.step(t.ctx, c)
	defer cancel()
	b, err := within(ctx, "begin", func() (b begun, err error) {
		defer func() {
			if err != nil {
				b.tx, b.conn = nil, nil
			}
		}()
		conn, err := s.db.Connx(ctx)
		if err != nil {
			return b, err
		}
		// The driver rolls back when the context given here ends: that would be
		// taken for the handler's doing.
		tx, err := conn.BeginTxx(context.WithoutCancel(ctx), &sql.TxOptions{Isolation: s.dialect.isolation()})
		if err != nil {
			conn.Close()
			return b, err
		}
		row, held, err := s.dialect.claimTx(ctx, s, tx, c)
		if err != nil {
			_ = tx.Rollback()
			conn.Close()
			return b, err
		}
		free := row.IsZero() || row.Expired || row.ID == c.ID && row.State == idempotency.Processing
		if held {
			row, free = inFlight(c), false
		}
		return begun{conn, tx, row, free}, nil
	}, func(b begun, _ error) {
		if b.tx != nil {
			_ = b.tx.Rollback()
			b.conn.Close()
		}
	})
	if err != nil {
		return idempotency.Row{}, false, err
	}
	t.conn, t.tx = b.conn, b.tx
	return b.row, b.free, nil
}

// close ends what is still open, also when the handler panicked.
func (t *transaction) close() {
	if !t.committed {
		_ = t.rollback()
	}
	conn := t.conn
	ctx, cancel := t.store.step(t.ctx, t.claim)
	defer cancel()
	_, _ = within(ctx, "close", func() (struct{}, error) { return struct{}{}, conn.Close() }, nil)
}

func (t *transaction) rollback() error {
	tx := t.tx
	ctx, cancel := t.store.step(t.ctx, t.claim)
	defer cancel()
	_, err := within(ctx, "roll back", func() (struct{}, error) { return struct{}{}, tx.Rollback() }, nil)
	return err
}

// record binds the statement that writes the outcome in place of seen, the row
// that was read, or of none.
func (t *transaction) record(seen *idempotency.Row, o idempotency.Outcome) query {
	c := t.claim
	expected, attempt := c.ID, int64(1)
	if !seen.IsZero() {
		expected = seen.ID
	}
	if !seen.IsZero() && !seen.Expired {
		attempt = int64(seen.Attempt)
	}
	unknown := o.State == idempotency.Unknown
	return t.store.bindTx(t.store.sql.record,
		c.Hash[:], c.ID[:], c.Owner[:], c.Fingerprint, int64(o.State), attempt, unknown, micros(c.TTL),
		[]byte(c.Operation), []byte(c.Key), int64(o.Status), o.Header, o.Body, expected[:])
}

// finish records the outcome and commits.
func (t *transaction) finish(seen *idempotency.Row, o idempotency.Outcome, keep bool) (idempotency.Row, error) {
	s, tx := t.store, t.tx
	write := t.record(seen, o)
	ctx, cancel := s.step(t.ctx, t.claim)
	defer cancel()
	type result struct {
		row     idempotency.Row
		written bool
	}
	r, err := within(ctx, "record", func() (r result, err error) {
		if !keep {
			if _, err := tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT "+savepoint); err != nil {
				return r, err
			}
		}
		r.row, r.written, err = rowTx(ctx, tx, write)
		return r, err
	}, nil)
	switch {
	case errors.Is(err, sql.ErrTxDone):
		return idempotency.Row{}, t.ended(seen)
	case err != nil:
		return idempotency.Row{}, err
	case !r.written:
		_ = t.rollback()
		row, err := t.read()
		return row, err
	}
	_, err = within(ctx, "commit", func() (struct{}, error) { return struct{}{}, tx.Commit() }, nil)
	if err == nil {
		t.committed = true
		r.row.Won, r.row.Outcome = true, o
		return r.row, nil
	}
	if s.dialect.rolledBack(err) {
		return idempotency.Row{}, err
	}
	return t.resolve(err, o)
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

// resolve finds out whether a commit took place whose answer was lost. Whoever
// still commits holds the key's lock, so the row is read once the lock is there.
func (t *transaction) resolve(lost error, o idempotency.Outcome) (idempotency.Row, error) {
	s := t.store
	ctx, cancel := s.step(t.ctx, t.claim)
	defer cancel()
	read := s.bindTx(s.sql.read, t.claim.Hash[:])
	lock := s.table.lockOf(t.claim.Hash)
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		row, err := within(ctx, "resolve", func() (row idempotency.Row, err error) {
			tx, err := s.db.BeginTxx(ctx, &sql.TxOptions{Isolation: s.dialect.isolation()})
			if err != nil {
				return row, err
			}
			defer tx.Rollback()
			if err := s.dialect.awaitTx(ctx, tx, lock); err != nil {
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
	write := t.record(seen, idempotency.Outcome{State: idempotency.Unknown})
	_, err := within(ctx, "record", func() (struct{}, error) {
		return struct{}{}, s.persist(ctx, func() (bool, error) {
			var r record
			err := s.db.GetContext(ctx, &r, write.text, write.args...)
			if errors.Is(err, sql.ErrNoRows) {
				err = nil // another has the key by now
			}
			return true, err
		})
	}, nil)
	return errors.Join(idempotency.ErrTxEnded, err)
}

// bindTx binds a statement for a transaction, where none is prepared.
func (s *Store) bindTx(st *statement, args ...any) query {
	if s.dialect.literals() {
		return query{text: st.literal(args)}
	}
	return query{text: st.text, args: args}
}

// rowTx sends a query that returns one row or none.
func rowTx(ctx context.Context, tx *sqlx.Tx, q query) (idempotency.Row, bool, error) {
	var r record
	err := tx.GetContext(ctx, &r, q.text, q.args...)
	if errors.Is(err, sql.ErrNoRows) {
		return idempotency.Row{}, false, nil
	}
	if err != nil {
		return idempotency.Row{}, false, err
	}
	row, err := r.row()
	return row, err == nil, err
}

// lockOf returns the advisory lock that stands for a key in this table.
func (t table) lockOf(hash [32]byte) int64 {
	sum := sha256.Sum256(append([]byte(t.String()), hash[:]...))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// What follows differs between the databases.

func (postgres) slots(pool int) int { return pool / 2 }

// isolation: under a stricter level, which may be the database's default, the
// row would be read from before the lock.
func (postgres) isolation() sql.IsolationLevel { return sql.LevelReadCommitted }

// claimTx takes the key's lock and then, in a statement of its own that sees
// what the lock's last holder committed, reads the row. lib/pq sends all in one
// trip.
func (postgres) claimTx(ctx context.Context, s *Store, tx *sqlx.Tx, c *idempotency.Claim) (row idempotency.Row, held bool, err error) {
	lock := fmt.Sprintf("SELECT pg_try_advisory_xact_lock(%d)", s.table.lockOf(c.Hash))
	read := s.bindTx(s.sql.read, c.Hash[:])
	var locked bool
	if fmt.Sprintf("%T", s.db.Driver()) != "*pq.Driver" {
		if err := tx.GetContext(ctx, &locked, lock); err != nil || !locked {
			return row, !locked, err
		}
		if row, _, err = rowTx(ctx, tx, read); err != nil {
			return row, false, err
		}
		_, err = tx.ExecContext(ctx, "SAVEPOINT "+savepoint)
		return row, false, err
	}
	rows, err := tx.QueryxContext(ctx, strings.Join([]string{lock, read.text, "SAVEPOINT " + savepoint}, "; "))
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

func (postgres) awaitTx(ctx context.Context, tx *sqlx.Tx, lock int64) error {
	if deadline, ok := ctx.Deadline(); ok {
		wait := max(time.Until(deadline), time.Millisecond)
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", wait.Milliseconds()+1)); err != nil {
			return err
		}
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", lock))
	return err
}

// rolledBack reports whether the server said that it did not commit. One that
// is being shut down says something else, and may have committed.
func (postgres) rolledBack(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && !strings.HasPrefix(state.SQLState(), "57") && !strings.HasPrefix(state.SQLState(), "08")
}

func (sqlite) slots(int) int { return 1 }

func (sqlite) isolation() sql.IsolationLevel { return sql.LevelDefault }

// claimTx becomes the writer first, also where the DSN does not say that
// transactions begin so: one that became it later could fail after the handler.
func (sqlite) claimTx(ctx context.Context, s *Store, tx *sqlx.Tx, c *idempotency.Claim) (row idempotency.Row, held bool, err error) {
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET attempt = attempt WHERE key_hash = x''", s.table)); err != nil {
		return row, false, err
	}
	if row, _, err = rowTx(ctx, tx, s.bindTx(s.sql.read, c.Hash[:])); err != nil {
		return row, false, err
	}
	_, err = tx.ExecContext(ctx, "SAVEPOINT "+savepoint)
	return row, false, err
}

func (sqlite) awaitTx(context.Context, *sqlx.Tx, int64) error { return nil }

func (sqlite) rolledBack(error) bool { return false }
