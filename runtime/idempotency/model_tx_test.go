package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// The protocol of transactions as a model, every state of which is visited.
//
// Some requests share one key. Each makes the steps of sqlstore's InTx on
// PostgreSQL, in its order, and the moves of runInTx between them, which
// [TestGuardFollowsTheTxModel] holds against the guard. The database goes on by
// itself: a connection breaks, and what was not committed is gone with it; a
// COMMIT that is under way takes place, or does not, whoever still waits for it.
// A crash needs no step of its own, as in [TestModel]: it is a request that
// takes none any more, whose connection breaks or whose COMMIT arrives.
//
// Beside the transactions there may be a run at least once of the same key, by
// a process that has the policy of yesterday. It takes no lock, and what it
// leaves behind when it dies is taken over.
//
// SQLite's one writer is a lock too that lasts until the commit, and its steps
// are fewer. A handler that ends the guard's transaction by itself is not
// modelled: what that leaves is documented with ErrTxEnded.

// A session is how far a request's transaction has come at the database.
type session uint8

const (
	noSession  session = iota
	holding            // it has the key's lock
	written            // and has written the record, which nobody sees yet
	committing         // its COMMIT is under way, and arrives or does not
	visible            // it took place, and the lock is about to be let go
)

// A txPlace is where a request stands: before a step, or in its handler.
type txPlace uint8

const (
	entering     txPlace = iota // calls InTx
	asking                      // of whoever has the key in this process: reads
	peeking                     // reads, without the lock, what need not wait for room in the pool
	claimingTx                  // takes the lock if nobody has it
	reading                     // reads the row, in a statement after that of the lock
	runningTx                   // its handler
	recording                   // what the handler answered, in place of what it read
	rereading                   // was rolled back, for another's row is there
	committingTx                // sends COMMIT and waits
	awaiting                    // its COMMIT failed or its answer was lost: waits for the lock
	resolving                   // and reads
	overtaking                  // what lapsed
	returning                   // frees what it took over
	away
)

// A txEnding is how a handler ends.
type txEnding uint8

const (
	txKeeps   txEnding = iota // an answer that is recorded with what was done
	txRefuses                 // a recorded 4xx, without
	txFails                   // an answer that frees the key
	txWithout                 // no answer: an error
	txPanics
	txTooLarge
	txEndings
)

// Replies that only transactions give.
const (
	endedReply    = replies + iota // the handler ended the transaction
	tooLargeReply                  // nothing was done
	txReplies
)

// A txParty is one request: what it knows, and what has become of it.
type txParty struct {
	at      txPlace
	session session
	read    kept  // what it read before it has the lock, if it is a mutant
	held    bool  // another had the lock
	seen    uint8 // whose row it replaces, or takes over; its own for none
	ran     bool
	ended   txEnding
	owns    bool  // it took the row over
	reply   reply // that is sent once it has given that back
	answer  uint8 // whose is replayed then
	late    uint8 // whose claim a takeover replaces that is under way on its own

	// History, for the laws.
	effect   bool // what it did is in the database
	excused  bool // it ran at least once, and its lease lapsed
	recorded bool
	over     bool // its record has expired
	denied   bool // its client was told that nothing was done
}

// A txClaimant is what of a request never changes.
type txClaimant struct {
	claimant
	process uint8
	plain   bool // it runs at least once, without a transaction
}

// A txWorld is one state of the model.
type txWorld struct {
	kept    kept
	lock    uint8 // whose session or resolution has the key's lock
	parties [modelParties]txParty
	final   uint8 // whose answer was sent as recorded and has not expired
	faults  uint8 // connections that may still break, and messages that may be lost
}

// The laws that hold in every state.
const (
	lawOneEffect = "one effect: what is done for a key is done once, until its record expires"
	lawTogether  = "together: what a run did that was refused or failed is not there"
	lawDenied    = "denied: what was answered as not done is not done, nor will be"
	lawAlone     = "alone: no handler begins where a record stands or another transaction may still commit"
)

// A txProtocol is what moves the parties. Mutants replace a part.
type txProtocol struct {
	*protocol // of the row outside transactions

	readsFirst     bool // and then takes the lock
	unlocksFirst   bool // and then commits
	resolvesFirst  bool // reads, and then waits for the lock
	believesErrors bool // a COMMIT that failed did not take place
	// free says that a handler may run in place of a row.
	free func(k kept, who claimant) bool
	// replaces says that a record may be written in place of a row.
	replaces func(k kept, seen uint8, who claimant) bool
	// keeps says that what a handler did is committed with its record.
	keeps func(e txEnding) bool
	// returned moves a party on from what InTx returned, or a takeover.
	returned func(q txParty, who claimant, row *Row, err error, patient bool) (txParty, reply)
}

func rightTxProtocol() *txProtocol {
	p := &txProtocol{
		protocol: rightProtocol(),
		free: func(k kept, who claimant) bool {
			return k == kept{} || k.expired || k.id == who.id && k.state == Processing
		},
		replaces: func(k kept, seen uint8, who claimant) bool {
			return k == kept{} || k.id == seen && (k.expired || k.id == who.id && k.state == Processing)
		},
		keeps: func(e txEnding) bool { return e == txKeeps },
	}
	p.returned = p.rightReturned
	return p
}

// leaves moves a party to its answer, which follows once it has freed what it
// took over.
func (q txParty) leaves(r reply) (txParty, reply) {
	q.at = away
	if q.owns {
		q.at, q.reply = returning, r
		return q, noReply
	}
	return q, r
}

func (p *txProtocol) rightReturned(q txParty, who claimant, row *Row, err error, patient bool) (txParty, reply) {
	switch {
	case errors.Is(err, errFreed):
		return q.leaves(freedReply(q.ended))
	case errors.Is(err, ErrOutcomeUnknown):
		return q.leaves(unsettledReply)
	case errors.Is(err, ErrTxEnded):
		return q.leaves(endedReply)
	case err != nil, row.IsZero() && q.at != overtaking:
		return q.leaves(unavailableReply)
	case q.at == overtaking && (row.IsZero() || row.Won):
		q.at, q.owns = entering, q.owns || row.Won
		return q, noReply
	}
	switch v := p.decide(modelExecutions[who.print], row); {
	case v == verdictRun:
		q.at, q.owns = away, false
		return q, handlers
	case q.ran && (v == verdictTakeOver || v == verdictInFlight && patient):
		return q.leaves(unavailableReply)
	case v == verdictTakeOver:
		q.at, q.seen = overtaking, row.ID[0]
		return q, noReply
	case v == verdictInFlight && patient:
		q.at = entering
		return q, noReply
	default:
		return q.leaves(refusalOf(v))
	}
}

// freedReply is what a run is answered that left nothing.
func freedReply(e txEnding) reply {
	return [txEndings]reply{txFails: handlers, txWithout: handlersEnd, txPanics: handlersEnd, txTooLarge: tooLargeReply}[e]
}

// inFlightRow is what InTx returns for a run that cannot be seen.
func inFlightRow(who claimant) Row { return kept{id: nobody, print: who.print}.row() }

const nobody = 0xff

// A txSetting is one model: who takes part, and what handlers may do.
type txSetting struct {
	name    string
	who     []txClaimant
	faults  uint8
	endings []txEnding
}

func inTx(process, print uint8) txClaimant {
	return txClaimant{claimant: claimant{print: print}, process: process}
}

func plainly(process uint8) txClaimant { return txClaimant{process: process, plain: true} }

// A txSpace is the states of one model that have been reached.
type txSpace struct {
	*txProtocol
	txSetting
	seen   map[txWorld]struct{}
	states []txWorld
	from   []origin
	steps  int
	sends  [txReplies]int
	broken string // the law that was broken first
	at     int32  // in this state
}

// exploreTx visits every state, those that the fewest steps lead to first,
// until a law is broken.
func exploreTx(p *txProtocol, s txSetting) *txSpace {
	x := &txSpace{txProtocol: p, txSetting: s, seen: map[txWorld]struct{}{}}
	start := txWorld{faults: s.faults}
	for i := range start.parties {
		if i >= len(s.who) {
			start.parties[i].at = away
			continue
		}
		s.who[i].id = uint8(i + 1)
	}
	x.reach(start, origin{state: -1}, "")
	for i := int32(0); x.broken == "" && int(i) < len(x.states); i++ {
		x.pass(i)
		for party := range s.who {
			x.session(i, party)
			x.deliver(i, party)
			if s.who[party].plain {
				x.plain(i, party)
			} else {
				x.step(i, party)
			}
		}
	}
	return x
}

func (x *txSpace) reach(w txWorld, from origin, broken string) {
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

// forget drops what can matter no more, so that states which differ in nothing
// else are one.
func (w *txWorld) forget() {
	w.kept.attempt = min(w.kept.attempt, 1) // no step depends on it
	for i := range w.parties {
		q := &w.parties[i]
		if q.at != reading && q.at != resolving {
			q.read, q.held = kept{}, false
		}
		if q.at != runningTx && q.at != recording && q.at != overtaking {
			q.seen = 0
		}
		if q.at != away || q.session != noSession {
			continue
		}
		q.ran, q.ended, q.owns, q.reply, q.answer, q.recorded, q.denied = false, 0, false, 0, 0, false, false
		if q.over || !q.effect {
			q.effect, q.excused, q.over = false, false, false
		}
	}
}

// pass does what time does.
func (x *txSpace) pass(at int32) {
	w := x.states[at]
	k := w.kept
	if k == (kept{}) {
		return
	}
	step := func(action string) origin { return origin{at, k.id, action} }
	if k.state == Processing && !k.lapsed {
		after := w
		after.kept.lapsed = true
		after.parties[k.id-1].excused = x.who[k.id-1].plain
		x.reach(after, step("lease lapses"), "")
	}
	if !k.expired && x.expires(k) {
		after := w
		after.kept.expired = true
		if k.state != Processing {
			after.parties[k.answer-1].over, after.final = true, 0
		}
		x.reach(after, step("expires"), "")
	}
	if x.sweeps(k) && !w.locksRow() {
		after := w
		after.kept = kept{}
		x.reach(after, step("swept"), "")
	}
}

// locksRow reports whether a transaction has written the row and not ended, so
// that other writers wait.
func (w *txWorld) locksRow() bool {
	for _, q := range w.parties {
		if q.session == written || q.session == committing {
			return true
		}
	}
	return false
}

// session does what the database does with a transaction by itself.
func (x *txSpace) session(at int32, i int) {
	w := x.states[at]
	q := &w.parties[i]
	step := func(action string) origin { return origin{at, x.who[i].id, action} }
	switch q.session {
	case noSession:
		return
	case committing:
		after := w
		broken := x.commit(&after, i)
		x.reach(after, step("commit takes place"), broken)
	}
	action := "lock is let go"
	if q.session != visible {
		if action = "connection breaks"; w.faults == 0 {
			return
		}
		w.faults--
	}
	w.end(i)
	x.reach(w, step(action), "")
}

// end ends a party's transaction, and lets the lock go.
func (w *txWorld) end(i int) {
	w.parties[i].session = noSession
	if w.lock == uint8(i+1) {
		w.lock = 0
	}
}

// commit makes what a party did and its record visible.
func (x *txSpace) commit(w *txWorld, i int) (broken string) {
	q := &w.parties[i]
	k := claimed(x.who[i].claimant, 1)
	k.state, k.answer = Completed, k.id
	w.kept, q.recorded, q.session = k, true, visible
	switch {
	case q.denied:
		return lawDenied
	case !x.keeps(q.ended):
		return ""
	case q.ended != txKeeps:
		return lawTogether
	}
	return w.did(i)
}

// did notes what a party did.
func (w *txWorld) did(i int) (broken string) {
	w.parties[i].effect = true
	for j, other := range w.parties {
		if j != i && other.effect && !other.over && !other.excused {
			return lawOneEffect
		}
	}
	return ""
}

// plain takes the steps of a run at least once.
func (x *txSpace) plain(at int32, i int) {
	w := x.states[at]
	q, who := &w.parties[i], x.who[i].claimant
	step := func(action string) origin { return origin{at, who.id, action} }
	switch q.at {
	case entering:
		if w.kept == (kept{}) && w.locksRow() {
			return // waits for who inserts the row
		}
		before := w.kept
		w.kept = x.store(before, callClaim, who, party{})
		if w.kept == before {
			q.at = away
			x.reach(w, step("finds a row"), "")
			return
		}
		q.at = recording
		broken := w.did(i)
		x.reach(w, step("claims and runs"), broken)
	case recording:
		if w.kept != (kept{}) && w.locksRow() {
			return
		}
		before := w.kept
		w.kept = x.store(before, callSettle, who, party{settles: Completed})
		row, _ := w.kept.result(before, callSettle, who, party{settles: Completed})
		q.at, q.recorded = away, row.Won
		q.excused = q.excused && !row.Won
		var broken string
		if row.Won {
			broken = x.sent(&w, i, handlers, who.id)
		}
		x.reach(w, step("settles"), broken)
	}
}

var errTxModel = errors.New("the connection broke, or nothing came in time")

// step takes the next step of a request, in each way in which it may end.
func (x *txSpace) step(at int32, i int) {
	w := x.states[at]
	q, who := &w.parties[i], x.who[i].claimant
	step := func(action string) origin { return origin{at, who.id, action} }
	to := func(w txWorld, at txPlace, action string) {
		w.parties[i].at = at
		x.reach(w, step(action), "")
	}
	fails := func(w txWorld, err error, action string) { x.returns(w, i, Row{}, err, step(action)) }
	lost := func(w txWorld, action string) {
		if w.faults > 0 {
			w.faults--
			fails(w, errTxModel, action)
		}
	}
	switch q.at {
	case entering:
		switch other := x.inside(&w, i); {
		case other >= runningTx:
			x.returns(w, i, inFlightRow(who), nil, step("runs here already"))
		case other > entering:
			to(w, asking, "another is here")
		default:
			to(w, claimingTx, "enters")
			to(w, peeking, "enters, the pool is full")
		}
	case asking:
		x.returns(w, i, settledOr(w.kept, who), nil, step("reads"))
	case peeking:
		if x.free(w.kept, who) {
			to(w, claimingTx, "finds it free")
		} else {
			x.returns(w, i, w.kept.row(), nil, step("reads"))
		}
	case claimingTx:
		if x.readsFirst {
			q.read = w.kept
		} else {
			x.tryLock(&w, i)
		}
		to(w, reading, "locks")
		lost(w, "nothing is heard of the lock")
	case reading:
		if x.readsFirst {
			x.tryLock(&w, i)
		} else {
			q.read = w.kept
		}
		switch {
		case q.session == noSession && !q.held:
			fails(w, errTxModel, "cannot read")
		case q.held:
			x.returns(w, i, settledOr(q.read, who), nil, step("another has the lock"))
		case !x.free(q.read, who):
			row := q.read.row()
			w.end(i)
			x.returns(w, i, row, nil, step("reads"))
		default:
			if q.seen = who.id; q.read != (kept{}) {
				q.seen = q.read.id
			}
			q.at = runningTx
			broken := x.begins(&w, i)
			x.reach(w, step("runs"), broken)
		}
	case runningTx:
		for _, e := range x.endings {
			q.ended = e
			if e == txKeeps || e == txRefuses || x.keeps(e) {
				to(w, recording, "handler ends")
			} else {
				fails(w, errFreed, "handler fails")
			}
		}
	case recording:
		if q.session == noSession {
			fails(w, errTxModel, "cannot record")
			return
		}
		lost(w, "nothing is heard of the record")
		switch {
		case w.locksRow():
		case x.replaces(w.kept, q.seen, who):
			q.session = written
			to(w, committingTx, "records")
			lost(w, "records, and does not hear of it")
		default:
			w.end(i)
			to(w, rereading, "finds another's row")
		}
	case rereading:
		x.returns(w, i, w.kept.row(), nil, step("reads"))
		lost(w, "cannot read")
	case committingTx:
		switch {
		case q.session == written:
			sent := w
			sent.parties[i].session = committing
			if x.unlocksFirst {
				sent.lock = 0
			}
			to(sent, committingTx, "sends COMMIT")
		case q.session == noSession && q.recorded:
			won := w.kept.row()
			won.Won, won.ID = true, ClaimID{who.id}
			x.returns(w, i, won, nil, step("has committed"))
		}
		switch {
		case q.session != noSession && w.faults == 0:
			return
		case q.session != noSession:
			w.faults--
		}
		if x.believesErrors {
			fails(w, errTxModel, "hears nothing of COMMIT")
		} else {
			to(w, awaiting, "hears nothing of COMMIT")
		}
	case awaiting:
		fails(w, ErrOutcomeUnknown, "gives up")
		switch {
		case x.resolvesFirst:
			q.read = w.kept
			to(w, resolving, "reads")
		case w.lock == 0:
			w.lock = who.id
			to(w, resolving, "has the lock")
		}
	case resolving:
		if !x.resolvesFirst {
			q.read = w.kept
			w.lock = 0
			to(w, awaiting, "loses the lock")
		} else if w.lock != 0 {
			return
		}
		if q.read.id == who.id && q.read.state == Completed {
			row := q.read.row()
			row.Won = true
			x.returns(w, i, row, nil, step("has committed"))
		} else {
			fails(w, errTxModel, "has not committed")
		}
	case overtaking:
		late := w
		late.parties[i].late = q.seen
		lost(late, "hears nothing of the takeover")
		if w.kept == (kept{}) || !w.locksRow() {
			before := w.kept
			overtaker := party{seen: q.seen}
			w.kept = x.store(before, callTakeover, who, overtaker)
			row, _ := w.kept.result(before, callTakeover, who, overtaker)
			x.returns(w, i, row, nil, step("takes over"))
		}
	case returning:
		r := q.reply
		q.at = away
		broken := x.sent(&w, i, r, q.answer)
		x.reach(w, step("leaves what it took over"), broken)
		if broken == "" && (w.kept == (kept{}) || !w.locksRow()) {
			w.kept = x.store(w.kept, callRelease, who, party{})
			x.reach(w, step("gives back"), "")
		}
	}
}

// deliver has a takeover arrive for whose answer nobody waits.
func (x *txSpace) deliver(at int32, i int) {
	w := x.states[at]
	q := &w.parties[i]
	if q.late == 0 || w.kept != (kept{}) && w.locksRow() {
		return
	}
	w.kept = x.store(w.kept, callTakeover, x.who[i].claimant, party{seen: q.late})
	q.late = 0
	x.reach(w, origin{at, x.who[i].id, "late takeover"}, "")
}

// inside returns how far another request of the same process has come that has
// the key there, or entering.
func (x *txSpace) inside(w *txWorld, i int) txPlace {
	for j := range x.who {
		if at := w.parties[j].at; j != i && x.who[j].process == x.who[i].process && at >= peeking && at <= resolving {
			return at
		}
	}
	return entering
}

// settledOr is what a request is told by whom another of its kind has the key.
func settledOr(k kept, who claimant) Row {
	if k.state != Processing && !k.expired {
		return k.row()
	}
	return inFlightRow(who)
}

// tryLock takes the key's lock if nobody has it.
func (x *txSpace) tryLock(w *txWorld, i int) {
	if q := &w.parties[i]; w.lock == 0 {
		w.lock, q.session = x.who[i].id, holding
	} else {
		q.held = true
	}
}

// begins is called when a party's handler begins. Where its transaction has
// ended meanwhile, of which it has not heard, another may have come.
func (x *txSpace) begins(w *txWorld, i int) (broken string) {
	q := &w.parties[i]
	if q.ran {
		return lawOneRun
	}
	q.ran = true
	if q.session == noSession {
		return ""
	}
	for j, other := range w.parties {
		if j != i && other.session >= holding && other.session <= committing {
			return lawAlone
		}
	}
	if w.kept.state == Completed && !w.kept.expired {
		return lawAlone
	}
	return ""
}

// returns moves a party on from what InTx or a takeover returned, as patient
// ones and others go.
func (x *txSpace) returns(w txWorld, i int, row Row, err error, from origin) {
	before := w.parties[i]
	var hasty txParty
	for _, patient := range []bool{false, true} {
		after, r := x.returned(before, x.who[i].claimant, &row, err, patient)
		if patient && after == hasty {
			return
		}
		hasty = after
		w.parties[i] = after
		answer := uint8(row.Outcome.Status)
		if after.at == returning {
			w.parties[i].answer = answer
		}
		moved := w
		broken := x.sent(&moved, i, r, answer)
		x.reach(moved, from, broken)
	}
}

// sent is called when a party answers its client; answer is whose a replay is.
func (x *txSpace) sent(w *txWorld, i int, r reply, answer uint8) (broken string) {
	x.sends[r]++
	q := &w.parties[i]
	var final uint8
	switch {
	case r == noReply:
	case r == replayed && x.who[answer-1].print != x.who[i].print:
		return lawOwnAnswer
	case r == replayed:
		final = answer
	case r == handlers && !x.who[i].plain && q.ended >= txFails, r == handlersEnd, r == tooLargeReply, r == unavailableReply:
		q.denied = true
		if q.effect && !q.over {
			return lawDenied
		}
	case r == handlers && !q.recorded:
		return lawDurable
	case r == handlers && !q.over:
		final = x.who[i].id
	}
	if final != 0 {
		if w.final != 0 && w.final != final {
			return lawFinal
		}
		w.final = final
	}
	return ""
}

// stuck reports whether a request that comes when no transaction is open and
// the lease has lapsed, and that nothing disturbs, learns nothing.
func (x *txSpace) stuck(k kept) bool {
	if k.state == Processing {
		k.lapsed = k != kept{}
	}
	who := claimant{id: modelParties + 1, print: k.print}
	var q txParty
	r := noReply
	for range 3 {
		if x.free(k, who) {
			return false
		}
		before, row := k, k.row()
		q, r = x.returned(q, who, &row, nil, false)
		if q.at != overtaking {
			break
		}
		overtaker := party{seen: q.seen}
		k = x.store(before, callTakeover, who, overtaker)
		row, _ = k.result(before, callTakeover, who, overtaker)
		q, r = x.returned(q, who, &row, nil, false)
	}
	return r != replayed
}

// trace tells how the law came to be broken.
func (x *txSpace) trace() string {
	var b strings.Builder
	var path []int32
	for i := x.at; i > 0; i = x.from[i].state {
		path = append(path, i)
	}
	for _, i := range slices.Backward(path) {
		fmt.Fprintf(&b, "request %d: %-30s %+v, lock of %d\n", x.from[i].who, x.from[i].action, x.states[i].kept, x.states[i].lock)
	}
	return b.String()
}

var txHandlers = []txEnding{txKeeps, txRefuses, txFails}

var txSettings = []txSetting{
	{"two in one process, one in another", []txClaimant{inTx(1, 0), inTx(1, 0), inTx(2, 0)}, 4, txHandlers},
	{"one in a transaction, one not", []txClaimant{inTx(1, 0), plainly(2)}, 4, txHandlers},
	{"two of one kind and another", []txClaimant{inTx(1, 0), inTx(2, 0), inTx(3, 1)}, 2, txHandlers[:1]},
	{"two in transactions, one not", []txClaimant{inTx(1, 0), inTx(2, 0), plainly(3)}, 2, txHandlers[:1]},
}

func TestTxModel(t *testing.T) {
	total := 0
	var sends [txReplies]int
	for _, s := range txSettings {
		x := exploreTx(rightTxProtocol(), s)
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
		switch reply(r) {
		case passed, notKept, unknown, handlersEnd, endedReply, tooLargeReply: // of no transaction, or as handlers
		default:
			if n == 0 {
				t.Errorf("nobody was ever answered %d", r)
			}
		}
	}
	const floor = 160_000
	if total < floor {
		t.Errorf("explored %d states, want at least %d: the model has lost some of what may happen", total, floor)
	}
}

// Each law catches who breaks it.
func TestTxModelRejectsMutants(t *testing.T) {
	for _, mutant := range []struct {
		name   string
		mutate func(p, right *txProtocol)
		broken string
	}{
		{"lock and look-up in one snapshot", func(p, _ *txProtocol) { p.readsFirst = true }, lawAlone},
		{"the lock is let go before the commit", func(p, _ *txProtocol) { p.unlocksFirst = true }, lawAlone},
		{"who looks for a lost commit reads before it has the lock", func(p, _ *txProtocol) { p.resolvesFirst = true }, lawDenied},
		{"a commit that failed is believed", func(p, _ *txProtocol) { p.believesErrors = true }, lawDenied},
		{"a commit that nobody could ask for is believed", func(p, right *txProtocol) {
			p.returned = func(q txParty, who claimant, row *Row, err error, patient bool) (txParty, reply) {
				if errors.Is(err, ErrOutcomeUnknown) {
					row, err = &Row{Won: true, ID: ClaimID{who.id}}, nil
				}
				return right.returned(q, who, row, err, patient)
			}
		}, lawDurable},
		{"a record overwrites", func(p, _ *txProtocol) {
			p.replaces = func(kept, uint8, claimant) bool { return true }
		}, lawOneEffect},
		{"a record replaces a claim that came to life again", func(p, _ *txProtocol) {
			p.replaces = func(k kept, seen uint8, _ claimant) bool { return k == kept{} || k.id == seen }
		}, lawOneEffect},
		{"what was refused is kept", func(p, _ *txProtocol) {
			p.keeps = func(e txEnding) bool { return e != txFails }
		}, lawTogether},
		{"what failed is committed", func(p, _ *txProtocol) {
			p.keeps = func(txEnding) bool { return true }
		}, lawTogether},
		{"who was overtaken runs again", func(p, right *txProtocol) {
			p.returned = func(q txParty, who claimant, row *Row, err error, patient bool) (txParty, reply) {
				ran := q.ran
				q.ran = false
				q, r := right.returned(q, who, row, err, patient)
				q.ran = ran
				return q, r
			}
		}, lawOneRun},
		{"what is taken over is given back, recorded or not", func(p, right *txProtocol) {
			p.store = func(k kept, c call, who claimant, q party) kept {
				if c == callRelease && k.id == who.id {
					return kept{}
				}
				return right.store(k, c, who, q)
			}
		}, lawOneEffect},
		{"the sweeper takes what is recorded", func(p, right *txProtocol) {
			p.sweeps = func(k kept) bool { return k.state == Completed || right.sweeps(k) }
		}, lawDenied},
		{"every request is the same", func(p, right *txProtocol) {
			p.decide = func(e *execution, row *Row) verdict {
				if v := right.decide(e, row); v != verdictMismatch {
					return v
				}
				return verdictReplay
			}
		}, lawOwnAnswer},
		{"nobody takes over", func(p, right *txProtocol) {
			p.decide = func(e *execution, row *Row) verdict {
				if v := right.decide(e, row); v != verdictTakeOver {
					return v
				}
				return verdictInFlight
			}
		}, lawStuck},
	} {
		t.Run(mutant.name, func(t *testing.T) {
			p := rightTxProtocol()
			mutant.mutate(p, rightTxProtocol())
			for _, s := range txSettings {
				if x := exploreTx(p, s); x.broken != "" {
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

// A txWalk is a Transactor that answers the guard as its script says, and has
// the model go along.
type txWalk struct {
	*walk
	p     *txProtocol
	at    txParty
	reply reply
}

// A txResult is what InTx or Takeover returns.
type txResult struct {
	row kept // of another, or the zero kept: none
	err error
	won bool
}

var errTxLost = errors.New("it did not happen")

// othersResults are what may be there in place of a request's own. The first lets
// every request end.
func othersResults() []txResult {
	results := []txResult{{err: errTxLost}, {row: kept{id: nobody}}}
	for _, k := range othersRows {
		results = append(results, txResult{row: k})
	}
	return results
}

// result chooses what is returned, and has the model hear it.
func (w *txWalk) result(claim *Claim, results []txResult) (Row, error) {
	chosen := results[0]
	if w.depth--; w.depth >= 0 {
		chosen = results[w.choose(len(results))]
	}
	row := chosen.row.row()
	if chosen.won {
		row = claimed(w.who, 1).row()
		row.Won = true
	}
	w.at, w.reply = w.p.returned(w.at, w.who, &row, chosen.err, w.patient)
	if row.IsZero() {
		return row, chosen.err
	}
	if row.ID == (ClaimID{w.who.id}) {
		row.ID = claim.ID
	}
	row.Owner = claim.Owner
	if bytes.Equal(row.Fingerprint, modelPrints[w.who.print]) {
		row.Fingerprint = claim.Fingerprint
	}
	row.Outcome.Header = encodeHeader(http.Header{}, "")
	row.LeaseLeft = 1
	return row, chosen.err
}

func (w *txWalk) stands(at txPlace) {
	if w.at.at != at {
		w.t.Fatalf("the guard is at %d, the model at %d; choices %v", at, w.at.at, w.choices)
	}
}

func (w *txWalk) CheckTx() error { return nil }

func (w *txWalk) InTx(ctx context.Context, claim *Claim, run func(context.Context) (Outcome, bool, error)) (row Row, err error) {
	w.stands(entering)
	if w.at.ran || w.choose(2) == 1 {
		return w.result(claim, slices.DeleteFunc(othersResults(), func(r txResult) bool { return r.err == nil && r.row == kept{} }))
	}
	w.at.at, w.at.ran = runningTx, true
	defer func() {
		if v := recover(); v != nil {
			w.at, w.reply = w.at.leaves(handlersEnd)
			panic(v)
		}
	}()
	o, keep, err := run(ctx)
	if frees := w.at.ended >= txFails; errors.Is(err, errFreed) != frees || !frees && (err != nil || keep != w.p.keeps(w.at.ended) || o.State != Completed) {
		w.t.Fatalf("the handler ended in %d and the guard returned %+v, %t, %v", w.at.ended, o, keep, err)
	}
	if err != nil {
		w.at, w.reply = w.p.returned(w.at, w.who, &Row{}, err, w.patient)
		return Row{}, err
	}
	return w.result(claim, append([]txResult{{won: true}, {err: ErrOutcomeUnknown}, {err: ErrTxEnded}}, othersResults()...))
}

func (w *txWalk) Takeover(_ context.Context, claim *Claim, seen ClaimID) (Row, error) {
	if w.stands(overtaking); seen[0] != w.at.seen {
		w.t.Fatalf("the guard takes over %v, the model %d", seen, w.at.seen)
	}
	return w.result(claim, append(othersResults(), txResult{won: true}))
}

func (w *txWalk) Release(context.Context, *Claim) error {
	w.stands(returning)
	w.at.at, w.reply = away, w.at.reply
	if w.choose(2) == 1 {
		return errTxLost
	}
	return nil
}

func (w *txWalk) handle(ctx context.Context) (*Response, error) {
	w.stands(runningTx)
	w.at.ended = txEnding(w.choose(int(txEndings)))
	switch w.at.ended {
	case txKeeps:
		return &Response{Status: 201}, nil
	case txRefuses:
		return &Response{Status: 404}, nil
	case txFails:
		return &Response{Status: 503}, nil
	case txTooLarge:
		return nil, Passing(ctx)
	case txPanics:
		panic(errTxLost)
	}
	return nil, errTxLost
}

// txReplyOf tells from what the guard returned what kind of reply it is.
func txReplyOf(resp *Response, err error) reply {
	if err == nil && resp != nil && resp.Status == http.StatusInternalServerError {
		switch {
		case bytes.Contains(resp.Body, []byte(wire.ResponseTooLarge)):
			return tooLargeReply
		case bytes.Contains(resp.Body, []byte(wire.OutcomeUnknown)):
			return endedReply
		}
	}
	return replyOf(resp, err)
}

// The guard goes on from what a transaction returns as the model does.
func TestGuardFollowsTheTxModel(t *testing.T) {
	walks := 0
	for _, patient := range []bool{false, true} {
		s := &script{}
		for more := true; more; more = s.next() {
			synctest.Test(t, func(t *testing.T) {
				w := &txWalk{
					walk: &walk{script: s, t: t, patient: patient, depth: 3, who: claimant{id: 1}},
					p:    rightTxProtocol(),
				}
				resp, err := do(t, w, Transaction, patient, w.handle)
				if got := txReplyOf(resp, err); w.at.at != away || got != w.reply {
					t.Fatalf("the guard answers %d, the model %d at %d; choices %v", got, w.reply, w.at.at, s.choices)
				}
			})
			walks++
		}
	}
	if t.Logf("%d walks", walks); walks < 1_600 {
		t.Errorf("only %d walks", walks)
	}
}
