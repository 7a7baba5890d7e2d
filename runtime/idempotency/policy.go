package idempotency

import (
	"time"
)

// A Policy is the resolved `x-idempotent` annotation of one operation. Generated
// code holds one per annotated operation, as a keyed literal with every field
// resolved; [DefaultPolicy] returns the defaults for policies written by hand.
//
// A Policy is checked once, by [Register], and must not be changed afterwards.
type Policy struct {
	// Operation is the identity of the operation: its method, a space and its
	// path template, such as "POST /orders/{id}/refunds".
	Operation string
	// OperationID is the operationId of the OpenAPI document, for events.
	OperationID string
	// Secured says that every alternative of the operation's security
	// requirement names a scheme. A secured operation needs a principal
	// function (see [WithPrincipal]) and answers 401 to an empty principal.
	Secured bool

	// Header is the name of the header field that carries the key.
	Header string
	// OnMissing is what a request without a key, or with a blank one, gets.
	OnMissing OnMissing
	// Key constrains keys.
	Key KeyRule
	// Scope is what makes two equal keys the same key.
	Scope Scope
	// TTL is how long a recorded answer is replayed, counted from completion.
	TTL time.Duration
	// Fingerprint is what makes two requests with the same key the same request.
	Fingerprint FingerprintRule
	// OnMismatch is what a request gets whose key was used by another request.
	OnMismatch OnMismatch
	// WaitFor is how long a duplicate waits for the run in flight before it is
	// answered 409. Zero answers at once.
	WaitFor time.Duration
	// Record lists the 4xx and 5xx statuses that are recorded and replayed.
	// 2xx and 3xx always are. Ignored under [AtMostOnce], which records all.
	Record []StatusPattern
	// Replay is how a recorded answer is sent again.
	Replay ReplayRule

	// Guarantee is what holds when a process dies in mid-handler.
	Guarantee Guarantee
	// Lease is how long a claim holds without renewal. A running handler renews
	// it at a third; after a crash the key is held until it ends.
	Lease time.Duration
	// Timeout cancels the handler's context when the request's own context
	// brings no deadline.
	Timeout time.Duration
	// MaxRequestBody is the largest request body, in bytes. Larger: 413.
	MaxRequestBody int64
	// MaxRecordedBody is the largest response body that is recorded, in bytes.
	// A larger response is sent, and its duplicates are answered 409.
	MaxRecordedBody int64
}

// OnMissing is the status that answers a request without a key: 400, 422, or
// [RunUnguarded].
type OnMissing int

// RunUnguarded lets a request without a key run unguarded; the observer hears
// of each.
const RunUnguarded OnMissing = 0

// OnMismatch is the status that answers a reused key: 400, 409, 422, or
// [ReplayAnyway].
type OnMismatch int

// ReplayAnyway replays the recorded answer whatever the new request says. The
// request body is then neither read nor compared.
const ReplayAnyway OnMismatch = 0

// A KeyRule constrains keys. Lengths count the key's bytes, without quotes.
type KeyRule struct {
	Format    KeyFormat
	MinLength int
	MaxLength int
	// Pattern is an RE2 expression that the key must match, or empty.
	Pattern string
}

// A KeyFormat is the syntax of a key.
type KeyFormat string

const (
	FormatAny  KeyFormat = "any"  // printable ASCII
	FormatUUID KeyFormat = "uuid" // RFC 9562, any version but nil; compared in lower case
)

// A Scope says who shares a name space of keys.
type Scope string

const (
	ScopePrincipal Scope = "principal" // one operation of one principal
	ScopeOperation Scope = "operation" // one operation, all principals
	ScopeGlobal    Scope = "global"    // the key alone
)

// A FingerprintRule says what of a request is compared. The method and the path
// always are.
type FingerprintRule struct {
	Body      BodyKind
	Query     bool
	MediaType bool
	// Headers are further header fields whose values are compared.
	Headers []string
	// Ignore are JSON pointers (RFC 6901) to members of a JSON body that are
	// left out.
	Ignore []string
}

// A BodyKind says how a request body is compared.
type BodyKind string

const (
	BodyAuto      BodyKind = "auto"      // by media type: JSON, multipart, else raw
	BodyJSON      BodyKind = "json"      // order of members and white space do not count
	BodyRaw       BodyKind = "raw"       // byte for byte
	BodyMultipart BodyKind = "multipart" // parts without their boundary
	BodyNone      BodyKind = "none"      // not read
)

// A StatusPattern is a status code such as "409", or a class: "4XX" or "5XX". A
// class does not reach 400, 401, 403, 408, 409, 413, 415, 422, 425 and 429,
// which a client gets for what it may mend and send again with the same key:
// those are recorded only when they are named.
type StatusPattern string

// A ReplayRule says how a recorded answer is sent again.
type ReplayRule struct {
	// None records that the operation completed but not its answer: duplicates
	// are answered 409.
	None bool
	// Status replaces the status of a replayed 2xx that has a body: 200, or 0
	// for the original.
	Status int
	// Marker is the header field, with value "true", that marks a replay.
	// Empty: none.
	Marker string
}

// A Guarantee says what holds when a handler panics or its process dies.
type Guarantee string

const (
	// AtLeastOnce: the key is held until its lease ends, then the next request
	// runs again. A 5xx, or a 4xx that is not recorded, frees the key at once.
	AtLeastOnce Guarantee = "atLeastOnce"
	// AtMostOnce: after the handler began, nothing runs twice. Every answer is
	// recorded. A crash or a panic leaves the outcome unknown.
	AtMostOnce Guarantee = "atMostOnce"
	// Transaction: claim, the handler's writes and the record commit together.
	Transaction Guarantee = "transaction"
)
