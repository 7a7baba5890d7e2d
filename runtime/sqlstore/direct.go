package sqlstore

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

const (
	// defaultConns is what [OpenPostgres] opens at most. Calls that write share
	// a connection, so that it takes many clients to use all.
	defaultConns = 10
	// connectTimeout bounds opening a connection where the DSN does not.
	connectTimeout = 5 * time.Second
	// maxTogether and maxTogetherBytes bound what runs together, and with it
	// how long those wait who come later.
	maxTogether      = 128
	maxTogetherBytes = 1 << 20
	// patience ends the queueing behind a connection that may have died.
	patience = 250 * time.Millisecond
	// maxAside is the size, in bytes, from which a call does not run together
	// with others.
	maxAside = 64 << 10
)

// OpenPostgres returns a store in a table of a PostgreSQL database, version 14
// or newer, with a pool of its own, of github.com/lib/pq: the fast way. It
// prepares its statements, and claims and settlements of requests at the same
// time share one statement and one commit, see [WithoutGrouping]. The DSN must
// lead to the primary itself, not through a pooler such as PgBouncer, for which
// there is [NewPostgres]. If it names several hosts, the one that takes writes is
// used; a read replica never is, whatever the DSN's target_session_attrs.
//
// Handlers that run under guarantee: transaction do so in the application's pool:
// pass it with [WithTransactions]. OpenPostgres does not connect. Close the store
// when no request is under way any more.
func OpenPostgres(dsn string, opts ...Option) (*Store, error) {
	o, err := newOptions(opts)
	if err != nil {
		return nil, err
	}
	if o.prepared && o.txDB == nil {
		return nil, errors.New("sqlstore: OpenPostgres always prepares its own statements; WithPreparedStatements is for the pool of WithTransactions")
	}
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		// What lib/pq says of a DSN may quote its password.
		return nil, errors.New("sqlstore: OpenPostgres: the DSN is not one that github.com/lib/pq reads")
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = connectTimeout
	}
	// Of several hosts the primary is looked for. A name that leads to a replica
	// for a while, as in a failover, leaves no connection to it in the pool.
	cfg.TargetSessionAttrs = pq.TargetSessionAttrsReadWrite
	// Bytes are sent as they are.
	cfg.BinaryParameters = true
	settings := map[string]string{
		// Each statement is one look into the primary key. The planner would
		// rather read a small table whole, and a prepared plan that was made
		// for it would stay when the table has grown.
		"enable_seqscan":   "off",
		"enable_hashjoin":  "off",
		"enable_mergejoin": "off",
		"plan_cache_mode":  "force_generic_plan",
		// Stricter levels refuse claims that are made at the same time.
		"default_transaction_isolation": "read committed",
	}
	for name, value := range cfg.Runtime {
		if _, ours := settings[name]; !ours {
			settings[name] = value
		}
	}
	cfg.Runtime = settings
	db := sql.OpenDB(&connector{cfg: cfg})
	conns := cmp.Or(o.maxConns, defaultConns)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	s := newPostgres(db, o)
	s.direct = &direct{db: db}
	if !o.alone {
		s.direct.groupCalls(s, singles(conns))
	}
	s.txDB = nil
	if o.txDB != nil {
		s.txDB = sqlx.NewDb(o.txDB, "postgres")
	}
	return s, nil
}

// WithMaxConns bounds the connections that [OpenPostgres] opens, 10 by default.
func WithMaxConns(n int) Option {
	return func(o *options) error {
		if n < 1 {
			return fmt.Errorf("sqlstore: WithMaxConns(%d): a store needs a connection", n)
		}
		o.maxConns = n
		return nil
	}
}

// WithoutGrouping lets each claim and each settlement be a statement and a commit
// of its own also with [OpenPostgres] and [NewSQLite]. Where a commit costs
// little and few requests come at a time that is faster; see docs/performance.md.
func WithoutGrouping() Option {
	return func(o *options) error {
		o.alone = true
		return nil
	}
}

// WithTransactions names the application's pool, of the database that
// [OpenPostgres] opens, for handlers that run under guarantee: transaction.
// Without it such operations are refused at their registration.
func WithTransactions(db *sql.DB) Option {
	return func(o *options) error {
		if db == nil {
			return errNoPool
		}
		o.txDB = db
		return nil
	}
}

// Close closes the pool of a store that [OpenPostgres] returned. With other
// stores, whose pools are the application's, it does nothing.
func (s *Store) Close() error {
	if s.direct == nil {
		return nil
	}
	return s.direct.db.Close()
}

// direct sends prepared statements over a pool of the store's own. Nothing
// watches a call but its context, whose end closes the connection.
type direct struct {
	db     *sql.DB
	groups map[*statement]*group[query, answer]
}

// An answer is what a statement returned: a row, or none, or only that it wrote.
type answer struct {
	row   idempotency.Row
	found bool
}

// singles is how many calls of one kind may run alone: there are two kinds that
// come equally often.
func singles(conns int) int { return (conns + 1) / 2 }

func (d *direct) groupCalls(s *Store, singles int) {
	d.groups = map[*statement]*group[query, answer]{
		s.sql.insertOrRead: d.group(s.sql.claimMany, 0, singles),
		s.sql.settle:       d.group(s.sql.settleMany, settleHash, singles),
	}
}

// run sends a query and returns what it found, or how it failed.
func (d *direct) run(ctx context.Context, q query) (answer, error) {
	if g := d.groups[q.statement]; g != nil && q.size() < maxAside {
		return g.do(ctx, q)
	}
	return d.alone(ctx, q)
}

// bounded begins a run of as many queries as may run together.
func bounded() func(query) bool {
	n, size := 0, 0
	return func(q query) bool {
		n, size = n+1, size+q.size()
		return n == 1 || n <= maxTogether && size <= maxTogetherBytes
	}
}

func (q query) size() (n int) {
	for _, arg := range q.args {
		if b, ok := arg.([]byte); ok {
			n += len(b)
		}
	}
	return n
}

func (d *direct) alone(ctx context.Context, q query) (a answer, err error) {
	args := make([]driver.NamedValue, len(q.args))
	for i, arg := range q.args {
		if b, ok := arg.([]byte); ok && b == nil {
			arg = []byte{} // nil is NULL
		}
		args[i] = driver.NamedValue{Ordinal: i + 1, Value: arg}
	}
	if q.exec {
		n, err := d.send(ctx, q.statement, args, nil)
		return answer{found: n > 0}, err
	}
	_, err = d.send(ctx, q.statement, args, func(values []driver.Value) (err error) {
		a.found = true
		a.row, err = readRow(values)
		return err
	})
	return a, err
}

// group returns the group of a statement whose version for many is given, and
// the place of the key's hash among its arguments.
func (d *direct) group(many *statement, hash, singles int) *group[query, answer] {
	of := func(q query) []byte { return q.args[hash].([]byte) }
	return &group[query, answer]{
		alone:    d.alone,
		limit:    singles,
		patience: patience,
		joins: func() func(query) bool {
			keys, fits := map[[32]byte]bool{}, bounded()
			return func(q query) bool {
				key := [32]byte(of(q))
				if keys[key] || !fits(q) {
					return false // one statement cannot write a row twice
				}
				keys[key] = true
				return true
			}
		},
		together: func(queries []query) func(context.Context) ([]answer, error) {
			// Rows are locked in one order, whoever locks them.
			order := make([]int, len(queries))
			place := make(map[[32]byte]int, len(queries))
			for i, q := range queries {
				order[i] = i
				place[[32]byte(of(q))] = i
			}
			slices.SortFunc(order, func(a, b int) int { return bytes.Compare(of(queries[a]), of(queries[b])) })
			args := make([]driver.NamedValue, len(queries[0].args))
			for i := range args {
				args[i] = driver.NamedValue{Ordinal: i + 1, Value: column(queries, order, i)}
			}
			return func(ctx context.Context) ([]answer, error) {
				answers := make([]answer, len(queries))
				_, err := d.send(ctx, many, args, func(values []driver.Value) (err error) {
					key, ok := values[0].([]byte)
					if !ok || len(key) != 32 {
						return errForeignRow
					}
					a := &answers[place[[32]byte(key)]]
					if a.found {
						// What was inserted comes first. What was read may be
						// older: a row that was deleted in between.
						return nil
					}
					a.found = true
					if len(values) > 1 {
						a.row, err = readRow(values[1:])
					}
					return err
				})
				return answers, err
			}
		},
	}
}

// column returns the arguments that the queries have in one place, as the array
// that PostgreSQL reads.
func column(queries []query, order []int, place int) driver.Value {
	switch queries[0].args[place].(type) {
	case []byte:
		const bytea = 17 // its type's number
		size := 20
		for _, q := range queries {
			size += 4 + len(q.args[place].([]byte))
		}
		array := make([]byte, 0, size)
		for _, n := range []uint32{1, 0, bytea, uint32(len(queries)), 1} { // dimensions, no NULL, type, length, first index
			array = binary.BigEndian.AppendUint32(array, n)
		}
		for _, i := range order {
			element := queries[i].args[place].([]byte)
			array = binary.BigEndian.AppendUint32(array, uint32(len(element)))
			array = append(array, element...)
		}
		return array
	default:
		array := []byte{'{'}
		for n, i := range order {
			if n > 0 {
				array = append(array, ',')
			}
			switch v := queries[i].args[place].(type) {
			case int64:
				array = strconv.AppendInt(array, v, 10)
			case bool:
				array = strconv.AppendBool(array, v)
			default:
				panic(fmt.Sprintf("sqlstore: no array of %T", v))
			}
		}
		return string(append(array, '}'))
	}
}

// send sends a statement and passes each row to read, which must keep none of
// the bytes, or, without read, returns how many it wrote. What a dead connection
// of the pool did not answer is sent again: a claim's own bytes tell whether it
// had been received.
func (d *direct) send(ctx context.Context, st *statement, args []driver.NamedValue, read func([]driver.Value) error) (n int64, err error) {
	var earlier error
	for {
		var again bool
		n, again, err = d.try(ctx, st, args, read)
		if err = afterwards(earlier, err); !again {
			return n, err
		}
		earlier = err
	}
}

// try sends a statement once. If it fails, again says that another connection
// may do better.
func (d *direct) try(ctx context.Context, st *statement, args []driver.NamedValue, read func([]driver.Value) error) (n int64, again bool, err error) {
	c, err := d.db.Conn(ctx)
	if err != nil {
		return 0, false, fmt.Errorf("%w: %w", errUnsent, err)
	}
	defer c.Close() // gives it back, or does nothing if Raw has closed it
	err = errUnsent // until it is
	_ = c.Raw(func(raw any) error {
		conn := raw.(*directConn)
		stale := conn.used
		conn.used = true
		stop := context.AfterFunc(ctx, conn.abort)
		n, err = conn.send(st, args, read)
		if !stop() {
			if err != nil {
				err = ctx.Err()
			}
			return driver.ErrBadConn
		}
		// A plan from before the table was changed, or a session that may not
		// write any more, will not do better.
		if conn.IsValid() && !hasState(err, "0A000", "26000", "25006") {
			return nil
		}
		again = stale && err != nil
		return driver.ErrBadConn
	})
	return n, again, err
}

// session returns a connection of the pool for statements that [direct.send] does
// not send, and what gives it back. If it is direct, ctx ends it likewise.
func (s *Store) session(ctx context.Context) (*sqlx.Conn, func(), error) {
	c, err := s.db.Connx(ctx)
	if err != nil || s.direct == nil {
		return c, func() { c.Close() }, err
	}
	stop := func() bool { return true }
	_ = c.Raw(func(raw any) error {
		stop = context.AfterFunc(ctx, raw.(*directConn).abort)
		return nil
	})
	return c, func() {
		if !stop() {
			_ = c.Raw(func(any) error { return driver.ErrBadConn })
		}
		c.Close()
	}, nil
}

// A connector opens connections that can be aborted.
type connector struct{ cfg pq.Config }

func (*connector) Driver() driver.Driver { return &pq.Driver{} }

func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	p, err := pq.NewConnectorConfig(c.cfg.Clone())
	if err != nil {
		return nil, err
	}
	d := &dialer{}
	p.Dialer(d)
	stop := context.AfterFunc(ctx, d.abort)
	raw, err := p.Connect(ctx)
	ended := !stop()
	if err == nil && ended {
		raw.Close()
	}
	if ended {
		return nil, ctx.Err()
	}
	if err != nil {
		if strings.Contains(err.Error(), "startup parameter") {
			err = fmt.Errorf("%w; this is a pooler: let OpenPostgres connect to PostgreSQL itself, or use NewPostgres", err)
		}
		return nil, err
	}
	return &directConn{pqConn: raw.(pqConn), net: d.conn, prepared: map[*statement]driver.Stmt{}}, nil
}

// A dialer keeps the connection that it opened last, so that it can be closed
// while lib/pq waits for it.
type dialer struct {
	mu      sync.Mutex
	conn    net.Conn
	aborted bool
}

func (d *dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

func (d *dialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return d.DialContext(ctx, network, address)
}

func (d *dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.aborted {
		conn.Close()
		return nil, net.ErrClosed
	}
	d.conn = conn
	return conn, nil
}

func (d *dialer) abort() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aborted = true
	if d.conn != nil {
		d.conn.Close()
	}
}

// pqConn is what lib/pq's connections are.
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

// A directConn is a connection with its prepared statements.
type directConn struct {
	pqConn
	net      net.Conn
	prepared map[*statement]driver.Stmt
	used     bool // by a statement before
}

func (c *directConn) abort() { c.net.Close() }

func (c *directConn) send(st *statement, args []driver.NamedValue, read func([]driver.Value) error) (int64, error) {
	// lib/pq starts a goroutine for each context that can end.
	ctx := context.Background()
	prepared := c.prepared[st]
	if prepared == nil {
		var err error
		if prepared, err = c.PrepareContext(ctx, sqlx.Rebind(sqlx.DOLLAR, st.text)); err != nil {
			return 0, err
		}
		c.prepared[st] = prepared
	}
	if read == nil {
		result, err := prepared.(driver.StmtExecContext).ExecContext(ctx, args)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	}
	rows, err := prepared.(driver.StmtQueryContext).QueryContext(ctx, args)
	if err != nil {
		return 0, err
	}
	values := make([]driver.Value, len(rows.Columns()))
	for err == nil {
		if err = rows.Next(values); err == nil {
			err = read(values)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return 0, cmp.Or(err, rows.Close())
}

// readRow reads a row in the order of the statements' columns.
func readRow(values []driver.Value) (idempotency.Row, error) {
	ok := true
	number := func(i int) int64 {
		v, is := values[i].(int64)
		ok = ok && is
		return v
	}
	seconds := func(i int) float64 {
		v, is := values[i].(float64)
		ok = ok && is
		return v
	}
	truth := func(i int) bool {
		v, is := values[i].(bool)
		ok = ok && is
		return v
	}
	content := func(i int) []byte {
		v, is := values[i].([]byte)
		ok = ok && (is || values[i] == nil)
		return bytes.Clone(v)
	}
	r := record{
		ClaimID: content(0), Owner: content(1), Fingerprint: content(2), State: int16(number(3)),
		AtMostOnce: truth(4), Attempt: int(number(5)), LeaseUntil: seconds(6), ExpiresAt: seconds(7), ReadAt: seconds(8),
		Headers: content(10), Body: content(11),
	}
	if values[9] != nil {
		r.Status = sql.NullInt16{Int16: int16(number(9)), Valid: true}
	}
	if !ok {
		return idempotency.Row{}, errForeignRow
	}
	return r.row()
}
