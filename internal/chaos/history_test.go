//go:build unix

package chaos

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// An input is one request. Its number is even or odd with its body: requests of
// one key are the same exactly if their numbers agree in that.
type input struct{ key, number int }

func sameRequest(a, b int) bool { return a%2 == b%2 }

// An output is what became of a request: of which kind its answer was and, of a
// handler's, which request's run gave it, and its status.
type output struct {
	kind        kind
	run, status int
}

type kind string

const (
	own         kind = "own answer"
	replayed    kind = "replayed"
	freed       kind = "own answer, not recorded"
	inFlight    kind = "in flight"
	heldHere    kind = "in flight in this process" // see holding
	mismatch    kind = "mismatch"
	unknown     kind = "outcome unknown" // nobody will run it
	unavailable kind = "unavailable"     // nobody ran it
	unsettled   kind = "unsettled"       // it may have run
	noAnswer    kind = "no answer"       // it may have run, and may do so later
	wrong       kind = "wrong"
)

// promise is what the guard promises of one key, as if requests came one after
// the other. A state is the number of the request whose run is recorded, or 0.
var promise = porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		keys := map[int][]porcupine.Operation{}
		for _, op := range history {
			key := op.Input.(input).key
			keys[key] = append(keys[key], op)
		}
		var partitions [][]porcupine.Operation
		for _, ops := range keys {
			partitions = append(partitions, ops)
		}
		return partitions
	},
	Init: func() []any { return []any{0} },
	Step: func(state, in, out any) []any {
		recorded, request, answer := state.(int), in.(input), out.(output)
		stays := func(ok bool) []any {
			if ok {
				return []any{recorded}
			}
			return nil
		}
		switch answer.kind {
		case own:
			if recorded == 0 && answer.run == request.number {
				return []any{request.number}
			}
			return nil
		case replayed:
			return stays(recorded != 0 && recorded == answer.run && sameRequest(recorded, request.number))
		case freed, inFlight:
			return stays(recorded == 0)
		case unknown:
			return stays(recorded == 0)
		case mismatch:
			return stays(recorded == 0 || !sameRequest(recorded, request.number))
		case unavailable, heldHere:
			return stays(true)
		case unsettled, noAnswer:
			if recorded == 0 {
				return []any{0, request.number}
			}
			return stays(true)
		}
		return nil
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v: %+v", in, out) },
}

// A history is what all requests asked and were answered, and what ran.
type history struct {
	ops     []porcupine.Operation // whose ClientId is that of the server
	runs    map[int][]run         // of each key
	held    map[int][]holding
	effects map[int][]int // the runs that left what they did, in transactions
	bound   map[int]binding
	marks   map[int]bool // the keys that a run tried to bind
	seen    map[string]int
}

// A run is which request ran, in which attempt of its key, and how.
type run struct {
	number, attempt int
	plan            string
}

// A holding is for how long a run in a transaction had its key in its process.
// There the key is in flight until the run has returned, also when its
// connection is broken and another process has long answered, or when another
// sees the commit before this one hears of it.
type holding struct {
	server   int
	from, to int64
}

// holds reports whether a run had the key in the process that was asked.
func (h *history) holds(op porcupine.Operation) bool {
	return slices.ContainsFunc(h.held[op.Input.(input).key], func(held holding) bool {
		return held.server == op.ClientId && held.from <= op.Return && op.Call <= held.to
	})
}

// A binding is the run of a key that was bound to be the last, and how many had
// begun by then.
type binding struct {
	run
	begun int
}

func (h *history) bind(key int, r run) {
	if _, bound := h.bound[key]; !bound {
		h.bound[key] = binding{r, len(h.runs[key])}
	}
}

var (
	errNoOrder  = errors.New("no order of one after the other explains the answers")
	errRanAgain = errors.New("ran again after a run that was bound to be the last")
	errMadeUp   = errors.New("answered what no run answered")
	errDenied   = errors.New("was told that it did not run, and ran")
	errTwice    = errors.New("was done more than once")
	errKept     = errors.New("left what it did, although it was refused or failed")
	errNotDone  = errors.New("was answered, and what it did is not there")
)

// checkEffects returns how what was left in transactions breaks the promise, or
// what was answered of requests that were denied.
func (h *history) checkEffects() error {
	for key, effects := range h.effects {
		for _, run := range h.runs[key] {
			if slices.Contains(effects, run.number) && (run.plan == "refuse" || run.plan == "fail" || run.plan == "panic") {
				return fmt.Errorf("key %d %w: %+v", key, errKept, run)
			}
		}
		if len(effects) > 1 {
			return fmt.Errorf("key %d %w: %v of %v", key, errTwice, effects, h.runs[key])
		}
	}
	answered := map[int]bool{} // whose answer somebody got
	for _, op := range h.ops {
		answered[op.Output.(output).run] = true
	}
	for _, op := range h.ops {
		in, out := op.Input.(input), op.Output.(output)
		if out.kind == unavailable && (answered[in.number] || slices.Contains(h.effects[in.key], in.number)) {
			return fmt.Errorf("request %d %w", in.number, errDenied)
		}
	}
	return nil
}

// check returns all ways in which the history breaks the promise, of each the
// first: what is wrong in one way often shows in others too.
func (h *history) check() error {
	return errors.Join(h.checkEffects(), h.checkOrder(), h.checkRuns())
}

// checkOrder returns the first key whose answers no order explains.
func (h *history) checkOrder() error {
	for i, op := range h.ops {
		if op.Output.(output).kind == inFlight && h.holds(op) {
			h.ops[i].Output = output{kind: heldHere}
		}
	}
	model := promise.ToModel()
	for _, ops := range promise.Partition(h.ops) {
		if result := porcupine.CheckOperationsTimeout(model, ops, time.Minute); result != porcupine.Ok {
			var b strings.Builder
			for _, op := range ops {
				fmt.Fprintf(&b, "\n%8.1f to %8.1f ms: %s", float64(op.Call)/1e6, float64(op.Return)/1e6, promise.DescribeOperation(op.Input, op.Output))
			}
			return fmt.Errorf("%w (%s):%s", errNoOrder, result, b.String())
		}
	}
	return nil
}

// checkRuns returns what ran although it was not to, or was not as it was
// answered.
func (h *history) checkRuns() error {
	ran := map[int]bool{}
	for key, runs := range h.runs {
		last, bound := h.bound[key]
		for i, run := range runs {
			// A run of a lower attempt was claimed before, and began late.
			if ran[run.number] || bound && i >= last.begun && run.attempt >= last.attempt {
				return fmt.Errorf("key %d %w: %v of %v (request, attempt)", key, errRanAgain, last.run, runs)
			}
			ran[run.number] = true
		}
	}
	for _, op := range h.ops {
		in, out := op.Input.(input), op.Output.(output)
		if out.run != 0 && !ran[out.run] || out.kind == unknown && !isAtMostOnce(in.key) && !h.marks[in.key] {
			return fmt.Errorf("request %d %w: %+v", in.number, errMadeUp, out)
		}
		if !isInTx(in.key) {
			if out.kind == unavailable && ran[in.number] {
				return fmt.Errorf("request %d %w", in.number, errDenied)
			}
			continue
		}
		left := h.effects[in.key] // of one run, or of none
		switch {
		case out.status == http.StatusCreated && !slices.Contains(left, out.run):
			return fmt.Errorf("request %d %w: %+v", in.number, errNotDone, out)
		case out.status == http.StatusNotFound && len(left) > 0, out.kind == freed && slices.Contains(left, out.run):
			return fmt.Errorf("request %d %w: %+v, left by %d", in.number, errKept, out, left)
		}
	}
	return nil
}

// The model of the promise tells right histories from wrong ones.
func TestPromise(t *testing.T) {
	ask := func(number int, kind kind, run int, call, end int64) porcupine.Operation {
		return porcupine.Operation{Input: input{number: number}, Output: output{kind: kind, run: run}, Call: call, Return: end}
	}
	for _, test := range []struct {
		name  string
		right bool
		ops   []porcupine.Operation
	}{
		{"a replay of the first", true, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(4, replayed, 2, 3, 4)}},
		{"a replay before the first ended", true, []porcupine.Operation{ask(2, own, 2, 1, 4), ask(4, replayed, 2, 2, 3)}},
		{"a replay before the first began", false, []porcupine.Operation{ask(2, own, 2, 3, 4), ask(4, replayed, 2, 1, 2)}},
		{"a replay of a run whose client left", true, []porcupine.Operation{ask(2, noAnswer, 0, 1, 9), ask(4, replayed, 2, 3, 4)}},
		{"a run after one whose client left", true, []porcupine.Operation{ask(2, noAnswer, 0, 1, 9), ask(4, own, 4, 3, 4)}},
		{"two answers of their own", false, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(4, own, 4, 3, 4)}},
		{"two replays that differ", false, []porcupine.Operation{ask(2, noAnswer, 0, 1, 9), ask(4, noAnswer, 0, 1, 9), ask(6, replayed, 2, 3, 4), ask(8, replayed, 4, 5, 6)}},
		{"in flight after the answer", false, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(4, inFlight, 0, 3, 4)}},
		{"a replay to another request", false, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(3, replayed, 2, 3, 4)}},
		{"a mismatch of the same request", false, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(4, mismatch, 0, 3, 4)}},
		{"unknown after the answer", false, []porcupine.Operation{ask(2, own, 2, 1, 2), ask(4, unknown, 0, 3, 4)}},
	} {
		if right := porcupine.CheckOperations(promise.ToModel(), test.ops); right != test.right {
			t.Errorf("%s: right is %t", test.name, right)
		}
	}
}
