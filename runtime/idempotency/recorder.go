package idempotency

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
)

// Handle guards one request of a net/http router and answers it on w. Generated
// code calls it in place of the handler.
func (g *Guard) Handle(p *Policy, w http.ResponseWriter, r *http.Request, next http.HandlerFunc) {
	if g.passthrough {
		next(w, r)
		return
	}
	outer := executionFrom(r.Context())
	resp, _ := g.Do(r.Context(), p, NewRequest(r, r), func(ctx context.Context) (*Response, error) {
		switch executionFrom(ctx) {
		case nil:
			g.innermost(next).ServeHTTP(w, r)
			return nil, nil
		case outer: // the guard around this one has run the middlewares
			next(w, r)
			return nil, nil
		}
		rec := NewRecorder(ctx, w)
		g.innermost(next).ServeHTTP(rec, r.WithContext(ctx))
		return rec.Response(), nil
	})
	if resp != nil {
		// The client may be gone; the record is durable, and the next request
		// gets it.
		_ = resp.WriteTo(w)
	}
}

func (g *Guard) innermost(h http.Handler) http.Handler {
	for _, middleware := range slices.Backward(g.inner) {
		h = middleware(h)
	}
	return h
}

// A Recorder is the http.ResponseWriter of a guarded run: it keeps the answer
// until its record is durable. At the first Flush or Hijack, and past the
// policy's MaxRecordedBody, it calls [Passing], and from then on the bytes go
// straight to the writer below. Informational responses (1xx) always do. Under
// [Transaction] a Flush does nothing, and neither a Hijack nor an answer past the
// limit is possible.
//
// It is for the handler's goroutine, like any http.ResponseWriter.
type Recorder struct {
	ctx     context.Context
	w       http.ResponseWriter
	e       *execution  // nil: the run is not guarded
	before  http.Header // what header was at first, with the same slices
	header  http.Header
	sent    http.Header // what header was when the status was written
	status  int
	body    []byte
	passing bool
}

// NewRecorder returns a Recorder over w for the guarded run that ctx belongs
// to. If there is none, it passes everything on.
func NewRecorder(ctx context.Context, w http.ResponseWriter) *Recorder {
	rec := &Recorder{ctx: ctx, w: w, e: executionFrom(ctx)}
	if rec.e == nil {
		rec.passing = true
		return rec
	}
	if rec.header = w.Header().Clone(); rec.header == nil {
		rec.header = http.Header{}
	}
	rec.before = maps.Clone(rec.header)
	return rec
}

// Unwrap is for [http.ResponseController], which reaches deadlines through it.
func (rec *Recorder) Unwrap() http.ResponseWriter { return rec.w }

func (rec *Recorder) Header() http.Header {
	if rec.passing {
		return rec.w.Header()
	}
	return rec.header
}

func (rec *Recorder) WriteHeader(status int) {
	switch {
	case rec.passing && informational(status):
		innermost(rec.w).WriteHeader(status)
	case rec.passing:
		rec.w.WriteHeader(status)
	case status < 100 || status > 999:
		panic(fmt.Sprintf("invalid WriteHeader code %v", status)) // as net/http does
	case rec.status != 0:
	case informational(status):
		rec.inform(status)
	default:
		rec.status = status
		rec.sent = maps.Clone(rec.header)
	}
}

func informational(status int) bool {
	return status >= 100 && status < 200 && status != http.StatusSwitchingProtocols
}

// inform sends an informational response, which does not end the exchange,
// with the handler's header fields and leaves the writer's own as they were. It
// passes by the writers of routers, which take it for the final one.
func (rec *Recorder) inform(status int) {
	w := innermost(rec.w)
	h := w.Header()
	clear(h)
	for name, values := range rec.header {
		h[name] = values
	}
	w.WriteHeader(status)
	clear(h)
	for name, values := range rec.before {
		h[name] = values
	}
}

func (rec *Recorder) Write(b []byte) (int, error) {
	if rec.passing {
		return rec.w.Write(b)
	}
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(rec.status) {
		return 0, http.ErrBodyNotAllowed
	}
	if int64(len(rec.body))+int64(len(b)) > rec.e.op.MaxRecordedBody {
		if err := rec.pass(); err != nil {
			return 0, err
		}
		return rec.w.Write(b)
	}
	rec.body = append(rec.body, b...)
	return len(b), nil
}

// pass lets go of what was kept, once "not replayable" is durable.
func (rec *Recorder) pass() error {
	if err := Passing(rec.ctx); err != nil {
		return err
	}
	resp := rec.Response()
	rec.passing = true
	applyHeader(rec.w.Header(), resp.Header)
	rec.w.WriteHeader(resp.Status)
	if len(resp.Body) == 0 {
		return nil
	}
	_, err := rec.w.Write(resp.Body)
	return err
}

// Flush implements [http.Flusher].
func (rec *Recorder) Flush() { _ = rec.FlushError() }

// FlushError is Flush for [http.ResponseController]. It returns
// [http.ErrNotSupported], and records nothing, if the writer below cannot
// flush.
func (rec *Recorder) FlushError() error {
	if !supports(rec.w, func(w http.ResponseWriter) bool {
		_, flusher := w.(http.Flusher)
		_, flushError := w.(interface{ FlushError() error })
		return flusher || flushError
	}) {
		return http.ErrNotSupported
	}
	if !rec.passing {
		if rec.status == 0 {
			rec.WriteHeader(http.StatusOK)
		}
		if rec.e.op.transactor != nil {
			return nil
		}
		if err := rec.pass(); err != nil {
			return err
		}
	}
	return http.NewResponseController(rec.w).Flush()
}

// Hijack implements [http.Hijacker]. It returns [http.ErrNotSupported], and
// records nothing, if the writer below cannot be hijacked.
func (rec *Recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if !supports(rec.w, func(w http.ResponseWriter) bool {
		_, ok := w.(http.Hijacker)
		return ok
	}) || !rec.passing && rec.e.op.transactor != nil {
		return nil, nil, http.ErrNotSupported
	}
	if !rec.passing {
		if err := Passing(rec.ctx); err != nil {
			return nil, nil, err
		}
		rec.passing = true
	}
	return http.NewResponseController(rec.w).Hijack()
}

// CloseNotify is for routers whose own writers ask the one below for it, as
// gin's do. The channel never gets a value if the writer below has no such
// method.
func (rec *Recorder) CloseNotify() <-chan bool {
	if w, ok := rec.w.(interface{ CloseNotify() <-chan bool }); ok {
		return w.CloseNotify()
	}
	return nil
}

// supports looks for a writer that can among those that w wraps.
func supports(w http.ResponseWriter, can func(http.ResponseWriter) bool) bool {
	for ; w != nil; w = below(w) {
		if can(w) {
			return true
		}
	}
	return false
}

func innermost(w http.ResponseWriter) http.ResponseWriter {
	for next := below(w); next != nil; next = below(w) {
		w = next
	}
	return w
}

// below returns the writer that w wraps, or nil.
func below(w http.ResponseWriter) http.ResponseWriter {
	switch w := w.(type) {
	case interface{ Unwrap() http.ResponseWriter }:
		return w.Unwrap()
	case interface{ Naive() http.ResponseWriter }: // as iris calls it
		return w.Naive()
	}
	return nil
}

// Response returns the answer that was kept, or nil if it has passed.
func (rec *Recorder) Response() *Response {
	if rec.passing {
		// What the handler set behind its body, in the header it got before.
		rec.copyTrailers(rec.w.Header())
		return nil
	}
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	resp := &Response{Status: rec.status, Header: changes(rec.before, rec.sent, sameSlice), Body: rec.body}
	rec.copyTrailers(resp.Header)
	return resp
}

// copyTrailers copies the fields that were set after the status was written and
// may be: trailers, declared or marked as such (see [http.ResponseWriter]).
func (rec *Recorder) copyTrailers(dst http.Header) {
	for name, values := range rec.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			dst[name] = values
		}
	}
	for name := range declaredTrailers(rec.sent) {
		if values, ok := rec.header[name]; ok {
			dst[name] = values
		}
	}
}

// ResponseOr is [Recorder.Response] for routers where a handler may attach an
// error and leave the answer to a middleware around it. When failed is not nil,
// and the handler wrote no body and no status of success, there is no answer to
// record, unless the run is at-most-once and a status of failure says how it ended: it returns failed, having passed the handler's header fields and status
// on to the writer below, which must not have sent them before the middleware
// can write.
func (rec *Recorder) ResponseOr(failed error) (*Response, error) {
	resp := rec.Response()
	if failed == nil || resp == nil || len(resp.Body) > 0 || resp.Status > http.StatusOK && resp.Status < 400 ||
		resp.Status >= 400 && rec.e.atMostOnce() {
		return resp, nil
	}
	applyHeader(rec.w.Header(), resp.Header)
	rec.w.WriteHeader(resp.Status)
	return nil, failed
}

var (
	_ http.Flusher  = (*Recorder)(nil)
	_ http.Hijacker = (*Recorder)(nil)
)
