package sqlstore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// slots is the writer's turn, which NewSQLite sets.
func (sqlite) slots(int) int { return 0 }

func (sqlite) way(*Store) way { return spelledOut }

func (sqlite) isolation() sql.IsolationLevel { return sql.LevelDefault }

// claimTx becomes the writer first: a transaction that became it later could
// fail after the handler.
func (d sqlite) claimTx(ctx context.Context, s *Store, tx *sqlx.Tx, c *idempotency.Claim, way way) (row idempotency.Row, held bool, err error) {
	if err := d.awaitTx(ctx, s, tx, c); err != nil {
		return row, false, err
	}
	if row, _, err = rowTx(ctx, tx, s.bindTx(way, s.sql.read, c.Hash[:])); err != nil {
		return row, false, err
	}
	_, err = tx.ExecContext(ctx, setSavepoint)
	return row, false, err
}

// recordTx fails if SQLite has rolled the transaction back by itself, as it does
// when a statement is interrupted: the record would be committed alone.
func (sqlite) recordTx(ctx context.Context, _ *Store, tx *sqlx.Tx, endSavepoint string, record query) (int64, error) {
	return execTx(ctx, tx, endSavepoint, record)
}

// awaitTx becomes the writer, also where the DSN does not say that transactions
// begin so.
func (sqlite) awaitTx(ctx context.Context, s *Store, tx *sqlx.Tx, _ *idempotency.Claim) error {
	_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET attempt = attempt WHERE key_hash = x''", s.table))
	return err
}
