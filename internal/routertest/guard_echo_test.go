package routertest

import (
	"errors"
	"io"
	"log/slog"
	"net/http"

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"
	echov5 "github.com/labstack/echo/v5"
	middlewarev5 "github.com/labstack/echo/v5/middleware"

	echo4 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo"
	echo4strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo-strict"
	echo5 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo5"
	echo5strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo5-strict"
	echo4second "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/echo"
	echo5second "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/echo5"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var echoTargets = []guardtest.Target{
	{Name: "echo", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := echoServer{s.Handle}, s.Guard(echo4.PrincipalFrom(echoPrincipal))
		return serveEcho(s, guard, func(r echo4.EchoRouter, baseURL string) {
			echo4.RegisterHandlersWithOptions(r, si, guard, echo4.RegisterHandlersOptions{BaseURL: baseURL})
		}, func() echo.HandlerFunc {
			return (&echo4.ServerInterfaceWrapper{Handler: echo4.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "echo/strict", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			echo4strict.ListThingsRequestObject, echo4strict.ListThingsResponseObject,
			echo4strict.HeadThingsRequestObject, echo4strict.HeadThingsResponseObject,
			echo4strict.CreateThingRequestObject, echo4strict.CreateThingResponseObject,
			echo4strict.PayRequestObject, echo4strict.PayResponseObject,
			echo4strict.UploadRequestObject, echo4strict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si, guard := echo4strict.NewStrictHandler(strict, nil), s.Guard(echo4strict.PrincipalFrom(echoPrincipal))
		return serveEcho(s, guard, func(r echo4.EchoRouter, baseURL string) {
			echo4strict.RegisterHandlersWithOptions(r, si, guard, echo4strict.RegisterHandlersOptions{BaseURL: baseURL})
		}, func() echo.HandlerFunc {
			return (&echo4strict.ServerInterfaceWrapper{Handler: echo4strict.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "echo5", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := echo5Server{s.Handle}, s.Guard(echo5.PrincipalFrom(echo5Principal))
		return serveEcho5(s, guard, func(r echo5.EchoRouter, baseURL string) {
			echo5.RegisterHandlersWithOptions(r, si, guard, echo5.RegisterHandlersOptions{BaseURL: baseURL})
		}, func() echov5.HandlerFunc {
			return (&echo5.ServerInterfaceWrapper{Handler: echo5.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "echo5/strict", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			echo5strict.ListThingsRequestObject, echo5strict.ListThingsResponseObject,
			echo5strict.HeadThingsRequestObject, echo5strict.HeadThingsResponseObject,
			echo5strict.CreateThingRequestObject, echo5strict.CreateThingResponseObject,
			echo5strict.PayRequestObject, echo5strict.PayResponseObject,
			echo5strict.UploadRequestObject, echo5strict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si, guard := echo5strict.NewStrictHandler(strict, nil), s.Guard(echo5strict.PrincipalFrom(echo5Principal))
		return serveEcho5(s, guard, func(r echo5.EchoRouter, baseURL string) {
			echo5strict.RegisterHandlersWithOptions(r, si, guard, echo5strict.RegisterHandlersOptions{BaseURL: baseURL})
		}, func() echov5.HandlerFunc {
			return (&echo5strict.ServerInterfaceWrapper{Handler: echo5strict.GuardServer(si, guard)}).CreateThing
		})
	})},
}

type echoServer struct{ handle guardtest.Handler }

func (s echoServer) ListThings(c echo.Context) error    { return s.serve(c, "listThings", nil) }
func (s echoServer) HeadThings(c echo.Context) error    { return s.serve(c, "headThings", nil) }
func (s echoServer) CreateThing(c echo.Context) error   { return s.serve(c, "createThing", nil) }
func (s echoServer) Pay(c echo.Context, _ string) error { return s.serve(c, "pay", nil) }
func (s echoServer) Upload(c echo.Context) error        { return s.serve(c, "upload", nil) }
func (s echoServer) CreateOrder(c echo.Context, p echo4second.CreateOrderParams) error {
	return s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s echoServer) CreateQuote(c echo.Context) error {
	return s.serve(c, "createQuote", nil)
}

func (s echoServer) serve(c echo.Context, operation string, key *string) error {
	body, err := io.ReadAll(c.Request().Body)
	if err != nil {
		return err
	}
	user, _ := c.Get("user").(string)
	reply := s.handle(c.Request().Context(), guardtest.Call{Operation: operation, Body: string(body), User: user, Key: key})
	if reply.Err != nil {
		return reply.Err
	}
	return writeHTTP(c.Response(), reply)
}

func serveEcho(s guardtest.Server, guard *idempotency.Guard, register func(r echo4.EchoRouter, baseURL string), byHand func() echo.HandlerFunc) http.Handler {
	e := echo.New()
	e.Logger.SetOutput(io.Discard)
	e.HTTPErrorHandler = func(err error, c echo.Context) {
		var failed *guardtest.Error
		if !errors.As(err, &failed) {
			e.DefaultHTTPErrorHandler(err, c)
		} else if !c.Response().Committed {
			_ = c.String(failed.Status, text(failed))
		}
	}
	if s.Compress {
		e.Use(middleware.Gzip())
	}
	if !s.NoRecovery {
		e.Use(middleware.Recover())
	}
	e.Use(func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			request := c.Request()
			if trip := request.Header.Get("X-Trip"); trip != "" {
				c.Response().Header().Set("X-Outer", trip)
			}
			c.Set("user", request.Header.Get("X-User"))
			ctx, cancel := guardtest.Outer(request.Context(), request.Header.Get)
			defer cancel()
			c.SetRequest(request.WithContext(ctx))
			return next(c)
		}
	})
	var r echo4.EchoRouter = e
	if s.Group != "" {
		r = e.Group(s.Group)
	}
	if s.ByHand {
		r.POST("/things", byHand())
	} else {
		register(r, s.BaseURL)
	}
	if s.Second {
		echo4second.RegisterHandlers(r, echoServer{s.Handle}, guard)
	}
	return e
}

func echoPrincipal(c echo.Context) (string, error) {
	user, _ := c.Get("user").(string)
	return guardtest.Principal(user)
}

type echo5Server struct{ handle guardtest.Handler }

func (s echo5Server) ListThings(c *echov5.Context) error    { return s.serve(c, "listThings", nil) }
func (s echo5Server) HeadThings(c *echov5.Context) error    { return s.serve(c, "headThings", nil) }
func (s echo5Server) CreateThing(c *echov5.Context) error   { return s.serve(c, "createThing", nil) }
func (s echo5Server) Pay(c *echov5.Context, _ string) error { return s.serve(c, "pay", nil) }
func (s echo5Server) Upload(c *echov5.Context) error        { return s.serve(c, "upload", nil) }
func (s echo5Server) CreateOrder(c *echov5.Context, p echo5second.CreateOrderParams) error {
	return s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s echo5Server) CreateQuote(c *echov5.Context) error {
	return s.serve(c, "createQuote", nil)
}

func (s echo5Server) serve(c *echov5.Context, operation string, key *string) error {
	body, err := io.ReadAll(c.Request().Body)
	if err != nil {
		return err
	}
	user, _ := c.Get("user").(string)
	reply := s.handle(c.Request().Context(), guardtest.Call{Operation: operation, Body: string(body), User: user, Key: key})
	if reply.Err != nil {
		return reply.Err
	}
	return writeHTTP(c.Response(), reply)
}

func serveEcho5(s guardtest.Server, guard *idempotency.Guard, register func(r echo5.EchoRouter, baseURL string), byHand func() echov5.HandlerFunc) http.Handler {
	e := echov5.New()
	e.Logger = slog.New(slog.DiscardHandler)
	e.HTTPErrorHandler = func(c *echov5.Context, err error) {
		var failed *guardtest.Error
		if !errors.As(err, &failed) {
			echov5.DefaultHTTPErrorHandler(false)(c, err)
		} else if r, _ := echov5.UnwrapResponse(c.Response()); !r.Committed {
			_ = c.String(failed.Status, text(failed))
		}
	}
	if s.Compress {
		e.Use(middlewarev5.Gzip())
	}
	if !s.NoRecovery {
		e.Use(middlewarev5.Recover())
	}
	e.Use(func(next echov5.HandlerFunc) echov5.HandlerFunc {
		return func(c *echov5.Context) error {
			request := c.Request()
			if trip := request.Header.Get("X-Trip"); trip != "" {
				c.Response().Header().Set("X-Outer", trip)
			}
			c.Set("user", request.Header.Get("X-User"))
			ctx, cancel := guardtest.Outer(request.Context(), request.Header.Get)
			defer cancel()
			c.SetRequest(request.WithContext(ctx))
			return next(c)
		}
	})
	var r echo5.EchoRouter = e
	if s.Group != "" {
		r = e.Group(s.Group)
	}
	if s.ByHand {
		r.POST("/things", byHand())
	} else {
		register(r, s.BaseURL)
	}
	if s.Second {
		echo5second.RegisterHandlers(r, echo5Server{s.Handle}, guard)
	}
	return e
}

func echo5Principal(c *echov5.Context) (string, error) {
	user, _ := c.Get("user").(string)
	return guardtest.Principal(user)
}
