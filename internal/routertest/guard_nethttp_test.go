package routertest

import (
	"compress/gzip"
	"io"
	"net/http"

	chirouter "github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/gorilla/handlers"
	"github.com/gorilla/mux"

	chi "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi"
	chistrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi-strict"
	gorilla "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gorilla"
	gorillastrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gorilla-strict"
	stdhttp "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/std-http"
	stdhttpstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/std-http-strict"
	chisecond "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/chi"
	gorillasecond "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/gorilla"
	stdhttpsecond "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/second/std-http"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var netHTTPTargets = []guardtest.Target{
	{Name: "std-http", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := httpServer{s.Handle}, s.Guard(stdhttp.PrincipalFrom(httpPrincipal))
		return serveStdHTTP(s, guard, func(r *http.ServeMux) {
			stdhttp.HandlerWithOptions(si, guard, stdhttp.StdHTTPServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&stdhttp.ServerInterfaceWrapper{Handler: stdhttp.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "std-http/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			stdhttpstrict.ListThingsRequestObject, stdhttpstrict.ListThingsResponseObject,
			stdhttpstrict.HeadThingsRequestObject, stdhttpstrict.HeadThingsResponseObject,
			stdhttpstrict.CreateThingRequestObject, stdhttpstrict.CreateThingResponseObject,
			stdhttpstrict.PayRequestObject, stdhttpstrict.PayResponseObject,
			stdhttpstrict.UploadRequestObject, stdhttpstrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := stdhttpstrict.NewStrictHandlerWithOptions(strict, nil, stdhttpstrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard := s.Guard(stdhttpstrict.PrincipalFrom(httpPrincipal))
		return serveStdHTTP(s, guard, func(r *http.ServeMux) {
			stdhttpstrict.HandlerWithOptions(si, guard, stdhttpstrict.StdHTTPServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&stdhttpstrict.ServerInterfaceWrapper{Handler: stdhttpstrict.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "chi", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := httpServer{s.Handle}, s.Guard(chi.PrincipalFrom(httpPrincipal))
		return serveChi(s, guard, func(r chirouter.Router) {
			chi.HandlerWithOptions(si, guard, chi.ChiServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&chi.ServerInterfaceWrapper{Handler: chi.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "chi/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			chistrict.ListThingsRequestObject, chistrict.ListThingsResponseObject,
			chistrict.HeadThingsRequestObject, chistrict.HeadThingsResponseObject,
			chistrict.CreateThingRequestObject, chistrict.CreateThingResponseObject,
			chistrict.PayRequestObject, chistrict.PayResponseObject,
			chistrict.UploadRequestObject, chistrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := chistrict.NewStrictHandlerWithOptions(strict, nil, chistrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard := s.Guard(chistrict.PrincipalFrom(httpPrincipal))
		return serveChi(s, guard, func(r chirouter.Router) {
			chistrict.HandlerWithOptions(si, guard, chistrict.ChiServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&chistrict.ServerInterfaceWrapper{Handler: chistrict.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "gorilla", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard := httpServer{s.Handle}, s.Guard(gorilla.PrincipalFrom(httpPrincipal))
		return serveGorilla(s, guard, func(r *mux.Router) {
			gorilla.HandlerWithOptions(si, guard, gorilla.GorillaServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&gorilla.ServerInterfaceWrapper{Handler: gorilla.GuardServer(si, guard)}).CreateThing
		})
	})},
	{Name: "gorilla/strict", SpoilsCompressed: true, Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			gorillastrict.ListThingsRequestObject, gorillastrict.ListThingsResponseObject,
			gorillastrict.HeadThingsRequestObject, gorillastrict.HeadThingsResponseObject,
			gorillastrict.CreateThingRequestObject, gorillastrict.CreateThingResponseObject,
			gorillastrict.PayRequestObject, gorillastrict.PayResponseObject,
			gorillastrict.UploadRequestObject, gorillastrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := gorillastrict.NewStrictHandlerWithOptions(strict, nil, gorillastrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard := s.Guard(gorillastrict.PrincipalFrom(httpPrincipal))
		return serveGorilla(s, guard, func(r *mux.Router) {
			gorillastrict.HandlerWithOptions(si, guard, gorillastrict.GorillaServerOptions{BaseURL: s.BaseURL, BaseRouter: r})
		}, func() http.HandlerFunc {
			return (&gorillastrict.ServerInterfaceWrapper{Handler: gorillastrict.GuardServer(si, guard)}).CreateThing
		})
	})},
}

func serveStdHTTP(s guardtest.Server, guard *idempotency.Guard, register func(*http.ServeMux), byHand func() http.HandlerFunc) http.Handler {
	r := http.NewServeMux()
	if s.ByHand {
		r.Handle("POST /things", byHand())
	} else {
		register(r)
	}
	if s.Second {
		stdhttpsecond.HandlerFromMux(stdHTTPSecond{httpServer{s.Handle}}, guard, r)
	}
	var h http.Handler = r
	if s.Group != "" {
		group := http.NewServeMux()
		group.Handle(s.Group+"/", http.StripPrefix(s.Group, r))
		h = group
	}
	h = aroundHTTP(s, h)
	if s.Compress {
		h = middleware.Compress(gzip.DefaultCompression)(h)
	}
	return h
}

func serveChi(s guardtest.Server, guard *idempotency.Guard, register func(chirouter.Router), byHand func() http.HandlerFunc) http.Handler {
	root := chirouter.NewRouter()
	if s.Compress {
		root.Use(middleware.Compress(gzip.DefaultCompression))
	}
	root.Use(func(next http.Handler) http.Handler { return aroundHTTP(s, next) })
	var r chirouter.Router = root
	if s.Group != "" {
		r = root.Route(s.Group, func(chirouter.Router) {})
	}
	if s.ByHand {
		r.Post("/things", byHand())
	} else {
		register(r)
	}
	if s.Second {
		chisecond.HandlerFromMux(chiSecond{httpServer{s.Handle}}, guard, r)
	}
	return root
}

func serveGorilla(s guardtest.Server, guard *idempotency.Guard, register func(*mux.Router), byHand func() http.HandlerFunc) http.Handler {
	root := mux.NewRouter()
	if s.Compress {
		root.Use(handlers.CompressHandler)
	}
	root.Use(func(next http.Handler) http.Handler { return aroundHTTP(s, next) })
	r := root
	if s.Group != "" {
		r = root.PathPrefix(s.Group).Subrouter()
	}
	if s.ByHand {
		r.Handle("/things", byHand()).Methods(http.MethodPost)
	} else {
		register(r)
	}
	if s.Second {
		gorillasecond.HandlerFromMux(gorillaSecond{httpServer{s.Handle}}, guard, r)
	}
	return root
}

// httpServer is a server of std-http, chi and gorilla.
type httpServer struct{ handle guardtest.Handler }

func (s httpServer) ListThings(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, "listThings", nil)
}
func (s httpServer) HeadThings(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, "headThings", nil)
}
func (s httpServer) CreateThing(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, "createThing", nil)
}
func (s httpServer) Pay(w http.ResponseWriter, r *http.Request, _ string) { s.serve(w, r, "pay", nil) }
func (s httpServer) Upload(w http.ResponseWriter, r *http.Request)        { s.serve(w, r, "upload", nil) }

func (s httpServer) CreateQuote(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, "createQuote", nil)
}

// The second document's servers.
type (
	stdHTTPSecond struct{ httpServer }
	chiSecond     struct{ httpServer }
	gorillaSecond struct{ httpServer }
)

func (s stdHTTPSecond) CreateOrder(w http.ResponseWriter, r *http.Request, p stdhttpsecond.CreateOrderParams) {
	s.serve(w, r, "createOrder", p.IdempotencyKey)
}

func (s chiSecond) CreateOrder(w http.ResponseWriter, r *http.Request, p chisecond.CreateOrderParams) {
	s.serve(w, r, "createOrder", p.IdempotencyKey)
}

func (s gorillaSecond) CreateOrder(w http.ResponseWriter, r *http.Request, p gorillasecond.CreateOrderParams) {
	s.serve(w, r, "createOrder", p.IdempotencyKey)
}

func (s httpServer) serve(w http.ResponseWriter, r *http.Request, operation string, key *string) {
	body, err := io.ReadAll(r.Body)
	reply := guardtest.Reply{Err: err}
	if err == nil {
		reply = s.handle(r.Context(), guardtest.Call{Operation: operation, Body: string(body), User: userIn(r.Context()), Key: key})
	}
	if reply.Err == nil {
		reply.Err = writeHTTP(w, reply)
	}
	if reply.Err != nil {
		failHTTP(w, r, reply.Err)
	}
}

func badRequest(w http.ResponseWriter, _ *http.Request, err error) {
	http.Error(w, err.Error(), http.StatusBadRequest)
}

func failHTTP(w http.ResponseWriter, _ *http.Request, err error) {
	http.Error(w, text(err), status(err))
}

func httpPrincipal(r *http.Request) (string, error) {
	return guardtest.Principal(userIn(r.Context()))
}

// aroundHTTP is the middlewares that the suite asks for.
func aroundHTTP(s guardtest.Server, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.NoRecovery {
			defer func() {
				if recover() != nil {
					w.WriteHeader(http.StatusInternalServerError)
				}
			}()
		}
		if trip := r.Header.Get("X-Trip"); trip != "" {
			w.Header().Set("X-Outer", trip)
		}
		ctx, cancel := guardtest.Outer(r.Context(), r.Header.Get)
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}
