package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// OpenSQLite opens a pool on a file, as sql.Open does with [SQLiteDSN], by the
// driver modernc.org/sqlite, which the program imports. Params are further
// parameters of the driver's DSN, such as "_pragma=foreign_keys(1)".
//
// The pool knows the writes that would wait for themselves: when a handler that
// runs under guarantee: transaction writes past [Tx], through this pool or another
// that OpenSQLite opened on the same file, the write fails at once. Elsewhere it
// waits for the handler's own transaction, which is SQLite's one writer, until the
// busy timeout ends. Such a write is known by its context, which is the handler's
// or derived from it. Reads are let through, and other writes wait for the writer
// as ever.
//
// The pool keeps up to 16 idle connections, where sql.Open keeps two: opening one
// takes longer than most statements.
//
// What [sql.Conn.Raw] passes is not the driver's own connection.
func OpenSQLite(path string, params ...string) (*sql.DB, error) {
	dsn := strings.Join(append([]string{SQLiteDSN(path)}, params...), "&")
	plain, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, fmt.Errorf("sqlstore: OpenSQLite: import modernc.org/sqlite: %w", err)
	}
	defer plain.Close()
	c := &sqliteConnector{driver: plain.Driver(), dsn: dsn}
	opening := &Store{dialect: sqlite{}}
	if err := opening.patiently(func() error { return plain.QueryRow(sqliteFile).Scan(&c.file) }); err != nil {
		return nil, fmt.Errorf("sqlstore: OpenSQLite: %w", err)
	}
	if err := plain.QueryRow("PRAGMA busy_timeout").Scan(&c.timeout); err != nil {
		return nil, fmt.Errorf("sqlstore: OpenSQLite: %w", err)
	}
	db := sql.OpenDB(c)
	db.SetMaxIdleConns(16)
	return db, nil
}

type sqliteConnector struct {
	driver  driver.Driver
	dsn     string
	file    string // as SQLite names it, however the path was written
	timeout int    // the busy timeout of the DSN, in milliseconds
}

func (c *sqliteConnector) Driver() driver.Driver { return c.driver }

func (c *sqliteConnector) Connect(ctx context.Context) (driver.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	opened, err := c.driver.Open(c.dsn)
	if err != nil {
		return nil, err
	}
	conn, ok := opened.(sqliteDriverConn)
	if !ok {
		opened.Close()
		return nil, fmt.Errorf("sqlstore: OpenSQLite: the driver that is registered as \"sqlite\" is a %T; import modernc.org/sqlite instead", c.driver)
	}
	return &sqliteConn{sqliteDriverConn: conn, connector: c}, nil
}

// A sqliteDriverConn is what the driver's connections are.
type sqliteDriverConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.Pinger
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

// A sqliteConn lets no statement wait for the transaction of the run that sends
// it. Which statements write SQLite alone knows: so these are sent too, but do
// not wait.
type sqliteConn struct {
	sqliteDriverConn
	connector *sqliteConnector
	hurried   bool // its busy timeout is not the DSN's, but none
}

var errPastTx = errors.New("sqlstore: a write of the handler's past its transaction, which is SQLite's one writer, would wait for itself; write through sqlstore.Tx(ctx)")

// runningTx returns the transaction of the handler that ctx belongs to, while
// that runs.
func runningTx(ctx context.Context) *heldTx {
	held, _ := idempotency.RunContext(ctx).Value(txKey{}).(*heldTx)
	if held == nil || held.over.Load() {
		return nil
	}
	return held
}

// send calls with the busy timeout that its context allows.
func send[T any](ctx context.Context, c *sqliteConn, call func() (T, error)) (T, error) {
	held := runningTx(ctx)
	itself := held != nil && held.conn != nil && held.conn != c && held.conn.connector.file == c.connector.file
	if err := c.setWait(!itself); err != nil {
		var none T
		return none, err
	}
	result, err := call()
	if itself && (sqlite{}).conflict(err) {
		err = fmt.Errorf("%w (%v)", errPastTx, err) // not a conflict that ends when one tries again
	}
	return result, err
}

// setWait sets whether the connection's next statements wait for the writer.
func (c *sqliteConn) setWait(wait bool) error {
	if c.hurried == !wait {
		return nil
	}
	timeout := 0
	if wait {
		timeout = c.connector.timeout
	}
	_, err := c.sqliteDriverConn.ExecContext(context.Background(), fmt.Sprintf("PRAGMA busy_timeout = %d", timeout), nil)
	if err == nil {
		c.hurried = !wait
	}
	return err
}

func (c *sqliteConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if held, ok := ctx.Value(beginTxKey{}).(*heldTx); ok {
		held.conn = c
	}
	return send(ctx, c, func() (driver.Tx, error) { return c.sqliteDriverConn.BeginTx(ctx, opts) })
}

func (c *sqliteConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return send(ctx, c, func() (driver.Result, error) { return c.sqliteDriverConn.ExecContext(ctx, query, args) })
}

func (c *sqliteConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return send(ctx, c, func() (driver.Rows, error) { return c.sqliteDriverConn.QueryContext(ctx, query, args) })
}

func (c *sqliteConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	stmt, err := c.sqliteDriverConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	return &sqliteStmt{stmt.(sqliteDriverStmt), c}, nil
}

type sqliteDriverStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

// A sqliteStmt is a prepared statement of a sqliteConn.
type sqliteStmt struct {
	sqliteDriverStmt
	conn *sqliteConn
}

func (s *sqliteStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return send(ctx, s.conn, func() (driver.Result, error) { return s.sqliteDriverStmt.ExecContext(ctx, args) })
}

func (s *sqliteStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return send(ctx, s.conn, func() (driver.Rows, error) { return s.sqliteDriverStmt.QueryContext(ctx, args) })
}
