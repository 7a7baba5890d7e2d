package idempotencytest_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest"
)

// api stands for a generated registration function.
func api(guard *idempotency.Guard, status int) (http.Handler, *int) {
	p := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[*http.Request](guard, &p)
	runs := new(int)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&p, w, r, func(w http.ResponseWriter, r *http.Request) {
			*runs++
			w.WriteHeader(status)
			fmt.Fprint(w, "run ", *runs)
		})
	}), runs
}

func order() *http.Request {
	return httptest.NewRequest("POST", "/orders", strings.NewReader(`{"item":"tea"}`))
}

func TestKeysAreOptional(t *testing.T) {
	handler, runs := api(idempotencytest.New(t), 201)
	for range 2 {
		handler.ServeHTTP(httptest.NewRecorder(), order())
	}
	if *runs != 2 {
		t.Fatalf("%d runs", *runs)
	}
}

func TestTwice(t *testing.T) {
	handler, runs := api(idempotencytest.New(t), 201)
	if resp := idempotencytest.Twice(t, handler, order()); resp.StatusCode != 201 || *runs != 1 {
		t.Fatalf("%d after %d runs", resp.StatusCode, *runs)
	}
}

type failures struct {
	testing.TB
	count int
}

func (f *failures) Errorf(string, ...any) { f.count++ }

func TestTwiceFailsWhereNothingIsReplayed(t *testing.T) {
	freed, _ := api(idempotencytest.New(t), 500)
	unguarded, _ := api(idempotency.Passthrough(), 201)
	same := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) })
	for _, handler := range []http.Handler{freed, unguarded, same} {
		f := &failures{TB: t}
		idempotencytest.Twice(f, handler, order())
		if f.count != 1 {
			t.Errorf("%d failures, want 1", f.count)
		}
	}
}
