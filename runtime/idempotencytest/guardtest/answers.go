package guardtest

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

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
	if first.ContentLength != int64(len(body)) {
		f.Errorf("Content-Length is %d, want %d", first.ContentLength, len(body))
	}
	if again.Header["Set-Cookie"] != nil || again.Header["X-Request-Id"] != nil {
		f.Errorf("the replay has another exchange's fields: %q", again.Header)
	}
	f.sameAnswer("all of it", first, again)
}

func outerFields(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		if strings.Contains(call.Body, "vase") {
			reply.Header["X-Outer"] = []string{"the handler's", "second"}
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
		if got := trip("b", vase, n); got != "the handler's|second" {
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

// neighbours are safe methods on the path of an annotated operation.
func neighbours(t *testing.T, target Target) {
	f := serve(t, target, func(_ context.Context, call Call) Reply {
		if call.Operation == "listThings" {
			return Reply{Status: http.StatusOK, Header: http.Header{"Content-Type": {"text/plain"}}, Body: "a lamp"}
		}
		return Reply{Status: http.StatusOK, Header: http.Header{"Etag": {`"1"`}}}
	})
	w := f.dial()
	for range 2 {
		for _, path := range []string{things, "/items"} {
			for method, body := range map[string]string{http.MethodGet: "a lamp", http.MethodHead: ""} {
				w.write(method+" "+path+" HTTP/1.1", "Host: things", "Idempotency-Key: a", "", "")
				a := w.answer(method)
				f.ran(method+" "+path, a, http.StatusOK)
				if a.body != body {
					f.Errorf("%s %s: got %q, want %q", method, path, a.body, body)
				}
			}
		}
	}
	f.ranTimes(8)
}

// sparse are answers of which there is little: they are replayed as little.
func sparse(t *testing.T, target Target) {
	for what, reply := range map[string]Reply{
		"nothing":               {},
		"a status":              {Status: http.StatusAccepted},
		"an empty 200":          {Status: http.StatusOK, Header: http.Header{"Etag": {`"1"`}}},
		"a redirect":            {Status: http.StatusSeeOther, Header: http.Header{"Location": {"/things/1"}}},
		"no Content-Type":       {Status: http.StatusCreated, Body: "<p>a lamp</p>"},
		"an empty field":        {Status: http.StatusCreated, Header: http.Header{"X-Empty": {""}}, Body: "x"},
		"bytes that are not":    {Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/octet-stream"}}, Body: "\x00\xff\xfe\r\n\r\n"},
		"a field in lower case": {Status: http.StatusCreated, Header: http.Header{"x-odd": {"1"}}, Body: "x"},
		"not ASCII":             {Status: http.StatusCreated, Header: http.Header{"X-Name": {"Lampe f\u00fcr 5 \u20ac"}}, Body: "x"},
	} {
		f := serve(t, target, func(context.Context, Call) Reply { return reply })
		first, again := f.send(request{path: things, key: "a", body: lamp}), f.send(request{path: things, key: "a", body: lamp})
		f.ran(what, first, max(reply.Status, http.StatusOK))
		f.replays(what+" again", again, first.StatusCode)
		f.ranTimes(1)
		for name, values := range reply.Header {
			if got := first.Header[http.CanonicalHeaderKey(name)]; !slices.Equal(got, values) {
				f.Errorf("%s: %s is %q, want %q", what, name, got, values)
			}
		}
		if first.body != reply.Body {
			f.Errorf("%s: the body is %q, want %q", what, first.body, reply.Body)
		}
		f.sameAnswer(what, first, again)
	}
}

// sameAnswer expects a replay to be as the first answer was, the marker aside.
func (f *fixture) sameAnswer(what string, first, again answer) {
	f.Helper()
	if again.body != first.body || again.ContentLength != first.ContentLength {
		f.Errorf("%s: the replay's body is %q, %d bytes long, want %q, %d", what, again.body, again.ContentLength, first.body, first.ContentLength)
	}
	want := first.Header.Clone()
	want.Set(wire.HeaderReplayed, "true")
	if once, twice := fields(want), fields(again.Header); !slices.Equal(once, twice) {
		f.Errorf("%s: the replay's header is\n%q, want\n%q", what, twice, once)
	}
}

// fields returns the lines of h but for what differs from answer to answer.
func fields(h http.Header) []string {
	var lines []string
	for name, values := range h {
		if name == "Date" || name == "Set-Cookie" || name == "X-Request-Id" {
			continue
		}
		for _, v := range values {
			lines = append(lines, name+": "+v)
		}
	}
	slices.SortStableFunc(lines, func(a, b string) int {
		nameA, _, _ := strings.Cut(a, ":")
		nameB, _, _ := strings.Cut(b, ":")
		return strings.Compare(nameA, nameB)
	})
	return lines
}

// earlyHints has an informational response come first: it is sent, and not
// taken for the answer.
func earlyHints(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		reply.Link = "</lamp.css>; rel=preload"
		return reply
	})
	send := func(r request) (answer, []string) {
		var links []string
		r.ctx = httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
				if code == http.StatusEarlyHints {
					links = append(links, header["Link"]...)
				}
				return nil
			},
		})
		return f.send(r), links
	}
	form := request{path: files, contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	for what, r := range map[string]request{"guarded": {path: things, key: "a", body: lamp}, "unguarded": form} {
		first, links := send(r)
		f.ran(what, first, http.StatusCreated)
		if !slices.Equal(links, []string{"</lamp.css>; rel=preload"}) {
			f.Errorf("%s: the hints are %q", what, links)
		}
		if first.body != lamp || first.Header["Link"] != nil || first.Header.Get("Location") != "/things/1" {
			f.Errorf("%s: after the hints came %q %q", what, first.Header, first.body)
		}
	}
	again, links := send(request{path: things, key: "a", body: lamp})
	f.replays("the same again", again, http.StatusCreated)
	if len(links) != 0 || again.body != lamp || again.Header["Link"] != nil {
		f.Errorf("the replay has hints %q, header %q and body %q", links, again.Header, again.body)
	}
}

// writers is what handlers do with an http.ResponseWriter.
func writers(t *testing.T, target Target) {
	for what, c := range map[string]struct {
		write  func(http.ResponseWriter)
		status int
		body   string
	}{
		"the status twice": {func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte("made"))
			w.WriteHeader(http.StatusTeapot)
		}, http.StatusCreated, "made"},
		"no status": {func(w http.ResponseWriter) {
			_, _ = w.Write([]byte("made"))
		}, http.StatusOK, "made"},
		"many writes": {func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusCreated)
			for range 1000 {
				_, _ = w.Write([]byte("0123456789"))
			}
		}, http.StatusCreated, strings.Repeat("0123456789", 1000)},
		"a field too late": {func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte("made"))
			w.Header().Set("X-Late", "1")
		}, http.StatusCreated, "made"},
		"http.ServeContent": {func(w http.ResponseWriter) {
			http.ServeContent(w, httptest.NewRequest(http.MethodGet, "/lamp.txt", nil), "lamp.txt", time.Unix(1, 0), strings.NewReader("a lamp"))
		}, http.StatusOK, "a lamp"},
		"io.Copy": {func(w http.ResponseWriter) {
			_, _ = io.Copy(w, strings.NewReader("made"))
		}, http.StatusOK, "made"},
		"a length of its own": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "4")
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte("made"))
		}, http.StatusCreated, "made"},
	} {
		f := serve(t, target, func(context.Context, Call) Reply { return Reply{Write: c.write} })
		first, again := f.send(request{path: things, key: "a", body: lamp}), f.send(request{path: things, key: "a", body: lamp})
		f.ran(what, first, c.status)
		f.replays(what+" again", again, c.status)
		if first.body != c.body || first.Header.Get("X-Late") != "" {
			f.Errorf("%s: got %q %q", what, first.Header, first.body)
		}
		f.sameAnswer(what, first, again)
	}
}

// trailers are sent with the first answer, and are not recorded: they belong to
// its transfer.
func trailers(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Write: func(w http.ResponseWriter) {
			w.Header().Set("Trailer", "X-Sum")
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte("made"))
			w.Header().Set("X-Sum", "4")
			w.Header().Set(http.TrailerPrefix+"X-More", "5")
		}}
	})
	first, again := f.send(request{path: things, key: "a", body: lamp}), f.send(request{path: things, key: "a", body: lamp})
	f.ran("first sight", first, http.StatusCreated)
	if first.body != "made" || first.Trailer.Get("X-Sum") != "4" || first.Trailer.Get("X-More") != "5" {
		f.Errorf("the first answer is %q with trailers %q", first.body, first.Trailer)
	}
	f.replays("the same again", again, http.StatusCreated)
	if again.body != "made" {
		f.Errorf("the replay is %q", again.body)
	}
}

// writesLater has a goroutine that a handler left behind go on writing.
func writesLater(t *testing.T, target Target) {
	if target.ReusesWriters {
		return // it would write into the answers of others
	}
	writer := make(chan http.ResponseWriter, 1)
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Write: func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte("made"))
			writer <- w
		}}
	})
	first := f.send(request{path: things, key: "a", body: lamp})
	f.ran("first sight", first, http.StatusCreated)
	w := wait(f, "the handler's return", writer)
	w.Header().Set("X-Late", "1")
	_, _ = io.WriteString(w, " late")
	_ = http.NewResponseController(w).Flush() // some routers' writers do not say that it failed
	again := f.send(request{path: things, key: "a", body: lamp})
	f.replays("the same again", again, http.StatusCreated)
	if again.body != "made" || again.Header.Get("X-Late") != "" {
		f.Errorf("the replay is %q %q", again.Header, again.body)
	}
}

// ownEnvelope has the application render the guard's refusals.
func ownEnvelope(t *testing.T, target Target) {
	envelope := idempotency.WithProblem(func(_ context.Context, _ *idempotency.Request, p idempotency.Problem) idempotency.Response {
		return idempotency.Response{
			Status: http.StatusTeapot,
			Header: http.Header{"Content-Type": {"text/plain"}, "X-Many": {"one", "two"}},
			Body:   []byte("refused: " + p.Type),
		}
	})
	f := serve(t, target, created, func(s *Server) { s.Guard = over(t, memorystore.New(), envelope) })
	a := f.send(request{path: things, body: lamp, header: http.Header{"X-Trip": {"1"}}})
	if a.StatusCode != http.StatusTeapot || a.body != "refused: "+wire.ProblemBase+wire.MissingKey || !slices.Equal(a.Header["X-Many"], []string{"one", "two"}) || a.Header.Get("X-Outer") != "1" {
		f.Errorf("the refusal is %d %q %q", a.StatusCode, a.Header, a.body)
	}
	f.ranTimes(0)
}

// unreadableRecord has the secret gone that a record was made with.
func unreadableRecord(t *testing.T, target Target) {
	shared := memorystore.New()
	with := func(id string) *fixture {
		secret := idempotency.WithFingerprintSecret(idempotency.Secret{ID: id, Key: bytes.Repeat([]byte(id), 32)})
		return serve(t, target, created, func(s *Server) { s.Guard = over(t, shared, secret) })
	}
	r := request{path: things, key: "a", body: lamp}
	f := with("1")
	f.ran("first sight", f.send(r), http.StatusCreated)
	f.replays("the same again", f.send(r), http.StatusCreated)
	f = with("2")
	f.refuses("when the secret is gone", f.send(r), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(0)
}

// outerContext has the handler find what middlewares put into the request's
// context: values, and a deadline.
func outerContext(t *testing.T, target Target) {
	type found struct {
		user, native string
		deadline     time.Time
	}
	seen := make(chan found, 1)
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		run := idempotency.RunContext(ctx)
		user, _ := run.Value(UserKey{}).(string)
		deadline, _ := run.Deadline()
		seen <- found{user, call.User, deadline}
		return created(ctx, call)
	})
	for timeout, within := range map[string]time.Duration{"1h": time.Hour, "": 5 * time.Minute} {
		f.ran("first sight", f.send(request{path: things, key: "a" + timeout, body: lamp, header: http.Header{"X-User": {"ann"}, "X-Timeout": {timeout}}}), http.StatusCreated)
		got := wait(f, "the run", seen)
		if left := time.Until(got.deadline); got.user != "ann" || got.native != "ann" || left > within || left < within-patience {
			f.Errorf("the handler found the users %q and %q and a deadline in %v, want ann and %v", got.user, got.native, left, within)
		}
	}
}
