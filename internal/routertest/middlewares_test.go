package routertest

import (
	"net/http"
	"testing"

	ginrouter "github.com/gin-gonic/gin"
	fiberv2 "github.com/gofiber/fiber/v2"
	irisrouter "github.com/kataras/iris/v12"

	fiber2 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/fiber"
	gin "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gin"
	iris "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/iris"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// saw is what a middleware around a guarded handler saw when it had returned.
type saw struct {
	status, size int
	body         string
	restored     bool // the context is as it was before
}

// expect sends one request twice, and has the middleware see the same both times.
func expect(t *testing.T, url string, from <-chan saw, want saw) {
	t.Helper()
	for _, replayed := range []bool{false, true} {
		send(t, "POST", url+"/things", "a", `{"item":"lamp"}`).expect(t, "POST /things", want.status, replayed)
		if got := <-from; got != want {
			t.Errorf("replayed: %v: a middleware saw %+v, want %+v", replayed, got, want)
		}
	}
}

// TestGinMiddlewares has a middleware set the status before, and see what was
// answered afterwards.
func TestGinMiddlewares(t *testing.T) {
	engine, seen := ginrouter.New(), make(chan saw, 1)
	engine.Use(func(c *ginrouter.Context) {
		request, writer := c.Request, c.Writer
		c.Status(http.StatusAccepted)
		c.Next()
		seen <- saw{status: c.Writer.Status(), size: c.Writer.Size(), restored: c.Request == request && c.Writer == writer && idempotency.KeyFrom(c) == idempotency.Key{}}
	})
	gin.RegisterHandlers(engine, ginText{}, newGuard(t, gin.PrincipalFrom(ginPrincipal)))
	expect(t, serve(t, engine), seen, saw{status: http.StatusAccepted, size: 4, restored: true})
}

// ginText writes a body and leaves the status.
type ginText struct{ gin.ServerInterface }

func (ginText) CreateThing(c *ginrouter.Context) { _, _ = c.Writer.WriteString("made") }

// TestIrisMiddlewares has middlewares that record, set the status before, read
// values that the handler set, and run behind it.
func TestIrisMiddlewares(t *testing.T) {
	app, seen, done := irisrouter.New(), make(chan saw, 1), make(chan string, 4)
	app.Logger().SetLevel("disable")
	app.Use(func(c irisrouter.Context) {
		recorder, request := c.Recorder(), c.Request()
		c.StatusCode(http.StatusAccepted)
		c.Next()
		seen <- saw{
			status: recorder.StatusCode(), size: len(recorder.Body()), body: string(recorder.Body()),
			restored: c.Recorder() == recorder && c.Request() == request,
		}
		done <- "value " + c.Values().GetString("handler")
	})
	app.Done(func(c irisrouter.Context) { done <- "behind the handler" })
	iris.RegisterHandlers(app, irisText{}, newGuard(t, iris.PrincipalFrom(irisPrincipal)))
	expect(t, serve(t, app), seen, saw{status: http.StatusAccepted, size: 4, body: "made", restored: true})
	for _, want := range []string{"behind the handler", "value set", "value "} {
		if got := <-done; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

type irisText struct{ iris.ServerInterface }

func (irisText) CreateThing(c irisrouter.Context) {
	c.Values().Set("handler", "set")
	_, _ = c.WriteString("made")
	c.Next()
}

// TestFiberMiddlewares has a middleware set the status before, and see what was
// answered afterwards.
func TestFiberMiddlewares(t *testing.T) {
	app, seen := fiberv2.New(fiberv2.Config{DisableStartupMessage: true}), make(chan saw, 1)
	app.Use(func(c *fiberv2.Ctx) error {
		c.Status(http.StatusAccepted)
		err := c.Next()
		seen <- saw{
			status: c.Response().StatusCode(), size: len(c.Response().Body()), body: string(c.Response().Body()),
			restored: idempotency.KeyFrom(c.UserContext()) == idempotency.Key{} && idempotency.KeyFrom(c.Context()) == idempotency.Key{},
		}
		return err
	})
	fiber2.RegisterHandlers(app, fiberText{}, newGuard(t, fiber2.PrincipalFrom(fiber2Principal)))
	expect(t, runFiber2(t, app).URL, seen, saw{status: http.StatusAccepted, size: 4, body: "made", restored: true})
}

type fiberText struct{ fiber2.ServerInterface }

func (fiberText) CreateThing(c *fiberv2.Ctx) error { return c.SendString("made") }
