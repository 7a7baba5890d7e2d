// Package guardtest drives generated servers over HTTP and checks that they keep
// what package idempotency promises, whatever router they are for. The module
// internal/routertest runs it on every target of the generator.
//
// A target serves the document internal/routertest/golden/guardtest/spec.yaml:
//
//	GET, HEAD /things                  not annotated
//	POST /things                       JSON; the defaults, and 409 is recorded
//	GET, HEAD, POST /items             an alias of /things
//	POST /accounts/{account}/payments  JSON; secured, at-most-once, duplicates wait
//	POST /files                        forms; keys are optional, bodies are at most 4 KiB, the lease is a second
//
// and, where [Server].Second asks for it, internal/routertest/golden/second/spec.yaml:
//
//	POST /orders                       in a transaction; the key is declared, a UUID; answers are at most 4 KiB
//	POST /quotes                       a known key is answered 200 whatever the body; bodies are at most 4 KiB
package guardtest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// A Target is generated code for one router, and how to serve it.
type Target struct {
	Name string
	// Serve serves s on a loopback address until the test ends.
	Serve func(t *testing.T, s Server) Running

	// What follows is where a router differs because it has to.

	// ErrorsAre500 says that a handler's error is always rendered as 500.
	ErrorsAre500 bool
	// ErrorsAreOutside says that handlers leave their errors to a middleware
	// around the guard, so that what it renders is not recorded.
	ErrorsAreOutside bool
	// SpoilsCompressed says that the router's own compressor spoils an answer that
	// the handler has compressed already: it compresses it once more, or takes its
	// Content-Encoding away.
	SpoilsCompressed bool
	// ReusesWriters says that an http.ResponseWriter is another request's as soon
	// as the handler has returned.
	ReusesWriters bool
	// FailedHijackIs200 says that the router writes no status behind a hijack,
	// also when it failed.
	FailedHijackIs200 bool
	// Fasthttp says that the server is not net/http's: handlers have no
	// http.ResponseWriter, what streams and what is hijacked is written after they
	// have returned, and a panic that nothing recovers ends the process.
	Fasthttp bool
}

// A Server is what a target serves. Around the guard it has middlewares of its
// own: one that turns a panic into status 500, one that sets the response field
// X-Outer to the request's X-Trip, one that keeps the request's X-User in the
// router's context, where the principal function finds it, and one that hands the
// context of [Outer] on.
type Server struct {
	// Guard returns the guard. The option is the generated PrincipalFrom over
	// [Principal].
	Guard func(principal idempotency.Option) *idempotency.Guard
	// Handle is what every operation does. The target writes its Reply.
	Handle Handler
	// BaseURL is put before every path.
	BaseURL string
	// Group has the target register its routes in a group of its router that
	// has this prefix.
	Group string
	// ByHand has the target register POST /things alone, with a
	// ServerInterfaceWrapper that is not made by a generated function.
	ByHand bool
	// Second has the target register the second document too.
	Second bool
	// NoRecovery leaves the middleware out that turns a panic into status 500.
	NoRecovery bool
	// Compress has the router's own compressor around everything else compress
	// what clients accept compressed.
	Compress bool
	// Around is put around the router. Targets over fasthttp do not get one.
	Around func(http.Handler) http.Handler
}

// Running is a server that has been started.
type Running struct {
	URL string // without a slash at its end
	// Shutdown stops the server gracefully: it returns when all requests in
	// flight are answered, or when ctx ends.
	Shutdown func(ctx context.Context) error
}

// A Handler handles a call. A panic of it is to reach the router's recovery.
type Handler func(ctx context.Context, call Call) Reply

// A Call is a request that reached its handler.
type Call struct {
	Operation string
	Body      string // as sent, or, behind a strict handler, what was decoded
	// User is the request's X-User as the handler finds it: in the router's
	// context where there is one, else in that of [Outer].
	User string
	// Key is the key as the generated code bound it to the parameter that the
	// second document declares.
	Key *string
}

// A Reply is what a handler answers. The zero Reply is a handler that writes
// nothing.
type Reply struct {
	Status int
	Header http.Header // replaces fields of the same name
	Body   string
	// Link, if any, is sent first as that field of an informational response, 103.
	Link string
	// Stream is sent in place of Body, each part as soon as it is written.
	// Between is called after the first part was sent.
	Stream  []string
	Between func()
	// Hijack gets the connection in place of everything else. It is closed
	// afterwards.
	Hijack func(net.Conn)
	// Write writes the answer in place of everything but Header. Targets over
	// fasthttp do not get one.
	Write func(http.ResponseWriter)
	// Panic, if any, is what the handler panics with when it has written Header,
	// Status and Body.
	Panic any
	// Err, if any, is an [*Error]: the handler fails in the way of its router,
	// and the router's own error handling is to answer with its status and its
	// text, "handled: " before it.
	Err error
}

// An Error is how a handler fails.
type Error struct {
	Status int
	Text   string
}

func (e *Error) Error() string { return e.Text }

// Principal is what the target's principal function is to return for a request
// whose X-User is user, or empty.
func Principal(user string) (string, error) {
	switch user {
	case "banned":
		return "", idempotency.ErrForbidden
	case "unknowable":
		return "", errors.New("no directory")
	}
	return user, nil
}

// UserKey is the key of the request's X-User in the context of [Outer].
type UserKey struct{}

// Outer returns the context that the target's middleware is to hand on in place
// of the request's: with the request's X-User, and with the deadline after which
// its X-Timeout, if any, ends. Field returns a field of the request.
func Outer(ctx context.Context, field func(name string) string) (context.Context, context.CancelFunc) {
	ctx = context.WithValue(ctx, UserKey{}, field("X-User"))
	if timeout, err := time.ParseDuration(field("X-Timeout")); err == nil {
		return context.WithTimeout(ctx, timeout)
	}
	return ctx, func() {}
}

// Run runs the suite on target, its cases in parallel.
func Run(t *testing.T, target Target) {
	held := promises
	if !target.Fasthttp {
		held = slices.Concat(promises, httpPromises)
	}
	for _, p := range held {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.check(t, target)
		})
	}
}
