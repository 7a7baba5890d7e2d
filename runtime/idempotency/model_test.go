package idempotency

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// The protocol of claims as a model, every state of which is visited.
//
// Some requests share one key and one row. Each makes the calls of the store
// that an execution makes, in its order, and the real [execution.decide] says
// what a row means; [TestGuardFollowsTheModel] holds the rest against the
// guard. The row does what [Store] promises. Whatever may happen, may happen
// between any two steps: a lease lapses, a record expires, the sweeper comes. A
// call of the store is one step, and its messages may be lost: the caller sees
// an error, or the driver sends the call again, while the first message is
// delivered at any later time, or never. A crash needs no step of its own: it
// is a request that takes none any more, and every prefix of every history is
// looked at.
//
// Time itself is not modelled, only what it brings about. A handler's context
// is not, for handlers need not heed it. A Transactor, whose key is held by the
// database, has a model of its own: [TestTxModel].

// A kept is the row of the key; the zero kept is no row.
type kept struct {
	id                          uint8 // of the request whose claim it holds, from 1
	state                       State
	lapsed, expired, atMostOnce bool
	attempt                     uint8
	print                       uint8 // of the claim's fingerprint
	answer                      uint8 // whose run was recorded
}

// A call is one of the store's operations; calls is a set of them.
type (
	call  uint8
	calls uint8
)

const (
	callClaim call = iota
	callTakeover
	callRenew
	callMark
	callSettle
	callRelease
	callDisown // what a store may do after an error: see [Store.Claim]
	noCall
)

var callNames = [...]string{"claim", "takeover", "renew", "mark", "settle", "release", "disown"}

func (s calls) has(c call) bool    { return s&(1<<c) != 0 }
func (s calls) with(c call) calls  { return s | 1<<c }
func (s calls) minus(c call) calls { return s &^ (1 << c) }

// A place is where a request stands: before a call, or in its handler.
type place uint8

const (
	claiming place = iota
	takingOver
	running
	marking
	settling
	releasing
	gone
)

func (p place) call() call {
	return [...]call{callClaim, callTakeover, noCall, callMark, callSettle, callRelease, noCall}[p]
}

// An ending is how a handler ends.
type ending uint8

const (
	endsRecorded ending = iota // an answer that is recorded
	endsFreeing                // one that frees the key, but for at-most-once
	endsWithout                // no answer: an error
	endsPassing                // its bytes pass uncaptured
	endsPanic
	endings
)

// A reply is what a request's client gets in the end.
type reply uint8

const (
	noReply     reply = iota
	handlers          // the handler's own answer
	handlersEnd       // the handler's error or panic goes on
	passed
	replayed
	mismatch
	inFlight
	notKept
	unknown
	unsettledReply   // it may have run
	unavailableReply // it did not run
	replies
)

// A party is one request: what it knows, and what has become of it.
type party struct {
	at        place
	seen      uint8 // whose claim it takes over
	attempt   uint8
	takeovers uint8
	settles   State
	ended     ending
	bound     bool // at-most-once by policy or mark

	late     calls // messages that are under way on their own
	lateSeen uint8

	// History, for the laws.
	owned    bool // it was told that it won
	excused  bool // since then its lease lapsed or it freed its key
	recorded bool // its outcome is durable
	over     bool // and has expired
}

// travels has the message of a call go its own way.
func (q *party) travels(c call) {
	q.late = q.late.with(c)
	if c == callTakeover {
		q.lateSeen = q.seen
	}
}

// A claimant is what of a request never changes.
type claimant struct {
	id, print  uint8
	atMostOnce bool
}

const modelParties = 3

// A world is one state of the model.
type world struct {
	kept    kept
	parties [modelParties]party
	final   uint8 // whose answer was sent as final and has not expired
	faults  uint8 // messages that may still be lost
}

// The laws that hold in every state. Each names a promise of the design.
const (
	lawAtMostOnce  = "at most once: after a run that is bound by its policy or a mark, nothing runs until its record expires"
	lawAtLeastOnce = "at least once: a second run needs a lease that lapsed, a run that freed its key, or a record that expired"
	lawOneRun      = "one request: it runs at most once, whatever it loses"
	lawFinal       = "final: an answer that was sent as recorded is what every duplicate gets until it expires"
	lawFence       = "fence: nobody writes a row but its holder while it is processing"
	lawDurable     = "durable before visible: no recorded answer leaves before its record"
	lawOwnAnswer   = "own answer: a request gets no answer to another request"
	lawStuck       = "not stuck: once the lease has lapsed the next request runs or gets what is known"
)

// A protocol is what moves the parties and the row. Mutants replace a part.
type protocol struct {
	// store is what a call does to the row.
	store func(k kept, c call, who claimant, q party) kept
	// expires and sweeps say whether the row may.
	expires, sweeps func(k kept) bool
	decide          func(*execution, *Row) verdict
	// next moves a party on from the answer to its call. Patient ones wait for
	// a run in flight and try again when settling fails.
	next func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply)
	// end moves a party on from its handler's end.
	end func(q party, e ending) (party, reply)
}

func rightProtocol() *protocol {
	p := &protocol{
		store: rightStore,
		expires: func(k kept) bool {
			return k.state == Completed || k.state == NotReplayable || k.lapsed && !k.atMostOnce
		},
		sweeps: func(k kept) bool { return k.expired },
		decide: (*execution).decide,
		end:    rightEnd,
	}
	p.next = p.rightNext
	return p
}

func claimed(who claimant, attempt uint8) kept {
	return kept{id: who.id, attempt: attempt, print: who.print, atMostOnce: who.atMostOnce}
}

func rightStore(k kept, c call, who claimant, q party) kept {
	switch {
	case c == callClaim && k == kept{}:
		return claimed(who, 1)
	case c == callTakeover && k.id == q.seen && k.expired:
		return claimed(who, 1)
	case c == callTakeover && k.id == q.seen && k.lapsed && !k.atMostOnce:
		return claimed(who, k.attempt+1)
	case c == callClaim || c == callTakeover || k.id != who.id || k.state != Processing:
		return k
	}
	return heldStore(k, c, who, q)
}

// heldStore is what a call does to the caller's own row.
func heldStore(k kept, c call, who claimant, q party) kept {
	switch c {
	case callRenew:
		k.lapsed, k.expired = false, false
	case callMark:
		k.atMostOnce, k.expired = true, false
	case callSettle:
		k.state, k.answer, k.lapsed, k.expired = q.settles, who.id, false, false
	case callRelease:
		return kept{}
	case callDisown:
		if k.attempt == 1 {
			return kept{}
		}
	}
	return k
}

// result is what the store answers to a call that left the row k; before is what
// the row was.
func (k kept) result(before kept, c call, who claimant, q party) (row Row, err error) {
	held := before.id == who.id && before.state == Processing
	switch c {
	case callClaim, callTakeover:
		row = k.row()
		row.Won = k.id == who.id && k.state == Processing
	case callSettle:
		row = k.row()
		row.Won = k.id == who.id && k.state == q.settles && k.answer == who.id
	case callRelease:
		if !held && before != (kept{}) {
			err = ErrLeaseLost
		}
	default:
		if !held {
			err = ErrLeaseLost
		}
	}
	return row, err
}

// The model's requests have one owner, and the fingerprints of two bodies.
var modelPrints = [...][]byte{fingerprint([32]byte{0}, nil), fingerprint([32]byte{1}, nil)}

var modelExecutions = func() (all [len(modelPrints)]*execution) {
	p := DefaultPolicy("POST /")
	for print := range all {
		all[print] = &execution{guard: &Guard{}, op: &operation{Policy: &p}, digest: [32]byte{byte(print)}}
	}
	return all
}()

func (k kept) row() Row {
	if k == (kept{}) {
		return Row{}
	}
	return Row{
		State: k.state, ID: ClaimID{k.id}, Fingerprint: modelPrints[k.print],
		Lapsed: k.lapsed, Expired: k.expired, AtMostOnce: k.atMostOnce, Attempt: int(k.attempt),
		Outcome: Outcome{State: k.state, Status: int(k.answer)},
	}
}

// read is what acquire does with a row.
func (p *protocol) read(q party, who claimant, row *Row, patient bool) (party, reply) {
	switch v := p.decide(modelExecutions[who.print], row); {
	case v == verdictRun:
		q.at, q.attempt = running, uint8(row.Attempt)
		return q, noReply
	case v == verdictTakeOver && q.takeovers < maxTakeovers:
		q.at, q.seen = takingOver, row.ID[0]
		q.takeovers++
		return q, noReply
	case v == verdictInFlight && patient:
		q.at = claiming
		return q, noReply
	default:
		q.at = gone
		return q, refusalOf(v)
	}
}

// refusalOf is what a verdict other than to run is answered.
func refusalOf(v verdict) reply {
	return map[verdict]reply{
		verdictReplay: replayed, verdictMismatch: mismatch, verdictInFlight: inFlight, verdictTakeOver: inFlight,
		verdictNotReplayable: notKept, verdictUnknown: unknown,
	}[v]
}

func (p *protocol) rightNext(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
	lost := errors.Is(err, ErrLeaseLost)
	switch c {
	case callClaim, callTakeover:
		switch {
		case err != nil:
			q.at = gone
			return q, unavailableReply
		case row.IsZero():
			q.at = claiming
			return q, noReply
		}
		return p.read(q, who, row, patient)
	case callMark:
		q.at, q.bound = running, q.bound || err == nil
		return q, noReply
	case callRelease:
		q.at = gone
		switch {
		case lost:
			return q, unsettledReply
		case q.ended == endsWithout:
			return q, handlersEnd
		}
		return q, handlers
	}
	// Settling, of an answer or of one that passes.
	if err != nil && patient {
		return q, noReply
	}
	q.at = gone
	switch {
	case err != nil, !row.Won && (q.ended == endsPassing || row.IsZero()):
		return q, unsettledReply
	case row.Won:
		return q, [endings]reply{endsRecorded: handlers, endsFreeing: handlers, endsWithout: handlersEnd, endsPassing: passed}[q.ended]
	}
	v := p.decide(modelExecutions[who.print], row)
	if v == verdictRun || v == verdictTakeOver {
		return q, unsettledReply
	}
	return q, refusalOf(v)
}

func rightEnd(q party, e ending) (party, reply) {
	q.ended = e
	switch {
	case e == endsPanic:
		q.at = gone
		return q, handlersEnd
	case e == endsPassing:
		q.at, q.settles = settling, NotReplayable
	case e == endsWithout && q.bound:
		q.at, q.settles = settling, Unknown
	case e == endsRecorded || q.bound:
		q.at, q.settles = settling, Completed
	default:
		q.at = releasing
	}
	return q, noReply
}

// A setting is one model: who takes part, and how much may go wrong.
type setting struct {
	name      string
	guarantee Guarantee
	prints    []uint8 // one for each request
	faults    uint8   // how many messages may be lost
	endings   []ending
	marks     bool // handlers may mark their effect
}

// A space is the states of one model that have been reached.
type space struct {
	*protocol
	setting
	who    []claimant
	seen   map[world]struct{}
	states []world
	from   []origin // of each state
	steps  int
	sends  [replies]int // how often each reply was sent
	probed map[kept]bool
	broken string // the law that was broken first
	at     int32  // in this state
}

// An origin is the step that first led to a state.
type origin struct {
	state  int32
	who    uint8
	action string
}

// explore visits every state, those that the fewest steps lead to first, until
// a law is broken.
func explore(p *protocol, s setting) *space {
	x := &space{protocol: p, setting: s, seen: map[world]struct{}{}, probed: map[kept]bool{}}
	start := world{faults: s.faults}
	for i := range start.parties {
		if i >= len(s.prints) {
			start.parties[i].at = gone
			continue
		}
		x.who = append(x.who, claimant{id: uint8(i + 1), print: s.prints[i], atMostOnce: s.guarantee == AtMostOnce})
	}
	x.reach(start, origin{state: -1}, "")
	for i := int32(0); x.broken == "" && int(i) < len(x.states); i++ {
		x.expand(i)
	}
	return x
}

// reach adds a state, unless it was reached before, or notes the law that the
// step to it broke.
func (x *space) reach(w world, from origin, broken string) {
	x.steps++
	if x.broken != "" {
		return
	}
	w.forget()
	if _, ok := x.seen[w]; ok && broken == "" {
		return
	}
	if broken == "" && x.stuck(w.kept) {
		broken = lawStuck
	}
	x.broken, x.at = broken, int32(len(x.states))
	x.seen[w] = struct{}{}
	x.states = append(x.states, w)
	x.from = append(x.from, from)
}

// expand takes each step that may be taken in a state.
func (x *space) expand(at int32) {
	w := x.states[at]
	x.pass(w, at)
	for i := range x.who {
		q := &w.parties[i]
		if i > 0 && x.who[i-1].print == x.who[i].print && w.parties[i-1] == (party{}) && w.kept.id != x.who[i-1].id {
			continue // requests that are the same but for their number begin in its order
		}
		step := func(action string) origin { return origin{at, x.who[i].id, action} }
		if q.at == running {
			for _, e := range x.endings {
				if e == endsFreeing && q.bound || e == endsWithout && !q.bound {
					continue // they move as endsRecorded, as endsFreeing
				}
				after := w
				var r reply
				after.parties[i], r = x.end(*q, e)
				broken := x.sent(&after, i, r, kept{})
				x.reach(after, step("handler ends"), broken)
			}
			if x.marks && !q.bound {
				after := w
				after.parties[i].at = marking
				x.reach(after, step("handler marks"), "")
			}
			if w.kept.lapsed { // else it changes nothing that is modelled
				x.deliver(w, i, callRenew, step("renew"))
				x.lose(w, i, callRenew, step("renew is late"))
			}
		}
		if c := q.at.call(); c != noCall {
			x.make(w, i, c, step(callNames[c]))
			x.lose(w, i, c, step(callNames[c]+" is sent again"))
			x.fail(w, i, c, step(callNames[c]+" fails"))
		}
		for c := range noCall {
			if q.late.has(c) {
				after := w
				after.parties[i].late = q.late.minus(c)
				x.deliver(after, i, c, step("late "+callNames[c]))
			}
		}
	}
}

// pass does what time does.
func (x *space) pass(w world, at int32) {
	if k := w.kept; k != (kept{}) && k.state == Processing && !k.lapsed {
		after := w
		after.kept.lapsed = true
		after.parties[k.id-1].excused = true
		x.reach(after, origin{at, k.id, "lease lapses"}, "")
	}
	if k := w.kept; k != (kept{}) && !k.expired && x.expires(k) {
		after := w
		after.kept.expired = true
		if k.state != Processing {
			after.parties[k.id-1].over, after.final = true, 0
		}
		x.reach(after, origin{at, k.id, "expires"}, "")
	}
	if k := w.kept; k != (kept{}) && x.sweeps(k) {
		after := w
		after.kept = kept{}
		x.reach(after, origin{at, k.id, "swept"}, "")
	}
}

// apply has a message do its work on the row, and returns the law it broke.
func (x *space) apply(w *world, i int, c call) (broken string) {
	who, q, before := x.who[i], &w.parties[i], w.kept
	after := x.store(before, c, who, *q)
	w.kept = after
	holds := before.id == who.id && before.state == Processing
	switch {
	case before == after:
	case c == callClaim && before != kept{}, c != callClaim && c != callTakeover && !holds:
		return lawFence
	case c == callSettle:
		q.recorded = q.settles != Unknown
		q.excused = false
	case c == callRenew:
		q.excused = false
	case c == callRelease:
		q.excused = q.ended == endsFreeing || q.ended == endsWithout
	}
	return ""
}

// deliver has a message arrive for whose answer nobody waits.
func (x *space) deliver(w world, i int, c call, from origin) {
	q := &w.parties[i]
	seen := q.seen
	if c == callTakeover {
		q.seen = q.lateSeen
	}
	broken := x.apply(&w, i, c)
	q.seen = seen
	x.reach(w, from, broken)
}

// lose has a message go its own way while the party calls again, or goes on.
func (x *space) lose(w world, i int, c call, from origin) {
	q := &w.parties[i]
	if w.faults == 0 || q.late.has(c) {
		return
	}
	w.faults--
	q.travels(c)
	x.reach(w, from, "")
}

// fail has a message go its own way while the caller gets an error.
func (x *space) fail(w world, i int, c call, from origin) {
	q := &w.parties[i]
	if w.faults == 0 {
		return
	}
	w.faults--
	q.travels(c)
	if c == callClaim || c == callTakeover {
		q.late = q.late.with(callDisown)
	}
	x.answered(w, i, c, &Row{}, errModel, from)
}

var errModel = errors.New("the message or its answer is lost")

// make has a party make its call and get the answer.
func (x *space) make(w world, i int, c call, from origin) {
	before := w.kept
	if broken := x.apply(&w, i, c); broken != "" {
		x.reach(w, from, broken)
		return
	}
	row, err := w.kept.result(before, c, x.who[i], w.parties[i])
	x.answered(w, i, c, &row, err, from)
}

// answered moves a party on from an answer, as patient ones and others go.
func (x *space) answered(w world, i int, c call, row *Row, err error, from origin) {
	before := w.parties[i]
	hasty, r := x.next(before, c, x.who[i], row, err, false)
	x.moved(w, i, hasty, r, from)
	if patient, r := x.next(before, c, x.who[i], row, err, true); patient != hasty {
		x.moved(w, i, patient, r, from)
	}
}

// moved has a party go on and holds the laws.
func (x *space) moved(w world, i int, after party, r reply, from origin) {
	before := w.parties[i]
	w.parties[i] = after
	var broken string
	switch {
	case after.at == running && before.at != marking:
		broken = x.won(&w, i)
	case after.bound && !before.bound:
		if k := w.kept; k.id != x.who[i].id || !k.atMostOnce || k.state != Processing {
			broken = lawAtMostOnce
		}
	default:
		broken = x.sent(&w, i, r, w.kept)
	}
	x.reach(w, from, broken)
}

// won is called when a party learns that it may run.
func (x *space) won(w *world, i int) (broken string) {
	q := &w.parties[i]
	switch {
	case q.owned:
		return lawOneRun
	case w.final != 0:
		return lawFinal
	}
	for j, other := range w.parties {
		switch {
		case j == i || !other.owned || other.over:
		case other.bound:
			return lawAtMostOnce
		case !other.excused:
			return lawAtLeastOnce
		}
	}
	q.owned, q.bound, q.excused = true, x.who[i].atMostOnce, w.kept.lapsed
	return ""
}

// sent is called when a party answers its client, having read k.
func (x *space) sent(w *world, i int, r reply, k kept) (broken string) {
	x.sends[r]++
	q := &w.parties[i]
	var final uint8
	switch {
	case r == replayed && x.who[k.answer-1].print != x.who[i].print:
		return lawOwnAnswer
	case r == replayed:
		final = k.answer
	case r == passed, r == handlers && (q.ended == endsRecorded || q.bound):
		if !q.recorded {
			return lawDurable
		}
		if !q.over {
			final = x.who[i].id
		}
	}
	if final != 0 {
		if w.final != 0 && w.final != final {
			return lawFinal
		}
		w.final = final
	}
	return ""
}

// forget drops what can matter no more, so that states which differ in nothing
// else are one.
func (w *world) forget() {
	comes := func(id uint8) bool { // the row is, or may become, a claim of id
		q := &w.parties[id-1]
		return w.kept.id == id || q.at == claiming || q.at == takingOver || q.late.has(callClaim) || q.late.has(callTakeover)
	}
	for i := range w.parties {
		q := &w.parties[i]
		if q.late.has(callTakeover) && !comes(q.lateSeen) {
			q.late = q.late.minus(callTakeover)
		}
		if !q.late.has(callTakeover) {
			q.lateSeen = 0
		}
		if !comes(uint8(i + 1)) {
			q.late = 0
		}
		if q.at != takingOver {
			q.seen = 0
		}
		if q.at != gone {
			continue
		}
		q.takeovers = 0
		if q.late == 0 {
			q.attempt, q.settles, q.ended = 0, 0, 0
		}
		if q.over || !q.owned {
			q.owned, q.bound, q.excused, q.recorded, q.over = false, false, false, false, false
		}
	}
}

// stuck reports whether a request that comes when the lease has lapsed, and
// that nothing disturbs, learns nothing. It needs at most three calls: a claim,
// a takeover, and another claim if the row was gone.
func (x *space) stuck(k kept) bool {
	if k.state == Processing {
		k.lapsed = k != kept{}
	}
	if stuck, ok := x.probed[k]; ok {
		return stuck
	}
	who := claimant{id: modelParties + 1, print: k.print}
	began, q, r := k, party{}, noReply
	for step := 0; q.at != running && q.at != gone && step < 3; step++ {
		before := k
		c := q.at.call()
		k = x.store(before, c, who, q)
		row, err := k.result(before, c, who, q)
		q, r = x.next(q, c, who, &row, err, false)
	}
	dead := began.state == Unknown || began.state == Processing && began.atMostOnce
	ok := q.at == running || r == replayed || r == notKept || r == unknown && dead
	x.probed[began] = !ok
	return !ok
}

// trace tells how the law came to be broken.
func (x *space) trace() string {
	var steps []string
	for i := x.at; i >= 0; i = x.from[i].state {
		steps = append(steps, fmt.Sprintf("request %d: %-20s %+v", x.from[i].who, x.from[i].action, x.states[i].kept))
	}
	var b strings.Builder
	for i := len(steps) - 2; i >= 0; i-- {
		fmt.Fprintln(&b, steps[i])
	}
	return b.String()
}

var allEndings = []ending{endsRecorded, endsFreeing, endsWithout, endsPassing, endsPanic}

// The more there is of one kind, the less there is of another, so that all of
// it is visited in seconds.
var settings = []setting{
	{"two requests, at least once", AtLeastOnce, []uint8{0, 0}, 1, allEndings, true},
	{"two requests, at most once", AtMostOnce, []uint8{0, 0}, 3, allEndings, true},
	{"three requests, at most once", AtMostOnce, []uint8{0, 0, 0}, 2, allEndings, true},
	{"two requests that lose more", AtLeastOnce, []uint8{0, 0}, 2, allEndings[:2], false},
	{"two of one kind and another", AtLeastOnce, []uint8{0, 0, 1}, 0, allEndings[:2], false},
	{"three requests, at least once", AtLeastOnce, []uint8{0, 0, 0}, 0, allEndings[:2], false},
}

func TestModel(t *testing.T) {
	total := 0
	var sends [replies]int
	for _, s := range settings {
		x := explore(rightProtocol(), s)
		t.Logf("%s: %d states, %d steps", s.name, len(x.states), x.steps)
		if x.broken != "" {
			t.Fatalf("broken law, %s:\n%s", x.broken, x.trace())
		}
		total += len(x.states)
		for r, n := range x.sends {
			sends[r] += n
		}
	}
	for r, n := range sends {
		if n == 0 {
			t.Errorf("nobody was ever answered %d", r)
		}
	}
	const floor = 300_000
	if total < floor {
		t.Errorf("explored %d states, want at least %d: the model has lost some of what may happen", total, floor)
	}
}

// Each law catches who breaks it.
func TestModelRejectsMutants(t *testing.T) {
	for _, mutant := range []struct {
		name   string
		mutate func(p, right *protocol)
		broken string
	}{
		{"a claim overwrites", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callClaim && k.state == Processing {
					return claimed(who, 1)
				}
				return right.store(k, c, who, q)
			}
		}, lawFence},
		{"a counter is the fence", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c >= callRenew && k != (kept{}) && k.state == Processing && k.attempt == q.attempt {
					return heldStore(k, c, who, q)
				}
				return right.store(k, c, who, q)
			}
		}, lawFence},
		{"release is not fenced", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callRelease {
					return kept{}
				}
				return right.store(k, c, who, q)
			}
		}, lawFence},
		{"renewal is not fenced", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callRenew {
					k.lapsed = false
				}
				return right.store(k, c, who, q)
			}
		}, lawFence},
		{"takeover without compare-and-set", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callTakeover {
					return claimed(who, k.attempt+1)
				}
				return right.store(k, c, who, q)
			}
		}, lawAtLeastOnce},
		{"takeover in spite of a renewal", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callTakeover && k.id == q.seen && k.state == Processing {
					return claimed(who, k.attempt+1)
				}
				return right.store(k, c, who, q)
			}
		}, lawAtLeastOnce},
		{"who loses a takeover runs too", func(p, right *protocol) {
			p.next = func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
				if c == callTakeover && err == nil {
					row.Won = true
				}
				return right.next(q, c, who, row, err, patient)
			}
		}, lawAtLeastOnce},
		{"takeover keeps the fingerprint", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				after := right.store(k, c, who, q)
				if c == callTakeover {
					after.print = k.print
				}
				return after
			}
		}, lawOwnAnswer},
		{"lapsed at-most-once is taken over", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				after := right.store(k, c, who, q)
				after.atMostOnce = false
				return after
			}
		}, lawAtMostOnce},
		{"a mark is forgotten", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callMark {
					return k
				}
				return right.store(k, c, who, q)
			}
		}, lawAtMostOnce},
		{"a renewal forgets the mark", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				after := right.store(k, c, who, q)
				if c == callRenew && after != k {
					after.atMostOnce = false
				}
				return after
			}
		}, lawAtMostOnce},
		{"a mark that failed counts", func(p, right *protocol) {
			p.next = func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
				if c == callMark {
					err = nil
				}
				return right.next(q, c, who, row, err, patient)
			}
		}, lawAtMostOnce},
		{"at-most-once expires in flight", func(p, right *protocol) {
			p.expires = func(k kept) bool { return k.lapsed || right.expires(k) }
		}, lawAtMostOnce},
		{"the sweeper takes what lapsed", func(p, right *protocol) {
			p.sweeps = func(k kept) bool { return k.lapsed || right.sweeps(k) }
		}, lawAtMostOnce},
		{"no answer frees the key, at most once", func(p, right *protocol) {
			p.end = func(q party, e ending) (party, reply) {
				bound := q.bound
				q.bound = bound && e != endsWithout
				q, r := right.end(q, e)
				q.bound = bound
				return q, r
			}
		}, lawAtMostOnce},
		{"the sweeper takes what is recorded", func(p, right *protocol) {
			p.sweeps = func(k kept) bool { return k.state == Completed || right.sweeps(k) }
		}, lawFinal},
		{"a panic frees the key at once", func(p, right *protocol) {
			p.end = func(q party, e ending) (party, reply) {
				if e == endsPanic {
					q.at, q.ended = releasing, e
					return q, noReply
				}
				return right.end(q, e)
			}
		}, lawAtLeastOnce},
		{"answers before it records", func(p, right *protocol) {
			p.end = func(q party, e ending) (party, reply) {
				q, _ = right.end(q, e)
				return q, handlers
			}
		}, lawDurable},
		{"answers although recording failed", func(p, right *protocol) {
			p.next = func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
				if c == callSettle && err != nil {
					row, err = &Row{Won: true}, nil
				}
				return right.next(q, c, who, row, err, patient)
			}
		}, lawDurable},
		{"a zombie answers what it did", func(p, right *protocol) {
			p.next = func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
				if c == callSettle && err == nil {
					row = &Row{Won: true}
				}
				return right.next(q, c, who, row, err, patient)
			}
		}, lawDurable},
		{"a zombie claims again", func(p, right *protocol) {
			p.next = func(q party, c call, who claimant, row *Row, err error, patient bool) (party, reply) {
				q, r := right.next(q, c, who, row, err, patient)
				if c == callSettle && r == unsettledReply {
					q.at = claiming
				}
				return q, r
			}
		}, lawOneRun},
		{"nobody takes over", func(p, right *protocol) {
			p.decide = func(e *execution, row *Row) verdict {
				if v := e.decide(row); v != verdictTakeOver || row.Expired {
					return v
				}
				return verdictInFlight
			}
		}, lawStuck},
		{"takeover fails for what expired", func(p, right *protocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callTakeover && k.expired {
					return k
				}
				return right.store(k, c, who, q)
			}
		}, lawStuck},
	} {
		t.Run(mutant.name, func(t *testing.T) {
			p := rightProtocol()
			mutant.mutate(p, rightProtocol())
			for _, s := range settings {
				if x := explore(p, s); x.broken != "" {
					if x.broken != mutant.broken {
						t.Errorf("it breaks %q", x.broken)
					}
					t.Logf("%s, after %d states, %s:\n%s", s.name, len(x.states), x.broken, x.trace())
					return
				}
			}
			t.Errorf("nothing breaks; want %q", mutant.broken)
		})
	}
}

// A script makes the choices of one walk through a request, in the order in
// which they are asked for, and from walk to walk goes through all of them.
type script struct {
	choices, options []int
	asked            int
}

func (s *script) choose(options int) int {
	if s.asked == len(s.choices) {
		s.choices, s.options = append(s.choices, 0), append(s.options, options)
	}
	s.asked++
	return s.choices[s.asked-1]
}

// next makes the script ready for the next walk; false: there is none.
func (s *script) next() bool {
	s.choices, s.options = s.choices[:s.asked], s.options[:s.asked]
	s.asked = 0
	for i := len(s.choices) - 1; i >= 0; i-- {
		if s.choices[i]++; s.choices[i] < s.options[i] {
			return true
		}
		s.choices, s.options = s.choices[:i], s.options[:i]
	}
	return false
}

// A walk is a store that answers the guard as its script says, and has the model
// go along.
type walk struct {
	*script
	t       *testing.T
	p       *protocol
	who     claimant
	patient bool
	depth   int // calls that the script still chooses the answer of
	rest    kept
	at      party
	reply   reply
}

// The rows that a guard may read which are not its own. The first lets every
// request end.
var othersRows = []kept{
	{id: 2, attempt: 1, state: Completed, answer: 2},
	{id: 2, attempt: 1},
	{id: 2, attempt: 1, lapsed: true},
	{id: 2, attempt: 1, atMostOnce: true, lapsed: true},
	{id: 2, attempt: 1, state: NotReplayable},
	{id: 2, attempt: 1, state: Unknown},
	{id: 2, attempt: 1, state: Completed, answer: 2, expired: true},
	{id: 2, attempt: 1, print: 1, lapsed: true},
	{},
}

// called is called for each call of the guard. It chooses the row that is there
// after it, or that it fails, and returns what the store answers.
func (w *walk) called(c call, claim *Claim) (Row, error) {
	if want := w.at.at.call(); c != want {
		w.t.Fatalf("the guard calls %s, the model is at %d; choices %v", callNames[c], w.at.at, w.choices)
	}
	mine := claimed(w.who, 1)
	before, after, err := mine, w.rest, error(nil)
	if w.depth--; w.depth >= 0 {
		switch n := w.choose(len(othersRows) + 2); {
		case n == len(othersRows):
			err = errModel
		case n == len(othersRows)+1:
			after = mine
		default:
			after = othersRows[n]
		}
	}
	if c == callClaim && after == (kept{}) {
		after = mine // a claim finds a row
	}
	if c != callClaim && c != callTakeover {
		before = after
		if after == mine {
			after = heldStore(mine, c, w.who, w.at)
		}
	}
	row, result := after.result(before, c, w.who, w.at)
	if err != nil {
		row, result = Row{}, err
	}
	w.at, w.reply = w.p.next(w.at, c, w.who, &row, result, w.patient)
	if row.ID == (ClaimID{w.who.id}) {
		row.ID = claim.ID
	}
	if !row.IsZero() {
		row.Owner = claim.Owner
		if bytes.Equal(row.Fingerprint, modelPrints[w.who.print]) {
			row.Fingerprint = claim.Fingerprint
		}
		row.Outcome.Header = encodeHeader(http.Header{}, "")
		row.LeaseLeft = 1
	}
	return row, result
}

func (w *walk) Claim(_ context.Context, c *Claim) (Row, error) { return w.called(callClaim, c) }

func (w *walk) Takeover(_ context.Context, c *Claim, seen ClaimID) (Row, error) {
	if seen[0] != w.at.seen {
		w.t.Fatalf("the guard takes over %v, the model %d", seen, w.at.seen)
	}
	return w.called(callTakeover, c)
}

func (w *walk) MarkEffect(_ context.Context, c *Claim) error {
	_, err := w.called(callMark, c)
	return err
}

func (w *walk) Settle(_ context.Context, c *Claim, o Outcome) (Row, error) {
	if o.State != w.at.settles {
		w.t.Fatalf("the guard settles as %d, the model as %d", o.State, w.at.settles)
	}
	return w.called(callSettle, c)
}

func (w *walk) Release(_ context.Context, c *Claim) error {
	_, err := w.called(callRelease, c)
	return err
}

func (w *walk) Renew(context.Context, *Claim) error {
	w.t.Fatal("no time passes in a handler")
	return nil
}

// handle is the handler: it may mark its effect, and ends in one of all ways.
func (w *walk) handle(ctx context.Context) (*Response, error) {
	if w.at.at != running {
		w.t.Fatalf("the guard runs the handler, the model is at %d", w.at.at)
	}
	w.at.bound = w.who.atMostOnce
	if w.choose(2) == 1 {
		if !w.at.bound {
			w.at.at = marking
		}
		_ = MarkEffect(ctx)
	}
	e := ending(w.choose(int(endings)))
	w.at, w.reply = w.p.end(w.at, e)
	switch e {
	case endsRecorded:
		return &Response{Status: 201}, nil
	case endsFreeing:
		return &Response{Status: 503}, nil
	case endsWithout:
		return nil, errModel
	case endsPassing:
		_ = Passing(ctx)
		return nil, nil
	}
	panic(errModel)
}

// replyOf tells from what the guard returned what kind of reply it is.
func replyOf(resp *Response, err error) reply {
	switch {
	case err != nil:
		return handlersEnd
	case resp == nil:
		return passed
	case resp.Header.Get(wire.HeaderReplayed) != "":
		return replayed
	case len(resp.Body) == 0:
		return handlers
	}
	var p Problem
	if json.Unmarshal(resp.Body, &p) != nil {
		return noReply
	}
	switch strings.TrimPrefix(p.Type, wire.ProblemBase) {
	case wire.KeyReused:
		return mismatch
	case wire.InFlight:
		return inFlight
	case wire.NotReplayable:
		return notKept
	case wire.StoreUnavailable:
		return unavailableReply
	case wire.OutcomeUnknown:
		if p.Status == http.StatusServiceUnavailable {
			return unsettledReply
		}
		return unknown
	}
	return noReply
}

// do sends one request through a guard over a walk's store. Who is not patient
// has no time to try again.
func do(t *testing.T, store Store, guarantee Guarantee, patient bool, handle func(context.Context) (*Response, error)) (resp *Response, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = v.(error)
		}
	}()
	p := DefaultPolicy("POST /")
	p.Guarantee = guarantee
	if patient {
		p.Lease, p.WaitFor = time.Hour, time.Hour
	}
	guard, err := New(store)
	if err != nil {
		t.Fatal(err)
	}
	Register[*http.Request](guard, &p)
	if !patient {
		p.Lease = time.Millisecond // less than Register takes
	}
	return guard.Do(context.Background(), &p, &Request{Method: "POST", Path: "/", Header: http.Header{wire.HeaderKey: {"k"}}}, handle)
}

// The guard makes the calls that the model makes and answers what it answers,
// whatever the store says.
func TestGuardFollowsTheModel(t *testing.T) {
	walks := 0
	for _, guarantee := range []Guarantee{AtLeastOnce, AtMostOnce} {
		for _, patient := range []bool{false, true} {
			for _, rest := range []kept{othersRows[0], othersRows[2]} {
				s := &script{}
				for more := true; more; more = s.next() {
					synctest.Test(t, func(t *testing.T) {
						w := &walk{
							script: s, t: t, p: rightProtocol(), patient: patient, depth: 3, rest: rest,
							who: claimant{id: 1, atMostOnce: guarantee == AtMostOnce},
						}
						resp, err := do(t, w, guarantee, patient, w.handle)
						if got := replyOf(resp, err); w.at.at != gone || got != w.reply {
							t.Fatalf("the guard answers %d, the model %d at %d; choices %v", got, w.reply, w.at.at, s.choices)
						}
					})
					walks++
				}
			}
		}
	}
	if t.Logf("%d walks", walks); walks < 9_000 {
		t.Errorf("only %d walks", walks)
	}
}
