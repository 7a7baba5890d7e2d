package routertest

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	fiberv2 "github.com/gofiber/fiber/v2"
	compressv2 "github.com/gofiber/fiber/v2/middleware/compress"
	recoverv2 "github.com/gofiber/fiber/v2/middleware/recover"
	fiberv3 "github.com/gofiber/fiber/v3"
	compressv3 "github.com/gofiber/fiber/v3/middleware/compress"
	recoverv3 "github.com/gofiber/fiber/v3/middleware/recover"
	"github.com/valyala/fasthttp"

	fiber2 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/fiber"
	fiber2strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/fiber-strict"
	fiber3 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/fiber-v3"
	fiber3strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/fiber-v3-strict"
	fiber2second "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/fiber"
	fiber3second "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/fiber-v3"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var fiberTargets = []guardtest.Target{
	{Name: "fiber", Fasthttp: true, Serve: func(t *testing.T, s guardtest.Server) guardtest.Running {
		si, guard := fiber2Server{s.Handle}, s.Guard(fiber2.PrincipalFrom(fiber2Principal))
		return serveFiber2(t, s, guard, func(r fiberv2.Router, baseURL string) {
			fiber2.RegisterHandlersWithOptions(r, si, guard, fiber2.FiberServerOptions{BaseURL: baseURL})
		}, func() fiberv2.Handler {
			return (&fiber2.ServerInterfaceWrapper{Handler: fiber2.GuardServer(si, guard)}).CreateThing
		})
	}},
	{Name: "fiber/strict", Fasthttp: true, Serve: func(t *testing.T, s guardtest.Server) guardtest.Running {
		strict := strictServer[
			fiber2strict.ListThingsRequestObject, fiber2strict.ListThingsResponseObject,
			fiber2strict.HeadThingsRequestObject, fiber2strict.HeadThingsResponseObject,
			fiber2strict.CreateThingRequestObject, fiber2strict.CreateThingResponseObject,
			fiber2strict.PayRequestObject, fiber2strict.PayResponseObject,
			fiber2strict.UploadRequestObject, fiber2strict.UploadResponseObject,
		]{s.Handle, func(r guardtest.Reply) any { return fiber2Reply{r} }}
		si, guard := fiber2strict.NewStrictHandler(strict, nil), s.Guard(fiber2strict.PrincipalFrom(fiber2Principal))
		return serveFiber2(t, s, guard, func(r fiberv2.Router, baseURL string) {
			fiber2strict.RegisterHandlersWithOptions(r, si, guard, fiber2strict.FiberServerOptions{BaseURL: baseURL})
		}, func() fiberv2.Handler {
			return (&fiber2strict.ServerInterfaceWrapper{Handler: fiber2strict.GuardServer(si, guard)}).CreateThing
		})
	}},
	{Name: "fiber-v3", Fasthttp: true, Serve: func(t *testing.T, s guardtest.Server) guardtest.Running {
		si, guard := fiber3Server{s.Handle}, s.Guard(fiber3.PrincipalFrom(fiber3Principal))
		return serveFiber3(t, s, guard, func(r fiberv3.Router, baseURL string) {
			fiber3.RegisterHandlersWithOptions(r, si, guard, fiber3.FiberServerOptions{BaseURL: baseURL})
		}, func() fiberv3.Handler {
			return (&fiber3.ServerInterfaceWrapper{Handler: fiber3.GuardServer(si, guard)}).CreateThing
		})
	}},
	{Name: "fiber-v3/strict", Fasthttp: true, Serve: func(t *testing.T, s guardtest.Server) guardtest.Running {
		strict := strictServer[
			fiber3strict.ListThingsRequestObject, fiber3strict.ListThingsResponseObject,
			fiber3strict.HeadThingsRequestObject, fiber3strict.HeadThingsResponseObject,
			fiber3strict.CreateThingRequestObject, fiber3strict.CreateThingResponseObject,
			fiber3strict.PayRequestObject, fiber3strict.PayResponseObject,
			fiber3strict.UploadRequestObject, fiber3strict.UploadResponseObject,
		]{s.Handle, func(r guardtest.Reply) any { return fiber3Reply{r} }}
		si, guard := fiber3strict.NewStrictHandler(strict, nil), s.Guard(fiber3strict.PrincipalFrom(fiber3Principal))
		return serveFiber3(t, s, guard, func(r fiberv3.Router, baseURL string) {
			fiber3strict.RegisterHandlersWithOptions(r, si, guard, fiber3strict.FiberServerOptions{BaseURL: baseURL})
		}, func() fiberv3.Handler {
			return (&fiber3strict.ServerInterfaceWrapper{Handler: fiber3strict.GuardServer(si, guard)}).CreateThing
		})
	}},
}

func writeFasthttp(c *fasthttp.RequestCtx, r guardtest.Reply) error {
	if r.Link != "" {
		c.Response.Header.Set("Link", r.Link)
		if err := c.EarlyHints(); err != nil {
			return err
		}
		c.Response.Header.Del("Link")
	}
	if r.Hijack != nil {
		c.HijackSetNoResponse(true)
		c.Hijack(r.Hijack)
		return nil
	}
	for name, values := range r.Header {
		c.Response.Header.Del(name)
		for _, v := range values {
			c.Response.Header.Add(name, v)
		}
	}
	if r.Status != 0 {
		c.SetStatusCode(r.Status)
	}
	if r.Stream == nil {
		_, err := c.WriteString(r.Body)
		if r.Panic != nil {
			panic(r.Panic)
		}
		return err
	}
	c.SetBodyStreamWriter(func(w *bufio.Writer) { _ = stream(w, r, w.Flush) })
	return nil
}

type fiber2Server struct{ handle guardtest.Handler }

func (s fiber2Server) ListThings(c *fiberv2.Ctx) error    { return s.serve(c, "listThings", nil) }
func (s fiber2Server) HeadThings(c *fiberv2.Ctx) error    { return s.serve(c, "headThings", nil) }
func (s fiber2Server) CreateThing(c *fiberv2.Ctx) error   { return s.serve(c, "createThing", nil) }
func (s fiber2Server) Pay(c *fiberv2.Ctx, _ string) error { return s.serve(c, "pay", nil) }
func (s fiber2Server) Upload(c *fiberv2.Ctx) error        { return s.serve(c, "upload", nil) }
func (s fiber2Server) CreateOrder(c *fiberv2.Ctx, p fiber2second.CreateOrderParams) error {
	return s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s fiber2Server) CreateQuote(c *fiberv2.Ctx) error {
	return s.serve(c, "createQuote", nil)
}

func (s fiber2Server) serve(c *fiberv2.Ctx, operation string, key *string) error {
	user, _ := c.Locals("user").(string)
	reply := s.handle(c.Context(), guardtest.Call{Operation: operation, Body: string(c.Request().Body()), User: user, Key: key})
	if reply.Err != nil {
		return reply.Err
	}
	return writeFiber2(c, reply)
}

func writeFiber2(c *fiberv2.Ctx, r guardtest.Reply) error {
	return writeFasthttp(c.Context(), r)
}

// fiber2Reply is the response object of strict servers.
type fiber2Reply struct{ guardtest.Reply }

func (r fiber2Reply) VisitListThingsResponse(c *fiberv2.Ctx) error  { return writeFiber2(c, r.Reply) }
func (r fiber2Reply) VisitHeadThingsResponse(c *fiberv2.Ctx) error  { return writeFiber2(c, r.Reply) }
func (r fiber2Reply) VisitCreateThingResponse(c *fiberv2.Ctx) error { return writeFiber2(c, r.Reply) }
func (r fiber2Reply) VisitPayResponse(c *fiberv2.Ctx) error         { return writeFiber2(c, r.Reply) }
func (r fiber2Reply) VisitUploadResponse(c *fiberv2.Ctx) error      { return writeFiber2(c, r.Reply) }

func serveFiber2(t *testing.T, s guardtest.Server, guard *idempotency.Guard, register func(r fiberv2.Router, baseURL string), byHand func() fiberv2.Handler) guardtest.Running {
	app := fiberv2.New(fiberv2.Config{DisableStartupMessage: true, ErrorHandler: func(c *fiberv2.Ctx, err error) error {
		var failed *guardtest.Error
		if !errors.As(err, &failed) {
			return fiberv2.DefaultErrorHandler(c, err)
		}
		return c.Status(failed.Status).SendString(text(failed))
	}})
	if s.Compress {
		app.Use(compressv2.New())
	}
	app.Use(recoverv2.New(), func(c *fiberv2.Ctx) error {
		if trip := c.Get("X-Trip"); trip != "" {
			c.Set("X-Outer", trip)
		}
		c.Locals("user", c.Get("X-User"))
		ctx, cancel := guardtest.Outer(c.UserContext(), func(name string) string { return strings.Clone(c.Get(name)) })
		defer cancel()
		c.SetUserContext(ctx)
		return c.Next()
	})
	var r fiberv2.Router = app
	if s.Group != "" {
		r = app.Group(s.Group)
	}
	if s.ByHand {
		r.Post("/things", byHand())
	} else {
		register(r, s.BaseURL)
	}
	if s.Second {
		fiber2second.RegisterHandlers(r, fiber2Server{s.Handle}, guard)
	}
	return runFiber2(t, app)
}

func fiber2Principal(c *fiberv2.Ctx) (string, error) {
	user, _ := c.Locals("user").(string)
	return guardtest.Principal(user)
}

func runFiber2(t *testing.T, app *fiberv2.App) guardtest.Running {
	return run(t, app.Listener, func(ctx context.Context) error { return app.ShutdownWithContext(ctx) }, nil)
}

type fiber3Server struct{ handle guardtest.Handler }

func (s fiber3Server) ListThings(c fiberv3.Ctx) error    { return s.serve(c, "listThings", nil) }
func (s fiber3Server) HeadThings(c fiberv3.Ctx) error    { return s.serve(c, "headThings", nil) }
func (s fiber3Server) CreateThing(c fiberv3.Ctx) error   { return s.serve(c, "createThing", nil) }
func (s fiber3Server) Pay(c fiberv3.Ctx, _ string) error { return s.serve(c, "pay", nil) }
func (s fiber3Server) Upload(c fiberv3.Ctx) error        { return s.serve(c, "upload", nil) }
func (s fiber3Server) CreateOrder(c fiberv3.Ctx, p fiber3second.CreateOrderParams) error {
	return s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s fiber3Server) CreateQuote(c fiberv3.Ctx) error {
	return s.serve(c, "createQuote", nil)
}

func (s fiber3Server) serve(c fiberv3.Ctx, operation string, key *string) error {
	user, _ := c.Locals("user").(string)
	reply := s.handle(c, guardtest.Call{Operation: operation, Body: string(c.Request().Body()), User: user, Key: key})
	if reply.Err != nil {
		return reply.Err
	}
	return writeFiber3(c, reply)
}

func writeFiber3(c fiberv3.Ctx, r guardtest.Reply) error {
	return writeFasthttp(c.RequestCtx(), r)
}

// fiber3Reply is the response object of strict servers.
type fiber3Reply struct{ guardtest.Reply }

func (r fiber3Reply) VisitListThingsResponse(c fiberv3.Ctx) error  { return writeFiber3(c, r.Reply) }
func (r fiber3Reply) VisitHeadThingsResponse(c fiberv3.Ctx) error  { return writeFiber3(c, r.Reply) }
func (r fiber3Reply) VisitCreateThingResponse(c fiberv3.Ctx) error { return writeFiber3(c, r.Reply) }
func (r fiber3Reply) VisitPayResponse(c fiberv3.Ctx) error         { return writeFiber3(c, r.Reply) }
func (r fiber3Reply) VisitUploadResponse(c fiberv3.Ctx) error      { return writeFiber3(c, r.Reply) }

func serveFiber3(t *testing.T, s guardtest.Server, guard *idempotency.Guard, register func(r fiberv3.Router, baseURL string), byHand func() fiberv3.Handler) guardtest.Running {
	app := fiberv3.New(fiberv3.Config{ErrorHandler: func(c fiberv3.Ctx, err error) error {
		var failed *guardtest.Error
		if !errors.As(err, &failed) {
			return fiberv3.DefaultErrorHandler(c, err)
		}
		return c.Status(failed.Status).SendString(text(failed))
	}})
	if s.Compress {
		app.Use(compressv3.New())
	}
	app.Use(recoverv3.New(), func(c fiberv3.Ctx) error {
		if trip := c.Get("X-Trip"); trip != "" {
			c.Set("X-Outer", trip)
		}
		c.Locals("user", c.Get("X-User"))
		ctx, cancel := guardtest.Outer(c.Context(), func(name string) string { return strings.Clone(c.Get(name)) })
		defer cancel()
		c.SetContext(ctx)
		return c.Next()
	})
	var r fiberv3.Router = app
	if s.Group != "" {
		r = app.Group(s.Group)
	}
	if s.ByHand {
		r.Post("/things", byHand())
	} else {
		register(r, s.BaseURL)
	}
	if s.Second {
		fiber3second.RegisterHandlers(r, fiber3Server{s.Handle}, guard)
	}
	return runFiber3(t, app)
}

func fiber3Principal(c fiberv3.Ctx) (string, error) {
	user, _ := c.Locals("user").(string)
	return guardtest.Principal(user)
}

func runFiber3(t *testing.T, app *fiberv3.App) guardtest.Running {
	return run(t, func(l net.Listener) error {
		return app.Listener(l, fiberv3.ListenConfig{DisableStartupMessage: true})
	}, func(ctx context.Context) error { return app.ShutdownWithContext(ctx) }, nil)
}
