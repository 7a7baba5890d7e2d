package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// Names of promises that the suite's own test refers to.
const (
	onlyHolderWrites     = "only the holder of a claim writes its row"
	noApplicationClock   = "no application's clock is compared"
	losersReadTheWinner  = "of 100 claims at once one wins and the others read its row"
	lateWritesSpare      = "late writes spare the claim that came after a release"
	takeoverNoComparison = "a takeover compares neither fingerprint nor owner"
	resentClaimWins      = "a claim that is sent again recognises its own row"
	sweepSparesLive      = "a sweep spares rows that are not expired"
	oneTakeoverWins      = "of many takeovers of one claim one wins"
	bytesComeBack        = "headers and body come back byte for byte"
)

var promises = []promise{
	// Claim.
	{"a claim of a free key wins", claimWins},
	{"a claim reads the row that is there", claimReads},
	{"a claim of one key leaves others alone", keysAreSeparate},
	{losersReadTheWinner, oneClaimWins},
	{"claims that race with releases neither fail nor read nothing", claimsAndReleases},
	{resentClaimWins, resentClaim},
	{"a claim never replaces a row, lapsed or expired", claimNeverReplaces},
	{"a row keeps its owner and fingerprint", rowKeepsClaim},
	{"a store keeps no slice of its caller's", slicesAreCopied},
	{noApplicationClock, clock},

	// Takeover.
	{"a takeover replaces a lapsed claim and counts the attempt", takeoverOfLapsed},
	{"a takeover of an expired row begins at attempt 1 with nothing left", takeoverOfExpired},
	{"a takeover of a live claim loses and reads it", takeoverOfLive},
	{"a takeover of a lapsed at-most-once claim loses", takeoverOfAtMostOnce},
	{"a takeover of another claim than the one seen loses", takeoverOfUnseen},
	{"a takeover of a row that is gone returns a zero row", takeoverOfNothing},
	{"a takeover that is sent again recognises its own row", resentTakeover},
	{takeoverNoComparison, takeoverComparesNothing},
	{oneTakeoverWins, oneTakeover},

	// Renew and MarkEffect.
	{"a renewal moves the end of the lease", renewMoves},
	{"a renewal holds a lapsed lease that nobody took over", renewAfterLapse},
	{"a renewal of no row is a lost lease", renewOfNothing},
	{"a marked row stays at-most-once", markStays},
	{"a marked row never expires", markedNeverExpires},
	{"a row claimed at-most-once never expires while it is processing", atMostOnceNeverExpires},
	{"an at-most-once row expires after its completion", atMostOnceCompletes},
	{"a processing row outlives its lease by its time to live", processingOutlivesLease},

	// Settle.
	{"a settled outcome is read by every claim", settleIsRead},
	{"a settlement after the lease holds if nobody took over", settleAfterLapse},
	{"a settlement that is sent again is won", resentSettle},
	{"a settlement with another outcome reads the first", settleTwice},
	{"a settlement of no row returns a zero row", settleOfNothing},
	{"an outcome that cannot be replayed is kept as such", notReplayable},
	{"an unknown outcome never expires", unknownNeverExpires},
	{"a time to live counts from completion", ttlCountsFromCompletion},
	{bytesComeBack, fidelity},
	{"a body of one mebibyte comes back", largeBody},

	// Release and fencing.
	{"a release frees the key at once", releaseFrees},
	{"a release of no row is done", releaseOfNothing},
	{"a settled row cannot be released", releaseOfSettled},
	{onlyHolderWrites, zombie},
	{lateWritesSpare, zombieThroughRelease},

	// Sweep.
	{"a sweep deletes what expired", sweepDeletes},
	{"a sweep deletes at most as many as it may", sweepIsBounded},
	{sweepSparesLive, sweepSpares},
	{"sweeps at once count each row once", sweepsAtOnce},

	// Contexts.
	{"a context that has ended is an error and writes nothing", endedContext},
}

func claimWins(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	row, err := s.Claim(ctx, c)
	if err != nil {
		return err
	}
	return same(row, idempotency.Row{Won: true, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1})
}

func claimReads(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	c.AtMostOnce = true
	if err := win(ctx, s, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	return same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, AtMostOnce: true, Attempt: 1})
}

func keysAreSeparate(ctx context.Context, s idempotency.Store) error {
	a, b := newClaim(), newClaim()
	// The least difference that two hashes can have.
	b.Hash = a.Hash
	b.Hash[31] ^= 1
	if err := win(ctx, s, a); err != nil {
		return err
	}
	if err := win(ctx, s, b); err != nil {
		return err
	}
	if err := settle(ctx, s, a, answer); err != nil {
		return err
	}
	return holds(ctx, s, b)
}

func oneClaimWins(ctx context.Context, s idempotency.Store) error {
	for range 3 {
		key := newClaim()
		rows, err := together(100, func(int) (idempotency.Row, error) { return s.Claim(ctx, rival(key)) })
		if err != nil {
			return err
		}
		won := winners(rows)
		if len(won) != 1 {
			return fmt.Errorf("%d of 100 claims won", len(won))
		}
		want := won[0]
		want.Won = false
		for _, row := range rows {
			if row.Won {
				continue
			}
			if err := same(row, want); err != nil {
				return fmt.Errorf("a loser did not read the winner's row: %w", err)
			}
		}
	}
	return nil
}

func claimsAndReleases(ctx context.Context, s idempotency.Store) error {
	key := newClaim()
	wins, err := together(16, func(int) (int, error) {
		won := 0
		for range 25 {
			c := rival(key)
			row, err := s.Claim(ctx, c)
			switch {
			case err != nil:
				return won, err
			case row.IsZero():
				return won, errors.New("Claim returned a zero row")
			case row.State != idempotency.Processing:
				return won, fmt.Errorf("Claim read a state that nobody wrote: %s", show(row))
			case row.Won:
				won++
				if err := s.Release(ctx, c); err != nil {
					return won, fmt.Errorf("Release: %w", err)
				}
			case row.Lapsed:
				return won, fmt.Errorf("Claim read a lapsed row: %s", show(row))
			}
		}
		return won, nil
	})
	if err != nil {
		return err
	}
	for _, won := range wins {
		if won > 0 {
			return nil
		}
	}
	return errors.New("no claim won")
}

func resentClaim(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := win(ctx, s, c); err != nil {
		return fmt.Errorf("sent again: %w", err)
	}
	return holds(ctx, s, c)
}

func claimNeverReplaces(ctx context.Context, s idempotency.Store) error {
	lapsed := brieflyHeld()
	if err := win(ctx, s, lapsed); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, lapsed); err != nil {
		return err
	}
	if err := holds(ctx, s, lapsed); err != nil {
		return err
	}
	expired := newClaim()
	expired.TTL = brief
	if err := win(ctx, s, expired); err != nil {
		return err
	}
	if err := settle(ctx, s, expired, answer); err != nil {
		return err
	}
	if err := awaitExpired(ctx, s, expired); err != nil {
		return err
	}
	row, err := peek(ctx, s, expired)
	if err != nil {
		return err
	}
	if row.ID != expired.ID || row.State != idempotency.Completed {
		return fmt.Errorf("an expired row was not returned as it is: %s", show(row))
	}
	return sameOutcome(row.Outcome, answer)
}

func rowKeepsClaim(ctx context.Context, s idempotency.Store) error {
	for size := 0; size <= 128; size += 32 {
		c := newClaim()
		c.Fingerprint = bytes.Repeat([]byte{0, 0xff, '\'', '\\'}, 32)[:size]
		c.Operation = "POST /o'rders/\\{id}\x00\xff;--"
		c.Key = "k'\\\"\x00\xfe\xff$1?"
		if err := win(ctx, s, c); err != nil {
			return err
		}
		row, err := peek(ctx, s, c)
		if err != nil {
			return err
		}
		if err := same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1}); err != nil {
			return err
		}
	}
	return nil
}

func slicesAreCopied(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	want := *c
	want.Fingerprint = bytes.Clone(c.Fingerprint)
	if err := win(ctx, s, c); err != nil {
		return err
	}
	o := answer
	o.Header, o.Body = bytes.Clone(answer.Header), bytes.Clone(answer.Body)
	if err := settle(ctx, s, c, o); err != nil {
		return err
	}
	for _, b := range [][]byte{c.Fingerprint, o.Header, o.Body} {
		clear(b)
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if !bytes.Equal(row.Fingerprint, want.Fingerprint) {
		return errors.New("the row changed with its caller's fingerprint")
	}
	return sameOutcome(row.Outcome, answer)
}

func clock(ctx context.Context, s idempotency.Store) error {
	held := newClaim()
	if err := win(ctx, s, held); err != nil {
		return err
	}
	row, err := peek(ctx, s, held)
	if err != nil {
		return err
	}
	// Half a lease is more than a test takes and less than a clock is off.
	if row.Lapsed || row.Expired || row.LeaseLeft < held.Lease/2 || row.LeaseLeft > held.Lease {
		return fmt.Errorf("a lease of %v that has just begun reads as %s", held.Lease, show(row))
	}
	short := brieflyHeld()
	short.TTL = brief
	if err := win(ctx, s, short); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, short); err != nil {
		return err
	}
	row, err = peek(ctx, s, short)
	if err != nil {
		return err
	}
	if row.LeaseLeft != 0 {
		return fmt.Errorf("a lapsed lease has time left: %s", show(row))
	}
	return awaitExpired(ctx, s, short)
}

func takeoverOfLapsed(ctx context.Context, s idempotency.Store) error {
	first := brieflyHeld()
	if err := win(ctx, s, first); err != nil {
		return err
	}
	for attempt := 2; attempt <= 3; attempt++ {
		if err := awaitLapsed(ctx, s, first); err != nil {
			return err
		}
		next := rival(first)
		next.Lease = brief
		row, err := s.Takeover(ctx, next, first.ID)
		if err != nil {
			return err
		}
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: attempt}
		if err := same(row, want); err != nil {
			return err
		}
		if row, err = peek(ctx, s, first); err != nil {
			return err
		}
		want.Won = false
		if err := same(row, want); err != nil {
			return fmt.Errorf("read again: %w", err)
		}
		first = next
	}
	return nil
}

func takeoverOfExpired(ctx context.Context, s idempotency.Store) error {
	for _, state := range []idempotency.State{idempotency.Processing, idempotency.Completed, idempotency.NotReplayable} {
		old := brieflyHeld()
		old.TTL = brief
		if err := win(ctx, s, old); err != nil {
			return err
		}
		if state != idempotency.Processing {
			o := answer
			o.State = state
			if err := settle(ctx, s, old, o); err != nil {
				return err
			}
		}
		if err := awaitExpired(ctx, s, old); err != nil {
			return err
		}
		next := rival(old)
		next.AtMostOnce = true
		row, err := s.Takeover(ctx, next, old.ID)
		if err != nil {
			return err
		}
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, AtMostOnce: true, Attempt: 1}
		if err := same(row, want); err != nil {
			return fmt.Errorf("state %d: %w", state, err)
		}
		if row, err = peek(ctx, s, next); err != nil {
			return err
		}
		want.Won = false
		if err := same(row, want); err != nil {
			return fmt.Errorf("state %d, read again: %w", state, err)
		}
		if row.Expired {
			return fmt.Errorf("state %d: the new claim is expired: %s", state, show(row))
		}
	}
	return nil
}

// takeoverLoses checks that a takeover of the claim seen loses and reads the
// row that is there.
func takeoverLoses(ctx context.Context, s idempotency.Store, c *idempotency.Claim, seen idempotency.ClaimID) error {
	before, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	row, err := s.Takeover(ctx, rival(c), seen)
	if err != nil {
		return err
	}
	if err := same(row, before); err != nil {
		return fmt.Errorf("the loser did not read the row that is there: %w", err)
	}
	after, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	return same(after, before)
}

func takeoverOfLive(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := takeoverLoses(ctx, s, c, c.ID); err != nil {
		return fmt.Errorf("processing: %w", err)
	}
	if err := settle(ctx, s, c, answer); err != nil {
		return err
	}
	if err := takeoverLoses(ctx, s, c, c.ID); err != nil {
		return fmt.Errorf("completed: %w", err)
	}
	return nil
}

func takeoverOfAtMostOnce(ctx context.Context, s idempotency.Store) error {
	claimed := brieflyHeld()
	claimed.AtMostOnce = true
	claimed.TTL = brief
	marked := brieflyHeld()
	marked.TTL = brief
	for _, c := range []*idempotency.Claim{claimed, marked} {
		if err := win(ctx, s, c); err != nil {
			return err
		}
	}
	if err := s.MarkEffect(ctx, marked); err != nil {
		return err
	}
	for _, c := range []*idempotency.Claim{claimed, marked} {
		if err := awaitLapsed(ctx, s, c); err != nil {
			return err
		}
		if err := takeoverLoses(ctx, s, c, c.ID); err != nil {
			return err
		}
	}
	return nil
}

func takeoverOfUnseen(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, c); err != nil {
		return err
	}
	return takeoverLoses(ctx, s, c, newClaim().ID)
}

func takeoverOfNothing(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	row, err := s.Takeover(ctx, c, newClaim().ID)
	if err != nil {
		return err
	}
	if row.Won || !row.IsZero() {
		return fmt.Errorf("got %s", show(row))
	}
	return win(ctx, s, c)
}

func resentTakeover(ctx context.Context, s idempotency.Store) error {
	old := brieflyHeld()
	if err := win(ctx, s, old); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, old); err != nil {
		return err
	}
	next := rival(old)
	for range 2 {
		row, err := s.Takeover(ctx, next, old.ID)
		if err != nil {
			return err
		}
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: 2}
		if err := same(row, want); err != nil {
			return err
		}
	}
	return nil
}

func takeoverComparesNothing(ctx context.Context, s idempotency.Store) error {
	old := brieflyHeld()
	if err := win(ctx, s, old); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, old); err != nil {
		return err
	}
	other := rival(old)
	row, err := s.Takeover(ctx, other, old.ID)
	if err != nil {
		return err
	}
	if !row.Won {
		return fmt.Errorf("another fingerprint and owner lost: %s", show(row))
	}
	return nil
}

func oneTakeover(ctx context.Context, s idempotency.Store) error {
	old := brieflyHeld()
	if err := win(ctx, s, old); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, old); err != nil {
		return err
	}
	rows, err := together(30, func(int) (idempotency.Row, error) { return s.Takeover(ctx, rival(old), old.ID) })
	if err != nil {
		return err
	}
	won := winners(rows)
	if len(won) != 1 {
		return fmt.Errorf("%d of 30 takeovers won", len(won))
	}
	want := won[0]
	want.Won = false
	for _, row := range rows {
		if row.Won {
			continue
		}
		if err := same(row, want); err != nil {
			return fmt.Errorf("a loser did not read the winner's row: %w", err)
		}
	}
	return nil
}

func renewMoves(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	c.Lease = long / 4
	if err := win(ctx, s, c); err != nil {
		return err
	}
	c.Lease = long
	if err := s.Renew(ctx, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.LeaseLeft < long/2 {
		return fmt.Errorf("after a renewal by %v: %s", c.Lease, show(row))
	}
	return nil
}

func renewAfterLapse(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, c); err != nil {
		return err
	}
	c.Lease = long
	if err := s.Renew(ctx, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.Lapsed || row.LeaseLeft < long/2 {
		return fmt.Errorf("the renewed lease does not hold: %s", show(row))
	}
	return takeoverLoses(ctx, s, c, c.ID)
}

func renewOfNothing(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := s.Renew(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
		return fmt.Errorf("Renew returned %v, not ErrLeaseLost", err)
	}
	if err := s.MarkEffect(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
		return fmt.Errorf("MarkEffect returned %v, not ErrLeaseLost", err)
	}
	return win(ctx, s, c)
}

func markStays(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := s.MarkEffect(ctx, c); err != nil {
		return err
	}
	if err := s.Renew(ctx, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	return same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, AtMostOnce: true, Attempt: 1})
}

// outlives checks that the row of c does not expire in the time that the row
// of a witness of the same lease and time to live does, and some.
func outlives(ctx context.Context, s idempotency.Store, c *idempotency.Claim) error {
	for range 2 {
		witness := newClaim()
		witness.Lease, witness.TTL = c.Lease, c.TTL
		if err := win(ctx, s, witness); err != nil {
			return err
		}
		if err := awaitExpired(ctx, s, witness); err != nil {
			return err
		}
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.Expired {
		return fmt.Errorf("the row expired: %s", show(row))
	}
	return nil
}

func markedNeverExpires(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	c.TTL = brief
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := s.MarkEffect(ctx, c); err != nil {
		return err
	}
	if err := s.Renew(ctx, c); err != nil {
		return err
	}
	return outlives(ctx, s, c)
}

func atMostOnceNeverExpires(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	c.TTL = brief
	c.AtMostOnce = true
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := s.Renew(ctx, c); err != nil {
		return err
	}
	return outlives(ctx, s, c)
}

func atMostOnceCompletes(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	c.TTL = brief
	c.AtMostOnce = true
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := settle(ctx, s, c, answer); err != nil {
		return err
	}
	return awaitExpired(ctx, s, c)
}

func processingOutlivesLease(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.Expired {
		return fmt.Errorf("the row expired with its lease: %s", show(row))
	}
	return nil
}

func settleIsRead(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	row, err := s.Settle(ctx, c, answer)
	if err != nil {
		return err
	}
	want := idempotency.Row{
		Won: true, State: idempotency.Completed, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1, Outcome: answer,
	}
	if err := same(row, want); err != nil {
		return err
	}
	want.Won = false
	if row, err = peek(ctx, s, c); err != nil {
		return err
	}
	if row.Lapsed || row.Expired || row.LeaseLeft != 0 {
		return fmt.Errorf("a completed row has a lease, or is expired: %s", show(row))
	}
	if err := same(row, want); err != nil {
		return err
	}
	// Not even its own claim runs again.
	if row, err = s.Claim(ctx, c); err != nil {
		return err
	}
	return same(row, want)
}

func settleAfterLapse(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, c); err != nil {
		return err
	}
	return settle(ctx, s, c, answer)
}

func resentSettle(ctx context.Context, s idempotency.Store) error {
	for _, o := range []idempotency.Outcome{
		answer,
		{State: idempotency.NotReplayable, Status: 200},
		{State: idempotency.Unknown},
		{State: idempotency.Completed, Status: 204, Header: []byte{}, Body: []byte{}},
	} {
		c := newClaim()
		if err := win(ctx, s, c); err != nil {
			return err
		}
		for range 2 {
			if err := settle(ctx, s, c, o); err != nil {
				return fmt.Errorf("state %d: %w", o.State, err)
			}
		}
	}
	return nil
}

func settleTwice(ctx context.Context, s idempotency.Store) error {
	for _, change := range []func(*idempotency.Outcome){
		func(o *idempotency.Outcome) { o.State = idempotency.NotReplayable },
		func(o *idempotency.Outcome) { o.Status = 200 },
		func(o *idempotency.Outcome) { o.Header = []byte("Location: /orders/2\r\n") },
		func(o *idempotency.Outcome) { o.Body = []byte(`{"a":1.0,"b":1}`) },
	} {
		c := newClaim()
		if err := win(ctx, s, c); err != nil {
			return err
		}
		if err := settle(ctx, s, c, answer); err != nil {
			return err
		}
		other := answer
		change(&other)
		row, err := s.Settle(ctx, c, other)
		if err != nil {
			return err
		}
		want := idempotency.Row{State: idempotency.Completed, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1, Outcome: answer}
		if err := same(row, want); err != nil {
			return err
		}
	}
	return nil
}

func settleOfNothing(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	row, err := s.Settle(ctx, c, answer)
	if err != nil {
		return err
	}
	if row.Won || !row.IsZero() {
		return fmt.Errorf("got %s", show(row))
	}
	return win(ctx, s, c)
}

func notReplayable(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := settle(ctx, s, c, idempotency.Outcome{State: idempotency.NotReplayable, Status: 200}); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.State != idempotency.NotReplayable || row.Outcome.Status != 200 {
		return fmt.Errorf("got %s", show(row))
	}
	return nil
}

func unknownNeverExpires(ctx context.Context, s idempotency.Store) error {
	c := brieflyHeld()
	c.TTL = brief
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := settle(ctx, s, c, idempotency.Outcome{State: idempotency.Unknown}); err != nil {
		return err
	}
	if err := outlives(ctx, s, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.State != idempotency.Unknown {
		return fmt.Errorf("the row is not unknown any more: %s", show(row))
	}
	return takeoverLoses(ctx, s, c, c.ID)
}

func ttlCountsFromCompletion(ctx context.Context, s idempotency.Store) error {
	// A row whose lease is long and whose time to live is short expires soon
	// after it completed, although it would have lived past its lease.
	c := newClaim()
	c.TTL = brief
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := settle(ctx, s, c, answer); err != nil {
		return err
	}
	if err := awaitExpired(ctx, s, c); err != nil {
		return err
	}
	// One that completed after its first time to live was over lives on.
	c = brieflyHeld()
	c.TTL = brief
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := awaitExpired(ctx, s, c); err != nil {
		return err
	}
	c.TTL = long
	if err := settle(ctx, s, c, answer); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.Expired {
		return fmt.Errorf("the row expired before its time: %s", show(row))
	}
	return nil
}

func fidelity(ctx context.Context, s idempotency.Store) error {
	every := make([]byte, 512)
	for i := range every {
		every[i] = byte(i)
	}
	bodies := [][]byte{
		every,
		nil,
		{},
		{0},
		[]byte(`{"z":1.0, "a":12345678901234567890,"a":2}` + "\n"),
		[]byte(`'; DROP TABLE idempotency_keys; -- \x00 $1 ? %s`),
		[]byte("\xef\xbb\xbf\xff\xfe\r\n"),
	}
	for _, body := range bodies {
		c := newClaim()
		if err := win(ctx, s, c); err != nil {
			return err
		}
		o := idempotency.Outcome{State: idempotency.Completed, Status: 599, Header: body, Body: body}
		if err := settle(ctx, s, c, o); err != nil {
			return err
		}
		row, err := peek(ctx, s, c)
		if err != nil {
			return err
		}
		if err := sameOutcome(row.Outcome, o); err != nil {
			return err
		}
	}
	return nil
}

func largeBody(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	o := answer
	o.Body = make([]byte, 1<<20)
	for i := range o.Body {
		o.Body[i] = byte(i * i >> 7)
	}
	if err := settle(ctx, s, c, o); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	return sameOutcome(row.Outcome, o)
}

func releaseFrees(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	if err := s.Release(ctx, c); err != nil {
		return err
	}
	next := rival(c)
	row, err := s.Claim(ctx, next)
	if err != nil {
		return err
	}
	return same(row, idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: 1})
}

func releaseOfNothing(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := s.Release(ctx, c); err != nil {
		return err
	}
	if err := win(ctx, s, c); err != nil {
		return err
	}
	for range 2 {
		if err := s.Release(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func releaseOfSettled(ctx context.Context, s idempotency.Store) error {
	for _, state := range []idempotency.State{idempotency.Completed, idempotency.NotReplayable, idempotency.Unknown} {
		c := newClaim()
		if err := win(ctx, s, c); err != nil {
			return err
		}
		o := answer
		o.State = state
		if err := settle(ctx, s, c, o); err != nil {
			return err
		}
		if err := s.Release(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
			return fmt.Errorf("state %d: Release returned %v, not ErrLeaseLost", state, err)
		}
		if err := s.Renew(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
			return fmt.Errorf("state %d: Renew returned %v, not ErrLeaseLost", state, err)
		}
		if err := s.MarkEffect(ctx, c); !errors.Is(err, idempotency.ErrLeaseLost) {
			return fmt.Errorf("state %d: MarkEffect returned %v, not ErrLeaseLost", state, err)
		}
		if _, err := peek(ctx, s, c); err != nil {
			return err
		}
	}
	return nil
}

func zombie(ctx context.Context, s idempotency.Store) error {
	dead := brieflyHeld()
	if err := win(ctx, s, dead); err != nil {
		return err
	}
	if err := awaitLapsed(ctx, s, dead); err != nil {
		return err
	}
	next := rival(dead)
	row, err := s.Takeover(ctx, next, dead.ID)
	if err != nil {
		return err
	}
	if !row.Won {
		return fmt.Errorf("Takeover did not win: %s", show(row))
	}
	if err := lost(ctx, s, dead); err != nil {
		return err
	}
	if err := settle(ctx, s, next, answer); err != nil {
		return err
	}
	return lost(ctx, s, dead)
}

func zombieThroughRelease(ctx context.Context, s idempotency.Store) error {
	dead := newClaim()
	if err := win(ctx, s, dead); err != nil {
		return err
	}
	if err := s.Release(ctx, dead); err != nil {
		return err
	}
	// Everything of the new claim but its id is the old one's.
	next := *dead
	next.ID = newClaim().ID
	if err := win(ctx, s, &next); err != nil {
		return err
	}
	if err := lost(ctx, s, dead); err != nil {
		return err
	}
	return holds(ctx, s, &next)
}

// expire leaves n expired rows, of every state that expires.
func expire(ctx context.Context, s idempotency.Store, n int) ([]*idempotency.Claim, error) {
	claims := make([]*idempotency.Claim, n)
	for i := range claims {
		c := brieflyHeld()
		c.TTL = brief
		if err := win(ctx, s, c); err != nil {
			return nil, err
		}
		if i%3 > 0 {
			o := answer
			o.State = idempotency.State(i % 3)
			if err := settle(ctx, s, c, o); err != nil {
				return nil, err
			}
		}
		claims[i] = c
	}
	for _, c := range claims {
		if err := awaitExpired(ctx, s, c); err != nil {
			return nil, err
		}
	}
	return claims, nil
}

// sweepAll sweeps until n rows are deleted.
func sweepAll(ctx context.Context, s idempotency.Store, max, n int) error {
	sweeper, ok := s.(idempotency.Sweeper)
	if !ok {
		return errors.New("the store is no Sweeper")
	}
	for deadline := time.Now().Add(patience); n > 0; {
		swept, err := sweeper.Sweep(ctx, max)
		if err != nil {
			return fmt.Errorf("Sweep: %w", err)
		}
		if swept > max || swept > n {
			return fmt.Errorf("Sweep deleted %d rows of %d expired ones, at most %d at once", swept, n, max)
		}
		n -= swept
		if time.Now().After(deadline) {
			return fmt.Errorf("%d expired rows are never swept", n)
		}
	}
	return nil
}

func sweepDeletes(ctx context.Context, s idempotency.Store) error {
	claims, err := expire(ctx, s, 6)
	if err != nil {
		return err
	}
	if err := sweepAll(ctx, s, 1000, len(claims)); err != nil {
		return err
	}
	for _, c := range claims {
		if err := win(ctx, s, rival(c)); err != nil {
			return fmt.Errorf("after the sweep: %w", err)
		}
	}
	return nil
}

func sweepIsBounded(ctx context.Context, s idempotency.Store) error {
	claims, err := expire(ctx, s, 7)
	if err != nil {
		return err
	}
	return sweepAll(ctx, s, 2, len(claims))
}

func sweepSpares(ctx context.Context, s idempotency.Store) error {
	processing := newClaim()
	lapsed := brieflyHeld()
	atMostOnce := brieflyHeld()
	atMostOnce.TTL, atMostOnce.AtMostOnce = brief, true
	marked := brieflyHeld()
	marked.TTL = brief
	completed, replayless, unknown := newClaim(), newClaim(), newClaim()
	unknown.TTL = brief
	live := []*idempotency.Claim{processing, lapsed, atMostOnce, marked, completed, replayless, unknown}
	for _, c := range live {
		if err := win(ctx, s, c); err != nil {
			return err
		}
	}
	if err := s.MarkEffect(ctx, marked); err != nil {
		return err
	}
	for c, state := range map[*idempotency.Claim]idempotency.State{
		completed: idempotency.Completed, replayless: idempotency.NotReplayable, unknown: idempotency.Unknown,
	} {
		o := answer
		o.State = state
		if err := settle(ctx, s, c, o); err != nil {
			return err
		}
	}
	for _, c := range []*idempotency.Claim{lapsed, atMostOnce, marked} {
		if err := awaitLapsed(ctx, s, c); err != nil {
			return err
		}
	}
	expired, err := expire(ctx, s, 3)
	if err != nil {
		return err
	}
	if err := sweepAll(ctx, s, 1000, len(expired)); err != nil {
		return err
	}
	for _, c := range live {
		row, err := peek(ctx, s, c)
		if err != nil {
			return err
		}
		if row.ID != c.ID {
			return fmt.Errorf("the row was replaced: %s", show(row))
		}
	}
	return nil
}

func sweepsAtOnce(ctx context.Context, s idempotency.Store) error {
	sweeper, ok := s.(idempotency.Sweeper)
	if !ok {
		return errors.New("the store is no Sweeper")
	}
	expired, err := expire(ctx, s, 12)
	if err != nil {
		return err
	}
	live := newClaim()
	if err := win(ctx, s, live); err != nil {
		return err
	}
	swept, err := together(4, func(int) (int, error) {
		total := 0
		for range 5 {
			n, err := sweeper.Sweep(ctx, 3)
			if err != nil {
				return total, err
			}
			total += n
		}
		return total, nil
	})
	if err != nil {
		return err
	}
	left := len(expired)
	for _, n := range swept {
		left -= n
	}
	if left < 0 {
		return fmt.Errorf("%d rows were counted twice", -left)
	}
	if err := sweepAll(ctx, s, 1000, left); err != nil {
		return err
	}
	return holds(ctx, s, live)
}

func endedContext(ctx context.Context, s idempotency.Store) error {
	c := newClaim()
	if err := win(ctx, s, c); err != nil {
		return err
	}
	free := newClaim()
	ended, cancel := context.WithCancel(ctx)
	cancel()
	calls := map[string]func() error{
		"Claim":      func() error { _, err := s.Claim(ended, free); return err },
		"Takeover":   func() error { _, err := s.Takeover(ended, rival(c), c.ID); return err },
		"Renew":      func() error { return s.Renew(ended, c) },
		"MarkEffect": func() error { return s.MarkEffect(ended, c) },
		"Settle":     func() error { _, err := s.Settle(ended, c, answer); return err },
		"Release":    func() error { return s.Release(ended, c) },
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%s returned %v, not context.Canceled", name, err)
		}
	}
	if err := win(ctx, s, free); err != nil {
		return err
	}
	if err := holds(ctx, s, c); err != nil {
		return err
	}
	row, err := peek(ctx, s, c)
	if err != nil {
		return err
	}
	if row.AtMostOnce {
		return errors.New("MarkEffect wrote")
	}
	return nil
}
