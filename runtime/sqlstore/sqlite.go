package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"
)

// SQLiteDSN returns the DSN under which modernc.org/sqlite opens the file as a
// store needs it: with a write-ahead log, so that replays do not wait for
// claims; synchronous, so that a claim survives a power failure; waiting for
// the one writer; and with transactions that write from their beginning, so
// that they do not fail at their end.
func SQLiteDSN(path string) string {
	path = filepath.ToSlash(path)
	if filepath.VolumeName(path) != "" {
		path = "/" + path
	}
	return "file:" + (&url.URL{Path: path}).EscapedPath() +
		fmt.Sprintf("?_pragma=busy_timeout(%d)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate", sqliteBusy.Milliseconds())
}

// sqliteBusy is how long connections wait for others.
const sqliteBusy = 5 * time.Second

// patiently tries again for that long what fails because of others: connections
// do not wait by themselves when they make a new file's log a write-ahead log. It
// returns how the last try ended.
func (s *Store) patiently(try func() error) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), sqliteBusy)
	defer cancel()
	_ = s.persist(ctx, func() (bool, error) {
		err = try()
		return true, err
	})
	return err
}

// NewSQLite returns a store in a table of an SQLite database, opened with
// modernc.org/sqlite and, best, [OpenSQLite]. It changes nothing of the pool and
// refuses one that would lose claims: whose connections do not wait for the
// disk, or do not share their tables.
func NewSQLite(db *sql.DB, opts ...Option) (*Store, error) {
	if db == nil {
		return nil, errNoPool
	}
	o, err := newOptions(opts)
	if err != nil {
		return nil, err
	}
	if err := o.table.checkSQLite(); err != nil {
		return nil, err
	}
	pool := sqlx.NewDb(db, "sqlite")
	s := &Store{
		db:       pool,
		txDB:     pool,
		dialect:  sqlite{},
		table:    o.table,
		prepared: true, // parsing is what a statement costs, and no pooler is in between
		sql: newStatements(
			"{table}", o.table.String(),
			"{now}", sqliteNow,
			"{clock}", sqliteNow,
			"{clock_after}", sqliteNow+" + ?",
			"{after}", sqliteNow+" + ?",
			"{never}", fmt.Sprint(math.MaxInt64),
			"{text}", "CAST(? AS TEXT)",
			"{seconds lease_until}", "lease_until / 1e6",
			"{seconds expires_at}", "expires_at / 1e6",
			"{seconds now}", sqliteNow+" / 1e6",
		),
	}
	s.writer = newSQLiteWriter(s, !o.alone)
	s.inTx.slots = s.writer.turn
	if err := s.patiently(s.checkSQLite); err != nil {
		return nil, fmt.Errorf("sqlstore: SQLite: %w", err)
	}
	return s, nil
}

func (t table) checkSQLite() error {
	if t.schema != "" {
		return fmt.Errorf("sqlstore: %q: SQLite has no schemas; name a table alone", t.unquoted())
	}
	return nil
}

// sqliteNow is SQLite's clock, which ticks in milliseconds, in microseconds.
const sqliteNow = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000"

// sqliteFile reads the name of the database's file, which is empty in memory.
const sqliteFile = "SELECT file FROM pragma_database_list WHERE name = 'main'"

func (s *Store) checkSQLite() error {
	if err := s.db.Ping(); err != nil {
		return err
	}
	var version string
	if err := s.db.Get(&version, "SELECT sqlite_version()"); err != nil {
		return fmt.Errorf("this is no SQLite; open the pool with modernc.org/sqlite, or use the constructor of its own database, such as NewPostgres: %w", err)
	}
	var file string
	if err := s.db.Get(&file, sqliteFile); err != nil {
		return err
	}
	if file == "" {
		if s.db.Stats().MaxOpenConnections != 1 {
			return errors.New("each connection has a database of its own in memory; call db.SetMaxOpenConns(1), or open a file with SQLiteDSN")
		}
		return nil
	}
	var synchronous int
	if err := s.db.Get(&synchronous, "PRAGMA synchronous"); err != nil {
		return err
	}
	var journal string
	if err := s.db.Get(&journal, "PRAGMA journal_mode"); err != nil {
		return err
	}
	const full = 2
	if synchronous < full || journal == "off" || journal == "memory" {
		return fmt.Errorf("with journal_mode %s and synchronous %d a power failure forgets claims; open the file with SQLiteDSN", journal, synchronous)
	}
	return nil
}

type sqlite struct{}

func (sqlite) literals() bool { return false }

// claims reads first: readers do not wait for the writer.
func (sqlite) claims(s *statements, insert, read []any) []bound {
	return []bound{{s.read, read}, {s.insert, insert}}
}

// tries is without bound: whoever waits for the writer has a context to end it.
func (sqlite) tries() int { return math.MaxInt }

func (sqlite) full(error) bool { return false }

func (sqlite) conflict(err error) bool {
	var coded interface{ Code() int }
	if !errors.As(err, &coded) {
		return false
	}
	switch coded.Code() & 0xff {
	case 5, 6: // SQLITE_BUSY, SQLITE_LOCKED, with all their extensions
		return true
	}
	return false
}

func (sqlite) migrate(ctx context.Context, s *Store) error {
	ddl, err := DDL("sqlite", s.table.unquoted())
	if err != nil {
		return err
	}
	if _, err := s.db.ExecContext(ctx, ddl); err != nil {
		return fmt.Errorf("creating the table %s: %w", s.table, err)
	}
	var have []string
	if err := s.db.SelectContext(ctx, &have, "SELECT name FROM pragma_table_info(?)", s.table.name); err != nil {
		return err
	}
	return s.table.checkColumns(have)
}

// sqliteSweep is how many rows one step deletes while it holds the writer up.
const sqliteSweep = 500

// sweep pauses after each step for as long as the step took. Whoever waits for
// the writer looks for it now and then, and would hardly ever find it free.
func (sqlite) sweep(ctx context.Context, s *Store, max int, swept *atomic.Int64) error {
	for {
		limit := min(int64(max)-swept.Load(), sqliteSweep)
		if limit <= 0 {
			return nil
		}
		var n int64
		began := time.Now()
		err := s.persist(ctx, func() (bool, error) {
			if err := s.writer.take(ctx); err != nil {
				return false, err
			}
			defer s.writer.giveBack()
			result, err := s.db.ExecContext(ctx, fmt.Sprintf(
				"DELETE FROM %[1]s WHERE rowid IN (SELECT rowid FROM %[1]s WHERE expires_at <= %[2]s LIMIT %[3]d)",
				s.table, sqliteNow, limit))
			if err == nil {
				n, err = result.RowsAffected()
			}
			return true, err
		})
		if err != nil {
			return err
		}
		swept.Add(n)
		if n < limit {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Since(began)):
		}
	}
}
