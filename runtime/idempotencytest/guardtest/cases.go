package guardtest

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime/multipart"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// cases are what the guard promises, each by name.
var cases = []struct {
	promise   string
	check     func(*testing.T, Target)
	needsHTTP bool // handlers that have an http.ResponseWriter
}{
	{"an operation that is not annotated is left alone", unannotated, false},
	{"a request without one valid key is refused", badKeys, false},
	{"a key is optional where the policy says so", optionalKey, false},
	{"a duplicate gets the recorded answer", replay, false},
	{"header fields of middlewares around are not recorded", outerFields, false},
	{"an answer without a body stays one", noBody, false},
	{"what a compressor around the guard does is not recorded", compressed, false},
	{"an answer that is compressed already is replayed as it is", compressedAlready, false},
	{"another request with the key is refused", mismatch, false},
	{"a duplicate of a request in flight is refused", inFlight, false},
	{"a duplicate waits for the request in flight", waiting, false},
	{"a race for one key has one run", race, false},
	{"an answer that is too large is sent and not replayed", tooLarge, false},
	{"an answer that streams is sent as it is written and not replayed", streams, false},
	{"a request body over the limit is refused and frees the key", bodyLimit, false},
	{"a chunked request is the same request", chunked, false},
	{"a multipart form is the same whatever its boundary", multipartForm, false},
	{"a urlencoded form reaches the handler and is compared", urlencodedForm, false},
	{"a body that does not decode frees the key", undecodable, false},
	{"an error is rendered by the router and recorded by its status", failures, false},
	{"a server error frees the key", serverError, false},
	{"a panic reaches the recovery and holds the key until its lease ends", panics, false},
	{"at-most-once records a server error too", atMostOnce, false},
	{"the handler's context is the run's", contexts, false},
	{"a client that hangs up changes nothing", hangUp, false},
	{"a graceful shutdown waits for the request in flight", shutdown, false},
	{"without its store nothing runs", storeDown, false},
	{"an answer that cannot be recorded is not sent", storeDownMeanwhile, false},
	{"the principal function sees what middlewares found out", principals, false},
	{"a base URL changes nothing", baseURL, false},
	{"a wrapper mounted by hand is guarded", byHand, false},
	{"a key is the same in whatever form", keyForms, false},
	{"a request is the same however it is written", wireForms, false},
	{"a request without a body is one however it says so", noRequestBody, false},
	{"a request that is cut short does not run", cutShort, false},
	{"a path is compared as it was sent", paths, false},
	{"bodies are as large as the limits", large, false},
	{"requests at once are not mixed up", notMixedUp, false},
	{"safe methods beside an annotated operation are left alone", neighbours, false},
	{"an answer is replayed with what it has and no more", sparse, false},
	{"an informational response is sent and not recorded", earlyHints, false},
	{"whatever a handler does with its writer is replayed", writers, true},
	{"trailers are sent and not recorded", trailers, true},
	{"what is written after the handler returned changes nothing", writesLater, true},
	{"refusals are rendered as the application has it", ownEnvelope, false},
	{"the handler's context has what middlewares put there", outerContext, false},
	{"a hijacked connection is recorded first", hijacks, false},
	{"a connection is not hijacked unrecorded", hijackUnrecorded, false},
	{"a flush sends what was written", flushes, true},
	{"what runs without a key may stream", unguardedStreams, false},
	{"a panic after a marked effect leaves the outcome unknown", markedPanic, false},
	{"a panic that nothing recovers sends nothing", unrecovered, true},
	{"a recovery answers for half an answer", recovered, false},
	{"a recovery comes too late behind a flush", recoveredFlush, true},
	{"a handler outlives http.TimeoutHandler", timeoutHandler, true},
	{"what runs without a key fails as ever", unguardedFailures, false},
	{"a group of routes is guarded", group, false},
	{"an alias is guarded", alias, false},
	{"two APIs share a guard and a table", twoAPIs, false},
	{"a key that the document declares is bound too", declaredKey, false},
	{"a transaction commits its record or nothing", inTransaction, false},
	{"a transaction that fails leaves nothing", failingTransaction, false},
	{"a flush waits for the transaction", flushedTransaction, true},
	{"the guard that guards nothing leaves things as they are", passthrough, false},
}

func unannotated(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply { return Reply{Status: http.StatusOK, Body: "[]"} })
	for range 2 {
		f.ran("a GET", f.send(request{method: http.MethodGet, path: things, key: "a"}), http.StatusOK)
	}
	f.ranTimes(2)
}

func badKeys(t *testing.T, target Target) {
	f := serve(t, target, created)
	f.refuses("no key", f.send(request{path: things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.refuses("a blank key", f.send(request{path: things, body: lamp, header: http.Header{wire.HeaderKey: {" "}}}), http.StatusBadRequest, wire.MissingKey)
	for what, values := range map[string][]string{
		"two fields":    {"a", "b"},
		"one key twice": {"a", "a"},
		"a comma":       {"a, b"},
		"not ASCII":     {"sch\u00fcssel"},
		"too long":      {strings.Repeat("k", 256)},
		"the nil UUID":  {"00000000-0000-0000-0000-000000000000"},
	} {
		f.refuses(what, f.send(request{path: things, body: lamp, header: http.Header{wire.HeaderKey: values}}), http.StatusBadRequest, wire.InvalidKey)
	}
	f.ranTimes(0)
	f.ran("a bare key", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same key, quoted", f.send(request{path: things, key: `"a"`, body: lamp}), http.StatusCreated)
}

func optionalKey(t *testing.T, target Target) {
	f := serve(t, target, created)
	form := request{path: files, contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	for range 2 {
		f.ran("no key", f.send(form), http.StatusCreated)
	}
	f.ranTimes(2)
}

func replay(t *testing.T, target Target) {
	body := `{"item":"lamp","n":9007199254740993,` + "\n" + ` "é":"` + "\U0001F4A1" + `"}`
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Status: http.StatusCreated, Body: body, Header: http.Header{
			"Content-Type":     {"application/json; charset=utf-8"},
			"Content-Language": {"de"},
			"Etag":             {`"1"`},
			"Location":         {"/things/1"},
			"X-Many":           {"one", "two, three", "one"},
			"Set-Cookie":       {"session=1; Path=/", "theme=dark"},
			"X-Request-Id":     {"r1"},
		}}
	})
	first := f.send(request{path: things, key: "a", body: lamp})
	f.ran("first sight", first, http.StatusCreated)
	again := f.send(request{path: things, key: "a", body: lamp})
	f.replays("the same again", again, http.StatusCreated)
	f.ranTimes(1)
	if first.body != body || again.body != body {
		f.Errorf("bodies are %q and %q, want %q", first.body, again.body, body)
	}
	if got := first.Header["Set-Cookie"]; len(got) != 2 {
		f.Errorf("the first answer sets cookies %q, want two", got)
	}
	for _, a := range []answer{first, again} {
		if a.ContentLength != int64(len(body)) {
			f.Errorf("Content-Length is %d, want %d", a.ContentLength, len(body))
		}
	}
	want := first.Header.Clone()
	want.Del("Set-Cookie")
	want.Del("X-Request-Id")
	want.Set(wire.HeaderReplayed, "true")
	got := again.Header.Clone()
	for _, h := range []http.Header{want, got} {
		h.Del("Date")
	}
	if !maps.EqualFunc(want, got, slices.Equal[[]string]) {
		f.Errorf("the replay's header is\n%q, want\n%q", got, want)
	}
}

func outerFields(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		if strings.Contains(call.Body, "vase") {
			reply.Header["X-Outer"] = []string{"the handler's"}
		}
		return reply
	})
	trip := func(key, body, trip string) string {
		return strings.Join(f.send(request{path: things, key: key, body: body, header: http.Header{"X-Trip": {trip}}}).Header["X-Outer"], "|")
	}
	if got := trip("a", lamp, "1"); got != "1" {
		f.Errorf("the first answer has a middleware's field as %q, want 1", got)
	}
	if got := trip("a", lamp, "2"); got != "2" {
		f.Errorf("a replay has a middleware's field as %q, want that of this request, 2", got)
	}
	for _, n := range []string{"3", "4"} {
		if got := trip("b", vase, n); got != "the handler's" {
			f.Errorf("a field that the handler changed is %q", got)
		}
	}
}

func noBody(t *testing.T, target Target) {
	for _, status := range []int{http.StatusNoContent, http.StatusNotModified} {
		f := serve(t, target, func(context.Context, Call) Reply {
			return Reply{Status: status, Header: http.Header{"Etag": {`"1"`}}}
		})
		first, again := f.send(request{path: things, key: "a", body: lamp}), f.send(request{path: things, key: "a", body: lamp})
		f.ran("first sight", first, status)
		f.replays("the same again", again, status)
		for _, a := range []answer{first, again} {
			if a.body != "" || a.Header.Get("Content-Length") != "" || a.Header.Get("Etag") != `"1"` {
				f.Errorf("%d has the body %q and header %q", status, a.body, a.Header)
			}
		}
	}
}

// unzip returns the body of an answer that was asked for compressed.
func (f *fixture) unzip(a answer) string {
	f.Helper()
	if got := a.Header["Content-Encoding"]; !slices.Equal(got, []string{"gzip"}) {
		f.Errorf("Content-Encoding is %q, want gzip", got)
		return ""
	}
	r, err := gzip.NewReader(strings.NewReader(a.body))
	if err != nil {
		f.Error(err)
		return ""
	}
	body, err := io.ReadAll(r)
	if err != nil {
		f.Error(err)
	}
	return string(body)
}

func compressed(t *testing.T, target Target) {
	body := `{"item":"` + strings.Repeat("lamp ", 2000) + `"}`
	s := &store{Store: memorystore.New(), settled: func(o idempotency.Outcome) {
		if string(o.Body) != body || bytes.Contains(o.Header, []byte("gzip")) {
			t.Errorf("recorded are %d bytes with the header %q", len(o.Body), o.Header)
		}
	}}
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		reply.Body = body
		return reply
	}, func(server *Server) { server.Compress, server.Guard = true, over(t, s) })
	r := request{path: things, key: "a", body: lamp, header: http.Header{"Accept-Encoding": {"gzip"}}}
	first, again := f.send(r), f.send(r)
	f.ran("first sight", first, http.StatusCreated)
	f.replays("the same again", again, http.StatusCreated)
	for _, a := range []answer{first, again} {
		if got := f.unzip(a); got != body {
			f.Errorf("the body is %q", got)
		}
	}
	r.header = http.Header{"Accept-Encoding": {"identity"}}
	plain := f.send(r)
	f.replays("the same, not compressed", plain, http.StatusCreated)
	if plain.body != body || plain.Header.Get("Content-Encoding") != "" {
		f.Errorf("the body is %q, encoded %q", plain.body, plain.Header.Get("Content-Encoding"))
	}
}

func compressedAlready(t *testing.T, target Target) {
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, err := io.WriteString(w, lamp)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		reply.Body = zipped.String()
		reply.Header.Set("Content-Encoding", "gzip")
		return reply
	}, func(s *Server) { s.Compress = true })
	r := request{path: things, key: "a", body: lamp, header: http.Header{"Accept-Encoding": {"gzip"}}}
	first, again := f.send(r), f.send(r)
	f.ran("first sight", first, http.StatusCreated)
	f.replays("the same again", again, http.StatusCreated)
	if target.SpoilsCompressed {
		f.sameAnswer("spoilt", first, again)
	} else {
		for _, a := range []answer{first, again} {
			if got := f.unzip(a); got != lamp {
				f.Errorf("the body is %q", got)
			}
		}
	}
	r.header = http.Header{"Accept-Encoding": {"identity"}}
	a := f.send(r)
	f.replays("the same, which the compressor leaves alone", a, http.StatusCreated)
	if got := f.unzip(a); got != lamp {
		f.Errorf("the body is %q", got)
	}
}

func mismatch(t *testing.T, target Target) {
	f := serve(t, target, created)
	f.ran("first sight", f.send(request{path: things + "?a=1&b=2", key: "a", body: `{"item":"lamp","n":1}`}), http.StatusCreated)
	f.replays("the same in another order", f.send(request{path: things + "?b=2&a=1", key: "a", body: `{ "n":1, "item":"lamp" }`}), http.StatusCreated)
	f.refuses("another body", f.send(request{path: things + "?a=1&b=2", key: "a", body: vase}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.refuses("another query", f.send(request{path: things + "?a=1&b=3", key: "a", body: `{"item":"lamp","n":1}`}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.refuses("another media type", f.send(request{path: things + "?a=1&b=2", key: "a", body: `{"item":"lamp","n":1}`, contentType: "application/vnd.t+json"}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

// held returns a handler that says when it begins and ends when it may.
func held() (handle Handler, begun <-chan struct{}, release func()) {
	started, ended := make(chan struct{}, 1), make(chan struct{})
	return func(ctx context.Context, call Call) Reply {
		started <- struct{}{}
		<-ended
		return created(ctx, call)
	}, started, sync.OnceFunc(func() { close(ended) })
}

func inFlight(t *testing.T, target Target) {
	handle, begun, release := held()
	f := serve(t, target, handle)
	t.Cleanup(release)
	first := f.start(request{path: things, key: "a", body: lamp})
	wait(f, "the first run", begun)
	again := f.send(request{path: things, key: "a", body: lamp})
	f.refuses("a duplicate", again, http.StatusConflict, wire.InFlight)
	if got := again.Header.Get("Retry-After"); got != "1" && got != "2" {
		f.Errorf("Retry-After is %q, want 1 or 2", got)
	}
	f.refuses("another request with the key", f.send(request{path: things, key: "a", body: vase}), http.StatusUnprocessableEntity, wire.KeyReused)
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.ranTimes(1)
}

func waiting(t *testing.T, target Target) {
	handle, begun, release := held()
	waits := make(chan struct{}, 1)
	f := serve(t, target, handle, func(s *Server) {
		s.Guard = over(t, &store{Store: memorystore.New(), claimed: func(row idempotency.Row) {
			if !row.Won {
				select {
				case waits <- struct{}{}:
				default:
				}
			}
		}})
	})
	t.Cleanup(release)
	pay := request{path: payments, key: "a", body: lamp, header: http.Header{"X-User": {"ann"}}}
	first := f.start(pay)
	wait(f, "the first run", begun)
	again := f.start(pay)
	wait(f, "the duplicate's claim", waits)
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.replays("the one that waited", wait(f, "the second answer", again), http.StatusCreated)
	f.ranTimes(1)
}

func race(t *testing.T, target Target) {
	f := serve(t, target, created)
	var group sync.WaitGroup
	for range 100 {
		group.Go(func() {
			if a := f.send(request{path: things, key: "a", body: lamp}); a.StatusCode != http.StatusConflict && (a.StatusCode != http.StatusCreated || a.body != lamp) {
				f.Errorf("in the race: %d %s", a.StatusCode, a.body)
			}
		})
	}
	group.Wait()
	f.ranTimes(1)
}

func tooLarge(t *testing.T, target Target) {
	large := strings.Repeat("0123456789abcdef", 300) // over 4 KiB
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"text/plain"}}, Body: large}
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	first := f.send(form)
	f.ran("first sight", first, http.StatusCreated)
	if first.body != large {
		f.Errorf("%d of %d bytes came", len(first.body), len(large))
	}
	f.refuses("the same again", f.send(form), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

func streams(t *testing.T, target Target) {
	between := make(chan struct{})
	ended := sync.OnceFunc(func() { close(between) })
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{
			Status:  http.StatusOK,
			Header:  http.Header{"Content-Type": {"text/event-stream"}},
			Stream:  []string{"data: one\n\n", "data: two\n\n"},
			Between: func() { <-between },
		}
	})
	t.Cleanup(ended)
	resp, err := f.open(request{path: things, key: "a", body: lamp})
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	begin := make([]byte, len("data: one\n\n"))
	if _, err := io.ReadFull(resp.Body, begin); err != nil || string(begin) != "data: one\n\n" {
		f.Fatalf("the first part came as %q: %v", begin, err)
	}
	f.refuses("a duplicate while it streams", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	ended()
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "data: two\n\n" || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		f.Errorf("the rest came as %d %q %q: %v", resp.StatusCode, resp.Header, rest, err)
	}
	f.refuses("a duplicate afterwards", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

func bodyLimit(t *testing.T, target Target) {
	f := serve(t, target, created)
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded"}
	for _, chunked := range []bool{false, true} {
		form.chunked, form.body = chunked, "item="+strings.Repeat("x", 4<<10)
		f.refuses(fmt.Sprintf("4 KiB and more, chunked: %v", chunked), f.send(form), http.StatusRequestEntityTooLarge, wire.RequestTooLarge)
	}
	f.ranTimes(0)
	form.body = "item=lamp"
	f.ran("a small body with the key", f.send(form), http.StatusCreated)
}

func chunked(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	f.ran("chunked", f.send(request{path: things, key: "a", body: lamp, chunked: true}), http.StatusCreated)
	f.replays("with a length", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.refuses("another, chunked", f.send(request{path: things, key: "a", body: vase, chunked: true}), http.StatusUnprocessableEntity, wire.KeyReused)
	if body, _ := seen.Load().(string); !strings.Contains(body, "lamp") {
		f.Errorf("the handler read %q", body)
	}
}

func multipartForm(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	form := func(boundary, content string) request {
		var body bytes.Buffer
		w := multipart.NewWriter(&body)
		err := w.SetBoundary(boundary)
		for _, field := range []string{"item", "colour", "size", "shape", "price", "weight"} {
			err = errors.Join(err, w.WriteField(field, "the "+field))
		}
		for _, name := range []string{"front.txt", "back.txt"} {
			part, failed := w.CreateFormFile("picture", name)
			err = errors.Join(err, failed)
			if failed == nil {
				_, failed = io.WriteString(part, name+content)
				err = errors.Join(err, failed)
			}
		}
		if err = errors.Join(err, w.Close()); err != nil {
			f.Fatal(err)
		}
		return request{path: files, key: "a", contentType: w.FormDataContentType(), body: body.String()}
	}
	f.ran("first sight", f.send(form("one", "lamp")), http.StatusCreated)
	if body, _ := seen.Load().(string); !strings.Contains(body, "front.txtlamp") || !strings.Contains(body, "the colour") {
		f.Errorf("the handler read %q", body)
	}
	for i := range 5 {
		f.replays("the same with another boundary", f.send(form(fmt.Sprintf("b%d", i), "lamp")), http.StatusCreated)
	}
	f.refuses("another file", f.send(form("one", "vase")), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

func urlencodedForm(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	f.ran("first sight", f.send(form), http.StatusCreated)
	if body, _ := seen.Load().(string); !strings.Contains(body, "lamp") {
		f.Errorf("the handler read %q", body)
	}
	f.replays("the same again", f.send(form), http.StatusCreated)
	form.body = "item=vase"
	f.refuses("another form", f.send(form), http.StatusUnprocessableEntity, wire.KeyReused)
}

func undecodable(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if !json.Valid([]byte(call.Body)) { // behind a strict handler it did not come so far
			return Reply{Status: http.StatusBadRequest, Body: "no JSON"}
		}
		return created(ctx, call)
	})
	for range 2 {
		f.ran("no JSON", f.send(request{path: things, key: "a", body: `{"item":`}), http.StatusBadRequest)
	}
	f.ran("JSON with the same key", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func failures(t *testing.T, target Target) {
	fail := func(status int, text string) (again answer, f *fixture) {
		f = serve(t, target, func(context.Context, Call) Reply { return Reply{Err: &Error{status, text}} })
		want := "handled: " + text
		if target.ErrorsAre500 {
			status, want = http.StatusInternalServerError, text
		}
		first := f.send(request{path: things, key: "a", body: lamp})
		f.ran("a failure", first, status)
		again = f.send(request{path: things, key: "a", body: lamp})
		for _, a := range []answer{first, again} {
			if a.StatusCode != status || strings.TrimSpace(a.body) != want {
				f.Errorf("the failure is rendered as %d %q, want %d %q", a.StatusCode, a.body, status, want)
			}
		}
		return again, f
	}
	recorded := !target.ErrorsAre500 && !target.ErrorsAreOutside
	for _, status := range []int{http.StatusNotFound, http.StatusConflict} {
		again, f := fail(status, "sold out")
		if again.replayed() != recorded {
			f.Errorf("%d was replayed: %v, want %v", status, again.replayed(), recorded)
		}
		if recorded {
			f.ranTimes(1)
		} else {
			f.ranTimes(2)
		}
	}
	again, f := fail(http.StatusTooManyRequests, "later")
	f.ranTimes(2)
	if again.replayed() {
		f.Error("429 was recorded by its class")
	}
}

func serverError(t *testing.T, target Target) {
	var broken atomic.Bool
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if broken.Load() {
			return Reply{Status: http.StatusBadGateway, Body: "broken"}
		}
		return created(ctx, call)
	})
	broken.Store(true)
	f.ran("broken", f.send(request{path: things, key: "a", body: lamp}), http.StatusBadGateway)
	broken.Store(false)
	f.ran("mended", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.ranTimes(2)
}

func panics(t *testing.T, target Target) {
	var attempts sync.Map
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		attempts.Store(idempotency.Attempt(ctx), true)
		if idempotency.Attempt(ctx) == 1 {
			panic("out of lamps")
		}
		return created(ctx, call)
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	f.ran("a panic", f.send(form), http.StatusInternalServerError)
	again := f.until("a second run", form, func(a answer) bool {
		if a.StatusCode == http.StatusConflict {
			f.refuses("before the lease ended", a, http.StatusConflict, wire.InFlight)
			return false
		}
		return true
	})
	f.ran("after the lease ended", again, http.StatusCreated)
	f.ranTimes(2)
	if _, ok := attempts.Load(2); !ok {
		f.Error("the second run was not attempt 2")
	}
}

func atMostOnce(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply { return Reply{Status: http.StatusBadGateway, Body: "broken"} })
	pay := request{path: payments, key: "a", body: lamp, header: http.Header{"X-User": {"ann"}}}
	f.ran("broken", f.send(pay), http.StatusBadGateway)
	f.replays("the same again", f.send(pay), http.StatusBadGateway)
	f.ranTimes(1)
}

func contexts(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		_, deadline := idempotency.RunContext(ctx).Deadline()
		derived := idempotency.DeriveKey(ctx, "charge")
		if err := idempotency.MarkEffect(ctx); err != nil {
			return Reply{Status: http.StatusTeapot, Body: err.Error()}
		}
		return Reply{
			Status: http.StatusBadGateway,
			Body: fmt.Sprintf("key %s, attempt %d, deadline %v, derived the same %v",
				idempotency.KeyFrom(ctx), idempotency.Attempt(ctx), deadline, derived == idempotency.DeriveKey(ctx, "charge")),
		}
	})
	first := f.send(request{path: things, key: "a", body: lamp})
	f.ran("a marked effect, then an error", first, http.StatusBadGateway)
	if want := "key a, attempt 1, deadline true, derived the same true"; first.body != want {
		f.Errorf("the handler found %q, want %q", first.body, want)
	}
	f.replays("the same again", f.send(request{path: things, key: "a", body: lamp}), http.StatusBadGateway)
	f.ranTimes(1)
}

func hangUp(t *testing.T, target Target) {
	handle, begun, release := held()
	cancelled := make(chan error, 1)
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if call.Operation != "createThing" {
			return Reply{Status: http.StatusOK}
		}
		reply := handle(ctx, call)
		cancelled <- idempotency.RunContext(ctx).Err()
		return reply
	})
	t.Cleanup(release)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := f.open(request{path: things, key: "a", body: lamp, ctx: ctx}); err == nil {
			resp.Body.Close()
		}
	}()
	wait(f, "the first run", begun)
	cancel()
	wait(f, "the hanging up", gone)
	f.ran("another request", f.send(request{method: http.MethodGet, path: things}), http.StatusOK)
	release()
	if err := wait(f, "the run's end", cancelled); err != nil {
		f.Errorf("the run's context: %v", err)
	}
	again := f.until("a replay", request{path: things, key: "a", body: lamp}, func(a answer) bool { return a.StatusCode != http.StatusConflict })
	f.replays("the same again", again, http.StatusCreated)
	f.ranTimes(2) // with the other request
}

func shutdown(t *testing.T, target Target) {
	handle, begun, release := held()
	f := serve(t, target, handle)
	t.Cleanup(release)
	first := f.start(request{path: things, key: "a", body: lamp})
	wait(f, "the first run", begun)
	down := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		down <- f.Shutdown(ctx)
	}()
	address := strings.TrimPrefix(f.URL, "http://")
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			break
		}
		conn.Close()
		if time.Now().After(deadline) {
			f.Fatal("the server still accepts connections")
		}
	}
	select {
	case err := <-down:
		f.Fatalf("the server went down (%v) with a request in flight", err)
	default:
	}
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.client.CloseIdleConnections()
	if err := wait(f, "the shutdown", down); err != nil {
		f.Errorf("shutdown: %v", err)
	}
}

// A store is one that can be watched and can fail.
type store struct {
	idempotency.Store
	claimed  func(idempotency.Row)
	settled  func(idempotency.Outcome)
	claims   atomic.Bool // fail
	settling atomic.Bool // fails
}

var errDown = errors.New("the store is down")

func (s *store) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	if s.claims.Load() {
		return idempotency.Row{}, errDown
	}
	row, err := s.Store.Claim(ctx, c)
	if s.claimed != nil && err == nil {
		s.claimed(row)
	}
	return row, err
}

func (s *store) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	if s.settling.Load() {
		return idempotency.Row{}, errDown
	}
	if s.settled != nil {
		s.settled(o)
	}
	return s.Store.Settle(ctx, c, o)
}

func storeDown(t *testing.T, target Target) {
	s := &store{Store: memorystore.New()}
	f := serve(t, target, created, func(server *Server) { server.Guard = over(t, s) })
	s.claims.Store(true)
	down := f.send(request{path: things, key: "a", body: lamp})
	f.refuses("store down", down, http.StatusServiceUnavailable, wire.StoreUnavailable)
	if down.Header.Get("Retry-After") == "" {
		f.Error("no Retry-After")
	}
	f.ranTimes(0)
	s.claims.Store(false)
	f.ran("store up", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func storeDownMeanwhile(t *testing.T, target Target) {
	s := &store{Store: memorystore.New()}
	for _, streaming := range []bool{false, true} {
		f := serve(t, target, func(ctx context.Context, call Call) Reply {
			reply := created(ctx, call)
			reply.Header.Set("X-Secret", "1")
			if streaming {
				reply.Stream, reply.Body = []string{"one", "two"}, ""
			}
			return reply
		}, func(server *Server) { server.Guard = over(t, s) })
		s.settling.Store(true)
		a := f.send(request{path: files, key: fmt.Sprint("a", streaming), contentType: "application/x-www-form-urlencoded", body: "item=lamp"})
		f.refuses("not recorded", a, http.StatusServiceUnavailable, wire.OutcomeUnknown)
		if a.Header.Get("X-Secret") != "" || a.Header.Get("Location") != "" || a.Header.Get("Retry-After") == "" {
			f.Errorf("the refusal's header is %q", a.Header)
		}
	}
}

func principals(t *testing.T, target Target) {
	f := serve(t, target, created)
	pay := func(user string) answer {
		r := request{path: payments, key: "a", body: lamp}
		if user != "" {
			r.header = http.Header{"X-User": {user}}
		}
		return f.send(r)
	}
	f.refuses("nobody", pay(""), http.StatusUnauthorized, wire.Unauthenticated)
	f.refuses("who cannot be known", pay("unknowable"), http.StatusInternalServerError, wire.PrincipalFailed)
	f.refuses("who may not", pay("banned"), http.StatusForbidden, wire.Forbidden)
	f.ranTimes(0)
	f.ran("ann", pay("ann"), http.StatusCreated)
	f.ran("bob, with ann's key", pay("bob"), http.StatusCreated)
	f.replays("ann again", pay("ann"), http.StatusCreated)
	f.ranTimes(2)
}

func baseURL(t *testing.T, target Target) {
	f := serve(t, target, created, func(s *Server) { s.BaseURL = "/v1" })
	f.refuses("no key", f.send(request{path: "/v1" + things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: "/v1" + things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: "/v1" + things, key: "a", body: lamp}), http.StatusCreated)
}

func byHand(t *testing.T, target Target) {
	f := serve(t, target, created, func(s *Server) { s.ByHand = true })
	f.refuses("no key", f.send(request{path: things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func passthrough(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if idempotency.KeyFrom(ctx) != (idempotency.Key{}) {
			return Reply{Status: http.StatusTeapot}
		}
		reply := created(ctx, call)
		if strings.Contains(call.Body, "vase") {
			reply.Body, reply.Stream = "", []string{"one", "two"}
		}
		return reply
	}, func(s *Server) {
		s.Guard = func(idempotency.Option) *idempotency.Guard { return idempotency.Passthrough() }
	})
	for _, key := range []string{"", "a", "a"} {
		a := f.send(request{path: things, key: key, body: lamp, header: http.Header{"X-Trip": {"1"}}})
		f.ran("unguarded", a, http.StatusCreated)
		if a.body != lamp || a.Header.Get("Location") != "/things/1" || a.Header.Get("X-Outer") != "1" {
			f.Errorf("unguarded: %q %q", a.Header, a.body)
		}
	}
	if a := f.send(request{path: things, key: "a", body: vase}); a.StatusCode != http.StatusCreated || a.body != "onetwo" {
		f.Errorf("a stream, unguarded: %d %q", a.StatusCode, a.body)
	}
	f.ranTimes(4)
}
