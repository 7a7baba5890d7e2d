// Package guardtest drives generated servers over HTTP and checks that they keep
// what package idempotency promises, whatever router they are for. The module
// internal/routertest runs it on every target of the generator.
//
// A target serves the document internal/routertest/golden/guardtest/spec.yaml:
//
//	GET  /things                       not annotated
//	POST /things                       JSON; the defaults, and 409 is recorded
//	POST /accounts/{account}/payments  JSON; secured, at-most-once, duplicates wait
//	POST /files                        forms; keys are optional, bodies are at most 4 KiB, the lease is a second
package guardtest

import (
	"context"
	"net/http"
	"testing"

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
}

// A Server is what a target serves. Around the guard it has middlewares of its
// own: one that turns a panic into status 500, one that sets the response field
// X-Outer to the request's X-Trip, and one that keeps the request's X-User in the
// router's context, where the principal function finds it.
type Server struct {
	// Guard returns the guard. The option is the generated PrincipalFrom over
	// [Principal].
	Guard func(principal idempotency.Option) *idempotency.Guard
	// Handle is what every operation does. The target writes its Reply.
	Handle Handler
	// BaseURL is put before every path.
	BaseURL string
	// ByHand has the target register POST /things alone, with a
	// ServerInterfaceWrapper that is not made by a generated function.
	ByHand bool
	// Compress has a middleware around everything else compress what clients
	// accept compressed.
	Compress bool
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
}

// A Reply is what a handler answers.
type Reply struct {
	Status int
	Header http.Header // replaces fields of the same name
	Body   string
	// Stream is sent in place of Body, each part as soon as it is written.
	// Between is called after the first part was sent.
	Stream  []string
	Between func()
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
	if user == "banned" {
		return "", idempotency.ErrForbidden
	}
	return user, nil
}

// Run runs the suite on target, its cases in parallel.
func Run(t *testing.T, target Target) {
	for _, c := range cases {
		t.Run(c.promise, func(t *testing.T) {
			t.Parallel()
			c.check(t, target)
		})
	}
}
