//go:build !race

// The race detector empties pools at random, and so counts other allocations.

package idempotency_test

import (
	"fmt"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
	golden "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/stdhttp/want"
)

// TestAllocations holds what the guard and a store in memory allocate beside the
// handler: at most 4 times for a replay, 6 for a fresh request and never for an
// operation that is not annotated.
func TestAllocations(t *testing.T) {
	const runs = 1000
	bare := newLoop(serving(answering))
	handler := testing.AllocsPerRun(runs, func() { bare.send("k") })

	replays := newLoop(behindGuard(t, answering))
	replays.send("k")
	if n := testing.AllocsPerRun(runs, func() { replays.send("k") }); n > 4 { // the handler does not run
		t.Errorf("a replay allocates %v times", n)
	}

	var keys [runs + 1]string
	for i := range keys {
		keys[i] = fmt.Sprintf("key %d", i)
	}
	fresh, next := newLoop(behindGuard(t, answering)), 0
	n := testing.AllocsPerRun(runs, func() {
		fresh.send(keys[next])
		next++
	})
	if n -= handler; n > 6 {
		t.Errorf("a fresh request allocates %v times more than its handler", n)
	}

	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	woven := newLoop(serving(golden.GuardServer(orders{}, guard).ListOrders))
	if n := testing.AllocsPerRun(runs, func() { woven.send("k") }); n != handler {
		t.Errorf("an unannotated operation allocates %v times, its handler %v times", n, handler)
	}
}
