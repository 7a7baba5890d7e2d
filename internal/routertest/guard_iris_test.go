package routertest

import (
	"io"
	"net/http"

	irisrouter "github.com/kataras/iris/v12"
	irisrecover "github.com/kataras/iris/v12/middleware/recover"

	iris "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/iris"
	irisstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/iris-strict"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var irisTargets = []guardtest.Target{
	{Name: "iris", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, app := irisServer{s.Handle}, s.Guard(iris.PrincipalFrom(irisPrincipal)), newIris()
		if s.ByHand {
			wrapper := iris.ServerInterfaceWrapper{Handler: iris.GuardServer(si, guard)}
			app.Post("/things", wrapper.CreateThing)
			return builtIris(app)
		}
		iris.RegisterHandlersWithOptions(app, si, guard, iris.IrisServerOptions{BaseURL: s.BaseURL})
		return app
	})},
	// oapi-codegen answers every error of a strict handler with 500.
	{Name: "iris/strict", ErrorsAre500: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			irisstrict.ListThingsRequestObject, irisstrict.ListThingsResponseObject,
			irisstrict.CreateThingRequestObject, irisstrict.CreateThingResponseObject,
			irisstrict.PayRequestObject, irisstrict.PayResponseObject,
			irisstrict.UploadRequestObject, irisstrict.UploadResponseObject,
		]{s.Handle, func(r guardtest.Reply) any { return irisReply{r} }}
		si, guard, app := irisstrict.NewStrictHandler(strict, nil), s.Guard(irisstrict.PrincipalFrom(irisPrincipal)), newIris()
		if s.ByHand {
			wrapper := irisstrict.ServerInterfaceWrapper{Handler: irisstrict.GuardServer(si, guard)}
			app.Post("/things", wrapper.CreateThing)
			return builtIris(app)
		}
		irisstrict.RegisterHandlersWithOptions(app, si, guard, irisstrict.IrisServerOptions{BaseURL: s.BaseURL})
		return app
	})},
}

type irisServer struct{ handle guardtest.Handler }

func (s irisServer) ListThings(c irisrouter.Context)    { s.serve(c, "listThings") }
func (s irisServer) CreateThing(c irisrouter.Context)   { s.serve(c, "createThing") }
func (s irisServer) Pay(c irisrouter.Context, _ string) { s.serve(c, "pay") }
func (s irisServer) Upload(c irisrouter.Context)        { s.serve(c, "upload") }

func (s irisServer) serve(c irisrouter.Context, operation string) {
	body, err := io.ReadAll(c.Request().Body)
	reply := guardtest.Reply{Err: err}
	if err == nil {
		reply = s.handle(c, guardtest.Call{Operation: operation, Body: string(body)})
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

func (r irisReply) VisitCreateThingResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitPayResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func (r irisReply) VisitUploadResponse(c irisrouter.Context) error {
	return writeHTTP(c.ResponseWriter(), r.Reply)
}

func newIris() *irisrouter.Application {
	app := irisrouter.New()
	app.Logger().SetLevel("disable")
	app.OnAnyErrorCode(func(c irisrouter.Context) {
		if err := c.GetErr(); err != nil {
			_, _ = c.WriteString(text(err))
		}
	})
	app.Use(irisrecover.New(), func(c irisrouter.Context) {
		if trip := c.GetHeader("X-Trip"); trip != "" {
			c.Header("X-Outer", trip)
		}
		c.Values().Set("user", c.GetHeader("X-User"))
		c.Next()
	})
	return app
}

// builtIris does what the generated function does behind its registrations.
func builtIris(app *irisrouter.Application) http.Handler {
	if err := app.Build(); err != nil {
		panic(err)
	}
	return app
}

func irisPrincipal(c irisrouter.Context) (string, error) {
	return guardtest.Principal(c.Values().GetString("user"))
}
