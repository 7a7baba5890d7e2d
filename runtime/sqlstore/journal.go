package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// ErrNotPending is in the chain of the error of a [Journal.Begin] of a call that
// is done, or whose Add is not committed. Nothing may be sent. A worker looks at
// what is noted, or just goes on with the next call.
var ErrNotPending = errors.New("sqlstore: the call is not pending: it is done, or was never added")

// A Journal remembers the keys of a client's logical calls in a table of the
// application's own database, as [idempotentclient.Journal], whose words on
// names and on when a call is done hold here too, does in a file. What it adds
// is the application's own transactions: a call is added, with its key, in the
// one that decides on it, and is done in the one that notes its answer.
//
//	tx, err := db.BeginTx(ctx, nil)
//	...                                             // INSERT INTO orders …
//	err = journal.Add(ctx, tx, "charge order 17")
//	err = tx.Commit()
//
// and then there, or in any process, now or after a crash:
//
//	calls, err := journal.Pending(ctx)
//	for _, pending := range calls {
//		call, err := journal.Begin(ctx, pending.Name)
//		if errors.Is(err, sqlstore.ErrNotPending) {
//			continue // another worker was faster
//		}
//		...                                     // any other error: send nothing
//		resp, err := client.CreatePaymentWithResponse(call, payment)
//		...                                     // no final answer: leave it pending
//		tx, err := db.BeginTx(ctx, nil)
//		...                                     // UPDATE orders SET payment …
//		err = journal.Done(ctx, tx, pending.Name)
//		err = tx.Commit()
//	}
//
// Add a name once, with what it speaks of: after Done it is forgotten, and Add
// would make a new key and so a second effect.
//
// # Workers
//
// Any number of workers, in any number of processes, may do so at once, and each
// effect happens once. Between Add and Done a name has one key: the requests of
// workers that make one call at the same time all carry it, and the server
// answers them with one effect. After Done there is none to begin with, however
// old a worker's list is: Begin makes no key, and waits for a Done whose commit is
// under way. So a worker that was killed while it committed may be replaced at
// once. For a transaction that is rolled back nothing is sent.
//
// # The database
//
// The isolation level may be any. Under REPEATABLE READ and SERIALIZABLE, Add
// and Done may fail with a serialization failure, as may any statement of the
// caller's transaction: run that again, or leave the call pending. Begin and
// Pending, whose statements are their own, try again by themselves.
//
// What was committed must outlive a crash. Leave PostgreSQL's synchronous_commit
// on for the journal's pool: when Begin returns, the key is on disk, and with it
// what was committed before it. On a database that forgets, as after a failover
// to a replica that lags, keys may be lost that were used.
//
// A Journal is safe for concurrent use.
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
	// Any name, in any encoding of the database.
	return newJournal(NewPostgres, db, cfg, "encode(?, 'escape')", "decode(name, 'escape')",
		"(extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
}

// NewSQLiteJournal returns a journal in a table of an SQLite database. The pool
// is as for [NewSQLite]: one that would lose keys is refused.
func NewSQLiteJournal(db *sql.DB, cfg JournalConfig) (*Journal, error) {
	return newJournal(NewSQLite, db, cfg, "?", "name", sqliteNow)
}

const defaultJournal = "idempotent_calls"

func newJournal(newStore func(*sql.DB, ...Option) (*Store, error), db *sql.DB, cfg JournalConfig, text, name, now string) (*Journal, error) {
	store, err := newStore(db, WithTable(cmp.Or(cfg.Table, defaultJournal)))
	if err != nil {
		return nil, err
	}
	words := strings.NewReplacer("{table}", store.table.String(), "{text}", text, "{name}", name, "{now}", now)
	expand := func(text string) *statement { return &statement{text: words.Replace(text)} }
	const columns = `{name} AS name, key, coalesce(begun_at, 0) AS begun, {now} AS now`
	return &Journal{
		store: store, keyAge: cfg.KeyAge,
		add: expand(`INSERT INTO {table} (name, added_at, key) VALUES ({text}, {now}, {text}) ON CONFLICT (name) DO NOTHING`),
		// A call's age is its first Begin's.
		begin:   expand(`UPDATE {table} SET begun_at = coalesce(begun_at, {now}) WHERE name = {text} RETURNING ` + columns),
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

// Migrate creates the table, unless it exists, and checks that it is one that the
// journal's statements can use. Any number of processes may call it at once. A
// table that is there needs no right to create one.
func (j *Journal) Migrate(ctx context.Context) error {
	_, err := within(ctx, "migrating the journal", func() (struct{}, error) {
		return struct{}{}, j.store.persist(ctx, func() (bool, error) { return true, j.migrate(ctx) })
	}, nil)
	return err
}

func (j *Journal) migrate(ctx context.Context) error {
	if j.check(ctx) == nil {
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
	if err := j.check(ctx); err != nil {
		return fmt.Errorf("the table %s is not a journal's: make it as JournalDDL says, or choose another: %w", j.store.table, err)
	}
	return nil
}

// check has the database explain each statement: it refuses what it could not
// run, such as an Add to a table whose names are not unique, and runs nothing.
func (j *Journal) check(ctx context.Context) error {
	for _, q := range []query{j.bind(j.add, "", ""), j.bind(j.begin, ""), j.bind(j.done, ""), j.bind(j.pending)} {
		if _, err := j.store.db.ExecContext(ctx, "EXPLAIN "+q.text, q.args...); err != nil {
			return err
		}
	}
	return nil
}

// bind binds text: PostgreSQL's statements take it as bytes, and SQLite stores it
// in the encoding of the database.
func (j *Journal) bind(st *statement, texts ...string) query {
	args := make([]any, len(texts))
	for i, text := range texts {
		args[i] = text
		if j.store.dialect.literals() {
			args[i] = []byte(text)
		}
	}
	return j.store.bind(st, args...)
}

// Add adds the call of this name to the journal, and makes its key, as part of a
// transaction of the application's: once that is committed, [Journal.Begin]
// begins it. A call that is pending already stays as it is, with its key. A name
// is UTF-8, of at most 600 bytes.
func (j *Journal) Add(ctx context.Context, tx Querier, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	key, err := idempotentclient.UUIDv4(ctx)
	if err != nil {
		return err
	}
	add := j.bind(j.add, name, key)
	if _, err := tx.ExecContext(ctx, add.text, add.args...); err != nil {
		return fmt.Errorf("sqlstore: adding %s to the journal: %w", brief(name), err)
	}
	return nil
}

// Begin begins the call of this name, or resumes it if it was begun before, and
// returns a context whose call carries its key. For a call that is not pending
// the error has [ErrNotPending] in its chain, and for one that was first begun too
// long ago, by the database's clock, [idempotentclient.ErrStale]. After any error,
// nothing may be sent.
//
// It uses a connection of the pool: within a transaction that has done the call,
// or on SQLite has written at all, it would wait for that transaction's end.
func (j *Journal) Begin(ctx context.Context, name string) (context.Context, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	begin := j.bind(j.begin, name)
	rows, err := j.rows(ctx, "beginning "+brief(name), begin)
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNotPending, brief(name))
	}
	return rows[0].call().Resume(ctx, time.UnixMicro(rows[0].Now), j.keyAge)
}

// Done forgets the call of this name, in a transaction of the application's, or
// by itself if tx is its pool. For a name that is not pending it does nothing.
func (j *Journal) Done(ctx context.Context, tx Querier, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	done := j.bind(j.done, name)
	if _, err := tx.ExecContext(ctx, done.text, done.args...); err != nil {
		return fmt.Errorf("sqlstore: taking %s off the journal: %w", brief(name), err)
	}
	return nil
}

// Pending returns the calls that were added, by whatever process, and are not
// done, the oldest first. One that was not begun has no time yet. By the time
// that it is read another worker may have done some of them.
func (j *Journal) Pending(ctx context.Context) ([]idempotentclient.PendingCall, error) {
	rows, err := j.rows(ctx, "reading the journal", j.bind(j.pending))
	if err != nil {
		return nil, err
	}
	calls := make([]idempotentclient.PendingCall, len(rows))
	for i, row := range rows {
		calls[i] = row.call()
	}
	return calls, nil
}

// rows sends a statement of the journal's own.
func (j *Journal) rows(ctx context.Context, what string, q query) ([]journalRow, error) {
	return within(ctx, what, func() (rows []journalRow, err error) {
		err = j.store.persist(ctx, func() (bool, error) {
			rows = nil
			return true, j.store.db.SelectContext(ctx, &rows, q.text, q.args...)
		})
		return rows, err
	}, nil)
}

// An index of PostgreSQL takes 2,704 bytes, and a name's bytes become up to four each.
const maxName = 600

func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("sqlstore: a call in the journal needs a name; say which effect is meant")
	case len(name) > maxName:
		return fmt.Errorf("sqlstore: %s is no name of a call: it has %d bytes, and at most %d are allowed", brief(name), len(name), maxName)
	case !utf8.ValidString(name), strings.ContainsAny(name, "\ufffe\uffff"): // which SQLite in UTF-16 takes for U+FFFD
		return fmt.Errorf("sqlstore: %s is no name of a call; say which effect is meant, in UTF-8", brief(name))
	}
	return nil
}

// brief quotes a name, or the beginning of a long one, for an error.
func brief(name string) string {
	const most = 100
	if len(name) > most {
		return fmt.Sprintf("%q…", name[:most])
	}
	return strconv.Quote(name)
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
	if r.Begun != 0 {
		call.Begun = time.UnixMicro(r.Begun)
	}
	return call
}

var _ = []Querier{(*sql.DB)(nil), (*sql.Conn)(nil), (*sql.Tx)(nil), (*sqlx.DB)(nil), (*sqlx.Tx)(nil)}
