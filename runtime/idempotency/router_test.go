package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// do runs a handler under a guard as the glue of a router does.
type do func(req *idempotency.Request, run func(context.Context) (*idempotency.Response, error)) (*idempotency.Response, error)

func guarded(t *testing.T) do {
	t.Helper()
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	p := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[any](guard, &p)
	return func(req *idempotency.Request, run func(context.Context) (*idempotency.Response, error)) (*idempotency.Response, error) {
		return guard.Do(t.Context(), &p, req, run)
	}
}

func keyed(key, contentType, body string) *idempotency.Request {
	header := map[string][]string{"Idempotency-Key": {key}, "Content-Type": {contentType}}
	return idempotency.CopyRequest("POST", "/orders", header, func() []byte { return []byte(body) }, nil)
}

// TestCopyRequest has a request outlive the buffers that it was made of.
func TestCopyRequest(t *testing.T) {
	buffer := []byte("POST/a%2Fb?x=1&y=2idempotency-keyk1k2")
	text := unsafe.String(&buffer[0], len(buffer)) // as fasthttp does
	req := idempotency.CopyRequest(text[:4], text[4:18], map[string][]string{text[18:33]: {text[33:35], text[35:37]}}, func() []byte { return []byte("body") }, 7)
	copy(buffer, bytes.Repeat([]byte("#"), len(buffer)))
	if req.Method != "POST" || req.Path != "/a%2Fb" || req.RawQuery != "x=1&y=2" || req.Native != 7 {
		t.Errorf("got %+v", req)
	}
	if keys := req.Header["Idempotency-Key"]; !slices.Equal(keys, []string{"k1", "k2"}) {
		t.Errorf("the header is %q, want both keys under the canonical name", req.Header)
	}
	if body, err := req.Body(0); string(body) != "body" || err != nil {
		t.Errorf("the body is %q, %v", body, err)
	}
	if req := idempotency.CopyRequest("GET", "http://a b/?q", nil, nil, nil); req.Path != "http://a b/" || req.RawQuery != "q" {
		t.Errorf("a target that is no URI became %q %q", req.Path, req.RawQuery)
	}
}

// TestCopyRequestLimit refuses a body over the limit, which a router holds whole.
func TestCopyRequestLimit(t *testing.T) {
	resp, err := guarded(t)(keyed("a", "text/plain", strings.Repeat("x", 1<<20+1)), func(context.Context) (*idempotency.Response, error) {
		t.Error("the handler ran")
		return nil, errors.New("ran")
	})
	if err != nil || resp.Status != http.StatusRequestEntityTooLarge {
		t.Errorf("got %v, %v, want 413", resp, err)
	}
}

// held is the response of a router that holds it until the handler returned.
type held struct {
	header  http.Header
	body    []byte
	touched []string
}

func (h *held) del(name string) { h.touched = append(h.touched, name); h.header.Del(name) }
func (h *held) add(name, value string) {
	h.header.Add(name, value)
}

// TestCapture records what a handler changed, and puts the answer that is sent in
// place of what the router holds.
func TestCapture(t *testing.T) {
	run := guarded(t)
	serve := func(outer string, handle func(*held)) (*held, *idempotency.Response) {
		h := &held{header: http.Header{"X-Outer": {outer}, "X-Gone": {"1"}, "Content-Type": {"text/plain"}}}
		capture := idempotency.NewCapture(h.header)
		resp, err := run(keyed("a", "text/plain", ""), func(ctx context.Context) (*idempotency.Response, error) {
			handle(h)
			return capture.Response(ctx, 201, h.header, false, func() []byte { return h.body })
		})
		if err != nil {
			t.Fatal(err)
		}
		capture.Restore(resp, h.header, h.del, h.add)
		return h, resp
	}
	body := []byte("made")
	first, resp := serve("1", func(h *held) {
		h.header["X-Many"] = []string{"one", "two, three"}
		h.header.Set("Content-Type", "application/json")
		h.header.Del("X-Gone")
		h.body = body
	})
	if len(first.touched) != 0 {
		t.Errorf("the handler's own answer was changed: %q", first.touched)
	}
	copy(body, "####")
	if string(resp.Body) != "made" {
		t.Errorf("the answer shares the router's buffer: %q", resp.Body)
	}
	again, resp := serve("2", func(*held) { t.Error("the handler ran twice") })
	want := http.Header{
		"X-Outer": {"2"}, "X-Many": {"one", "two, three"}, "Content-Type": {"application/json"}, "Idempotent-Replayed": {"true"},
	}
	if !maps.EqualFunc(again.header, want, slices.Equal[[]string]) || resp.Status != 201 || string(resp.Body) != "made" {
		t.Errorf("the replay is %d %q %q, want 201 %q", resp.Status, again.header, resp.Body, want)
	}
	if slices.Contains(again.touched, "X-Outer") {
		t.Error("a field that stays was touched")
	}
}

// TestCaptureStream makes an answer not replayable without asking for its body.
func TestCaptureStream(t *testing.T) {
	run := guarded(t)
	capture := idempotency.NewCapture(nil)
	body := func() []byte { t.Error("the body of a stream was read"); return nil }
	resp, err := run(keyed("a", "text/plain", ""), func(ctx context.Context) (*idempotency.Response, error) {
		return capture.Response(ctx, 200, nil, true, body)
	})
	if resp != nil || err != nil {
		t.Errorf("got %v, %v, want nothing: the router sends it", resp, err)
	}
	resp, err = run(keyed("a", "text/plain", ""), func(context.Context) (*idempotency.Response, error) {
		t.Error("the handler ran twice")
		return nil, nil
	})
	if err != nil || resp.Status != http.StatusConflict || !bytes.Contains(resp.Body, []byte("idempotency-not-replayable")) {
		t.Errorf("the same again: %v, %v", resp, err)
	}
	if resp, err := capture.Response(t.Context(), 200, nil, false, body); resp != nil || err != nil {
		t.Errorf("outside a guarded run: %v, %v, want nothing", resp, err)
	}
}

// TestRender renders what fails in a guarded run, and there only.
func TestRender(t *testing.T) {
	failed, renders := errors.New("failed"), 0
	render := func(error) error { renders++; return nil }
	if err := idempotency.Render(t.Context(), failed, render); err != failed || renders != 0 {
		t.Errorf("unguarded: %v after %d renderings, want the error itself", err, renders)
	}
	_, _ = guarded(t)(keyed("a", "text/plain", ""), func(ctx context.Context) (*idempotency.Response, error) {
		if err := idempotency.Render(ctx, nil, render); err != nil || renders != 0 {
			t.Errorf("no error: %v after %d renderings", err, renders)
		}
		if err := idempotency.Render(ctx, failed, render); err != nil || renders != 1 {
			t.Errorf("guarded: %v after %d renderings, want one", err, renders)
		}
		return &idempotency.Response{Status: 500}, nil
	})
}

// TestResponseOr leaves a handler's error to the middlewares around it, unless
// there is an answer.
func TestResponseOr(t *testing.T) {
	failed := errors.New("failed")
	for _, c := range []struct {
		status int
		body   string
		failed error
		left   bool
	}{
		{200, "", failed, true},
		{409, "", failed, true},
		{500, "", failed, true},
		{409, "sold out", failed, false},
		{204, "", failed, false}, // a warning beside a success
		{303, "", failed, false},
		{200, "", nil, false},
	} {
		below := httptest.NewRecorder()
		resp, err := guarded(t)(keyed("a", "text/plain", ""), func(ctx context.Context) (*idempotency.Response, error) {
			recorder := idempotency.NewRecorder(ctx, below)
			recorder.Header().Set("X-Handler", "1")
			recorder.WriteHeader(c.status)
			if c.body != "" {
				_, _ = recorder.Write([]byte(c.body))
			}
			return recorder.ResponseOr(c.failed)
		})
		if left := err == failed && resp == nil; left != c.left {
			t.Errorf("%d %q: got %v, %v; left to middlewares: want %v", c.status, c.body, resp, err, c.left)
		}
		if passed := below.Code == c.status && below.Header().Get("X-Handler") == "1"; c.left && !passed {
			t.Errorf("%d: the writer below got %d %q", c.status, below.Code, below.Header())
		}
	}
}

// byName is a router's context that finds values by name only.
type byName struct {
	context.Context
	values map[string]any
}

func (c *byName) Value(key any) any {
	name, _ := key.(string)
	return c.values[name]
}

// TestRunContext finds the run through a context that has it by name.
func TestRunContext(t *testing.T) {
	_, err := guarded(t)(keyed("a", "text/plain", ""), func(ctx context.Context) (*idempotency.Response, error) {
		native := &byName{t.Context(), map[string]any{}}
		if key := idempotency.KeyFrom(native); key.String() != "" || idempotency.RunContext(native) != context.Context(native) {
			t.Errorf("a context without a run has the key %q", key)
		}
		native.values[idempotency.RunContextKey] = ctx
		if key := idempotency.KeyFrom(native); key.String() != "a" || idempotency.Attempt(native) != 1 || idempotency.RunContext(native) != ctx {
			t.Errorf("the run was not found: key %q", key)
		}
		return &idempotency.Response{Status: 200}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestMultipartOrder compares the parts of a form by name: fasthttp does not keep
// the order of names. The order of equal names counts.
func TestMultipartOrder(t *testing.T) {
	run := guarded(t)
	status := func(parts ...string) int {
		body := ""
		for _, part := range parts {
			name, value, _ := strings.Cut(part, "=")
			body += "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
		}
		resp, err := run(keyed("a", "multipart/form-data; boundary=b", body+"--b--\r\n"), func(context.Context) (*idempotency.Response, error) {
			return &idempotency.Response{Status: 201}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Status
	}
	for _, c := range []struct {
		want  int
		parts []string
	}{
		{201, []string{"x=1", "y=2", "x=3"}},
		{201, []string{"y=2", "x=1", "x=3"}},
		{422, []string{"x=3", "y=2", "x=1"}},
		{422, []string{"x=1", "y=2"}},
	} {
		if got := status(c.parts...); got != c.want {
			t.Errorf("%q: got %d, want %d", c.parts, got, c.want)
		}
	}
}

// TestCloseNotify asks the writer below, if that can tell.
func TestCloseNotify(t *testing.T) {
	below := &notifier{ResponseRecorder: httptest.NewRecorder(), gone: make(chan bool, 1)}
	below.gone <- true
	if !<-idempotency.NewRecorder(t.Context(), below).CloseNotify() {
		t.Error("the writer below was not asked")
	}
	if c := idempotency.NewRecorder(t.Context(), httptest.NewRecorder()).CloseNotify(); c != nil {
		t.Error("a channel without a writer that can tell")
	}
}

type notifier struct {
	*httptest.ResponseRecorder
	gone chan bool
}

func (n *notifier) CloseNotify() <-chan bool { return n.gone }
