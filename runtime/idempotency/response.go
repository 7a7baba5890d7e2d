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

	// there says that Header is the header of the writer that the response will
	// be sent on; encoded, that a middleware had announced an encoding in it.
	there, encoded bool
	length         [1]string
}

// WriteTo sends the response on w: its header fields replace those that are
// there, and Content-Length is computed anew, unless a middleware has announced
// a Content-Encoding, under which only it knows the length.
func (resp *Response) WriteTo(w http.ResponseWriter) error {
	header, encoded, length := w.Header(), resp.encoded, resp.length[:]
	if !resp.there {
		encoded, length = announced(header), make([]string, 1)
		applyHeader(header, resp.Header)
	}
	delete(header, "Content-Length")
	if !bodyAllowed(resp.Status) {
		w.WriteHeader(resp.Status)
		return nil
	}
	if !encoded && first(header, "Trailer") == "" && first(header, "Transfer-Encoding") == "" {
		length[0] = strconv.Itoa(len(resp.Body))
		header["Content-Length"] = length
	}
	var trailers http.Header
	if len(header["Trailer"]) > 0 {
		trailers = http.Header{}
		for name := range declaredTrailers(header) {
			if values, ok := header[name]; ok {
				trailers[name] = values
				delete(header, name)
			}
		}
	}
	w.WriteHeader(resp.Status)
	var err error
	if len(resp.Body) > 0 {
		_, err = w.Write(resp.Body)
	}
	applyHeader(header, trailers)
	return err
}

// announced reports whether an encoding is announced.
func announced(h http.Header) bool { return first(h, "Content-Encoding") != "" }

// first returns the first value of a field whose name is canonical.
func first(h http.Header, name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
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
type Capture struct {
	before http.Header
	taken  bool
}

// NewCapture begins before the handler runs, with the header fields that outer
// middlewares have set. It copies them.
func NewCapture(header map[string][]string) *Capture { return &Capture{before: copyHeader(header)} }

// Response returns a copy of what the router holds after the guarded run that
// ctx belongs to. When it streams, its bytes are not there yet: then it calls
// [Passing], does not ask for the body, and returns no response. Nor does it in
// a run that is not guarded, whose response is to be left as it is.
func (c *Capture) Response(ctx context.Context, status int, header map[string][]string, streams bool, body func() []byte) (*Response, error) {
	c.taken = true
	if executionFrom(ctx) == nil {
		return nil, nil
	}
	if streams {
		return nil, Passing(ctx)
	}
	return &Response{Status: status, Header: changes(c.before, copyHeader(header), slices.Equal), Body: bytes.Clone(body())}, nil
}

// Discard is what glue defers to the end of the run that ctx belongs to. When that
// had no answer, since its handler panicked, the router still holds what it wrote:
// Discard takes it away, so that no recovery sends it. Header returns what the
// router's header is now.
func (c *Capture) Discard(ctx context.Context, header func() map[string][]string, del func(name string), add func(name, value string), resetBody func()) {
	if c.taken || executionFrom(ctx) == nil {
		return
	}
	c.Restore(&Response{}, header(), del, add)
	resetBody()
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
		applyField(dst, name, values)
	}
}

func applyField(dst http.Header, name string, values []string) {
	if _, there := dst[name]; len(values) == 0 && there {
		delete(dst, name)
	} else {
		dst[name] = values
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

// encodeHeader encodes the recordable fields byte for byte. A marker, whose name is
// canonical, is not one of them.
func encodeHeader(h http.Header, marker string) []byte {
	return appendHeader(nil, h, marker)
}

func appendHeader(b []byte, h http.Header, marker string) []byte {
	var scratch [16]string
	names := scratch[:0]
	for name := range h {
		if canonical := http.CanonicalHeaderKey(name); (marker == "" || canonical != marker) && recordable(canonical) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	b = append(b, headerEncoding)
	for _, name := range names {
		values := h[name]
		b = binary.AppendUvarint(appendField(b, name), uint64(len(values)))
		for _, v := range values {
			b = appendField(b, v)
		}
	}
	return b
}

var errEncoding = errors.New("idempotency: recorded header has an unknown encoding")

// A headerReader reads what appendHeader appended.
type headerReader struct {
	b      []byte
	at     int
	broken bool
}

func readHeader(b []byte) headerReader {
	return headerReader{b: b, at: 1, broken: len(b) == 0 || b[0] != headerEncoding}
}

func (r *headerReader) more() bool { return !r.broken && r.at < len(r.b) }

// number returns a number that is not greater than what is left.
func (r *headerReader) number() int {
	n, size := binary.Uvarint(r.b[r.at:])
	if size <= 0 || n > uint64(len(r.b)-r.at-size) {
		r.broken = true
		return 0
	}
	r.at += size
	return int(n)
}

// text returns where a text begins and ends.
func (r *headerReader) text() (from, to int) {
	size := r.number()
	r.at += size
	return r.at - size, r.at
}

func decodeHeader(b []byte) (http.Header, error) {
	h := http.Header{}
	return h, decodeHeaderInto(h, b, "")
}

// decodeHeaderInto puts the fields of b into h, and the marker if there is one.
// If b is broken it changes nothing.
func decodeHeaderInto(h http.Header, b []byte, marker string) error {
	total := 1
	r := readHeader(b)
	for r.more() {
		r.text()
		count := r.number()
		total += count
		for ; count > 0 && !r.broken; count-- {
			r.text()
		}
	}
	if r.broken {
		return errEncoding
	}
	text, all := string(b), make([]string, 0, total)
	for r := readHeader(b); r.more(); {
		from, to := r.text()
		values := all[len(all):]
		for range r.number() {
			from, to := r.text()
			values = append(values, text[from:to])
		}
		all = all[:len(all)+len(values)]
		applyField(h, text[from:to], slices.Clip(values))
	}
	if marker != "" {
		h[marker] = append(all[len(all):], "true")
	}
	return nil
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
	resp := e.into
	if resp == nil {
		resp = &Response{Header: http.Header{}}
	}
	if err := decodeHeaderInto(resp.Header, o.Header, e.op.marker); err != nil {
		return nil, err
	}
	resp.Status, resp.Body = o.Status, o.Body
	if p.Replay.Status != 0 && o.Status >= 200 && o.Status < 300 && len(o.Body) > 0 {
		resp.Status = p.Replay.Status
	}
	return resp, nil
}
