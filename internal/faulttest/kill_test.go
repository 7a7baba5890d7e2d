//go:build unix

package faulttest

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// long asks for many times what shows a fault that is there most times.
var long = flag.Bool("faults.long", false, "break things for minutes instead of seconds")

// shortOr returns a size of the short form, or of the long one.
func shortOr(short, longer int) int {
	if *long {
		return longer
	}
	return short
}

// The instants at which a server may die of a request.
const (
	beforeClaim  = "before the claim"
	afterClaim   = "after the claim"
	inHandler    = "in the handler"
	afterEffect  = "after the business commit" // in a transaction: the business write
	beforeRecord = "before the record"         // in a transaction: the last instant before it is written
	afterRecord  = "after the record"          // in a transaction: the commit
	beforeAnswer = "before the answer"
)

type deathKey struct{}

// dieIf ends the process as kill -9 does if the request of ctx says so.
func dieIf(ctx context.Context, instant string) {
	if ctx.Value(deathKey{}) == instant {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal comes
	}
}

// A mortal is a store whose process may die around each of its calls.
type mortal struct{ *sqlstore.Store }

func (m mortal) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	dieIf(ctx, beforeClaim)
	row, err := m.Store.Claim(ctx, c)
	dieIf(ctx, afterClaim)
	return row, err
}

func (m mortal) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	dieIf(ctx, beforeRecord)
	row, err := m.Store.Settle(ctx, c, o)
	dieIf(ctx, afterRecord)
	return row, err
}

func (m mortal) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	dieIf(ctx, beforeClaim)
	row, err := m.Store.InTx(ctx, c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		dieIf(ctx, afterClaim)
		o, keep, err := run(ctx)
		dieIf(ctx, beforeRecord)
		return o, keep, err
	})
	dieIf(ctx, afterRecord)
	return row, err
}

// A mortalWriter writes the answer of a server that may die before it does.
type mortalWriter struct {
	http.ResponseWriter
	request *http.Request
}

func (w mortalWriter) WriteHeader(status int) {
	dieIf(w.request.Context(), beforeAnswer)
	w.ResponseWriter.WriteHeader(status)
}

// A death is an instant, and what the retry at another server is answered and
// how often the handler had its effect, under each guarantee.
type death struct {
	instant string
	then    map[string]string
	effects map[string]int
}

var deaths = []death{
	{beforeClaim, same(created), counts(1, 1, 1)},
	{afterClaim, again(unknown), counts(1, 0, 1)},
	{inHandler, again(unknown), counts(1, 0, 1)},
	{afterEffect, again(unknown), counts(2, 1, 1)},
	{beforeRecord, again(unknown), counts(2, 1, 1)},
	{afterRecord, same(replayed), counts(1, 1, 1)},
	{beforeAnswer, same(replayed), counts(1, 1, 1)},
}

func same(kind string) map[string]string {
	return map[string]string{atLeastOnce: kind, atMostOnce: kind, transaction: kind}
}

// again says what follows a run that left no record.
func again(once string) map[string]string {
	return map[string]string{atLeastOnce: created, atMostOnce: once, transaction: created}
}

func counts(atLeast, atMost, inTransaction int) map[string]int {
	return map[string]int{atLeastOnce: atLeast, atMostOnce: atMost, transaction: inTransaction}
}

// A server is killed at every instant of a request, under each guarantee.
func TestKilledAtEveryInstant(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		const lease = 2 * time.Second
		c := newConfig(d, lease)
		survivor := start(t, c)
		rounds := shortOr(1, 12)
		kills, ran := 0, 0
		for round := range rounds {
			c.Process++
			type victim struct {
				death
				path, key string
				sent      time.Time
			}
			var victims []victim
			for _, death := range deaths {
				for _, path := range []string{atLeastOnce, atMostOnce, transaction} {
					victims = append(victims, victim{death: death, path: path, key: fmt.Sprintf("%s %s %d", path[1:], death.instant, round)})
				}
			}
			var wg sync.WaitGroup
			for i := range victims {
				v := &victims[i]
				server := start(t, c)
				v.sent = time.Now()
				a := server.send(t.Context(), v.path, v.key, "effect", v.instant)
				if a.body != "" {
					t.Fatalf("%s was answered %s: %s", v.key, a.kind, a.body)
				}
				server.awaitExit(t)
				kills++
				wg.Go(func() {
					first := survivor.until(t, v.path, v.key, "effect", inFlight)
					now := time.Now()
					if first.kind != v.then[v.path] {
						t.Errorf("%s: the retry: %s, want %s", v.key, first.kind, v.then[v.path])
					}
					held := v.path == atLeastOnce && v.then[v.path] != v.then[atMostOnce]
					if after := now.Sub(v.sent); held && after < lease {
						t.Errorf("%s: ran again after %v, within the lease of %v", v.key, after, lease)
					}
					next := survivor.post(v.path, v.key, "effect")
					want := replayed
					if first.kind == unknown {
						want = unknown
					}
					if next.kind != want || want == replayed && next.body != first.body {
						t.Errorf("%s: afterwards: %s (%s), want %s of %q", v.key, next.kind, next.body, want, first.body)
					}
				})
			}
			wg.Wait()
			all := e.of(t)
			for _, v := range victims {
				if got := all[v.key]; len(got) != v.effects[v.path] {
					t.Errorf("%s: effects (process, attempt) %v, want %d", v.key, got, v.effects[v.path])
				}
				ran += len(all[v.key])
			}
		}
		t.Logf("%d kills, at %d instants under 3 guarantees; %d effects", kills, len(deaths), ran)
	})
}
