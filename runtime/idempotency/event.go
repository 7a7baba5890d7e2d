package idempotency

import (
	"context"
	"time"
)

// An Event tells an observer what the guard did. It carries nothing of a body
// and no key, only the key's hash.
type Event struct {
	Kind      EventKind
	Operation string // Policy.Operation
	// KeyHash is the key's hash in the store, in hexadecimal; empty before a
	// key was accepted.
	KeyHash string
	// Attempt counts the runs of the key's handler, this one included; zero if
	// none ran.
	Attempt int
	// Status is the status of the answer, as far as there is one.
	Status int
	// Problem is the name of the refusal, for EventRefused.
	Problem string
	// StoreTime is how long the request has waited for the store so far: it adds
	// up over a request's events.
	StoreTime time.Duration
	Err       error
}

// An EventKind says what happened.
type EventKind string

const (
	EventRecorded      EventKind = "recorded"       // the handler ran and its answer is durable
	EventReleased      EventKind = "released"       // the handler ran and its answer frees the key
	EventReplayed      EventKind = "replayed"       // a recorded answer was sent
	EventRefused       EventKind = "refused"        // the guard answered; Problem says what
	EventUnguarded     EventKind = "unguarded"      // no key, and the policy lets it run
	EventTakenOver     EventKind = "taken over"     // a claim whose lease had ended was taken over
	EventNotReplayable EventKind = "not replayable" // the handler ran and its answer cannot be recorded
	EventUnknown       EventKind = "unknown"        // the handler failed without an answer, at most once
	EventPanicked      EventKind = "panicked"       // the handler panicked; the key is held until its lease ends
	EventRenewFailed   EventKind = "renew failed"   // a renewal failed; the handler is cancelled if none succeeds
	EventLeaseLost     EventKind = "lease lost"     // another run took over, or an operator settled the key
	EventSealFailed    EventKind = "seal failed"    // the sealer failed; the answer is not recorded
	EventStoreFailed   EventKind = "store failed"   // a call of the store failed; Err says how
)

func (g *Guard) emit(ctx context.Context, e Event) {
	if g.observe != nil {
		g.observe(ctx, e)
	}
}
