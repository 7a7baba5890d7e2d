package storetest

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A mutant is a right store with one fault. It remembers who holds each key and
// what was claimed, as far as its fault needs that.
type mutant struct {
	*memorystore.Store
	mu     sync.Mutex
	holder map[[32]byte]*idempotency.Claim
	calls  map[idempotency.ClaimID]int
}

func newMutant() *mutant {
	return &mutant{Store: memorystore.New(), holder: map[[32]byte]*idempotency.Claim{}, calls: map[idempotency.ClaimID]int{}}
}

func (m *mutant) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := m.Store.Claim(ctx, c)
	m.note(c, row)
	return row, err
}

func (m *mutant) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	row, err := m.Store.Takeover(ctx, c, seen)
	m.note(c, row)
	return row, err
}

func (m *mutant) note(c *idempotency.Claim, row idempotency.Row) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[c.ID]++
	if row.Won {
		m.holder[c.Hash] = c
	}
}

// asHolder returns c with the id of whoever holds its key.
func (m *mutant) asHolder(c *idempotency.Claim) *idempotency.Claim {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h, ok := m.holder[c.Hash]; ok {
		disguised := *c
		disguised.ID = h.ID
		return &disguised
	}
	return c
}

type ignoresID struct{ *mutant }

func (m ignoresID) Renew(ctx context.Context, c *idempotency.Claim) error {
	return m.mutant.Renew(ctx, m.asHolder(c))
}

func (m ignoresID) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	return m.mutant.MarkEffect(ctx, m.asHolder(c))
}

func (m ignoresID) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	return m.mutant.Settle(ctx, m.asHolder(c), o)
}

// An appClock reads leases against a clock that is off.
type appClock struct {
	*mutant
	off time.Duration
}

func (m appClock) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := m.mutant.Claim(ctx, c)
	if row.State == idempotency.Processing {
		row.LeaseLeft = max(0, row.LeaseLeft-m.off)
		row.Lapsed = row.LeaseLeft == 0
	}
	return row, err
}

// A zeroRows does not read again when the row that it lost to is not there to
// be read yet.
type zeroRows struct{ *mutant }

func (m zeroRows) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := m.mutant.Claim(ctx, c)
	if err == nil && !row.Won {
		row = idempotency.Row{State: idempotency.Processing, ID: idempotency.ClaimID{15: 1}, LeaseLeft: c.Lease}
	}
	return row, err
}

type lateRelease struct{ *mutant }

func (m lateRelease) Release(ctx context.Context, c *idempotency.Claim) error {
	return m.mutant.Release(ctx, m.asHolder(c))
}

type takeoverCompares struct{ *mutant }

func (m takeoverCompares) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	row, err := m.Store.Claim(ctx, c)
	if err != nil || !bytes.Equal(row.Fingerprint, c.Fingerprint) {
		return row, err
	}
	return m.mutant.Takeover(ctx, c, seen)
}

type resentLoses struct{ *mutant }

func (m resentLoses) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := m.mutant.Claim(ctx, c)
	m.mu.Lock()
	defer m.mu.Unlock()
	row.Won = row.Won && m.calls[c.ID] == 1
	return row, err
}

// A sweepsLive takes a processing row whose lease ended for garbage.
type sweepsLive struct{ *mutant }

func (m sweepsLive) Sweep(ctx context.Context, max int) (int, error) {
	swept, err := m.mutant.Sweep(ctx, max)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.holder {
		if row, err := m.Store.Claim(ctx, c); err == nil && row.Lapsed {
			_ = m.Store.Release(ctx, c)
		}
	}
	return swept, err
}

type twoWinners struct{ *mutant }

func (m twoWinners) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (idempotency.Row, error) {
	row, err := m.mutant.Takeover(ctx, c, seen)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[seen]++
	if m.calls[seen] == 3 { // the claim itself, the winner, and one more
		row.Won, row.ID = true, c.ID
	}
	return row, err
}

type roundsBody struct{ *mutant }

func (m roundsBody) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	var body any
	if json.Unmarshal(o.Body, &body) == nil {
		o.Body, _ = json.Marshal(body)
	}
	return m.mutant.Settle(ctx, c, o)
}

// An everYoung says of every settled row that its whole time is still to come,
// and more.
type everYoung struct{ *mutant }

func (m everYoung) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := m.mutant.Claim(ctx, c)
	if row.ExpiresIn > 0 {
		row.ExpiresIn += time.Hour
	}
	return row, err
}

func TestRejectsMutants(t *testing.T) {
	for _, test := range []struct {
		name   string
		store  func() idempotency.Store
		broken string
	}{
		{"ignores the claim's id", func() idempotency.Store { return ignoresID{newMutant()} }, onlyHolderWrites},
		{"compares an app clock that is ahead", func() idempotency.Store { return appClock{newMutant(), time.Hour} }, noApplicationClock},
		{"compares an app clock that is behind", func() idempotency.Store { return appClock{newMutant(), -time.Hour} }, noApplicationClock},
		{"takes zero rows for in flight", func() idempotency.Store { return zeroRows{newMutant()} }, losersReadTheWinner},
		{"late release deletes the successor", func() idempotency.Store { return lateRelease{newMutant()} }, lateWritesSpare},
		{"takeover compares fingerprints", func() idempotency.Store { return takeoverCompares{newMutant()} }, takeoverNoComparison},
		{"resent claim reads as lost", func() idempotency.Store { return resentLoses{newMutant()} }, resentClaimWins},
		{"sweeps a live row", func() idempotency.Store { return sweepsLive{newMutant()} }, sweepSparesLive},
		{"two winners of a takeover", func() idempotency.Store { return twoWinners{newMutant()} }, oneTakeoverWins},
		{"rounds the body through json", func() idempotency.Store { return roundsBody{newMutant()} }, bytesComeBack},
		{"says that rows live longer than they do", func() idempotency.Store { return everYoung{newMutant()} }, settledRowsSayWhen},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p := find(t, test.broken)
			if err := p.test(t.Context(), newMutant()); err != nil {
				t.Fatalf("the right store breaks %q: %v", p.name, err)
			}
			err := p.test(t.Context(), test.store())
			if err == nil {
				t.Fatalf("the suite does not see that the store breaks %q", p.name)
			}
			t.Log(err)
		})
	}
}

func find(t *testing.T, name string) promise {
	t.Helper()
	for _, p := range promises {
		if p.name == name {
			return p
		}
	}
	t.Fatalf("no promise is called %q", name)
	return promise{}
}

func TestNamesAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range promises {
		if seen[p.name] || strings.TrimSpace(p.name) == "" {
			t.Errorf("%q names two promises, or none", p.name)
		}
		seen[p.name] = true
	}
}
