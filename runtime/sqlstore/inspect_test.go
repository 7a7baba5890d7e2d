package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func newInspector(t *testing.T, db *sql.DB, opts ...sqlstore.Option) *sqlstore.PostgresInspector {
	t.Helper()
	inspector, err := sqlstore.NewPostgresInspector(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return inspector
}

// see returns the entry of a claim's key.
func see(t *testing.T, inspector idempotency.Inspector, c *idempotency.Claim) *idempotency.Entry {
	t.Helper()
	found, err := inspector.Find(t.Context(), fmt.Sprintf("%x", c.Hash))
	if err != nil || len(found) != 1 {
		t.Fatalf("found %+v, %v", found, err)
	}
	return &found[0]
}

// lapsedClaim returns a claim that was made and whose lease has ended.
func lapsedClaim(t *testing.T, store idempotency.Store, atMostOnce bool) *idempotency.Claim {
	t.Helper()
	c := newClaim()
	c.Lease, c.AtMostOnce = time.Microsecond, atMostOnce
	mustWin(t, store, c)
	eventually(t, func() error {
		row, err := store.Claim(t.Context(), rival(c))
		if err == nil && !row.Lapsed {
			err = errors.New("the lease still holds")
		}
		return err
	})
	return c
}

func mustSettle(t *testing.T, store idempotency.Store, c *idempotency.Claim, o idempotency.Outcome) {
	t.Helper()
	if row, err := store.Settle(t.Context(), c, o); err != nil || !row.Won {
		t.Fatalf("not settled: %+v, %v", row, err)
	}
}

func TestInspectorSeesEachCondition(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db)
	inspector := newInspector(t, db)

	claims := map[idempotency.Condition]*idempotency.Claim{
		idempotency.ConditionInFlight:      newClaim(),
		idempotency.ConditionUnknown:       newClaim(),
		idempotency.ConditionCompleted:     newClaim(),
		idempotency.ConditionNotReplayable: newClaim(),
		idempotency.ConditionExpired:       newClaim(),
	}
	claims[idempotency.ConditionExpired].TTL = time.Microsecond
	for condition, c := range claims {
		c.Operation, c.Key = "POST /"+string(condition), `it's "a" \ key; --`
		mustWin(t, store, c)
	}
	mustSettle(t, store, claims[idempotency.ConditionUnknown], idempotency.Outcome{State: idempotency.Unknown})
	answer := idempotency.Outcome{State: idempotency.Completed, Status: 201, Header: []byte{1, 0}, Body: []byte("\x00body\xff")}
	mustSettle(t, store, claims[idempotency.ConditionCompleted], answer)
	mustSettle(t, store, claims[idempotency.ConditionNotReplayable], idempotency.Outcome{State: idempotency.NotReplayable, Status: 200})
	mustSettle(t, store, claims[idempotency.ConditionExpired], answer)
	claims[idempotency.ConditionStuck] = lapsedClaim(t, store, false)
	stuckForGood := lapsedClaim(t, store, true)

	for condition, c := range claims {
		listed, err := inspector.List(t.Context(), idempotency.Filter{Condition: condition, Operation: c.Operation})
		if err != nil {
			t.Fatal(err)
		}
		var e *idempotency.Entry
		for i := range listed {
			if listed[i].Condition != condition {
				t.Errorf("as %s there is listed %+v", condition, listed[i])
			}
			if listed[i].Hash == c.Hash {
				e = &listed[i]
			}
		}
		if e == nil {
			t.Errorf("%s is not listed", condition)
			continue
		}
		if e.ID != c.ID || e.Operation != c.Operation || e.Key != c.Key || e.Attempt != 1 || e.AtMostOnce != c.AtMostOnce {
			t.Errorf("%s is listed as %+v", condition, e)
		}
		if never := condition == idempotency.ConditionUnknown; e.Expires.IsZero() != never {
			t.Errorf("%s expires at %v", condition, e.Expires)
		}
	}
	if e := see(t, inspector, claims[idempotency.ConditionCompleted]); !reflect.DeepEqual(e.Outcome, answer) {
		t.Errorf("got the outcome %+v, want %+v", e.Outcome, answer)
	}

	unknown, err := inspector.List(t.Context(), idempotency.Filter{Condition: idempotency.ConditionUnknown})
	if err != nil {
		t.Fatal(err)
	}
	if len(unknown) != 2 || unknown[1].Hash != stuckForGood.Hash || unknown[1].Condition != idempotency.ConditionStuck {
		t.Errorf("as unknown there are listed %+v", unknown)
	}

	tallies, err := inspector.Tally(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	counted := map[string]int64{}
	for _, tally := range tallies {
		counted[tally.Operation+" "+string(tally.Condition)] = tally.Keys
		if tally.Oldest <= 0 || tally.Oldest > time.Hour {
			t.Errorf("%+v has an odd age", tally)
		}
	}
	want := map[string]int64{
		"POST /in-flight in-flight": 1, "POST /unknown unknown": 1, "POST /completed completed": 1,
		"POST /not-replayable not-replayable": 1, "POST /expired expired": 1, "POST /orders stuck": 2,
	}
	if !reflect.DeepEqual(counted, want) {
		t.Errorf("counted %v, want %v", counted, want)
	}
}

func TestInspectorListsTheOldestFirst(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db, sqlstore.WithTable("public.k"))
	inspector := newInspector(t, db, sqlstore.WithTable("public.k"))
	var claims []*idempotency.Claim
	for range 3 {
		claims = append(claims, newClaim())
		mustWin(t, store, claims[len(claims)-1])
	}
	if _, err := db.Exec("UPDATE k SET created_at = created_at - interval '1 hour' WHERE key_hash = $1", claims[2].Hash[:]); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		filter idempotency.Filter
		want   []int
	}{
		{idempotency.Filter{}, []int{2, 0, 1}},
		{idempotency.Filter{Limit: 2}, []int{2, 0}},
		{idempotency.Filter{OlderThan: time.Minute}, []int{2}},
		{idempotency.Filter{OlderThan: 2 * time.Hour}, nil},
		{idempotency.Filter{Operation: "POST /other"}, nil},
	} {
		entries, err := inspector.List(t.Context(), test.filter)
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != len(test.want) {
			t.Errorf("%+v lists %d entries, want %d", test.filter, len(entries), len(test.want))
			continue
		}
		for i, want := range test.want {
			if entries[i].Hash != claims[want].Hash {
				t.Errorf("%+v lists %x as number %d", test.filter, entries[i].Hash, i)
			}
		}
	}
}

func TestInspectorFindsByTheBeginningOfAHash(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db)
	inspector := newInspector(t, db)
	for _, first := range []byte{0x3f, 0x3e, 0xff} {
		c := newClaim()
		c.Hash[0] = first
		mustWin(t, store, c)
		for _, digits := range []string{fmt.Sprintf("%x", c.Hash), fmt.Sprintf("%x", c.Hash)[:63], fmt.Sprintf("%X", c.Hash)[:2]} {
			if found, err := inspector.Find(t.Context(), digits); err != nil || len(found) != 1 || found[0].Hash != c.Hash {
				t.Errorf("Find(%q) found %+v, %v", digits, found, err)
			}
		}
	}
	for digits, want := range map[string]int{"3": 2, "f": 1, "0": 0} {
		if found, err := inspector.Find(t.Context(), digits); err != nil || len(found) != want {
			t.Errorf("Find(%q) found %+v, %v; want %d", digits, found, err, want)
		}
	}
	for _, digits := range []string{"", "xy", "3g", "'", strings.Repeat("0", 65)} {
		if found, err := inspector.Find(t.Context(), digits); err == nil {
			t.Errorf("Find(%q) found %+v", digits, found)
		}
	}
}

// TestInspectorSettlesWhatWasSeen changes rows between the look and the
// settlement.
func TestInspectorSettlesWhatWasSeen(t *testing.T) {
	db := postgresDB(t)
	store := newPostgres(t, db)
	inspector := newInspector(t, db)
	answer := idempotency.Outcome{State: idempotency.Completed, Status: 201, Header: []byte{1}, Body: []byte("found out")}

	for name, test := range map[string]struct {
		change func(t *testing.T, c *idempotency.Claim)
		force  bool
		want   bool
	}{
		"nothing changed": {func(*testing.T, *idempotency.Claim) {}, false, true},
		"another took over": {func(t *testing.T, c *idempotency.Claim) {
			if row, err := store.Takeover(t.Context(), rival(c), c.ID); err != nil || !row.Won {
				t.Fatalf("not taken over: %+v, %v", row, err)
			}
		}, true, false},
		"it came back and settled": {func(t *testing.T, c *idempotency.Claim) {
			mustSettle(t, store, c, idempotency.Outcome{State: idempotency.Completed, Status: 200})
		}, true, false},
		"it came back and goes on": {func(t *testing.T, c *idempotency.Claim) {
			c.Lease = time.Hour
			if err := store.Renew(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}, false, false},
		"it came back and is overruled": {func(t *testing.T, c *idempotency.Claim) {
			c.Lease = time.Hour
			if err := store.Renew(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}, true, true},
		"it came back and gave the key up": {func(t *testing.T, c *idempotency.Claim) {
			if err := store.Release(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}, true, false},
	} {
		for _, as := range []string{"completed", "never happened"} {
			t.Run(name+", "+as, func(t *testing.T) {
				c := lapsedClaim(t, store, false)
				seen := see(t, inspector, c)
				test.change(t, c)
				before, err := inspector.Find(t.Context(), fmt.Sprintf("%x", c.Hash))
				if err != nil {
					t.Fatal(err)
				}
				var settled bool
				if as == "completed" {
					settled, err = inspector.Settle(t.Context(), seen, answer, time.Hour, test.force)
				} else {
					settled, err = inspector.Forget(t.Context(), seen, test.force)
				}
				if err != nil || settled != test.want {
					t.Fatalf("settled: %t, %v; want %t", settled, err, test.want)
				}
				after, err := inspector.Find(t.Context(), fmt.Sprintf("%x", c.Hash))
				if err != nil {
					t.Fatal(err)
				}
				switch {
				case !test.want:
					if len(after) != len(before) || len(after) > 0 && (after[0].ID != before[0].ID || !reflect.DeepEqual(after[0].Outcome, before[0].Outcome)) {
						t.Errorf("nothing was settled, and yet %+v became %+v", before, after)
					}
				case as == "completed":
					if len(after) != 1 || !reflect.DeepEqual(after[0].Outcome, answer) || after[0].Condition != idempotency.ConditionCompleted {
						t.Errorf("after the settlement there is %+v", after)
					}
					if left := after[0].Expires.Sub(after[0].Claimed); left < time.Hour || left > time.Hour+time.Minute {
						t.Errorf("the answer lasts for %v, want an hour", left)
					}
					if row, err := store.Claim(t.Context(), rival(c)); err != nil || row.Won || !reflect.DeepEqual(row.Outcome, answer) {
						t.Errorf("the next request gets %+v, %v", row, err)
					}
				default:
					mustWin(t, store, rival(c))
				}
			})
		}
	}
}

// TestInspectorsSettleOnce has many settle one key at once, where the database
// answers such conflicts with an error.
func TestInspectorsSettleOnce(t *testing.T) {
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			dsn := pgtest.DSN(t)
			store := newPostgres(t, open(t, "postgres", dsn))
			db := open(t, "postgres", dsn+"&default_transaction_isolation="+strings.ReplaceAll(isolation, " ", "%20"))
			inspector := newInspector(t, db)
			for range 20 {
				c := lapsedClaim(t, store, true)
				seen := see(t, inspector, c)
				var settled atomic.Int32
				var wg sync.WaitGroup
				for i := range 8 {
					wg.Go(func() {
						var ok bool
						var err error
						if i%2 == 0 {
							ok, err = inspector.Forget(t.Context(), seen, false)
						} else {
							ok, err = inspector.Settle(t.Context(), seen, idempotency.Outcome{State: idempotency.Completed, Status: 200 + i}, time.Hour, false)
						}
						if err != nil {
							t.Error(err)
						}
						if ok {
							settled.Add(1)
						}
					})
				}
				wg.Wait()
				if n := settled.Load(); n != 1 {
					t.Fatalf("%d of 8 were told that they settled it", n)
				}
			}
		})
	}
}

// TestInspectorTakesOneTripAndHoldsItsDeadline: what a pooler and a network
// that drops packets ask for.
func TestInspectorTakesOneTripAndHoldsItsDeadline(t *testing.T) {
	p, dsn := newProxy(t, pgtest.DSN(t))
	db := open(t, "postgres", dsn)
	store := newPostgres(t, db)
	inspector := newInspector(t, db)
	c := lapsedClaim(t, store, false)
	seen := see(t, inspector, c)
	calls := []struct {
		what string
		call func(context.Context) error
	}{
		{"List", func(ctx context.Context) error {
			_, err := inspector.List(ctx, idempotency.Filter{Operation: "POST /orders", Limit: 1})
			return err
		}},
		{"Find", func(ctx context.Context) error { _, err := inspector.Find(ctx, "ab"); return err }},
		{"Tally", func(ctx context.Context) error { _, err := inspector.Tally(ctx); return err }},
		{"Settle", func(ctx context.Context) error {
			_, err := inspector.Settle(ctx, seen, idempotency.Outcome{State: idempotency.Completed, Status: 200}, time.Hour, false)
			return err
		}},
		{"Forget", func(ctx context.Context) error { _, err := inspector.Forget(ctx, seen, false); return err }},
	}
	for _, call := range calls {
		before := p.trips.Load()
		if err := call.call(t.Context()); err != nil {
			t.Errorf("%s: %v", call.what, err)
		}
		if trips := p.trips.Load() - before; trips != 1 {
			t.Errorf("%s took %d trips", call.what, trips)
		}
	}
	p.silence()
	for _, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := call.call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s on a silent connection returned %v", call.what, err)
		}
		cancel()
	}
}
