package routertest

import (
	"errors"
	"io"
	"net/http"

	irisrouter "github.com/kataras/iris/v12"
	irisrecover "github.com/kataras/iris/v12/middleware/recover"

	iris "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/iris"
	irisstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/iris-strict"
	irissecond "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/iris"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var irisTargets = []guardtest.Target{
	{Name: "iris", SpoilsCompressed: true, FailedHijackIs200: true, ReusesWriters: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := irisServer{s.Handle}, s.Guard(iris.PrincipalFrom(irisPrincipal))
		return serveIris(s, guard, func(app *irisrouter.Application) {
			iris.RegisterHandlersWithOptions(app, si, guard, iris.IrisServerOptions{BaseURL: s.BaseURL})
		}, func() irisrouter.Handler {
			return (&iris.ServerInterfaceWrapper{Handler: iris.GuardServer(si, guard)}).CreateThing
		})
	})},
	// oapi-codegen answers every error of a strict handler with 500.
	{Name: "iris/strict", SpoilsCompressed: true, FailedHijackIs200: true, ReusesWriters: true, ErrorsAre500: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			irisstrict.ListThingsRequestObject, irisstrict.ListThingsResponseObject,
			irisstrict.HeadThingsRequestObject, irisstrict.HeadThingsResponseObject,
			irisstrict.CreateThingRequestObject, irisstrict.CreateThingResponseObject,
			irisstrict.PayRequestObject, irisstrict.PayResponseObject,
			irisstrict.UploadRequestObject, irisstrict.UploadResponseObject,
		]{s.Handle, func(r guardtest.Reply) any { return irisReply{r} }}
		si, guard := irisstrict.NewStrictHandler(strict, nil), s.Guard(irisstrict.PrincipalFrom(irisPrincipal))
		return serveIris(s, guard, func(app *irisrouter.Application) {
			irisstrict.RegisterHandlersWithOptions(app, si, guard, irisstrict.IrisServerOptions{BaseURL: s.BaseURL})
		}, func() irisrouter.Handler {
			return (&irisstrict.ServerInterfaceWrapper{Handler: irisstrict.GuardServer(si, guard)}).CreateThing
		})
	})},
}

type irisServer struct{ handle guardtest.Handler }

func (s irisServer) ListThings(c irisrouter.Context)    { s.serve(c, "listThings", nil) }
func (s irisServer) HeadThings(c irisrouter.Context)    { s.serve(c, "headThings", nil) }
func (s irisServer) CreateThing(c irisrouter.Context)   { s.serve(c, "createThing", nil) }
func (s irisServer) Pay(c irisrouter.Context, _ string) { s.serve(c, "pay", nil) }
func (s irisServer) Upload(c irisrouter.Context)        { s.serve(c, "upload", nil) }
func (s irisServer) CreateOrder(c irisrouter.Context, p irissecond.CreateOrderParams) {
	s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s irisServer) CreateQuote(c irisrouter.Context) {
	s.serve(c, "createQuote", nil)
}

func (s irisServer) serve(c irisrouter.Context, operation string, key *string) {
	body, err := io.ReadAll(c.Request().Body)
	reply := guardtest.Reply{Err: err}
	if err == nil {
		reply = s.handle(c, guardtest.Call{Operation: operation, Body: string(body), User: c.Values().GetString("user"), Key: key})
	}
	if reply.Err == nil {
		reply.Err = writeHTTP(c.ResponseWriter(), reply)
	}
	if reply.Err != nil { // to be rendered by the handler of its status
		c.StopWithPlainError(status(reply.Err), reply.Err)
	}
}

// irisReply is the response object of strict servers.
type irisReply struct{ guardtest.Reply }

func (r irisReply) VisitListThingsResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitHeadThingsResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitCreateThingResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitPayResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitUploadResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

// serveIris registers by hand in a group, since what is generated takes the
// application only.
func serveIris(s guardtest.Server, guard *idempotency.Guard, register func(*irisrouter.Application), byHand func() irisrouter.Handler) http.Handler {
	app := irisrouter.New()
	app.Logger().SetLevel("disable")
	app.OnAnyErrorCode(func(c irisrouter.Context) {
		if err := c.GetErr(); err != nil {
			_, _ = c.WriteString(text(err))
		}
	})
	if s.Compress {
		app.Use(irisrouter.Compression)
	}
	if !s.NoRecovery {
		app.Use(irisrecover.New())
	}
	app.Use(func(c irisrouter.Context) {
		if trip := c.GetHeader("X-Trip"); trip != "" {
			c.Header("X-Outer", trip)
		}
		c.Values().Set("user", c.GetHeader("X-User"))
		ctx, cancel := guardtest.Outer(c.Request().Context(), c.GetHeader)
		defer cancel()
		c.ResetRequest(c.Request().WithContext(ctx))
		c.Next()
	})
	if s.Second {
		irissecond.RegisterHandlers(app, irisServer{s.Handle}, guard)
	}
	if s.ByHand || s.Group != "" {
		app.Party(s.Group).Post("/things", byHand())
	} else {
		register(app)
	}
	// What is generated builds the application, once, behind its own routes.
	if err := errors.Join(app.Build(), app.RefreshRouter()); err != nil {
		panic(err)
	}
	return app
}

func irisPrincipal(c irisrouter.Context) (string, error) {
	return guardtest.Principal(c.Values().GetString("user"))
}
