package idempotentclient

import (
	"context"
	"net/http"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A Transport is the form for callers without generated methods: as the
// Transport of an [http.Client] it gives each request of an operation a key and
// repeats it, as a [Call] does. The header field counts as the parameter.
//
// The Timeout of the http.Client then bounds the whole call, and failed calls
// have an [*Error] within a *url.Error, but for those that the Timeout ends, whose
// error the http.Client makes anew: bound a call with its context. The fields must not be changed once the
// Transport is in use; it is then safe for concurrent use.
//
// Requests of generated methods pass through: they are repeated by their own
// call. What retries above a Transport makes another call each time, with
// another key, unless the context has one (see [WithKey]).
type Transport struct {
	// Base sends the attempts. Nil: http.DefaultTransport.
	Base http.RoundTripper
	// Config is how keys are made and attempts repeated.
	Config Config
	// Operation returns the operation of a request; nil for a request that is
	// none, which is sent as it is. Nil: every POST and PATCH is an operation
	// with the defaults of the x-idempotent extension.
	Operation func(*http.Request) *Operation
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	find := t.Operation
	if find == nil {
		find = postAndPatch
	}
	op := find(req)
	ctx := req.Context()
	if op == nil || underWay(ctx) {
		return t.base().RoundTrip(req)
	}
	hop := exchangeOf(req.Response) // a redirect is still the same call
	if hop != nil && hop.key != "" {
		ctx = WithKey(ctx, hop.key)
	}
	call := t.Config.Start(op, req.Clone(ctx))
	call.hop = hop
	return call.Do(roundTripper{t.base()})
}

// CloseIdleConnections closes those of Base, for [http.Client.CloseIdleConnections].
func (t *Transport) CloseIdleConnections() { closeIdle(t.base()) }

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// underWay reports whether ctx is that of an attempt, of this or another client.
func underWay(ctx context.Context) bool {
	e, ok := ctx.Value(exchangeKey{}).(*exchange)
	return ok && !e.over.Load()
}

var defaultOperation = Operation{Marker: wire.HeaderReplayed}

func postAndPatch(req *http.Request) *Operation {
	if req.Method == http.MethodPost || req.Method == http.MethodPatch {
		return &defaultOperation
	}
	return nil
}

// roundTripper is a Doer that follows no redirects.
type roundTripper struct{ http.RoundTripper }

func (r roundTripper) Do(req *http.Request) (*http.Response, error) { return r.RoundTrip(req) }

func (r roundTripper) CloseIdleConnections() { closeIdle(r.RoundTripper) }
