//go:build unix

package faulttest

import (
	"testing"
	"time"
)

// Many who ask at once for what is done are all answered with it, under each
// guarantee.
func TestReplaysAtOnce(t *testing.T) {
	onEach(t, func(t *testing.T, d database, e effects) {
		one, two := pair(t, newConfig(d, 30*time.Second))
		servers := []*process{one, two}
		for _, path := range paths {
			key := "done" + path[1:]
			first := one.post(path, key, "effect")
			want(t, "first", first, created)
			for _, a := range answers(100, func(i int) answer { return servers[i%2].post(path, key, "effect") }) {
				want(t, path, a, replayed)
			}
		}
	})
}
