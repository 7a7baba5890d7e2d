//go:build unix

package faulttest

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

// answers collects what each of many requests at once is answered.
func answers(n int, send func(i int) answer) []answer {
	all := make([]answer, n)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i] = send(i) })
	}
	wg.Wait()
	return all
}

func TestTwoProcessesRunAKeyOnce(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		one, two := pair(t, newConfig(d, 30*time.Second))
		servers := []*process{one, two}
		for round := range 10 {
			key := fmt.Sprintf("payment-%d", round)
			var first answer
			all := answers(100, func(i int) answer {
				return servers[i%2].post(atLeastOnce, key, "effect,sleep=20ms")
			})
			for _, a := range all {
				if a.kind == created {
					first = a
				}
			}
			count := map[string]int{}
			for _, a := range all {
				count[a.kind]++
				if a.kind == replayed && a.body != first.body {
					t.Errorf("round %d: replay of %q is %q", round, first.body, a.body)
				}
			}
			if count[created] != 1 || count[created]+count[replayed]+count[inFlight] != len(all) {
				t.Fatalf("round %d: %v, want one created, and the others replayed or in flight", round, count)
			}
			if ran := e.of(t)[key]; len(ran) != 1 {
				t.Fatalf("round %d: ran %v (process, attempt)", round, ran)
			}
			wantReplay(t, one, atLeastOnce, key, first)
			wantReplay(t, two, atLeastOnce, key, first)
		}
	})
}

func TestHandlerOfThreeLeasesRunsOnce(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		const lease = 1500 * time.Millisecond
		one, two := pair(t, newConfig(d, lease))
		sent := time.Now()
		done := one.hold(t, atLeastOnce, "slow", "effect,hold")
		stretch(sent, 3*lease+lease/2, func() {
			want(t, "through the other server", two.post(atLeastOnce, "slow", "effect"), inFlight)
			want(t, "through the same server", one.post(atLeastOnce, "slow", "effect"), inFlight)
		})
		one.release(t, "slow")
		first := two.until(t, atLeastOnce, "slow", "effect", inFlight)
		want(t, "after the handler's end", first, replayed)
		a := receive(t, done)
		want(t, "the slow request", a, created)
		if a.body != first.body {
			t.Errorf("replay of %q is %q", a.body, first.body)
		}
		e.want(t, "slow", effect{1, 1})
	})
}

// A pool of two connections, one of which the handler holds, serves two hundred
// duplicates of it and twenty others.
func TestFullPool(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		c := newConfig(d, 30*time.Second)
		c.MaxOpenConns = 2
		one := start(t, c)
		done := one.hold(t, atLeastOnce, "busy", "effect,connection,hold")
		all := answers(220, func(i int) answer {
			if i%11 == 0 {
				return one.post(atLeastOnce, fmt.Sprint("other-", i/11), "effect")
			}
			return one.post(atLeastOnce, "busy", "effect")
		})
		for i, a := range all {
			if i%11 == 0 {
				want(t, "another key", a, created)
			} else {
				want(t, "the same key", a, inFlight)
			}
		}
		one.release(t, "busy")
		first := receive(t, done)
		want(t, "the request that held a connection", first, created)
		wantReplay(t, one, atLeastOnce, "busy", first)
		ran := e.of(t)
		for key, runs := range ran {
			if len(runs) != 1 {
				t.Errorf("%s ran %v (process, attempt)", key, runs)
			}
		}
		if len(ran) != 21 {
			t.Errorf("%d keys ran, want 21", len(ran))
		}
	})
}

// Two hundred requests share a pool of two connections, one of which each handler
// takes beside its transaction.
func TestFullPoolInTransactions(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		l := &load{t: t, e: e, lease: 30 * time.Second, faulty: true} // there is no room for many of them
		c := newConfig(d, l.lease)
		c.MaxOpenConns = 2
		one := start(t, c)
		var calls []*call
		for range 40 {
			calls = append(calls, l.call("crowded", transaction, "effect,connection,sleep=5ms"))
		}
		atOnce(200, func(i int) {
			for deadline := time.Now().Add(3 * patience); !l.post(one, calls[i%len(calls)]) && time.Now().Before(deadline); {
				time.Sleep(pause)
			}
		})
		l.check(one)
	})
}
