package idempotency

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// A Request is what the guard reads of a request, whatever the router.
type Request struct {
	Method   string
	Path     string // escaped, as the client sent it
	RawQuery string
	Header   http.Header // canonical names; the guard does not change it
	// Native is what the router's handlers get; the principal function takes
	// it. See [WithPrincipal].
	Native any
	// Body returns the whole body and leaves it readable for the handler, or
	// ErrBodyTooLarge if it is longer than limit bytes. It is called at most
	// once, and not at all under policies that do not compare bodies. Nil
	// stands for an empty body.
	Body func(limit int64) ([]byte, error)

	http     *httpRequest // nil for routers that are not net/http underneath
	bodySize func() int64 // for those
}

// ErrBodyTooLarge is returned by Request.Body.
var ErrBodyTooLarge = errors.New("idempotency: request body too large")

// NewRequest returns the Request for r. Its Body replaces r.Body by what it read,
// which is kept once. Native is r itself for net/http routers, else the router's
// own context.
func NewRequest(r *http.Request, native any) *Request {
	req := new(httpRequest)
	req.init(r, native)
	req.Body = req.buffer
	return &req.Request
}

// An httpRequest is a Request with what it needs to buffer r's body.
type httpRequest struct {
	Request
	r        *http.Request
	buffered bufferedBody
	small    [384]byte // holds a body that is not longer
}

func (req *httpRequest) init(r *http.Request, native any) {
	req.r = r
	req.Request = Request{
		Method:   r.Method,
		Path:     r.URL.EscapedPath(),
		RawQuery: r.URL.RawQuery,
		Header:   r.Header,
		Native:   native,
		http:     req,
	}
}

// CopyRequest returns the Request of a router that is not net/http underneath
// and whose strings are buffers that later requests use again, like fasthttp's:
// it copies them. The target is the path and query as the client sent them, body
// returns the whole body, and native is the router's own context.
func CopyRequest(method, target string, header map[string][]string, body func() []byte, native any) *Request {
	req := &Request{
		Method:   strings.Clone(method),
		Header:   copyHeader(header),
		Native:   native,
		Body:     func(int64) ([]byte, error) { return body(), nil },
		bodySize: func() int64 { return int64(len(body())) },
	}
	target = strings.Clone(target)
	req.Path, req.RawQuery, _ = strings.Cut(target, "?")
	if u, err := url.ParseRequestURI(target); err == nil {
		req.Path, req.RawQuery = u.EscapedPath(), u.RawQuery
	}
	return req
}

func copyHeader(h map[string][]string) http.Header {
	header := make(http.Header, len(h))
	for name, values := range h {
		name = http.CanonicalHeaderKey(strings.Clone(name))
		for _, v := range values {
			header[name] = append(header[name], strings.Clone(v))
		}
	}
	return header
}

// length is the body's length as far as it is known before it is read, else
// less than 1.
func (req *Request) length() int64 {
	switch {
	case req.http != nil:
		return req.http.r.ContentLength
	case req.bodySize != nil:
		return req.bodySize()
	}
	return 0
}

func (req *Request) readBody(limit int64) ([]byte, error) {
	var body []byte
	var err error
	switch {
	case req.Body != nil:
		body, err = req.Body(limit)
	case req.http != nil:
		body, err = req.http.buffer(limit)
	}
	if err == nil && int64(len(body)) > limit {
		err = ErrBodyTooLarge
	}
	return body, err
}

// limitBody bounds a body that is not compared, and so not read before the
// handler reads it.
func (req *Request) limitBody(limit int64) {
	if req.http == nil {
		return
	}
	if r := req.http.r; r.Body != nil && r.Body != http.NoBody {
		r.Body = withValue(r.Body, body{http.MaxBytesReader(nil, r.Body, limit), r.Body})
	}
}

func (req *httpRequest) buffer(limit int64) ([]byte, error) {
	r := req.r
	if r.Body == nil || r.Body == http.NoBody {
		return parsedForm(r)
	}
	if r.ContentLength > limit {
		return nil, ErrBodyTooLarge
	}
	body, err := readAll(r.Body, req.small[:0], r.ContentLength, limit)
	if err != nil {
		return nil, err
	}
	req.buffered.Reset(body)
	req.buffered.Closer = r.Body
	r.Body = withValue(r.Body, &req.buffered)
	if len(body) == 0 {
		return parsedForm(r)
	}
	return body, nil
}

// readAll reads all of src behind buf, which is empty, or fails with
// ErrBodyTooLarge. What src says of its length, if it is positive, is believed
// step by step: memory is never more than sixteen times what has come, and a
// body of that length is copied once in sixteen.
func readAll(src io.Reader, buf []byte, length, limit int64) ([]byte, error) {
	for {
		if len(buf) == cap(buf) {
			buf = append(make([]byte, 0, grown(int64(len(buf)), length)), buf...)
		}
		n, err := src.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case int64(len(buf)) > limit:
			return nil, ErrBodyTooLarge
		case err == io.EOF:
			return buf, nil
		case err != nil:
			return nil, err
		}
	}
}

// grown returns the next size of a buffer that is full with have bytes.
func grown(have, length int64) int64 {
	if length < have {
		return 2 * have
	}
	size := length + 1 // to see the end
	for size/16 > have {
		size /= 16
	}
	return size
}

// parsedForm stands for a body that a middleware has already consumed by
// parsing it as a form; else two such requests would look the same.
func parsedForm(r *http.Request) ([]byte, error) {
	var b []byte
	if r.PostForm != nil {
		b = append(b, r.PostForm.Encode()...)
	}
	if r.MultipartForm == nil {
		return b, nil
	}
	for name, values := range sorted(r.MultipartForm.Value) {
		for _, v := range values {
			b = appendField(appendField(b, name), v)
		}
	}
	for name, files := range sorted(r.MultipartForm.File) {
		for _, file := range files {
			b = appendField(appendField(b, name), file.Filename)
			sum, err := digestFile(file)
			if err != nil {
				return nil, err
			}
			b = append(b, sum...)
		}
	}
	return b, nil
}

func sorted[V any](m map[string]V) func(yield func(string, V) bool) {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return func(yield func(string, V) bool) {
		for _, name := range names {
			if !yield(name, m[name]) {
				return
			}
		}
	}
}

func digestFile(file *multipart.FileHeader) ([]byte, error) {
	f, err := file.Open()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// withValue returns replacement, which is to be read in place of original.
// Request validators leave the value that they validated on the body for
// handlers to bind: that is passed on.
func withValue(original, replacement io.ReadCloser) io.ReadCloser {
	if v, ok := original.(validated); ok {
		return validatedBody{replacement, v}
	}
	return replacement
}

type validated interface{ ValidatedValue() any }

type validatedBody struct {
	io.ReadCloser
	validated
}

type body struct {
	io.Reader
	io.Closer
}

// A bufferedBody is read from memory and closes what it was read from.
type bufferedBody struct {
	bytes.Reader
	io.Closer
}
