package idempotentclient

import (
	"bytes"
	"context"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"time"
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
		return payload{}, notSent("reading its body: %w", err)
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

// readAhead reads at most limit bytes of an answer that is JSON or of known
// length, and returns them with the error that broke it off. The answer can
// still be read whole, up to that error. Other answers may be streams, for
// which it does not wait.
func readAhead(resp *http.Response, limit int64) ([]byte, error) {
	known := resp.ContentLength > 0 && resp.ContentLength <= limit
	if !known && !isJSON(resp.Header) {
		return nil, nil
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, limit))
	var rest io.Reader = resp.Body
	if err != nil {
		rest = broken{err}
	}
	resp.Body = joined{io.MultiReader(bytes.NewReader(head), rest), resp.Body}
	return head, err
}

// discard reads what is left of the body of an answer that is given up, so that
// its connection serves the next attempt, and closes it. A body that has more
// than limit bytes, or has not ended when the wait has, is closed as it is.
func discard(body io.ReadCloser, limit int64, wait time.Duration) {
	stop := time.AfterFunc(wait, func() { body.Close() })
	io.CopyN(io.Discard, body, limit)
	stop.Stop()
	body.Close()
}

// answered is the body of an answer, whose reader may not have the answer, and
// so learns from the error that breaks it off which key makes it safe to call again.
type answered struct {
	io.ReadCloser
	key      string
	attempts int
}

func (a answered) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = &Error{Key: a.key, Attempts: a.attempts, Err: err}
	}
	return n, err
}

// broken repeats the error that ended a body.
type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

func isJSON(h http.Header) bool {
	mediaType, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return mediaType == "application/json" || strings.HasSuffix(mediaType, "+json")
}
