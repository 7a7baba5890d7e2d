package routertest

import (
	"context"
	"net/http"
	"testing"

	chi "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi"
	chistrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi-strict"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

// TestUnimplemented embeds what chi's target alone generates: operations that
// answer 501. That frees the key for when they are implemented.
func TestUnimplemented(t *testing.T) {
	implemented := func(context.Context, guardtest.Call) guardtest.Reply {
		return guardtest.Reply{Status: http.StatusCreated, Body: "made"}
	}
	guard := newGuard(t, chi.PrincipalFrom(httpPrincipal))
	strictGuard := newGuard(t, chistrict.PrincipalFrom(httpPrincipal))
	for name, handlers := range map[string][2]http.Handler{
		"chi": {
			chi.Handler(chi.Unimplemented{}, guard),
			chi.Handler(httpServer{implemented}, guard),
		},
		"chi/strict": {
			chistrict.Handler(chistrict.Unimplemented{}, strictGuard),
			chistrict.Handler(httpServer{implemented}, strictGuard),
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := serve(t, handlers[0]) + "/things"
			send(t, "POST", url, "", `{"item":"lamp"}`).expect(t, "no key", 400, false)
			for range 2 {
				send(t, "POST", url, "a", `{"item":"lamp"}`).expect(t, "unimplemented", 501, false)
			}
			url = serve(t, handlers[1]) + "/things"
			send(t, "POST", url, "a", `{"item":"lamp"}`).expect(t, "implemented", 201, false)
			send(t, "POST", url, "a", `{"item":"lamp"}`).expect(t, "the same again", 201, true)
		})
	}
}
