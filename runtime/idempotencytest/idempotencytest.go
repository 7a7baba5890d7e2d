// Package idempotencytest helps to test handlers that are guarded.
package idempotencytest

import (
	"bytes"
	"crypto/rand"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// New returns a guard over memory for one test, to be passed to generated
// registration functions. Requests without a key run unguarded whatever their
// policy says, so that tests of other things need none. The options come on
// top; a document with secured operations needs its PrincipalFrom.
func New(t testing.TB, options ...idempotency.Option) *idempotency.Guard {
	t.Helper()
	guard, err := idempotency.New(memorystore.New(), append([]idempotency.Option{idempotency.WithOptionalKeys()}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	return guard
}

// Twice sends req to handler, sends it again, and fails the test unless the
// second answer is a replay of the first: same status, same body, marked. A
// request without an Idempotency-Key gets a random one. It returns the first
// answer, whose body is still to be read.
func Twice(t testing.TB, handler http.Handler, req *http.Request) *http.Response {
	t.Helper()
	var body []byte
	if req.Body != nil {
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			t.Fatal(err)
		}
	}
	key := req.Header.Get(wire.HeaderKey)
	if key == "" {
		key = rand.Text()
	}
	var answers [2]*httptest.ResponseRecorder
	for i := range answers {
		r := req.Clone(req.Context())
		r.Body = io.NopCloser(bytes.NewReader(body))
		r.Header.Set(wire.HeaderKey, key)
		answers[i] = httptest.NewRecorder()
		handler.ServeHTTP(answers[i], r)
	}
	first, again := answers[0], answers[1]
	if first.Code != again.Code || !bytes.Equal(first.Body.Bytes(), again.Body.Bytes()) {
		t.Errorf("%s %s is not replayed: the first answer is %d %q, the second %d %q",
			req.Method, req.URL.Path, first.Code, first.Body, again.Code, again.Body)
	} else if again.Header().Get(wire.HeaderReplayed) != "true" {
		t.Errorf("%s %s ran twice: its second answer has no %s", req.Method, req.URL.Path, wire.HeaderReplayed)
	}
	return first.Result()
}
