package sqlstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/jmoiron/sqlx"
)

// NewPostgres returns a store in a table of a PostgreSQL database, version 14
// or newer. The pool is the application's, of github.com/lib/pq or of pgx's
// stdlib package, and must lead to the primary, never to a read replica. It may
// lead through PgBouncer in transaction mode: the store keeps no state in a
// session. NewPostgres does not connect.
func NewPostgres(db *sql.DB, opts ...Option) (*Store, error) {
	if db == nil {
		return nil, errNoPool
	}
	o, err := newOptions(opts)
	if err != nil {
		return nil, err
	}
	return newPostgres(db, o), nil
}

func newPostgres(pool *sql.DB, o options) *Store {
	db := sqlx.NewDb(pool, "postgres")
	return &Store{
		db:       db,
		txDB:     db,
		dialect:  postgres{},
		table:    o.table,
		prepared: o.prepared,
		sql: newStatements(
			"{table}", o.table.String(),
			"{now}", "now()",
			"{clock}", "clock_timestamp()", // now() stands still in a transaction
			"{clock_after}", "clock_timestamp() + ?::bigint * interval '1 microsecond'",
			"{after}", "now() + ?::bigint * interval '1 microsecond'",
			"{never}", "'infinity'::timestamptz",
			"{text}", "encode(?, 'escape')", // any bytes, in any encoding of the database
			"{seconds lease_until}", "date_part('epoch', lease_until)",
			"{seconds expires_at}", "date_part('epoch', expires_at)",
			"{seconds now}", "date_part('epoch', now())",
		),
	}
}

// postgres speaks the simple protocol: one trip, and nothing left in a session.
type postgres struct{}

func (postgres) literals() bool { return true }

func (postgres) claims(s *statements, insert, read []any) []bound {
	return []bound{{s.insertOrRead, append(insert, read...)}}
}

// tries is enough for a hundred claims of one key at once, which PostgreSQL's
// snapshots hide from each other for as long as a commit takes.
func (postgres) tries() int { return 12 }

func (postgres) conflict(err error) bool {
	return hasState(err, "40001", "40P01") // serialization failure, deadlock
}

func (postgres) full(err error) bool {
	return hasState(err, "53300") // too many connections
}

func hasState(err error, states ...string) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && slices.Contains(states, state.SQLState())
}

func (postgres) migrate(ctx context.Context, s *Store) error {
	ddl, err := DDL("postgres", s.table.unquoted())
	if err != nil {
		return err
	}
	conn, done, err := s.session(ctx)
	if err != nil {
		return err
	}
	defer done()
	// In other isolation levels the statements after the lock would see what
	// was there before it.
	tx, err := conn.BeginTxx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after Commit
	// Statements that create one table at the same time fail.
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", s.table.lock("migrate"))); err != nil {
		return err
	}
	have, err := s.postgresColumns(ctx, tx)
	if err != nil {
		return err
	}
	if have == nil {
		if _, err := tx.ExecContext(ctx, ddl); err != nil {
			return fmt.Errorf("creating the table %s: %w", s.table, err)
		}
		if have, err = s.postgresColumns(ctx, tx); err != nil {
			return err
		}
	}
	if err := s.table.checkColumns(have); err != nil {
		return err
	}
	return tx.Commit()
}

// postgresColumns returns the table's columns, or nil if there is no table.
func (s *Store) postgresColumns(ctx context.Context, tx *sqlx.Tx) (columns []string, err error) {
	err = tx.SelectContext(ctx, &columns, fmt.Sprintf(
		"SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass('%s') AND attnum > 0 AND NOT attisdropped", s.table))
	return columns, err
}

// sweepPages is how much of the table one step looks at. Rows of a page are
// found without an index, and a step takes some milliseconds.
const sweepPages = 32

// sweep looks at each page once, from where the last sweep ended. One sweeper
// works at a time; the others find nothing.
func (p postgres) sweep(ctx context.Context, s *Store, max int, swept *atomic.Int64) error {
	var step struct {
		Swept int64 `db:"swept"`
		Pages int64 `db:"pages"`
	}
	first := s.sweepAt.Load()
	for looked := int64(0); looked <= step.Pages; {
		left := int64(max) - swept.Load()
		if left <= 0 {
			return nil
		}
		err := s.persist(ctx, func() (bool, error) {
			conn, done, err := s.session(ctx)
			if err != nil {
				return false, err
			}
			defer done()
			return true, conn.GetContext(ctx, &step, fmt.Sprintf(`WITH swept AS (
DELETE FROM %[1]s WHERE expires_at <= now() AND ctid = ANY (ARRAY(
SELECT ctid FROM %[1]s WHERE (SELECT pg_try_advisory_xact_lock(%[2]d))
AND ctid >= '(%[3]d,0)' AND ctid < '(%[4]d,0)' AND expires_at <= now() LIMIT %[5]d)) RETURNING 1)
SELECT (SELECT count(*) FROM swept) AS swept,
pg_relation_size('%[1]s') / current_setting('block_size')::bigint AS pages`,
				s.table, s.table.lock("sweep"), first, first+sweepPages, left))
		})
		if err != nil {
			return err
		}
		swept.Add(step.Swept)
		if step.Swept == left {
			return nil // these pages may hold more
		}
		looked += sweepPages
		if first += sweepPages; first >= step.Pages {
			first = 0
		}
		s.sweepAt.Store(first)
	}
	return nil
}

// lock returns the key of an advisory lock.
func (t table) lock(purpose string) int64 {
	sum := sha256.Sum256([]byte("oapi-idempotent " + purpose + " " + t.String()))
	return int64(binary.BigEndian.Uint64(sum[:]))
}
