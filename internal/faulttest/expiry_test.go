//go:build unix

package faulttest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// sweep sweeps with two sweepers, as two processes do, and tells how many rows
// each sweep deleted.
func sweep(t *testing.T, d database, interval time.Duration, swept func(int)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 2 {
		db, store, err := d.open(2)
		if err != nil {
			t.Fatal(err)
		}
		s := sqlstore.NewSweeper(store)
		s.Interval = interval
		s.Observe = func(_ context.Context, n int, err error) {
			if err != nil {
				t.Errorf("sweeping: %v", err)
			}
			swept(n)
		}
		wg.Go(func() {
			_ = s.Run(ctx) // returns what ended it
			db.Close()
		})
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
}

// Many expired rows among live ones are swept under load: each of them, none of
// the others, and everybody is served meanwhile.
func TestSweepUnderLoad(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		expired := shortOr(20_000, 100_000)
		if d.Driver == "sqlite" && !*long { // each step waits for the disk, and for the others' claims
			expired = 4_000
		}
		bound := time.Duration(shortOr(60, 300)) * time.Second
		live := expired / 10
		const columns = "INSERT INTO idempotency_keys (key_hash, claim_id, owner, fingerprint, state, lease_until, expires_at, operation, key) "
		insert := columns + `SELECT sha256(i::text::bytea), '', '', '', 1, now(), now() + CASE i %% 11 WHEN 0 THEN interval '1 day' ELSE interval '-1 hour' END, 'filler', ''
			FROM generate_series(1, %d) i`
		if d.Driver == "sqlite" {
			insert = columns + `SELECT randomblob(32), '', '', '', 1, 0, CASE value %% 11 WHEN 0 THEN 9223372036854775806 ELSE 0 END, 'filler', ''
			FROM (WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < %d) SELECT value FROM n)`
		}
		if _, err := e.db.Exec(fmt.Sprintf(insert, expired+live)); err != nil {
			t.Fatal(err)
		}
		l := &load{t: t, e: e, lease: 30 * time.Second}
		one, two := pair(t, newConfig(d, l.lease))
		servers := []*process{one, two}
		var swept atomic.Int64
		began := time.Now()
		sweep(t, d, 20*time.Millisecond, func(n int) { swept.Add(int64(n)) })
		done := func() bool { return swept.Load() >= int64(expired) }
		atOnce(4, func(worker int) {
			for i := 0; !(done() && i > 50) && !t.Failed(); i++ {
				c := l.call("amid", paths[(worker+i)%len(paths)], "effect")
				for !l.post(servers[i%2], c) && !t.Failed() {
					time.Sleep(pause)
				}
				if time.Since(began) > bound {
					t.Errorf("%d of %d rows are swept after %v", swept.Load(), expired, bound)
				}
			}
		})
		took := time.Since(began)
		l.check(one)
		left := 0
		if err := e.db.QueryRow("SELECT count(*) FROM idempotency_keys WHERE operation = 'filler'").Scan(&left); err != nil {
			t.Fatal(err)
		}
		if swept.Load() != int64(expired) || left != live {
			t.Errorf("swept %d rows, of %d that had expired; of %d live ones %d are left", swept.Load(), expired, live, left)
		}
		t.Logf("%d expired rows swept from among %d live ones, %d keys served, in %v", expired, live, len(l.calls), took)
	})
}

// At the instant of its expiry a key that fifty ask for at once runs once more.
func TestInstantOfExpiry(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		const ttl, before, span = 1500 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond
		c := newConfig(d, 30*time.Second)
		c.Policy.TTL = ttl
		one, two := pair(t, c)
		servers := []*process{one, two}
		sweep(t, d, 5*time.Millisecond, func(int) {})
		rounds := shortOr(4, 40)
		count := map[string]int{}
		for round := range rounds {
			path, key := paths[round%len(paths)], fmt.Sprintf("expires-%d", round)
			first := one.post(path, key, "effect")
			want(t, "the first", first, created)
			expiry := time.Now().Add(ttl)
			all := answers(50, func(i int) answer {
				time.Sleep(time.Until(expiry.Add(rand.N(span) - before)))
				return servers[i%2].post(path, key, "effect")
			})
			runs := e.runs(t)[key]
			again := 0
			for _, a := range all {
				count[a.kind]++
				switch {
				case a.kind == created:
					again++
				case a.kind == inFlight:
					continue
				case a.kind != replayed:
					t.Errorf("%s: %s (%s)", key, a.kind, a.body)
				}
				if !isOf(a.body, runs) {
					t.Errorf("%s is answered %q, of no run of %v", key, a.body, runs)
				}
			}
			if len(runs) == 1 {
				// Each was in flight to one who came in time, or to such a one. That
				// is over now.
				want(t, "one who comes later", one.until(t, path, key, "effect", inFlight), created)
				runs, again = e.runs(t)[key], 1
			}
			if len(runs) < 2 || again != len(runs)-1 {
				t.Errorf("%s: ran %v, and %d clients were told so after its expiry", key, runs, again)
			}
			for i := 1; i < len(runs); i++ { // SQLite's clock ticks in milliseconds
				if after := runs[i].at.Sub(runs[i-1].at); after < ttl-time.Millisecond || runs[i].attempt != 1 {
					t.Errorf("%s: ran again after %v, in attempt %d", key, after, runs[i].attempt)
				}
			}
		}
		t.Logf("%d keys, each asked for 50 times when it expired: %v", rounds, count)
	})
}
