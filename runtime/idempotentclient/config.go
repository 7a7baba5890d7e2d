package idempotentclient

import (
	"cmp"
	"context"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// An Operation is what the document says about the calls of one operation.
// Generated code holds one per annotated operation. It must not be changed once
// it is in use.
type Operation struct {
	// ID is the operationId, for observers.
	ID string
	// Header is the header field that carries the key. Empty: Idempotency-Key.
	Header string
	// Marker is the header field by which the server marks a replayed answer.
	// Empty: the server does not mark them.
	Marker string
	// Natural says that the operation is idempotent without a key: it is
	// repeated without one.
	Natural bool
	// NoRetry says that a call is one attempt.
	NoRetry bool
	// Retry limits the attempts of one call.
	Retry Retry
}

// Retry limits the attempts of one call. A field that is not positive has its
// default, which is that of the x-idempotent extension.
type Retry struct {
	MaxAttempts int           // 4; 1: no repetition
	Base        time.Duration // 500ms: the longest wait after the first attempt
	Max         time.Duration // 8s: the longest wait of all
	MaxElapsed  time.Duration // 60s: no attempt begins later than this
}

// or returns r with its unset fields taken from other.
func (r Retry) or(other Retry) Retry {
	pick := func(a, b time.Duration) time.Duration { return cmp.Or(max(a, 0), b) }
	return Retry{
		MaxAttempts: cmp.Or(max(r.MaxAttempts, 0), other.MaxAttempts),
		Base:        pick(r.Base, other.Base),
		Max:         pick(r.Max, other.Max),
		MaxElapsed:  pick(r.MaxElapsed, other.MaxElapsed),
	}
}

var defaultRetry = Retry{
	MaxAttempts: wire.DefaultRetryMaxAttempts,
	Base:        wire.DefaultRetryBase,
	Max:         wire.DefaultRetryMax,
	MaxElapsed:  wire.DefaultRetryMaxElapsed,
}

// defaultBodyLimit is how many bytes of a body are held in memory, see
// [WithBodyLimit].
const defaultBodyLimit = 1 << 20

// A Config is how a client gives keys to its calls and repeats them. The zero
// Config follows each operation's document. A Config does not change once it is
// made and is safe for concurrent use.
type Config struct {
	generate  func(context.Context) (string, error)
	retry     Retry
	noRetry   bool
	conflicts bool
	bodyLimit int64
	observe   func(context.Context, Attempt)
}

// NewConfig returns a Config with opts applied in their order.
func NewConfig(opts ...Option) Config {
	var c Config
	for _, opt := range opts {
		opt(&c)
	}
	return c
}

// An Option configures a client.
type Option func(*Config)

// WithGenerator makes the keys of calls for which the caller gave none. It is
// called once per call; its error, or a key that cannot be sent, makes the call
// fail before anything is sent. The default is [UUIDv4].
func WithGenerator(generate func(context.Context) (string, error)) Option {
	return func(c *Config) { c.generate = generate }
}

// WithRetry overrides, for every operation of the client that is repeated at
// all, the limits that are positive in r.
func WithRetry(r Retry) Option {
	return func(c *Config) { c.retry = r }
}

// NoRetry makes every call one attempt, which still carries a key. (net/http may
// send it again by itself, see the package comment.) For a single call there is
// [WithoutRetry].
func NoRetry() Option {
	return func(c *Config) { c.noRetry = true }
}

// WithConflictsInFlight takes a 409 without a problem type for "the first
// request is still in flight": it is repeated, and [Check] says [InFlight] of it.
// It is for servers that do not send problem details and use 409 for nothing
// else.
func WithConflictsInFlight() Option {
	return func(c *Config) { c.conflicts = true }
}

// WithBodyLimit sets how many bytes are held in memory of a request body that
// has no GetBody, and of an answer. The default, also for a limit that is not
// positive, is 1 MiB.
func WithBodyLimit(bytes int64) Option {
	return func(c *Config) { c.bodyLimit = bytes }
}

// WithObserver calls observe after every attempt, before any wait, on the
// goroutine of the call.
func WithObserver(observe func(context.Context, Attempt)) Option {
	return func(c *Config) { c.observe = observe }
}

// An Attempt is one exchange of a call, as an observer sees it.
type Attempt struct {
	Operation string // Operation.ID
	Key       string // empty for a natural operation
	Number    int    // 1 for the first
	Status    int    // of the answer, or 0
	Err       error  // why there is no whole answer, or nil
	Again     bool   // another attempt follows after Wait
	Wait      time.Duration
}

type withoutRetry struct{}

// WithoutRetry returns a context whose calls are one attempt each.
func WithoutRetry(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutRetry{}, true)
}
