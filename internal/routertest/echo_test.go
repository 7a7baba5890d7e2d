// Package routertest runs what is generated for routers that the released
// module must not depend on.
package routertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/labstack/echo/v4"

	echostrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/echo-strict/want"
	plainecho "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/echo/want"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// counts are the runs of each operation.
type counts struct{ created, changed, cancelled atomic.Int64 }

type orders struct{ counts }

func (o *orders) ListOrders(c echo.Context) error { return c.JSON(http.StatusOK, []string{}) }

func (o *orders) CreateOrder(c echo.Context, params plainecho.CreateOrderParams) error {
	var body plainecho.NewOrder
	if err := c.Bind(&body); err != nil {
		return err
	}
	id := fmt.Sprint(o.created.Add(1))
	switch body.Item {
	case "sold out":
		return echo.NewHTTPError(http.StatusConflict, "sold out "+id)
	case "broken":
		return errors.New("broken")
	}
	c.Response().Header().Set("Location", "/orders/"+id)
	return c.JSON(http.StatusCreated, plainecho.Order{Id: id, Item: body.Item})
}

func (o *orders) ChangeOrder(c echo.Context, id string) error {
	o.changed.Add(1)
	return c.NoContent(http.StatusNoContent)
}

func (o *orders) CancelOrder(c echo.Context, id string) error {
	o.cancelled.Add(1)
	return c.NoContent(http.StatusNoContent)
}

type strictOrders struct{ counts }

func (o *strictOrders) ListOrders(context.Context, echostrict.ListOrdersRequestObject) (echostrict.ListOrdersResponseObject, error) {
	return echostrict.ListOrders200JSONResponse{}, nil
}

func (o *strictOrders) CreateOrder(_ context.Context, request echostrict.CreateOrderRequestObject) (echostrict.CreateOrderResponseObject, error) {
	id := fmt.Sprint(o.created.Add(1))
	switch request.Body.Item {
	case "sold out":
		return nil, echo.NewHTTPError(http.StatusConflict, "sold out "+id)
	case "broken":
		return nil, errors.New("broken")
	}
	return echostrict.CreateOrder201JSONResponse{Id: id, Item: request.Body.Item}, nil
}

func (o *strictOrders) ChangeOrder(context.Context, echostrict.ChangeOrderRequestObject) (echostrict.ChangeOrderResponseObject, error) {
	o.changed.Add(1)
	return echostrict.ChangeOrder204Response{}, nil
}

func (o *strictOrders) CancelOrder(context.Context, echostrict.CancelOrderRequestObject) (echostrict.CancelOrderResponseObject, error) {
	o.cancelled.Add(1)
	return echostrict.CancelOrder204Response{}, nil
}

func newGuard(t *testing.T, options ...idempotency.Option) *idempotency.Guard {
	t.Helper()
	guard, err := idempotency.New(memorystore.New(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return guard
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

type answer struct {
	status int
	header http.Header
	body   string
}

// send sends a request; key "" sends none.
func send(t *testing.T, method, url, key, body string) answer {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(data)}
}

func (a answer) expect(t *testing.T, what string, status int, replayed bool) {
	t.Helper()
	if a.status != status || (a.header.Get("Idempotent-Replayed") == "true") != replayed {
		t.Errorf("%s: got %d, replayed %q, %s; want %d, replayed %v", what, a.status, a.header.Get("Idempotent-Replayed"), a.body, status, replayed)
	}
}

// seen is what a middleware around the handler saw of one request.
type seen struct {
	status    int
	size      int64
	committed bool
	hooked    bool // its Before hook ran
	err       error
}

// observing returns a middleware that reports what it saw.
func observing(into chan<- seen) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			request, response := c.Request(), c.Response()
			s := seen{}
			response.Before(func() { s.hooked = true })
			s.err = next(c)
			if c.Request() != request || c.Response() != response {
				s.err = errors.New("the context's request or response is not the one from before")
			}
			s.status, s.size, s.committed = response.Status, response.Size, response.Committed
			into <- s
			return s.err
		}
	}
}

// TestEcho runs what is generated for echo over a connection.
func TestEcho(t *testing.T) {
	register := map[string]func(*echo.Echo) *counts{
		"plain": func(e *echo.Echo) *counts {
			o := &orders{}
			plainecho.RegisterHandlers(e, o, newGuard(t))
			return &o.counts
		},
		"strict": func(e *echo.Echo) *counts {
			o := &strictOrders{}
			echostrict.RegisterHandlers(e, echostrict.NewStrictHandler(o, nil), newGuard(t))
			return &o.counts
		},
	}
	for name, register := range register {
		t.Run(name, func(t *testing.T) {
			e := echo.New()
			ran := register(e)
			url := serve(t, e)
			lamp, vase := `{"item":"lamp"}`, `{"item":"vase"}`

			send(t, "GET", url+"/orders", "", "").expect(t, "an operation that is not annotated", 200, false)
			send(t, "POST", url+"/orders", "", lamp).expect(t, "no key", 400, false)
			first := send(t, "POST", url+"/orders", "a", lamp)
			first.expect(t, "first sight", 201, false)
			second := send(t, "POST", url+"/orders", "a", lamp)
			second.expect(t, "the same again", 201, true)
			if second.body != first.body || second.header.Get("Location") != first.header.Get("Location") || first.body == "" {
				t.Errorf("the replay differs: %q %v, first %q %v", second.body, second.header, first.body, first.header)
			}
			send(t, "POST", url+"/orders", "a", vase).expect(t, "another request with the key", 422, false)
			if n := ran.created.Load(); n != 1 {
				t.Errorf("%d orders were created, want 1", n)
			}

			soldOut := send(t, "POST", url+"/orders", "b", `{"item":"sold out"}`)
			soldOut.expect(t, "an error that the error handler renders", 409, false)
			send(t, "POST", url+"/orders", "b", `{"item":"sold out"}`).expect(t, "the same again, unrecorded by class", 409, false)
			if !strings.Contains(soldOut.body, "sold out 2") {
				t.Errorf("the error was rendered as %q", soldOut.body)
			}
			send(t, "POST", url+"/orders", "c", `{"item":"broken"}`).expect(t, "an error that is not an HTTP error", 500, false)

			send(t, "PATCH", url+"/orders/1", "", lamp).expect(t, "no key where that is allowed", 204, false)
			send(t, "PATCH", url+"/orders/1", "a", lamp).expect(t, "a key", 204, false)
			send(t, "PATCH", url+"/orders/1", "a", lamp).expect(t, "the same again", 204, true)
			if n := ran.changed.Load(); n != 2 {
				t.Errorf("%d changes ran, want 2", n)
			}

			var group sync.WaitGroup
			for range 50 {
				group.Go(func() {
					if a := send(t, "POST", url+"/orders/1/cancel", "race", ""); a.status != 204 && a.status != 409 {
						t.Errorf("in the race: %d %s", a.status, a.body)
					}
				})
			}
			group.Wait()
			if n := ran.cancelled.Load(); n != 1 {
				t.Errorf("%d runs in a race for one key, want 1", n)
			}
		})
	}
}

// TestEchoMiddlewares has middlewares around a guarded handler see the
// response as if it were not guarded.
func TestEchoMiddlewares(t *testing.T) {
	e := echo.New()
	saw := make(chan seen, 1)
	e.Use(observing(saw))
	plainecho.RegisterHandlers(e, &orders{}, newGuard(t))
	url := serve(t, e)

	for _, what := range []string{"first sight", "replay"} {
		a := send(t, "POST", url+"/orders", "a", `{"item":"lamp"}`)
		s := <-saw
		if s.err != nil || s.status != 201 || !s.committed || !s.hooked || s.size != int64(len(a.body)) {
			t.Errorf("%s: a middleware saw %+v of %d %q", what, s, a.status, a.body)
		}
	}
	send(t, "PATCH", url+"/orders/1", "", "{}").expect(t, "unguarded", 204, false)
	if s := <-saw; s.err != nil || s.status != 204 || !s.committed || !s.hooked {
		t.Errorf("unguarded: a middleware saw %+v", s)
	}
	send(t, "POST", url+"/orders", "b", `{"item":"broken"}`).expect(t, "a handler's error", 500, false)
	if s := <-saw; s.err == nil || s.status != 500 || !s.committed {
		t.Errorf("a handler's error: a middleware saw %+v", s)
	}
}

// TestEchoPrincipal has a principal function take echo's context, and a guard
// with net/http middlewares refused, which could not run here.
func TestEchoPrincipal(t *testing.T) {
	e := echo.New()
	who := plainecho.PrincipalFrom(func(c echo.Context) (string, error) {
		if c.QueryParam("user") == "" {
			return "", idempotency.ErrUnauthenticated
		}
		return c.QueryParam("user"), nil
	})
	o := &orders{}
	plainecho.RegisterHandlers(e, o, newGuard(t, who))
	url := serve(t, e) + "/orders/1/cancel"
	send(t, "POST", url, "a", "").expect(t, "nobody", 401, false)
	send(t, "POST", url+"?user=ann", "a", "").expect(t, "ann", 204, false)
	send(t, "POST", url+"?user=bob", "a", "").expect(t, "bob, with the same key", 204, false)
	send(t, "POST", url+"?user=ann", "a", "").expect(t, "ann again", 204, true)

	defer func() {
		if recover() == nil {
			t.Error("a guard with WithInner was registered for echo")
		}
	}()
	plainecho.RegisterHandlers(echo.New(), o, newGuard(t, idempotency.WithInner(func(h http.Handler) http.Handler { return h })))
}

// TestEchoPassthrough has the guard that guards nothing leave things as they are.
func TestEchoPassthrough(t *testing.T) {
	e := echo.New()
	o := &orders{}
	plainecho.RegisterHandlers(e, o, idempotency.Passthrough())
	url := serve(t, e)
	for range 2 {
		send(t, "POST", url+"/orders", "", `{"item":"lamp"}`).expect(t, "no key", 201, false)
	}
	if n := o.created.Load(); n != 2 {
		t.Errorf("%d orders, want 2", n)
	}
}
