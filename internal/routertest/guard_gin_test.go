package routertest

import (
	"io"
	"net/http"

	ginrouter "github.com/gin-gonic/gin"

	gin "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gin"
	ginstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gin-strict"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var ginTargets = []guardtest.Target{
	// A gin handler that attaches an error leaves the answer to a middleware.
	{Name: "gin", ErrorsAreOutside: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, engine := ginServer{s.Handle}, s.Guard(gin.PrincipalFrom(ginPrincipal)), newGin()
		if s.ByHand {
			wrapper := gin.ServerInterfaceWrapper{Handler: gin.GuardServer(si, guard)}
			engine.POST("/things", wrapper.CreateThing)
			return engine
		}
		gin.RegisterHandlersWithOptions(engine, si, guard, gin.GinServerOptions{BaseURL: s.BaseURL})
		return engine
	})},
	{Name: "gin/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			ginstrict.ListThingsRequestObject, ginstrict.ListThingsResponseObject,
			ginstrict.CreateThingRequestObject, ginstrict.CreateThingResponseObject,
			ginstrict.PayRequestObject, ginstrict.PayResponseObject,
			ginstrict.UploadRequestObject, ginstrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := ginstrict.NewStrictHandlerWithOptions(strict, nil, ginstrict.StrictGinServerOptions{
			HandlerErrorFunc: func(c *ginrouter.Context, err error) { c.String(status(err), text(err)) },
		})
		guard, engine := s.Guard(ginstrict.PrincipalFrom(ginPrincipal)), newGin()
		if s.ByHand {
			wrapper := ginstrict.ServerInterfaceWrapper{Handler: ginstrict.GuardServer(si, guard)}
			engine.POST("/things", wrapper.CreateThing)
			return engine
		}
		ginstrict.RegisterHandlersWithOptions(engine, si, guard, ginstrict.GinServerOptions{BaseURL: s.BaseURL})
		return engine
	})},
}

type ginServer struct{ handle guardtest.Handler }

func (s ginServer) ListThings(c *ginrouter.Context)    { s.serve(c, "listThings") }
func (s ginServer) CreateThing(c *ginrouter.Context)   { s.serve(c, "createThing") }
func (s ginServer) Pay(c *ginrouter.Context, _ string) { s.serve(c, "pay") }
func (s ginServer) Upload(c *ginrouter.Context)        { s.serve(c, "upload") }

func (s ginServer) serve(c *ginrouter.Context, operation string) {
	body, err := io.ReadAll(c.Request.Body)
	if err != nil {
		_ = c.Error(err)
		return
	}
	reply := s.handle(c, guardtest.Call{Operation: operation, Body: string(body)})
	if reply.Err == nil {
		reply.Err = writeHTTP(c.Writer, reply)
	}
	if reply.Err != nil {
		_ = c.Error(reply.Err)
	}
}

func newGin() *ginrouter.Engine {
	engine := ginrouter.New()
	engine.Use(ginrouter.RecoveryWithWriter(io.Discard), func(c *ginrouter.Context) {
		if trip := c.GetHeader("X-Trip"); trip != "" {
			c.Header("X-Outer", trip)
		}
		c.Set("user", c.GetHeader("X-User"))
		c.Next()
		if failed := c.Errors.Last(); failed != nil && !c.Writer.Written() {
			c.String(status(failed.Err), text(failed.Err))
		}
	})
	return engine
}

func ginPrincipal(c *ginrouter.Context) (string, error) {
	return guardtest.Principal(c.GetString("user"))
}

func init() { ginrouter.SetMode(ginrouter.ReleaseMode) }
