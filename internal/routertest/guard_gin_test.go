package routertest

import (
	"compress/gzip"
	"io"
	"net/http"

	gingzip "github.com/gin-contrib/gzip"
	ginrouter "github.com/gin-gonic/gin"

	gin "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gin"
	ginstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gin-strict"
	ginsecond "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/gin"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var ginTargets = []guardtest.Target{
	// A gin handler that attaches an error leaves the answer to a middleware.
	{Name: "gin", SpoilsCompressed: true, ErrorsAreOutside: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := ginServer{s.Handle}, s.Guard(gin.PrincipalFrom(ginPrincipal))
		return serveGin(s, guard, func(r ginrouter.IRouter, baseURL string) {
			gin.RegisterHandlersWithOptions(r, si, guard, gin.GinServerOptions{BaseURL: baseURL})
		}, func() ginrouter.HandlerFunc {
			return (&gin.ServerInterfaceWrapper{Handler: gin.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "gin/strict", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			ginstrict.ListThingsRequestObject, ginstrict.ListThingsResponseObject,
			ginstrict.HeadThingsRequestObject, ginstrict.HeadThingsResponseObject,
			ginstrict.CreateThingRequestObject, ginstrict.CreateThingResponseObject,
			ginstrict.PayRequestObject, ginstrict.PayResponseObject,
			ginstrict.UploadRequestObject, ginstrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := ginstrict.NewStrictHandlerWithOptions(strict, nil, ginstrict.StrictGinServerOptions{
			HandlerErrorFunc: func(c *ginrouter.Context, err error) { c.String(status(err), text(err)) },
		})
		guard := s.Guard(ginstrict.PrincipalFrom(ginPrincipal))
		return serveGin(s, guard, func(r ginrouter.IRouter, baseURL string) {
			ginstrict.RegisterHandlersWithOptions(r, si, guard, ginstrict.GinServerOptions{BaseURL: baseURL})
		}, func() ginrouter.HandlerFunc {
			return (&ginstrict.ServerInterfaceWrapper{Handler: ginstrict.GuardServer(si, guard)}).CreateThing
		})
	})},
}

type ginServer struct{ handle guardtest.Handler }

func (s ginServer) ListThings(c *ginrouter.Context)    { s.serve(c, "listThings", nil) }
func (s ginServer) HeadThings(c *ginrouter.Context)    { s.serve(c, "headThings", nil) }
func (s ginServer) CreateThing(c *ginrouter.Context)   { s.serve(c, "createThing", nil) }
func (s ginServer) Pay(c *ginrouter.Context, _ string) { s.serve(c, "pay", nil) }
func (s ginServer) Upload(c *ginrouter.Context)        { s.serve(c, "upload", nil) }
func (s ginServer) CreateOrder(c *ginrouter.Context, p ginsecond.CreateOrderParams) {
	s.serve(c, "createOrder", p.IdempotencyKey)
}

func (s ginServer) CreateQuote(c *ginrouter.Context) {
	s.serve(c, "createQuote", nil)
}

func (s ginServer) serve(c *ginrouter.Context, operation string, key *string) {
	body, err := io.ReadAll(c.Request.Body)
	if err != nil {
		_ = c.Error(err)
		return
	}
	reply := s.handle(c, guardtest.Call{Operation: operation, Body: string(body), User: c.GetString("user"), Key: key})
	if reply.Err == nil {
		reply.Err = writeHTTP(c.Writer, reply)
	}
	if reply.Err != nil {
		_ = c.Error(reply.Err)
	}
}

func serveGin(s guardtest.Server, guard *idempotency.Guard, register func(r ginrouter.IRouter, baseURL string), byHand func() ginrouter.HandlerFunc) http.Handler {
	engine := ginrouter.New()
	if s.Compress {
		engine.Use(gingzip.Gzip(gzip.DefaultCompression))
	}
	if !s.NoRecovery {
		engine.Use(ginrouter.RecoveryWithWriter(io.Discard))
	}
	engine.Use(func(c *ginrouter.Context) {
		if trip := c.GetHeader("X-Trip"); trip != "" {
			c.Header("X-Outer", trip)
		}
		c.Set("user", c.GetHeader("X-User"))
		ctx, cancel := guardtest.Outer(c.Request.Context(), c.GetHeader)
		defer cancel()
		c.Request = c.Request.WithContext(ctx)
		c.Next()
		if failed := c.Errors.Last(); failed != nil && !c.Writer.Written() {
			c.String(status(failed.Err), text(failed.Err))
		}
	})
	var r ginrouter.IRouter = engine
	if s.Group != "" {
		r = engine.Group(s.Group)
	}
	if s.ByHand {
		r.POST("/things", byHand())
	} else {
		register(r, s.BaseURL)
	}
	if s.Second {
		ginsecond.RegisterHandlers(r, ginServer{s.Handle}, guard)
	}
	return engine
}

func ginPrincipal(c *ginrouter.Context) (string, error) {
	return guardtest.Principal(c.GetString("user"))
}

func init() { ginrouter.SetMode(ginrouter.ReleaseMode) }
