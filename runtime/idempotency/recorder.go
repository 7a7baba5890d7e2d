package idempotency

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Handle guards one request of a net/http router and answers it on w. Generated
// code calls it in place of the handler.
func (g *Guard) Handle(p *Policy, w http.ResponseWriter, r *http.Request, next http.HandlerFunc) {
	if g.passthrough {
		next(w, r)
		return
	}
	h := &handling{w: w, r: r, next: next}
	h.request.init(r, r)
	h.response = Response{Header: w.Header(), there: true, encoded: announced(w.Header())}
	h.into = &h.response
	resp, _ := g.do(r.Context(), p, &h.request.Request, h, &h.execution)
	if resp == nil {
		return
	}
	if resp != &h.response { // the answer is not the handler's
		h.recorder.restore()
	}
	// The client may be gone; the record is durable, and the next request gets
	// it.
	_ = resp.WriteTo(w)
}

// A handling is one request's way through Handle, in one piece of memory.
type handling struct {
	execution
	w        http.ResponseWriter
	r        *http.Request
	next     http.HandlerFunc
	request  httpRequest
	rec      Recorder
	response Response
}

// run implements runner.
func (h *handling) run(ctx context.Context) (*Response, error) {
	switch executionFrom(ctx) {
	case &h.execution:
	case nil:
		h.guard.innermost(h.next).ServeHTTP(h.w, h.r)
		return nil, nil
	default: // the guard around this one has run the middlewares
		h.next(h.w, h.r)
		return nil, nil
	}
	h.into = nil // what the handler writes is there from now on
	h.rec.init(ctx, h.w, &h.execution)
	h.guard.innermost(h.next).ServeHTTP(&h.rec, h.r.WithContext(ctx))
	if h.rec.leaves(&h.response) {
		return &h.response, nil
	}
	return h.rec.Response(), nil
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
// Its header is that of the writer below, which gets back what it had when the
// handler panics, or another answer is sent.
//
// It is for the handler's goroutine, like any http.ResponseWriter.
type Recorder struct {
	ctx     context.Context
	w       http.ResponseWriter
	e       *execution  // nil: the run is not guarded
	before  http.Header // what the handler found, with the same slices; nil: nothing
	sent    []field     // what was there when it wrote the status
	status  int
	body    []byte
	passing bool

	few [4]field // sent, unless it is longer
}

type field struct {
	name   string
	values []string
}

// NewRecorder returns a Recorder over w for the guarded run that ctx belongs
// to. If there is none, it passes everything on.
func NewRecorder(ctx context.Context, w http.ResponseWriter) *Recorder {
	rec := new(Recorder)
	rec.init(ctx, w, executionFrom(ctx))
	return rec
}

func (rec *Recorder) init(ctx context.Context, w http.ResponseWriter, e *execution) {
	rec.ctx, rec.w, rec.e = ctx, w, e
	if rec.passing = e == nil; rec.passing {
		return
	}
	e.recorder = rec
	if h := w.Header(); len(h) > 0 {
		rec.before = maps.Clone(h)
	}
}

// Unwrap is for [http.ResponseController], which reaches deadlines through it.
func (rec *Recorder) Unwrap() http.ResponseWriter { return rec.w }

func (rec *Recorder) Header() http.Header { return rec.w.Header() }

func (rec *Recorder) WriteHeader(status int) {
	switch {
	case informational(status) && (rec.passing || rec.status == 0):
		// It does not end the exchange. Writers of routers take it for the final
		// one, so it passes them by.
		innermost(rec.w).WriteHeader(status)
	case rec.passing:
		rec.w.WriteHeader(status)
	case status < 100 || status > 999:
		panic(fmt.Sprintf("invalid WriteHeader code %v", status)) // as net/http does
	case rec.status == 0:
		rec.status, rec.sent = status, rec.few[:0]
		for name, values := range rec.w.Header() {
			rec.sent = append(rec.sent, field{name, values})
		}
	}
}

func informational(status int) bool {
	return status >= 100 && status < 200 && status != http.StatusSwitchingProtocols
}

func (rec *Recorder) Write(b []byte) (int, error) {
	keeps, err := rec.keeps(len(b))
	switch {
	case err != nil:
		return 0, err
	case !keeps:
		return rec.w.Write(b)
	}
	rec.body = append(rec.body, b...)
	return len(b), nil
}

// WriteString implements [io.StringWriter].
func (rec *Recorder) WriteString(s string) (int, error) {
	keeps, err := rec.keeps(len(s))
	switch {
	case err != nil:
		return 0, err
	case !keeps:
		return io.WriteString(rec.w, s)
	}
	rec.body = append(rec.body, s...)
	return len(s), nil
}

// keeps reports whether the next n bytes are kept, and has made room for them; if
// not they pass.
func (rec *Recorder) keeps(n int) (bool, error) {
	if rec.passing {
		return false, nil
	}
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(rec.status) {
		return false, http.ErrBodyNotAllowed
	}
	if int64(len(rec.body))+int64(n) > rec.e.op.MaxRecordedBody {
		return false, rec.pass()
	}
	rec.grow(n)
	return true, nil
}

// grow makes room for n bytes of the body, and for all of it if the handler said
// how long it is: a large body is copied as rarely as can be.
func (rec *Recorder) grow(n int) {
	size := len(rec.body) + n
	if size <= cap(rec.body) {
		return
	}
	size = max(size, 2*cap(rec.body))
	if said := rec.w.Header()["Content-Length"]; rec.body == nil && len(said) == 1 {
		if length, err := strconv.ParseInt(said[0], 10, 64); err == nil && length <= rec.e.op.MaxRecordedBody {
			size = max(size, int(length))
		}
	}
	rec.body = append(make([]byte, 0, size), rec.body...)
}

// pass lets go of what was kept, once "not replayable" is durable.
func (rec *Recorder) pass() error {
	if err := Passing(rec.ctx); err != nil {
		return err
	}
	resp := rec.Response()
	rec.passing = true
	header := rec.w.Header()
	applyHeader(header, resp.Header)
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

// Response returns the answer that was kept, or nil if it has passed. The writer
// below gets back the header that the handler found.
func (rec *Recorder) Response() *Response {
	if rec.passing {
		return nil
	}
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	sent := make(http.Header, len(rec.sent))
	for _, f := range rec.sent {
		sent[f.name] = f.values
	}
	resp := &Response{Status: rec.status, Header: changes(rec.before, sent, sameSlice), Body: rec.body}
	// Fields that were set after the status was written count if they are
	// trailers, declared or marked as such (see [http.ResponseWriter]).
	h := rec.w.Header()
	for name, values := range h {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			resp.Header[name] = values
		}
	}
	for name := range declaredTrailers(sent) {
		if values, ok := h[name]; ok {
			resp.Header[name] = values
		}
	}
	rec.restore()
	return resp
}

// leaves sets resp to the answer that was kept if the writer's header is what the
// handler alone has set, and has been since the status was written.
func (rec *Recorder) leaves(resp *Response) bool {
	if rec.passing || rec.before != nil {
		return false
	}
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	for _, f := range rec.sent {
		if values, there := resp.Header[f.name]; !there || !sameSlice(values, f.values) {
			return false
		}
	}
	resp.Status, resp.Body = rec.status, rec.body
	return len(rec.sent) == len(resp.Header)
}

// restore gives the writer below the header that the handler found, unless the
// answer has passed. There may be no recorder.
func (rec *Recorder) restore() {
	if rec == nil || rec.passing {
		return
	}
	h := rec.w.Header()
	clear(h)
	maps.Copy(h, rec.before)
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
	_ http.Flusher    = (*Recorder)(nil)
	_ http.Hijacker   = (*Recorder)(nil)
	_ io.StringWriter = (*Recorder)(nil)
)
