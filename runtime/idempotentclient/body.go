package idempotentclient

import (
	"bytes"
	"context"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
)

// A payload gives each attempt its request body.
type payload struct {
	once io.ReadCloser                 // for the only attempt
	open func() (io.ReadCloser, error) // for any number of attempts; nil: none but once
}

// newPayload takes the body of req, which was first when the call started, over.
// It holds at most limit bytes in memory to make the body repeatable.
func newPayload(ctx context.Context, req *http.Request, first io.ReadCloser, limit int64) (payload, error) {
	body := req.Body
	if body == nil || body == http.NoBody {
		return payload{open: func() (io.ReadCloser, error) { return body, nil }}, nil
	}
	// An editor that replaced the body often leaves the GetBody of the old one.
	if req.GetBody != nil && same(body, first) {
		body.Close()
		return payload{open: req.GetBody}, nil
	}
	stop := context.AfterFunc(ctx, func() { body.Close() })
	head, err := io.ReadAll(io.LimitReader(body, max(limit, limit+1)))
	stop()
	if err != nil {
		body.Close()
		return payload{}, err
	}
	if int64(len(head)) > limit {
		return payload{once: joined{io.MultiReader(bytes.NewReader(head), body), body}}, nil
	}
	body.Close()
	return payload{open: func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(head)), nil
	}}, nil
}

// same reports whether a and b are one body; false where Go cannot compare them.
func same(a, b io.ReadCloser) bool {
	return b != nil && reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// joined is a body whose parts were taken apart.
type joined struct {
	io.Reader
	io.Closer
}

// problemLimit is how much is read of a refusal at least: what a guard says of
// the key decides whether the call may be repeated.
const problemLimit = 64 << 10

// readAhead reads at most limit bytes of an answer that is JSON or of known
// length, and returns them, with whether that was all and the error that broke
// it off. The answer can still be read whole, up to that error. Other answers may
// be streams, for which it does not wait.
func readAhead(resp *http.Response, limit int64) (head []byte, ended bool, cut error) {
	if resp.StatusCode >= 400 {
		limit = max(limit, problemLimit)
	}
	if resp.Body == http.NoBody {
		return nil, true, nil
	}
	known := resp.ContentLength > 0 && resp.ContentLength <= limit
	if !known && !isJSON(resp.Header) {
		return nil, false, nil
	}
	head, cut = io.ReadAll(io.LimitReader(resp.Body, limit))
	var rest io.Reader = resp.Body
	if cut != nil {
		rest = broken{cut}
	}
	resp.Body = joined{io.MultiReader(bytes.NewReader(head), rest), resp.Body}
	return head, cut == nil && int64(len(head)) < limit, cut
}

// answered is the body of the last answer, with which its attempt ends. Whoever
// reads it may not have the answer, and so learns from the error that breaks it
// off which key makes it safe to call again.
type answered struct {
	io.ReadCloser
	lost *Error
	stop func()
}

func (a *answered) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	if err == nil {
		return n, nil
	}
	a.stop()
	if err != io.EOF {
		lost := *a.lost
		lost.Err = err
		err = &lost
	}
	return n, err
}

func (a *answered) Close() error {
	defer a.stop()
	return a.ReadCloser.Close()
}

// upgraded is such a body that is also written to.
type upgraded struct {
	*answered
	io.Writer
}

// broken repeats the error that ended a body.
type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

func isJSON(h http.Header) bool {
	mediaType, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return mediaType == "application/json" || strings.HasSuffix(mediaType, "+json")
}
