package routertest

import (
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/chi/want"
	"github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/gorilla/want"
)

type chiOrders struct {
	chi.ServerInterface
	ran atomic.Int64
}

func (o *chiOrders) CancelOrder(w http.ResponseWriter, r *http.Request, id string) {
	o.ran.Add(1)
	w.WriteHeader(http.StatusNoContent)
}

type gorillaOrders struct {
	gorilla.ServerInterface
	ran atomic.Int64
}

func (o *gorillaOrders) CancelOrder(w http.ResponseWriter, r *http.Request, id string) {
	o.ran.Add(1)
	w.WriteHeader(http.StatusNoContent)
}

// TestNetHTTPRouters runs what is generated for routers whose handlers are
// net/http's.
func TestNetHTTPRouters(t *testing.T) {
	c, g := &chiOrders{}, &gorillaOrders{}
	for _, router := range []struct {
		name    string
		handler http.Handler
		ran     *atomic.Int64
	}{
		{"chi", chi.Handler(c, newGuard(t)), &c.ran},
		{"gorilla", gorilla.Handler(g, newGuard(t)), &g.ran},
	} {
		t.Run(router.name, func(t *testing.T) {
			url := serve(t, router.handler) + "/orders/1/cancel"
			send(t, "POST", url, "", "").expect(t, "no key", 400, false)
			send(t, "POST", url, "a", "").expect(t, "first sight", 204, false)
			send(t, "POST", url, "a", "").expect(t, "the same again", 204, true)
			if n := router.ran.Load(); n != 1 {
				t.Errorf("%d runs, want 1", n)
			}
		})
	}
}
