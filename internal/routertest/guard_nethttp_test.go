package routertest

import (
	"context"
	"io"
	"net/http"

	chirouter "github.com/go-chi/chi/v5"
	"github.com/gorilla/mux"

	chi "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi"
	chistrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/chi-strict"
	gorilla "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gorilla"
	gorillastrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/gorilla-strict"
	stdhttp "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/std-http"
	stdhttpstrict "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/guardtest/std-http-strict"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

var netHTTPTargets = []guardtest.Target{
	{Name: "std-http", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		return stdHTTP(s, httpServer{s.Handle})
	})},
	{Name: "std-http/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			stdhttpstrict.ListThingsRequestObject, stdhttpstrict.ListThingsResponseObject,
			stdhttpstrict.CreateThingRequestObject, stdhttpstrict.CreateThingResponseObject,
			stdhttpstrict.PayRequestObject, stdhttpstrict.PayResponseObject,
			stdhttpstrict.UploadRequestObject, stdhttpstrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := stdhttpstrict.NewStrictHandlerWithOptions(strict, nil, stdhttpstrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard, router := s.Guard(stdhttpstrict.PrincipalFrom(httpPrincipal)), http.NewServeMux()
		if s.ByHand {
			wrapper := stdhttpstrict.ServerInterfaceWrapper{Handler: stdhttpstrict.GuardServer(si, guard)}
			router.HandleFunc("POST /things", wrapper.CreateThing)
			return aroundHTTP(router)
		}
		return aroundHTTP(stdhttpstrict.HandlerWithOptions(si, guard, stdhttpstrict.StdHTTPServerOptions{BaseURL: s.BaseURL, BaseRouter: router}))
	})},
	{Name: "chi", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, router := httpServer{s.Handle}, s.Guard(chi.PrincipalFrom(httpPrincipal)), chirouter.NewRouter()
		router.Use(aroundHTTP)
		if s.ByHand {
			wrapper := chi.ServerInterfaceWrapper{Handler: chi.GuardServer(si, guard)}
			router.Post("/things", wrapper.CreateThing)
			return router
		}
		return chi.HandlerWithOptions(si, guard, chi.ChiServerOptions{BaseURL: s.BaseURL, BaseRouter: router})
	})},
	{Name: "chi/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			chistrict.ListThingsRequestObject, chistrict.ListThingsResponseObject,
			chistrict.CreateThingRequestObject, chistrict.CreateThingResponseObject,
			chistrict.PayRequestObject, chistrict.PayResponseObject,
			chistrict.UploadRequestObject, chistrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := chistrict.NewStrictHandlerWithOptions(strict, nil, chistrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard, router := s.Guard(chistrict.PrincipalFrom(httpPrincipal)), chirouter.NewRouter()
		router.Use(aroundHTTP)
		if s.ByHand {
			wrapper := chistrict.ServerInterfaceWrapper{Handler: chistrict.GuardServer(si, guard)}
			router.Post("/things", wrapper.CreateThing)
			return router
		}
		return chistrict.HandlerWithOptions(si, guard, chistrict.ChiServerOptions{BaseURL: s.BaseURL, BaseRouter: router})
	})},
	{Name: "gorilla", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		si, guard, router := httpServer{s.Handle}, s.Guard(gorilla.PrincipalFrom(httpPrincipal)), mux.NewRouter()
		router.Use(aroundHTTP)
		if s.ByHand {
			wrapper := gorilla.ServerInterfaceWrapper{Handler: gorilla.GuardServer(si, guard)}
			router.HandleFunc("/things", wrapper.CreateThing).Methods(http.MethodPost)
			return router
		}
		return gorilla.HandlerWithOptions(si, guard, gorilla.GorillaServerOptions{BaseURL: s.BaseURL, BaseRouter: router})
	})},
	{Name: "gorilla/strict", Serve: overHTTP(func(s guardtest.Server) http.Handler {
		strict := strictServer[
			gorillastrict.ListThingsRequestObject, gorillastrict.ListThingsResponseObject,
			gorillastrict.CreateThingRequestObject, gorillastrict.CreateThingResponseObject,
			gorillastrict.PayRequestObject, gorillastrict.PayResponseObject,
			gorillastrict.UploadRequestObject, gorillastrict.UploadResponseObject,
		]{s.Handle, newHTTPReply}
		si := gorillastrict.NewStrictHandlerWithOptions(strict, nil, gorillastrict.StrictHTTPServerOptions{RequestErrorHandlerFunc: badRequest, ResponseErrorHandlerFunc: failHTTP})
		guard, router := s.Guard(gorillastrict.PrincipalFrom(httpPrincipal)), mux.NewRouter()
		router.Use(aroundHTTP)
		if s.ByHand {
			wrapper := gorillastrict.ServerInterfaceWrapper{Handler: gorillastrict.GuardServer(si, guard)}
			router.HandleFunc("/things", wrapper.CreateThing).Methods(http.MethodPost)
			return router
		}
		return gorillastrict.HandlerWithOptions(si, guard, gorillastrict.GorillaServerOptions{BaseURL: s.BaseURL, BaseRouter: router})
	})},
}

func stdHTTP(s guardtest.Server, si stdhttp.ServerInterface) http.Handler {
	guard, router := s.Guard(stdhttp.PrincipalFrom(httpPrincipal)), http.NewServeMux()
	if s.ByHand {
		wrapper := stdhttp.ServerInterfaceWrapper{Handler: stdhttp.GuardServer(si, guard)}
		router.HandleFunc("POST /things", wrapper.CreateThing)
		return aroundHTTP(router)
	}
	return aroundHTTP(stdhttp.HandlerWithOptions(si, guard, stdhttp.StdHTTPServerOptions{BaseURL: s.BaseURL, BaseRouter: router}))
}

// httpServer is a server of std-http, chi and gorilla.
type httpServer struct{ handle guardtest.Handler }

func (s httpServer) ListThings(w http.ResponseWriter, r *http.Request)    { s.serve(w, r, "listThings") }
func (s httpServer) CreateThing(w http.ResponseWriter, r *http.Request)   { s.serve(w, r, "createThing") }
func (s httpServer) Pay(w http.ResponseWriter, r *http.Request, _ string) { s.serve(w, r, "pay") }
func (s httpServer) Upload(w http.ResponseWriter, r *http.Request)        { s.serve(w, r, "upload") }

func (s httpServer) serve(w http.ResponseWriter, r *http.Request, operation string) {
	body, err := io.ReadAll(r.Body)
	reply := guardtest.Reply{Err: err}
	if err == nil {
		reply = s.handle(r.Context(), guardtest.Call{Operation: operation, Body: string(body)})
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

type userKey struct{}

func httpPrincipal(r *http.Request) (string, error) {
	user, _ := r.Context().Value(userKey{}).(string)
	return guardtest.Principal(user)
}

// aroundHTTP is the middlewares that the suite asks for.
func aroundHTTP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if recover() != nil {
				w.WriteHeader(http.StatusInternalServerError)
			}
		}()
		if trip := r.Header.Get("X-Trip"); trip != "" {
			w.Header().Set("X-Outer", trip)
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), userKey{}, r.Header.Get("X-User"))))
	})
}
