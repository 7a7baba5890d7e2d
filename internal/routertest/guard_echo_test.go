package routertest

import (
	"errors"
	"io"
	"net/http"

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"
	echov5 "github.com/labstack/echo/v5"
	middlewarev5 "github.com/labstack/echo/v5/middleware"

	echo4 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo"
	echo4strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo-strict"
	echo5 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo5"
	echo5strict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/echo5-strict"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var echoTargets = []guardtest.Target{
	{Name: "echo", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, e := echoServer{s.Handle}, s.Guard(echo4.PrincipalFrom(echoPrincipal)), newEcho()
		if s.ByHand {
			wrapper := echo4.ServerInterfaceWrapper{Handler: echo4.GuardServer(si, guard)}
			e.POST("/things", wrapper.CreateThing)
			return e
		}
		echo4.RegisterHandlersWithOptions(e, si, guard, echo4.RegisterHandlersOptions{BaseURL: s.BaseURL})
		return e
	})},
	{Name: "echo/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			echo4strict.ListThingsRequestObject, echo4strict.ListThingsResponseObject,
			echo4strict.CreateThingRequestObject, echo4strict.CreateThingResponseObject,
			echo4strict.PayRequestObject, echo4strict.PayResponseObject,
			echo4strict.UploadRequestObject, echo4strict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si, guard, e := echo4strict.NewStrictHandler(strict, nil), s.Guard(echo4strict.PrincipalFrom(echoPrincipal)), newEcho()
		if s.ByHand {
			wrapper := echo4strict.ServerInterfaceWrapper{Handler: echo4strict.GuardServer(si, guard)}
			e.POST("/things", wrapper.CreateThing)
			return e
		}
		echo4strict.RegisterHandlersWithOptions(e, si, guard, echo4strict.RegisterHandlersOptions{BaseURL: s.BaseURL})
		return e
	})},
	{Name: "echo5", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, e := echo5Server{s.Handle}, s.Guard(echo5.PrincipalFrom(echo5Principal)), newEcho5()
		if s.ByHand {
			wrapper := echo5.ServerInterfaceWrapper{Handler: echo5.GuardServer(si, guard)}
			e.POST("/things", wrapper.CreateThing)
			return e
		}
		echo5.RegisterHandlersWithOptions(e, si, guard, echo5.RegisterHandlersOptions{BaseURL: s.BaseURL})
		return e
	})},
	{Name: "echo5/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			echo5strict.ListThingsRequestObject, echo5strict.ListThingsResponseObject,
			echo5strict.CreateThingRequestObject, echo5strict.CreateThingResponseObject,
			echo5strict.PayRequestObject, echo5strict.PayResponseObject,
			echo5strict.UploadRequestObject, echo5strict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si, guard, e := echo5strict.NewStrictHandler(strict, nil), s.Guard(echo5strict.PrincipalFrom(echo5Principal)), newEcho5()
		if s.ByHand {
			wrapper := echo5strict.ServerInterfaceWrapper{Handler: echo5strict.GuardServer(si, guard)}
			e.POST("/things", wrapper.CreateThing)
			return e
		}
		echo5strict.RegisterHandlersWithOptions(e, si, guard, echo5strict.RegisterHandlersOptions{BaseURL: s.BaseURL})
		return e
	})},
}

type echoServer struct{ handle guardtest.Handler }

func (s echoServer) ListThings(c echo.Context) error    { return s.serve(c, "listThings") }
func (s echoServer) CreateThing(c echo.Context) error   { return s.serve(c, "createThing") }
func (s echoServer) Pay(c echo.Context, _ string) error { return s.serve(c, "pay") }
func (s echoServer) Upload(c echo.Context) error        { return s.serve(c, "upload") }

func (s echoServer) serve(c echo.Context, operation string) error {
	body, err := io.ReadAll(c.Request().Body)
	if err != nil {
		return err
	}
	reply := s.handle(c.Request().Context(), guardtest.Call{Operation: operation, Body: string(body)})
	if reply.Err != nil {
		return reply.Err
	}
	return writeHTTP(c.Response(), reply)
}

func newEcho() *echo.Echo {
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
	e.Use(middleware.Recover(), func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			if trip := c.Request().Header.Get("X-Trip"); trip != "" {
				c.Response().Header().Set("X-Outer", trip)
			}
			c.Set("user", c.Request().Header.Get("X-User"))
			return next(c)
		}
	})
	return e
}

func echoPrincipal(c echo.Context) (string, error) {
	user, _ := c.Get("user").(string)
	return guardtest.Principal(user)
}

type echo5Server struct{ handle guardtest.Handler }

func (s echo5Server) ListThings(c *echov5.Context) error    { return s.serve(c, "listThings") }
func (s echo5Server) CreateThing(c *echov5.Context) error   { return s.serve(c, "createThing") }
func (s echo5Server) Pay(c *echov5.Context, _ string) error { return s.serve(c, "pay") }
func (s echo5Server) Upload(c *echov5.Context) error        { return s.serve(c, "upload") }

func (s echo5Server) serve(c *echov5.Context, operation string) error {
	body, err := io.ReadAll(c.Request().Body)
	if err != nil {
		return err
	}
	reply := s.handle(c.Request().Context(), guardtest.Call{Operation: operation, Body: string(body)})
	if reply.Err != nil {
		return reply.Err
	}
	return writeHTTP(c.Response(), reply)
}

func newEcho5() *echov5.Echo {
	e := echov5.New()
	e.HTTPErrorHandler = func(c *echov5.Context, err error) {
		var failed *guardtest.Error
		if !errors.As(err, &failed) {
			echov5.DefaultHTTPErrorHandler(false)(c, err)
		} else if r, _ := echov5.UnwrapResponse(c.Response()); !r.Committed {
			_ = c.String(failed.Status, text(failed))
		}
	}
	e.Use(middlewarev5.Recover(), func(next echov5.HandlerFunc) echov5.HandlerFunc {
		return func(c *echov5.Context) error {
			if trip := c.Request().Header.Get("X-Trip"); trip != "" {
				c.Response().Header().Set("X-Outer", trip)
			}
			c.Set("user", c.Request().Header.Get("X-User"))
			return next(c)
		}
	})
	return e
}

func echo5Principal(c *echov5.Context) (string, error) {
	user, _ := c.Get("user").(string)
	return guardtest.Principal(user)
}
