// Package wire holds what servers, clients and the generator must agree on:
// names on the wire, and the defaults of the x-idempotent extension. Each has
// its one definition here. It depends on the standard library alone.
package wire

import "time"

// Header fields and media types.
const (
	HeaderKey      = "Idempotency-Key"          // draft-ietf-httpapi-idempotency-key-header-07
	HeaderReplayed = "Idempotent-Replayed"      // the default marker of a replay
	ProblemType    = "application/problem+json" // RFC 9457
)

// ProblemBase is what problem types begin with unless a server says otherwise.
// Clients compare what follows the last '/', '#' or ':' of a type.
const ProblemBase = "urn:oapi-idempotent:"

// NilUUID is what clients send that did not set a key: refused, and never sent.
const NilUUID = "00000000-0000-0000-0000-000000000000"

// Names of problems: what a problem's type ends in.
const (
	MissingKey        = "missing-idempotency-key"
	InvalidKey        = "invalid-idempotency-key"
	KeyReused         = "idempotency-key-reused"
	InFlight          = "idempotency-in-flight"
	NotReplayable     = "idempotency-not-replayable"
	StoreUnavailable  = "idempotency-store-unavailable"
	OutcomeUnknown    = "idempotency-outcome-unknown"
	RequestTooLarge   = "request-too-large"
	ResponseTooLarge  = "response-too-large"
	RequestUnreadable = "request-unreadable"
	Unauthenticated   = "unauthenticated"
	Forbidden         = "forbidden"
	PrincipalFailed   = "principal-failed"
)

// Defaults of the x-idempotent extension.
const (
	DefaultOnMissing       = 400
	DefaultOnMismatch      = 422
	DefaultKeyMinLength    = 1
	DefaultKeyMaxLength    = 255
	DefaultTTL             = 24 * time.Hour
	DefaultWaitFor         = 0 * time.Second
	DefaultRecord          = "4XX"
	DefaultLease           = 30 * time.Second
	MinLease               = 100 * time.Millisecond // a machine stalls for longer than less
	DefaultTimeout         = 5 * time.Minute
	DefaultMaxRequestBody  = 1 << 20 // bytes
	DefaultMaxRecordedBody = 1 << 20 // bytes

	DefaultRetryMaxAttempts = 4
	DefaultRetryBase        = 500 * time.Millisecond
	DefaultRetryMax         = 8 * time.Second
	DefaultRetryMaxElapsed  = 60 * time.Second
)
