package sqlstore

import (
	"context"
	"fmt"

	"github.com/jmoiron/sqlx"
)

// A sqliteWriter sends the store's writes. Of this process one writes at a time,
// in the order in which they came: SQLite itself would let the others look now
// and then whether it is their turn. Writes that wait share the next commit.
type sqliteWriter struct {
	store *Store
	turn  chan struct{} // of one; also what guarded transactions take
	group *group[query, written]
}

// written is what one of several writes did. What fails alone harms no other:
// SQLite undoes a statement that fails, not those before it.
type written struct {
	answer
	err error
}

func newSQLiteWriter(s *Store, grouped bool) *sqliteWriter {
	w := &sqliteWriter{store: s, turn: make(chan struct{}, 1)}
	if grouped {
		w.group = &group[query, written]{
			alone:    w.alone,
			joins:    bounded,
			limit:    1,
			together: w.together,
		}
	}
	return w
}

// run sends a write, and returns when it is durable.
func (w *sqliteWriter) run(ctx context.Context, q query) (answer, error) {
	if err := w.mayWait(ctx); err != nil {
		return answer{}, err
	}
	do := w.alone
	if w.group != nil {
		do = w.group.do
	}
	done, err := do(ctx, q)
	if err == nil {
		err = done.err
	}
	return done.answer, err
}

// mayWait fails if ctx is of a handler whose transaction has the turn.
func (w *sqliteWriter) mayWait(ctx context.Context) error {
	if held := runningTx(ctx); w != nil && held != nil && held.store == w.store {
		return errPastTx
	}
	return nil
}

// take waits for the turn to write.
func (w *sqliteWriter) take(ctx context.Context) error {
	select {
	case w.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: others of this process are writing: %w", errUnsent, ctx.Err())
	}
}

func (w *sqliteWriter) giveBack() { <-w.turn }

func (w *sqliteWriter) alone(ctx context.Context, q query) (done written, err error) {
	st, err := w.store.prepare(ctx, q.statement)
	if err != nil {
		return done, err
	}
	if err := w.take(ctx); err != nil {
		return done, err
	}
	defer w.giveBack()
	done.answer, err = sendPrepared(ctx, st, q)
	return done, err
}

// together writes in one transaction, which no caller's leaving interrupts. If it
// cannot commit, SQLite has undone all of it, or had undone the first part and
// committed each write of the rest; so each must be such that running it twice
// is like running it once.
func (w *sqliteWriter) together(queries []query) func(context.Context) ([]written, error) {
	return func(ctx context.Context) ([]written, error) {
		if err := w.take(ctx); err != nil {
			return nil, err
		}
		defer w.giveBack()
		prepared := map[*statement]*sqlx.Stmt{}
		for _, q := range queries {
			st, err := w.store.prepare(ctx, q.statement)
			if err != nil {
				return nil, err
			}
			prepared[q.statement] = st
		}
		tx, err := w.store.db.BeginTxx(ctx, nil)
		if err != nil {
			return nil, err
		}
		defer tx.Rollback()        // does nothing after Commit
		ctx = context.Background() // the driver starts a goroutine to watch one that can end
		for st, p := range prepared {
			prepared[st] = tx.StmtxContext(ctx, p)
		}
		all := make([]written, len(queries))
		for i, q := range queries {
			all[i].answer, all[i].err = sendPrepared(ctx, prepared[q.statement], q)
			if w.store.dialect.conflict(all[i].err) {
				return nil, all[i].err // where transactions begin without becoming the writer
			}
		}
		return all, tx.Commit()
	}
}

func sendPrepared(ctx context.Context, st *sqlx.Stmt, q query) (a answer, err error) {
	if q.exec {
		result, err := st.ExecContext(ctx, q.args...)
		if err != nil {
			return a, err
		}
		n, err := result.RowsAffected()
		return answer{found: n > 0}, err
	}
	a.row, a.found, err = oneRow(func(r *record) error { return st.GetContext(ctx, r, q.args...) })
	return a, err
}
