package envelope_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/envelope"
	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/std-http/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func ExampleProblem() {
	alice := func(*http.Request) (string, error) { return "alice", nil }
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(alice),
		idempotency.WithProblem(envelope.Problem),
		idempotency.WithProblemBase("https://pay.example/problems/"))
	if err != nil {
		log.Fatal(err)
	}
	answer := httptest.NewRecorder()
	api.Handler(struct{ api.ServerInterface }{}, guard).ServeHTTP(answer, httptest.NewRequest("POST", "/payments", nil))
	fmt.Println(answer.Code, answer.Body)
	// Output:
	// 400 {"type":"https://pay.example/problems/missing-idempotency-key","error":{"code":"missing-idempotency-key","message":"The idempotency key is missing"}}
}
