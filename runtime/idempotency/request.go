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

	limitBody func(limit int64)
	// length is the body's length as far as it is known before it is read.
	length func() int64
}

// ErrBodyTooLarge is returned by Request.Body.
var ErrBodyTooLarge = errors.New("idempotency: request body too large")

// NewRequest returns the Request for r. Its Body replaces r.Body by a buffered
// copy of what it read. Native is r itself for net/http routers, else the
// router's own context.
func NewRequest(r *http.Request, native any) *Request {
	return &Request{
		Method:    r.Method,
		Path:      r.URL.EscapedPath(),
		RawQuery:  r.URL.RawQuery,
		Header:    r.Header,
		Native:    native,
		Body:      func(limit int64) ([]byte, error) { return bufferBody(r, limit) },
		limitBody: func(limit int64) { limitBody(r, limit) },
		length:    func() int64 { return r.ContentLength },
	}
}

// CopyRequest returns the Request of a router that is not net/http underneath
// and whose strings are buffers that later requests use again, like fasthttp's:
// it copies them. The target is the path and query as the client sent them, body
// returns the whole body, and native is the router's own context.
func CopyRequest(method, target string, header map[string][]string, body func() []byte, native any) *Request {
	req := &Request{
		Method: strings.Clone(method),
		Header: copyHeader(header),
		Native: native,
		Body:   func(int64) ([]byte, error) { return body(), nil },
		length: func() int64 { return int64(len(body())) },
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

func (req *Request) readBody(limit int64) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	body, err := req.Body(limit)
	if err == nil && int64(len(body)) > limit {
		err = ErrBodyTooLarge
	}
	return body, err
}

func bufferBody(r *http.Request, limit int64) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return parsedForm(r)
	}
	if r.ContentLength > limit {
		return nil, ErrBodyTooLarge
	}
	var buf bytes.Buffer
	if n := r.ContentLength; n > 0 {
		buf.Grow(int(min(n, 64<<10)) + bytes.MinRead)
	}
	if _, err := buf.ReadFrom(io.LimitReader(r.Body, max(limit, limit+1))); err != nil {
		return nil, err
	}
	if int64(buf.Len()) > limit {
		return nil, ErrBodyTooLarge
	}
	body := buf.Bytes()
	replaceBody(r, bytes.NewReader(body))
	if len(body) == 0 {
		return parsedForm(r)
	}
	return body, nil
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

// limitBody bounds a body that is not compared, and so not read before the
// handler reads it.
func limitBody(r *http.Request, limit int64) {
	if r.Body != nil && r.Body != http.NoBody {
		replaceBody(r, http.MaxBytesReader(nil, r.Body, limit))
	}
}

// replaceBody has r read from source. Request validators leave the value that
// they validated on the body for handlers to bind: that is passed on.
func replaceBody(r *http.Request, source io.Reader) {
	b := body{source, r.Body}
	if v, ok := r.Body.(interface{ ValidatedValue() any }); ok {
		r.Body = validatedBody{b, v}
		return
	}
	r.Body = b
}

type body struct {
	io.Reader
	io.Closer
}

type validatedBody struct {
	body
	validated interface{ ValidatedValue() any }
}

func (b validatedBody) ValidatedValue() any { return b.validated.ValidatedValue() }
