package idempotency

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// A Response is an answer: the handler's, a recorded one, or a refusal.
type Response struct {
	Status int
	// Header holds the fields that the handler set or changed. A field with no
	// values is one that it removed from what outer middlewares had set.
	Header http.Header
	Body   []byte
}

// WriteTo sends the response on w: its header fields replace those that are
// there, and Content-Length is computed anew, unless a middleware has announced
// a Content-Encoding, under which only it knows the length.
func (resp *Response) WriteTo(w http.ResponseWriter) error {
	encoded := w.Header().Get("Content-Encoding") != ""
	applyHeader(w.Header(), resp.Header)
	w.Header().Del("Content-Length")
	if !bodyAllowed(resp.Status) {
		w.WriteHeader(resp.Status)
		return nil
	}
	if !encoded && w.Header().Get("Trailer") == "" && w.Header().Get("Transfer-Encoding") == "" {
		w.Header().Set("Content-Length", strconv.Itoa(len(resp.Body)))
	}
	trailers := http.Header{}
	for name := range declaredTrailers(w.Header()) {
		if values, ok := w.Header()[name]; ok {
			trailers[name] = values
			delete(w.Header(), name)
		}
	}
	w.WriteHeader(resp.Status)
	var err error
	if len(resp.Body) > 0 {
		_, err = w.Write(resp.Body)
	}
	applyHeader(w.Header(), trailers)
	return err
}

// declaredTrailers yields the names of the fields that the field Trailer lists.
func declaredTrailers(h http.Header) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, list := range h["Trailer"] {
			for name := range strings.SplitSeq(list, ",") {
				if !yield(http.CanonicalHeaderKey(strings.TrimSpace(name))) {
					return
				}
			}
		}
	}
}

// A Capture takes the answer out of a router that holds its response until the
// handler has returned, like fasthttp's, and puts the one to be sent in its
// place. It is to such routers what a [Recorder] is to net/http's.
type Capture struct{ before http.Header }

// NewCapture begins before the handler runs, with the header fields that outer
// middlewares have set. It copies them.
func NewCapture(header map[string][]string) *Capture { return &Capture{copyHeader(header)} }

// Response returns a copy of what the router holds after the guarded run that
// ctx belongs to. When it streams, its bytes are not there yet: then it calls
// [Passing], does not ask for the body, and returns no response. Nor does it in
// a run that is not guarded, whose response is to be left as it is.
func (c *Capture) Response(ctx context.Context, status int, header map[string][]string, streams bool, body func() []byte) (*Response, error) {
	if executionFrom(ctx) == nil {
		return nil, nil
	}
	if streams {
		return nil, Passing(ctx)
	}
	return &Response{Status: status, Header: changes(c.before, copyHeader(header), slices.Equal), Body: bytes.Clone(body())}, nil
}

// Restore makes the router's header what it was before the run and resp has it
// be. Header is what it is now; fields that stay are not touched. Status and
// body are left to the caller.
func (c *Capture) Restore(resp *Response, header map[string][]string, del func(name string), add func(name, value string)) {
	now, want := copyHeader(header), c.before.Clone()
	applyHeader(want, resp.Header)
	for name, values := range changes(now, want, slices.Equal) {
		del(name)
		for _, v := range values {
			add(name, v)
		}
	}
}

// Render has render write the answer of a handler that failed, so that it can be
// recorded, and returns nil or why that failed too. In a run that is not guarded
// it returns failed, for the router to render as ever. A nil error stays nil.
func Render(ctx context.Context, failed error, render func(error) error) error {
	if failed == nil || executionFrom(ctx) == nil {
		return failed
	}
	return render(failed)
}

// changes returns the fields that are not the same in after, and without values
// those that it lacks.
func changes(before, after http.Header, same func(_, _ []string) bool) http.Header {
	changed := http.Header{}
	for name, values := range after {
		// A field without values keeps net/http from adding one of its own.
		if had, ok := before[name]; !ok || !same(values, had) {
			changed[name] = values
		}
	}
	for name := range before {
		if _, ok := after[name]; !ok {
			changed[name] = []string{}
		}
	}
	return changed
}

// sameSlice tells a field that was left alone from one that was set to what it
// was: a compressor around announces its Content-Encoding before the handler does.
func sameSlice(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func applyHeader(dst, src http.Header) {
	for name, values := range src {
		if _, there := dst[name]; len(values) == 0 && there {
			delete(dst, name)
		} else {
			dst[name] = values
		}
	}
}

// bodyAllowed follows RFC 9110, section 6.4.1.
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// recordable reports whether a header field of an answer may be sent to whoever
// sends the request again. Fields that speak of one connection, one exchange or
// one caller may not.
func recordable(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
		"Content-Length", "Date", "Set-Cookie", "Set-Cookie2",
		"Request-Id", "X-Request-Id", "X-Correlation-Id", "Correlation-Id", "X-Amzn-Requestid", "X-Amzn-Trace-Id", "X-Trace-Id",
		"Traceparent", "Tracestate", "Traceresponse", "Server-Timing":
		return false
	}
	for _, prefix := range []string{"Access-Control-", "Ratelimit", "X-Ratelimit-", "X-Rate-Limit-", http.TrailerPrefix} {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return true
}

// The first byte of a recorded header.
const (
	headerEncoding = 1
	sealedEncoding = 2 // and the body is sealed too
)

// encodeHeader encodes the recordable fields byte for byte.
func encodeHeader(h http.Header, marker string) []byte {
	b := []byte{headerEncoding}
	marker = http.CanonicalHeaderKey(marker)
	for name, values := range sorted(h) {
		if canonical := http.CanonicalHeaderKey(name); marker != "" && canonical == marker || !recordable(canonical) {
			continue
		}
		b = binary.AppendUvarint(appendField(b, name), uint64(len(values)))
		for _, v := range values {
			b = appendField(b, v)
		}
	}
	return b
}

var errEncoding = errors.New("idempotency: recorded header has an unknown encoding")

func decodeHeader(b []byte) (http.Header, error) {
	if len(b) == 0 || b[0] != headerEncoding {
		return nil, errEncoding
	}
	b = b[1:]
	h := http.Header{}
	for len(b) > 0 {
		name, rest, ok := cutField(b)
		count, n := binary.Uvarint(rest)
		if !ok || n <= 0 || count > uint64(len(rest)) {
			return nil, errEncoding
		}
		b = rest[n:]
		values := make([]string, count)
		for i := range values {
			if values[i], b, ok = cutField(b); !ok {
				return nil, errEncoding
			}
		}
		h[name] = values
	}
	return h, nil
}

func cutField(b []byte) (field string, rest []byte, ok bool) {
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(len(b)-n) {
		return "", nil, false
	}
	b = b[n:]
	return string(b[:size]), b[size:], true
}

// replay returns the recorded answer as the policy has it sent.
func (e *execution) replay(row *Row) (*Response, error) {
	p, o := e.op.Policy, &row.Outcome
	if len(o.Header) > 0 && o.Header[0] == sealedEncoding {
		opened, err := open(e.guard.sealer, *o, e.claim.Hash, row.ID)
		if err != nil {
			return nil, err
		}
		o = &opened
	}
	h, err := decodeHeader(o.Header)
	if err != nil {
		return nil, err
	}
	if p.Replay.Marker != "" {
		h.Set(p.Replay.Marker, "true")
	}
	status := o.Status
	if p.Replay.Status != 0 && status >= 200 && status < 300 && len(o.Body) > 0 {
		status = p.Replay.Status
	}
	return &Response{Status: status, Header: h, Body: o.Body}, nil
}
