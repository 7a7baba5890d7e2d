package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// A Journal remembers the keys of a client's logical calls in a table of the
// application's own database, as [idempotentclient.Journal], whose words on
// names and on when a call is done hold here too, does in a file. What it adds
// is the application's own transactions: a call is added in the one that decides
// on it, and is done in the one that notes its answer.
//
//	tx, err := db.BeginTx(ctx, nil)
//	...                                             // INSERT INTO orders …
//	err = journal.Add(ctx, tx, "charge order 17")
//	err = tx.Commit()
//
// and then there, or in any process, now or after a crash:
//
//	calls, err := journal.Pending(ctx)
//	call, err := journal.Begin(ctx, calls[0].Name)
//	resp, err := client.CreatePaymentWithResponse(call, payment)
//	tx, err := db.BeginTx(ctx, nil)
//	...                                             // UPDATE orders SET charged …
//	err = journal.Done(ctx, tx, calls[0].Name)
//	err = tx.Commit()
//
// Begin alone makes a key, and commits it before it gives it out: no request is
// sent for a transaction that is then rolled back. On a database that forgets
// what it committed, such as PostgreSQL with synchronous_commit off, a crash may
// lose keys that were used.
//
// A Journal is safe for concurrent use, and any number of processes may share
// its table. Two of them that make one call at the same time have one key, and
// the server answers both with one effect.
type Journal struct {
	store  *Store // for its pool and its dialect; the table is the journal's
	keyAge time.Duration

	add, begin, done, pending *statement
}

// A JournalConfig configures a [Journal]. Its zero value has the defaults.
type JournalConfig struct {
	// Table is the journal's table, as for [WithTable]. Empty:
	// "idempotent_calls".
	Table string
	// KeyAge is how long a call is resumed, see [idempotentclient.ErrStale]. It
	// must be less than the ttl of the operations' x-idempotent. Not positive:
	// [idempotentclient.DefaultKeyAge].
	KeyAge time.Duration
}

// A Querier is a pool, a connection or a transaction: [sql.DB], [sql.Conn],
// [sql.Tx], or one of sqlx's.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// NewPostgresJournal returns a journal in a table of a PostgreSQL database. The
// pool is as for [NewPostgres].
func NewPostgresJournal(db *sql.DB, cfg JournalConfig) (*Journal, error) {
	return newJournal(NewPostgres, db, cfg, "encode(?, 'escape')", "decode(name, 'escape')",
		"(extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
}

// NewSQLiteJournal returns a journal in a table of an SQLite database. The pool
// is as for [NewSQLite]: one that would lose keys is refused.
func NewSQLiteJournal(db *sql.DB, cfg JournalConfig) (*Journal, error) {
	return newJournal(NewSQLite, db, cfg, "CAST(? AS TEXT)", "CAST(name AS BLOB)", sqliteNow)
}

const defaultJournal = "idempotent_calls"

func newJournal(newStore func(*sql.DB, ...Option) (*Store, error), db *sql.DB, cfg JournalConfig, text, name, now string) (*Journal, error) {
	store, err := newStore(db, WithTable(cmp.Or(cfg.Table, defaultJournal)))
	if err != nil {
		return nil, err
	}
	words := strings.NewReplacer("{table}", store.table.String(), "{text}", text, "{name}", name, "{now}", now)
	expand := func(text string) *statement { return &statement{text: words.Replace(text)} }
	const columns = `{name} AS name, coalesce(key, '') AS key, coalesce(begun_at, 0) AS begun, {now} AS now`
	return &Journal{
		store: store, keyAge: cfg.KeyAge,
		add: expand(`INSERT INTO {table} (name, added_at) VALUES ({text}, {now}) ON CONFLICT (name) DO NOTHING`),
		begin: expand(`INSERT INTO {table} AS call (name, added_at, key, begun_at) VALUES ({text}, {now}, {text}, {now})
ON CONFLICT (name) DO UPDATE SET key = coalesce(call.key, excluded.key), begun_at = coalesce(call.begun_at, excluded.begun_at)
RETURNING ` + columns),
		done:    expand(`DELETE FROM {table} WHERE name = {text}`),
		pending: expand(`SELECT ` + columns + ` FROM {table} ORDER BY added_at, 1`),
	}, nil
}

// JournalDDL returns the statement that creates a journal's table, the same for
// PostgreSQL and SQLite: what [Journal.Migrate] runs. The table is as for
// [JournalConfig].
func JournalDDL(tableName string) (string, error) {
	t, err := parseTable(cmp.Or(tableName, defaultJournal))
	if err != nil {
		return "", err
	}
	text, err := schema.ReadFile("schema/journal.sql")
	if err != nil {
		return "", err
	}
	return strings.ReplaceAll(string(text), defaultJournal, t.String()), nil
}

// Migrate creates the table, unless it exists, and checks that it has the
// columns that the journal needs. Any number of processes may call it at once. A
// table that is there needs no right to create one.
func (j *Journal) Migrate(ctx context.Context) error {
	_, err := within(ctx, "migrating the journal", func() (struct{}, error) {
		return struct{}{}, j.store.persist(ctx, func() (bool, error) { return true, j.migrate(ctx) })
	}, nil)
	return err
}

func (j *Journal) migrate(ctx context.Context) error {
	if _, err := j.list(ctx); err == nil {
		return nil
	}
	ddl, err := JournalDDL(j.store.table.unquoted())
	if err != nil {
		return err
	}
	tx, err := j.store.db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after Commit
	if j.store.dialect.literals() {
		// PostgreSQL's statements that create one table at the same time fail.
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", j.store.table.lock("migrate"))); err != nil {
			return err
		}
	}
	if _, err := tx.ExecContext(ctx, ddl); err != nil {
		return fmt.Errorf("creating the table %s: %w", j.store.table, err)
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	if _, err := j.list(ctx); err != nil {
		return fmt.Errorf("the table %s is not a journal's; choose another: %w", j.store.table, err)
	}
	return nil
}

// Add adds the call of this name to the journal as part of a transaction of the
// application's, for [Journal.Begin] to begin once that is committed. A call
// that is pending already stays as it is.
func (j *Journal) Add(ctx context.Context, tx Querier, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	add := j.store.bind(j.add, []byte(name))
	if _, err := tx.ExecContext(ctx, add.text, add.args...); err != nil {
		return fmt.Errorf("sqlstore: adding %q to the journal: %w", name, err)
	}
	return nil
}

// Begin begins the call of this name, or resumes it if it is pending, and
// returns a context whose call carries its key. The key is committed when it
// returns; after an error, nothing may be sent. It uses a connection of the
// pool: within a transaction that has added or done a call of this name, or on
// SQLite has written at all, it would wait for that transaction's end.
func (j *Journal) Begin(ctx context.Context, name string) (context.Context, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	key, err := idempotentclient.UUIDv4(ctx)
	if err != nil {
		return nil, err
	}
	begin := j.store.bind(j.begin, []byte(name), []byte(key))
	row, err := within(ctx, fmt.Sprintf("beginning %q", name), func() (row journalRow, err error) {
		err = j.store.persist(ctx, func() (bool, error) {
			return true, j.store.db.GetContext(ctx, &row, begin.text, begin.args...)
		})
		return row, err
	}, nil)
	if err != nil {
		return nil, err
	}
	return row.call().Resume(ctx, time.UnixMicro(row.Now), j.keyAge)
}

// Done forgets the call of this name, in a transaction of the application's, or
// by itself if tx is its pool. For a name that is not pending it does nothing.
func (j *Journal) Done(ctx context.Context, tx Querier, name string) error {
	done := j.store.bind(j.done, []byte(name))
	if _, err := tx.ExecContext(ctx, done.text, done.args...); err != nil {
		return fmt.Errorf("sqlstore: taking %q off the journal: %w", name, err)
	}
	return nil
}

// Pending returns the calls that were added or begun, by whatever process, and
// are not done, the oldest first. One that was only added has neither a key nor
// a time yet.
func (j *Journal) Pending(ctx context.Context) ([]idempotentclient.PendingCall, error) {
	return within(ctx, "reading the journal", func() (calls []idempotentclient.PendingCall, err error) {
		err = j.store.persist(ctx, func() (bool, error) {
			calls, err = j.list(ctx)
			return true, err
		})
		return calls, err
	}, nil)
}

func (j *Journal) list(ctx context.Context) ([]idempotentclient.PendingCall, error) {
	var rows []journalRow
	if err := j.store.db.SelectContext(ctx, &rows, j.pending.text); err != nil {
		return nil, err
	}
	calls := make([]idempotentclient.PendingCall, len(rows))
	for i, row := range rows {
		calls[i] = row.call()
	}
	return calls, nil
}

func checkName(name string) error {
	if name == "" {
		return errors.New("sqlstore: a call in the journal needs a name; say which effect is meant")
	}
	return nil
}

// A journalRow is a row as the statements return it. Times are microseconds.
type journalRow struct {
	Name  []byte `db:"name"`
	Key   string `db:"key"`
	Begun int64  `db:"begun"`
	Now   int64  `db:"now"`
}

func (r journalRow) call() idempotentclient.PendingCall {
	call := idempotentclient.PendingCall{Name: string(r.Name), Key: r.Key}
	if r.Key != "" {
		call.Begun = time.UnixMicro(r.Begun)
	}
	return call
}

var _ = []Querier{(*sql.DB)(nil), (*sql.Conn)(nil), (*sql.Tx)(nil), (*sqlx.DB)(nil), (*sqlx.Tx)(nil)}
