// Package sqlstore keeps claims and outcomes in one table of an SQL database,
// through the application's own database/sql pool or, faster, one of its own.
//
//	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL"))
//	store, err := sqlstore.NewPostgres(db)
//	err = store.Migrate(ctx) // or apply what DDL returns
//
// or, where nothing stands between the program and PostgreSQL:
//
//	store, err := sqlstore.OpenPostgres(os.Getenv("DATABASE_URL"), sqlstore.WithTransactions(db))
//	defer store.Close()
//
// or, embedded:
//
//	db, err := sqlstore.OpenSQLite("keys.db") // with modernc.org/sqlite
//	store, err := sqlstore.NewSQLite(db)
//	err = store.Migrate(ctx)
//
// The package does not import SQLite's driver. Run a [Sweeper], or call [Store.Sweep] now and
// then: expired rows count as absent, but nothing else deletes them.
//
// Handlers under guarantee: transaction write through [Tx]. For clients,
// [Journal] is an outbox: it keeps the key of a call across a crash, for any
// number of workers.
//
// # PostgreSQL
//
// Version 14 or newer, with lz4. A claim, a settlement and a replay take one
// trip each; a takeover takes one more. Statements go by the simple protocol,
// with every value as a hexadecimal or numeric literal, and leave nothing in a
// session: the pool may lead through PgBouncer in transaction mode. With pgx's
// stdlib package behind a pooler, set default_query_exec_mode=simple_protocol.
// Where the pool connects directly, [WithPreparedStatements] is faster. A server
// that logs statements logs recorded bodies, in hexadecimal.
//
// [OpenPostgres] is for direct connections only, and the fastest: claims and
// settlements that come at the same time share a statement and a commit. One that
// fails harms only itself, and whoever finds nobody else is not held up.
//
// The pool must lead to the primary. A read replica lags behind the claims, and
// a key would be claimed twice. For the same reason a claim that was committed
// with synchronous_commit off may be forgotten in a crash: leave it on. Where the
// host's name may lead to a replica for a while, as in a failover, write
// target_session_attrs=read-write into the DSN: else connections to the replica
// stay in the pool. [OpenPostgres] does so by itself.
//
// The database's default isolation may be any; conflicts are retried.
//
// # SQLite
//
// One process writes at a time, and the others wait; so this is for one machine
// and moderate traffic. Writes of one [Store] take turns, and those that wait
// share the next commit; so use one for the whole process. Replays wait for
// nobody but, under guarantee: transaction, for another process's transaction.
// [NewSQLite] refuses a pool that would lose claims.
//
// While the application holds a writing transaction open, claims wait for it: a
// handler that calls the store from within a transaction of its own waits for
// itself until its context ends. Under guarantee: transaction, such a call fails
// at once, and so does what else the handler writes past its transaction, if
// [OpenSQLite] opened the pool.
//
// # Contexts
//
// Every call returns when its context ends, also on a connection that has gone
// silent, and with a context that never ends it may never return. An abandoned
// call goes on in the background, and keeps its connection of the pool, until
// the driver gives up. On a dead network that is when the operating system does,
// on Linux after some fifteen minutes unless TCP_USER_TIMEOUT or tcp_retries2 is
// lowered. A claim that is abandoned is given back when it turns out to be made.
// A call over the pool of [OpenPostgres] leaves nothing behind: the end of its
// context closes its connection, and the next call opens another.
package sqlstore
