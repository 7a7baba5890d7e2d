package faulttest

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

const fullLease = 3 * time.Second

// A disk that is full stops neither what is true nor what was recorded, and what
// is asked for once there is room again is done.
func TestDiskFull(t *testing.T) {
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		cluster := pgtest.Start(t, "autovacuum=off") // which would make room
		d := database{Driver: "postgres", DSN: cluster.DSN(t)}
		e := migrate(t, d)
		// The limit is for all files alike. Those of the log are of 16 MiB, so
		// the table is made larger than they are.
		if _, err := e.db.Exec(`INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, state, lease_until, expires_at, operation, key, body)
			SELECT sha256(i::text::bytea), '', '', '', 1, now(), now() + interval '1 day', '', '', repeat('x', 1500)::bytea FROM generate_series(1, 12000) i`); err != nil {
			t.Fatal(err)
		}
		var size uint64
		if err := e.db.QueryRow("SELECT pg_relation_size('idempotency_keys')").Scan(&size); err != nil {
			t.Fatal(err)
		}
		if size < 17<<20 {
			t.Fatalf("the table has %d bytes, too few to be the largest file", size)
		}
		diskFull(t, d, e, func() { cluster.LimitFiles(t, size) }, func(one *process) *process {
			cluster.LimitFiles(t, pgtest.NoLimit)
			return one
		})
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		d := database{Driver: "sqlite", DSN: sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "full.db"))}
		e := migrate(t, d)
		var pages int
		if err := e.db.QueryRow("PRAGMA page_count").Scan(&pages); err != nil {
			t.Fatal(err)
		}
		// Servers of the narrow database see a disk with room for some records.
		narrow := d
		narrow.DSN += fmt.Sprintf("&_pragma=max_page_count(%d)", pages+40)
		diskFull(t, narrow, e, func() {}, func(*process) *process {
			return start(t, newConfig(d, fullLease))
		})
	})
}

// diskFull serves on a database in which, once full was called, there is soon no
// room left, and then at the server that room returns when it has made some.
func diskFull(t *testing.T, d database, e effects, full func(), room func(one *process) *process) {
	l := &load{t: t, e: e, lease: fullLease, faulty: true}
	c := newConfig(d, l.lease)
	c.StoreTimeout = time.Second
	one, two := pair(t, c)
	servers := []*process{one, two}
	const pad = ",pad=1400" // so that no record finds room in a page that is there

	var running sync.WaitGroup
	var held []*call
	for i := range 9 {
		c := l.call("held", paths[i%len(paths)], "effect,hold"+pad)
		if d.Driver == "sqlite" && c.path == transaction {
			c.path = atLeastOnce // the one writer would hold up all others
		}
		held = append(held, c)
		running.Go(func() { l.post(one, c) })
		one.await(t, "holding "+c.key)
	}
	full()
	var unrecorded atomic.Int64
	deadline := time.Now().Add(patience / 2)
	atOnce(8, func(worker int) {
		for i := worker; unrecorded.Load() < 24 && !t.Failed() && time.Now().Before(deadline); i++ {
			c := l.call("full", paths[i%len(paths)], "effect"+pad)
			if !l.post(servers[rand.N(2)], c) {
				unrecorded.Add(1)
			}
		}
	})
	if unrecorded.Load() == 0 {
		t.Fatal("the disk is not full")
	}
	for _, c := range held {
		one.release(t, c.key)
	}
	running.Wait()
	for _, c := range held {
		c.steps = "effect" // does not hold again
	}

	roomy := room(one)
	l.check(roomy)
	want(t, "a new key when there is room again", roomy.post(atLeastOnce, "after", "effect"+pad), created)
	t.Logf("%d keys could not be recorded while the disk was full", unrecorded.Load())
}
