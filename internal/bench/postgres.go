package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	_ "github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// A cluster is the PostgreSQL of one run.
type cluster struct {
	server *pgtest.Server
	admin  *sql.DB
	// syncs is the query that counts how often the write-ahead log was waited
	// for on the disk.
	syncs     string
	databases int
}

// postgres returns the run's PostgreSQL, which it starts at the first call.
//
// What is not PostgreSQL's default keeps checkpoints, which anything may cause,
// out of the rounds. Commits wait for the disk, and that is checked.
func (b *bench) postgres() (*cluster, error) {
	if b.cluster != nil {
		return b.cluster, nil
	}
	// PostgreSQL's own pause before it waits for the disk stands for a slower one.
	server, err := pgtest.Open("fsync=on", "synchronous_commit=on", "full_page_writes=on",
		"shared_buffers=1GB", "max_wal_size=16GB", "checkpoint_timeout=1h",
		fmt.Sprintf("commit_delay=%d", b.disk.Microseconds()), "commit_siblings=0")
	if err != nil {
		return nil, err
	}
	// It outlives the contest that asks first.
	b.closers = slices.Insert(b.closers, 0, server.Close)
	c := &cluster{server: server}
	if c.admin, err = sql.Open("postgres", c.dsn("postgres")); err != nil {
		return nil, err
	}
	b.closers = slices.Insert(b.closers, 1, c.admin.Close)
	c.admin.SetMaxOpenConns(1)
	for setting, want := range map[string]string{"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"} {
		var is string
		if err := c.admin.QueryRow("SHOW " + setting).Scan(&is); err != nil || is != want {
			return nil, fmt.Errorf("%s is %q, not %q, and nothing that is measured would be worth it: %w", setting, is, want, err)
		}
	}
	var version int
	if err := c.admin.QueryRow("SHOW server_version_num").Scan(&version); err != nil {
		return nil, err
	}
	c.syncs = "SELECT wal_sync FROM pg_stat_wal"
	if version >= 180000 {
		c.syncs = "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"
	}
	b.cluster = c
	return c, nil
}

func (c *cluster) dsn(database string) string {
	return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", c.server.Addr(), database)
}

// database makes a database for one contest and returns its DSN.
func (b *bench) database() (*cluster, string, error) {
	c, err := b.postgres()
	if err != nil {
		return nil, "", err
	}
	c.databases++
	name := fmt.Sprintf("bench%d", c.databases)
	if _, err := c.admin.Exec("CREATE DATABASE " + name); err != nil {
		return nil, "", err
	}
	b.onClose(func() error {
		_, err := c.admin.Exec("DROP DATABASE " + name + " WITH (FORCE)")
		return err
	})
	return c, c.dsn(name), nil
}

// settle ends what a contest prepared: so the rounds do not write it.
func settle(db *sql.DB) error {
	for _, statement := range []string{"VACUUM (FREEZE, ANALYZE)", "CHECKPOINT"} {
		if _, err := db.Exec(statement); err != nil {
			return err
		}
	}
	return nil
}

// counted adds to each sample what the server wrote to its log, and how often
// it waited for the disk. All connections of a round are to end with it:
// backends report when they end. A round may do more than it counts in ops, to
// warm up: it says in total how many operations that is with these.
func (c *cluster) counted(r func(time.Duration) (s sample, total int64, err error)) func(time.Duration) (sample, error) {
	return func(d time.Duration) (sample, error) {
		bytes, syncs, err := c.written()
		if err != nil {
			return sample{}, err
		}
		s, total, err := r(d)
		if err != nil {
			return s, err
		}
		bytesNow, syncsNow, err := c.written()
		if err != nil {
			return s, err
		}
		if s.per == nil {
			s.per = map[string]float64{}
		}
		s.per["WAL-B/op"] = float64(bytesNow-bytes) / float64(total)
		s.per["fsyncs/op"] = float64(syncsNow-syncs) / float64(total)
		return s, nil
	}
}

func (c *cluster) written() (bytes, syncs int64, err error) {
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		var others int
		err := c.admin.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()").Scan(&others)
		if err != nil {
			return 0, 0, err
		}
		if others == 0 {
			break
		}
		if time.Now().After(deadline) {
			return 0, 0, fmt.Errorf("%d connections of the last round are still open", others)
		}
	}
	if err := c.admin.QueryRow("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&bytes); err != nil {
		return 0, 0, err
	}
	err = c.admin.QueryRow(c.syncs).Scan(&syncs)
	return bytes, syncs, err
}

// syncTime is how long the disk takes to make a page of PostgreSQL's durable.
func (c *cluster) syncTime() (_ time.Duration, err error) {
	f, err := os.Create(filepath.Join(c.server.SocketDir(), "sync"))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	var took []float64
	page := make([]byte, 8192)
	for range 100 {
		start := time.Now()
		if _, err := f.WriteAt(page, 0); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		took = append(took, float64(time.Since(start)))
	}
	return time.Duration(median(took)), nil
}

// open returns a pool with as many connections as there are clients, all of
// them open.
func open(ctx context.Context, dsn string, clients int) (*sql.DB, error) {
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(clients)
	db.SetMaxIdleConns(clients)
	var conns []*sql.Conn
	for range clients {
		conn, err := db.Conn(ctx)
		if err != nil {
			return nil, errors.Join(err, db.Close())
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		if err := conn.Close(); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	return db, nil
}
