package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
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
	settledRowsSayWhen   = "a settled row says how long it still lives"
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
	{settledRowsSayWhen, settledRowsExpireIn},
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

func claimWins(k *check) {
	c := newClaim()
	row := k.claim(c)
	k.same(row, idempotency.Row{Won: true, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1})
}

func claimReads(k *check) {
	c := newClaim()
	c.AtMostOnce = true
	k.win(c)
	row := k.peek(c)
	k.same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, AtMostOnce: true, Attempt: 1})
}

func keysAreSeparate(k *check) {
	a, b := newClaim(), newClaim()
	// The least difference that two hashes can have.
	b.Hash = a.Hash
	b.Hash[31] ^= 1
	k.win(a)
	k.win(b)
	k.settle(a, answer)
	k.holds(b)
}

func oneClaimWins(k *check) {
	for range 3 {
		key := newClaim()
		rows := together(k, 100, func() (idempotency.Row, error) { return k.store.Claim(k.ctx, rival(key)) })
		k.oneWinner(rows)
	}
}

func claimsAndReleases(k *check) {
	key := newClaim()
	wins := together(k, 16, func() (int, error) {
		won := 0
		for range 25 {
			c := rival(key)
			row, err := k.store.Claim(k.ctx, c)
			switch {
			case err != nil:
				return won, err
			case row.IsZero():
				return won, errors.New("a claim read a zero row")
			case row.State != idempotency.Processing:
				return won, fmt.Errorf("a claim read a state that nobody wrote: %s", show(row))
			case row.Won:
				won++
				if err := k.store.Release(k.ctx, c); err != nil {
					return won, err
				}
			case row.Lapsed:
				return won, fmt.Errorf("a claim read a lapsed row: %s", show(row))
			}
		}
		return won, nil
	})
	if slices.Max(wins) == 0 {
		k.fail("no claim won")
	}
}

func resentClaim(k *check) {
	c := newClaim()
	k.win(c)
	k.win(c)
	k.holds(c)
}

func claimNeverReplaces(k *check) {
	lapsed := brieflyHeld()
	k.win(lapsed)
	k.awaitLapsed(lapsed)
	k.holds(lapsed)
	expired := newClaim()
	expired.TTL = brief
	k.win(expired)
	k.settle(expired, answer)
	k.awaitExpired(expired)
	row := k.peek(expired)
	if row.ID != expired.ID || row.State != idempotency.Completed {
		k.fail("an expired row was not returned as it is: %s", show(row))
	}
	k.sameOutcome(row.Outcome, answer)
}

func rowKeepsClaim(k *check) {
	for size := 0; size <= 128; size += 32 {
		c := newClaim()
		c.Fingerprint = bytes.Repeat([]byte{0, 0xff, '\'', '\\'}, 32)[:size]
		c.Operation = "POST /o'rders/\\{id}\x00\xff;--"
		c.Key = "k'\\\"\x00\xfe\xff$1?"
		k.win(c)
		row := k.peek(c)
		k.same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1})
	}
}

func slicesAreCopied(k *check) {
	c := newClaim()
	want := *c
	want.Fingerprint = bytes.Clone(c.Fingerprint)
	k.win(c)
	o := answer
	o.Header, o.Body = bytes.Clone(answer.Header), bytes.Clone(answer.Body)
	k.settle(c, o)
	for _, b := range [][]byte{c.Fingerprint, o.Header, o.Body} {
		clear(b)
	}
	row := k.peek(c)
	if !bytes.Equal(row.Fingerprint, want.Fingerprint) {
		k.fail("the row changed with its caller's fingerprint")
	}
	k.sameOutcome(row.Outcome, answer)
}

func clock(k *check) {
	held := newClaim()
	k.win(held)
	row := k.peek(held)
	// Half a lease is more than a test takes and less than a clock is off.
	if row.Lapsed || row.Expired || row.LeaseLeft < held.Lease/2 || row.LeaseLeft > held.Lease {
		k.fail("a lease of %v that has just begun reads as %s", held.Lease, show(row))
	}
	short := brieflyHeld()
	short.TTL = brief
	k.win(short)
	k.awaitLapsed(short)
	row = k.peek(short)
	if row.LeaseLeft != 0 {
		k.fail("a lapsed lease has time left: %s", show(row))
	}
	k.awaitExpired(short)
}

func takeoverOfLapsed(k *check) {
	first := brieflyHeld()
	k.win(first)
	for attempt := 2; attempt <= 3; attempt++ {
		k.awaitLapsed(first)
		next := rival(first)
		next.Lease = brief
		row := k.takeover(next, first.ID)
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: attempt}
		k.same(row, want)
		row = k.peek(first)
		want.Won = false
		k.same(row, want)
		first = next
	}
}

func takeoverOfExpired(k *check) {
	for _, state := range []idempotency.State{idempotency.Processing, idempotency.Completed, idempotency.NotReplayable} {
		old := brieflyHeld()
		old.TTL = brief
		k.win(old)
		if state != idempotency.Processing {
			o := answer
			o.State = state
			k.settle(old, o)
		}
		k.awaitExpired(old)
		next := rival(old)
		next.AtMostOnce = true
		row := k.takeover(next, old.ID)
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, AtMostOnce: true, Attempt: 1}
		k.same(row, want)
		row = k.peek(next)
		want.Won = false
		k.same(row, want)
		if row.Expired {
			k.fail("state %d: the new claim is expired: %s", state, show(row))
		}
	}
}

// takeoverLoses checks that a takeover of the claim seen loses and reads the
// row that is there.
func (k *check) takeoverLoses(c *idempotency.Claim, seen idempotency.ClaimID) {
	before := k.peek(c)
	row := k.takeover(rival(c), seen)
	k.same(row, before)
	after := k.peek(c)
	k.same(after, before)
}

func takeoverOfLive(k *check) {
	c := newClaim()
	k.win(c)
	k.takeoverLoses(c, c.ID)
	k.settle(c, answer)
	k.takeoverLoses(c, c.ID)
}

func takeoverOfAtMostOnce(k *check) {
	claimed := brieflyHeld()
	claimed.AtMostOnce = true
	claimed.TTL = brief
	marked := brieflyHeld()
	marked.TTL = brief
	for _, c := range []*idempotency.Claim{claimed, marked} {
		k.win(c)
	}
	k.mark(marked)
	for _, c := range []*idempotency.Claim{claimed, marked} {
		k.awaitLapsed(c)
		k.takeoverLoses(c, c.ID)
	}
}

func takeoverOfUnseen(k *check) {
	c := brieflyHeld()
	k.win(c)
	k.awaitLapsed(c)
	k.takeoverLoses(c, newClaim().ID)
}

func takeoverOfNothing(k *check) {
	c := newClaim()
	row := k.takeover(c, newClaim().ID)
	if row.Won || !row.IsZero() {
		k.fail("got %s", show(row))
	}
	k.win(c)
}

func resentTakeover(k *check) {
	old := brieflyHeld()
	k.win(old)
	k.awaitLapsed(old)
	next := rival(old)
	for range 2 {
		row := k.takeover(next, old.ID)
		want := idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: 2}
		k.same(row, want)
	}
}

func takeoverComparesNothing(k *check) {
	old := brieflyHeld()
	k.win(old)
	k.awaitLapsed(old)
	other := rival(old)
	row := k.takeover(other, old.ID)
	if !row.Won {
		k.fail("another fingerprint and owner lost: %s", show(row))
	}
}

func oneTakeover(k *check) {
	old := brieflyHeld()
	k.win(old)
	k.awaitLapsed(old)
	rows := together(k, 30, func() (idempotency.Row, error) { return k.store.Takeover(k.ctx, rival(old), old.ID) })
	k.oneWinner(rows)
}

func renewMoves(k *check) {
	c := newClaim()
	c.Lease = long / 4
	k.win(c)
	c.Lease = long
	k.renew(c)
	row := k.peek(c)
	if row.LeaseLeft < long/2 {
		k.fail("after a renewal by %v: %s", c.Lease, show(row))
	}
}

func renewAfterLapse(k *check) {
	c := brieflyHeld()
	k.win(c)
	k.awaitLapsed(c)
	c.Lease = long
	k.renew(c)
	row := k.peek(c)
	if row.Lapsed || row.LeaseLeft < long/2 {
		k.fail("the renewed lease does not hold: %s", show(row))
	}
	k.takeoverLoses(c, c.ID)
}

func renewOfNothing(k *check) {
	c := newClaim()
	k.leaseLost("Renew", k.store.Renew(k.ctx, c))
	k.leaseLost("MarkEffect", k.store.MarkEffect(k.ctx, c))
	k.win(c)
}

func markStays(k *check) {
	c := newClaim()
	k.win(c)
	k.mark(c)
	k.renew(c)
	row := k.peek(c)
	k.same(row, idempotency.Row{ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, AtMostOnce: true, Attempt: 1})
}

// outlives checks that the row of c does not expire in the time that the row
// of a witness of the same lease and time to live does, and some.
func (k *check) outlives(c *idempotency.Claim) {
	for range 2 {
		witness := newClaim()
		witness.Lease, witness.TTL = c.Lease, c.TTL
		k.win(witness)
		k.awaitExpired(witness)
	}
	row := k.peek(c)
	if row.Expired {
		k.fail("the row expired: %s", show(row))
	}
}

func markedNeverExpires(k *check) {
	c := brieflyHeld()
	c.TTL = brief
	k.win(c)
	k.mark(c)
	k.renew(c)
	k.outlives(c)
}

func atMostOnceNeverExpires(k *check) {
	c := brieflyHeld()
	c.TTL = brief
	c.AtMostOnce = true
	k.win(c)
	k.renew(c)
	k.outlives(c)
}

func atMostOnceCompletes(k *check) {
	c := newClaim()
	c.TTL = brief
	c.AtMostOnce = true
	k.win(c)
	k.settle(c, answer)
	k.awaitExpired(c)
}

func processingOutlivesLease(k *check) {
	c := brieflyHeld()
	k.win(c)
	k.awaitLapsed(c)
	row := k.peek(c)
	if row.Expired {
		k.fail("the row expired with its lease: %s", show(row))
	}
}

func settleIsRead(k *check) {
	c := newClaim()
	k.win(c)
	row := k.trySettle(c, answer)
	want := idempotency.Row{
		Won: true, State: idempotency.Completed, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1, Outcome: answer,
	}
	k.same(row, want)
	want.Won = false
	row = k.peek(c)
	if row.Lapsed || row.Expired || row.LeaseLeft != 0 {
		k.fail("a completed row has a lease, or is expired: %s", show(row))
	}
	k.same(row, want)
	// Not even its own claim runs again.
	row = k.claim(c)
	k.same(row, want)
}

func settleAfterLapse(k *check) {
	c := brieflyHeld()
	k.win(c)
	k.awaitLapsed(c)
	k.settle(c, answer)
}

func resentSettle(k *check) {
	for _, o := range []idempotency.Outcome{
		answer,
		{State: idempotency.NotReplayable, Status: 200},
		{State: idempotency.Unknown},
		{State: idempotency.Completed, Status: 204, Header: []byte{}, Body: []byte{}},
	} {
		c := newClaim()
		k.win(c)
		for range 2 {
			k.settle(c, o)
		}
	}
}

func settleTwice(k *check) {
	for _, change := range []func(*idempotency.Outcome){
		func(o *idempotency.Outcome) { o.State = idempotency.NotReplayable },
		func(o *idempotency.Outcome) { o.Status = 200 },
		func(o *idempotency.Outcome) { o.Header = []byte("Location: /orders/2\r\n") },
		func(o *idempotency.Outcome) { o.Body = []byte(`{"a":1.0,"b":1}`) },
	} {
		c := newClaim()
		k.win(c)
		k.settle(c, answer)
		other := answer
		change(&other)
		row := k.trySettle(c, other)
		want := idempotency.Row{State: idempotency.Completed, ID: c.ID, Owner: c.Owner, Fingerprint: c.Fingerprint, Attempt: 1, Outcome: answer}
		k.same(row, want)
	}
}

func settleOfNothing(k *check) {
	c := newClaim()
	row := k.trySettle(c, answer)
	if row.Won || !row.IsZero() {
		k.fail("got %s", show(row))
	}
	k.win(c)
}

func notReplayable(k *check) {
	c := newClaim()
	k.win(c)
	k.settle(c, idempotency.Outcome{State: idempotency.NotReplayable, Status: 200})
	row := k.peek(c)
	if row.State != idempotency.NotReplayable || row.Outcome.Status != 200 {
		k.fail("got %s", show(row))
	}
}

func unknownNeverExpires(k *check) {
	c := brieflyHeld()
	c.TTL = brief
	k.win(c)
	k.settle(c, idempotency.Outcome{State: idempotency.Unknown})
	k.outlives(c)
	row := k.peek(c)
	if row.State != idempotency.Unknown {
		k.fail("the row is not unknown any more: %s", show(row))
	}
	k.takeoverLoses(c, c.ID)
}

func ttlCountsFromCompletion(k *check) {
	// A row whose lease is long and whose time to live is short expires soon
	// after it completed, although it would have lived past its lease.
	c := newClaim()
	c.TTL = brief
	k.win(c)
	k.settle(c, answer)
	k.awaitExpired(c)
	// One that completed after its first time to live was over lives on.
	c = brieflyHeld()
	c.TTL = brief
	k.win(c)
	k.awaitExpired(c)
	c.TTL = long
	k.settle(c, answer)
	row := k.peek(c)
	if row.Expired {
		k.fail("the row expired before its time: %s", show(row))
	}
}

func settledRowsExpireIn(k *check) {
	// says checks what a row says that was settled no earlier than at began.
	says := func(row idempotency.Row, c *idempotency.Claim, began time.Time) {
		if row.ExpiresIn <= c.TTL-time.Since(began)-tick || row.ExpiresIn > c.TTL {
			k.fail("a row that lives for %v says that it expires in %v: %s", c.TTL, row.ExpiresIn, show(row))
		}
	}
	for _, state := range []idempotency.State{idempotency.Completed, idempotency.NotReplayable} {
		c := newClaim()
		k.win(c)
		o := answer
		o.State = state
		began := time.Now()
		row := k.trySettle(c, o)
		says(row, c, began)
		row = k.peek(c)
		says(row, c, began)
	}

	// None lives longer than it says, and what is expired says nothing.
	c := newClaim()
	c.TTL = brief
	k.win(c)
	began := time.Now()
	row := k.trySettle(c, answer)
	says(row, c, began)
	latest := began.Add(row.ExpiresIn)
	for !row.Expired {
		if time.Since(began) > patience {
			k.fail("the row never became expired: %s", show(row))
		}
		asked := time.Now()
		row = k.peek(c)
		if until := asked.Add(row.ExpiresIn); row.ExpiresIn > 0 && until.After(latest) {
			latest = until
		}
	}
	if early := time.Until(latest); early > tick || row.ExpiresIn != 0 {
		k.fail("a row expired %v before it said it would: %s", early, show(row))
	}

	held, unknown := newClaim(), newClaim()
	held.AtMostOnce = true
	k.win(held)
	k.win(unknown)
	k.settle(unknown, idempotency.Outcome{State: idempotency.Unknown})
	for _, c := range []*idempotency.Claim{held, unknown} {
		if row := k.peek(c); row.ExpiresIn != 0 {
			k.fail("a row that does not expire says when: %s", show(row))
		}
	}
}

func fidelity(k *check) {
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
		k.win(c)
		o := idempotency.Outcome{State: idempotency.Completed, Status: 599, Header: body, Body: body}
		k.settle(c, o)
		row := k.peek(c)
		k.sameOutcome(row.Outcome, o)
	}
}

func largeBody(k *check) {
	c := newClaim()
	k.win(c)
	o := answer
	o.Body = make([]byte, 1<<20)
	for i := range o.Body {
		o.Body[i] = byte(i * i >> 7)
	}
	k.settle(c, o)
	row := k.peek(c)
	k.sameOutcome(row.Outcome, o)
}

func releaseFrees(k *check) {
	c := newClaim()
	k.win(c)
	k.release(c)
	next := rival(c)
	row := k.claim(next)
	k.same(row, idempotency.Row{Won: true, ID: next.ID, Owner: next.Owner, Fingerprint: next.Fingerprint, Attempt: 1})
}

func releaseOfNothing(k *check) {
	c := newClaim()
	k.release(c)
	k.win(c)
	for range 2 {
		k.release(c)
	}
}

func releaseOfSettled(k *check) {
	for _, state := range []idempotency.State{idempotency.Completed, idempotency.NotReplayable, idempotency.Unknown} {
		c := newClaim()
		k.win(c)
		o := answer
		o.State = state
		k.settle(c, o)
		k.leaseLost("Release", k.store.Release(k.ctx, c))
		k.leaseLost("Renew", k.store.Renew(k.ctx, c))
		k.leaseLost("MarkEffect", k.store.MarkEffect(k.ctx, c))
		k.peek(c)
	}
}

func zombie(k *check) {
	dead := brieflyHeld()
	k.win(dead)
	k.awaitLapsed(dead)
	next := rival(dead)
	row := k.takeover(next, dead.ID)
	if !row.Won {
		k.fail("the takeover did not win: %s", show(row))
	}
	k.lost(dead)
	k.settle(next, answer)
	k.lost(dead)
}

func zombieThroughRelease(k *check) {
	dead := newClaim()
	k.win(dead)
	k.release(dead)
	// Everything of the new claim but its id is the old one's.
	next := *dead
	next.ID = newClaim().ID
	k.win(&next)
	k.lost(dead)
	k.holds(&next)
}

// expire leaves n expired rows, of every state that expires.
func (k *check) expire(n int) []*idempotency.Claim {
	claims := make([]*idempotency.Claim, n)
	for i := range claims {
		c := brieflyHeld()
		c.TTL = brief
		k.win(c)
		if i%3 > 0 {
			o := answer
			o.State = idempotency.State(i % 3)
			k.settle(c, o)
		}
		claims[i] = c
	}
	for _, c := range claims {
		k.awaitExpired(c)
	}
	return claims
}

// sweepAll sweeps until n rows are deleted.
func (k *check) sweepAll(max, n int) {
	sweeper := k.sweeper()
	for deadline := time.Now().Add(patience); n > 0; {
		swept, err := sweeper.Sweep(k.ctx, max)
		k.ok(err)
		if swept > max || swept > n {
			k.fail("Sweep deleted %d rows of %d expired ones, at most %d at once", swept, n, max)
		}
		n -= swept
		if time.Now().After(deadline) {
			k.fail("%d expired rows are never swept", n)
		}
	}
}

func sweepDeletes(k *check) {
	claims := k.expire(6)
	k.sweepAll(1000, len(claims))
	for _, c := range claims {
		k.win(rival(c))
	}
}

func sweepIsBounded(k *check) {
	claims := k.expire(7)
	k.sweepAll(2, len(claims))
}

func sweepSpares(k *check) {
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
		k.win(c)
	}
	k.mark(marked)
	for c, state := range map[*idempotency.Claim]idempotency.State{
		completed: idempotency.Completed, replayless: idempotency.NotReplayable, unknown: idempotency.Unknown,
	} {
		o := answer
		o.State = state
		k.settle(c, o)
	}
	for _, c := range []*idempotency.Claim{lapsed, atMostOnce, marked} {
		k.awaitLapsed(c)
	}
	expired := k.expire(3)
	k.sweepAll(1000, len(expired))
	for _, c := range live {
		row := k.peek(c)
		if row.ID != c.ID {
			k.fail("the row was replaced: %s", show(row))
		}
	}
}

func sweepsAtOnce(k *check) {
	sweeper := k.sweeper()
	expired := k.expire(12)
	live := newClaim()
	k.win(live)
	swept := together(k, 4, func() (int, error) {
		total := 0
		for range 5 {
			n, err := sweeper.Sweep(k.ctx, 3)
			if err != nil {
				return total, err
			}
			total += n
		}
		return total, nil
	})
	left := len(expired)
	for _, n := range swept {
		left -= n
	}
	if left < 0 {
		k.fail("%d rows were counted twice", -left)
	}
	k.sweepAll(1000, left)
	k.holds(live)
}

func endedContext(k *check) {
	c := newClaim()
	k.win(c)
	free := newClaim()
	ended, cancel := context.WithCancel(k.ctx)
	cancel()
	calls := map[string]func() error{
		"Claim":      func() error { _, err := k.store.Claim(ended, free); return err },
		"Takeover":   func() error { _, err := k.store.Takeover(ended, rival(c), c.ID); return err },
		"Renew":      func() error { return k.store.Renew(ended, c) },
		"MarkEffect": func() error { return k.store.MarkEffect(ended, c) },
		"Settle":     func() error { _, err := k.store.Settle(ended, c, answer); return err },
		"Release":    func() error { return k.store.Release(ended, c) },
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, context.Canceled) {
			k.fail("%s returned %v, not context.Canceled", name, err)
		}
	}
	k.win(free)
	k.holds(c)
	row := k.peek(c)
	if row.AtMostOnce {
		k.fail("MarkEffect wrote")
	}
}
