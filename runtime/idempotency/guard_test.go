package idempotency_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A fixture is a server over HTTP whose every path is one guarded operation.
type fixture struct {
	*httptest.Server
	t      *testing.T
	policy *idempotency.Policy
	runs   atomic.Int64

	mu     sync.Mutex
	events []idempotency.Event
}

type setup struct {
	store   idempotency.Store
	policy  func(*idempotency.Policy)
	options []idempotency.Option
	outer   func(http.Handler) http.Handler
}

func serve(t *testing.T, s setup, handler http.HandlerFunc) *fixture {
	t.Helper()
	f := &fixture{t: t}
	p := idempotency.DefaultPolicy("POST /orders")
	if s.policy != nil {
		s.policy(&p)
	}
	f.policy = &p
	if s.store == nil {
		s.store = memorystore.New()
	}
	observer := idempotency.WithObserver(func(_ context.Context, e idempotency.Event) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.events = append(f.events, e)
	})
	guard, err := idempotency.New(s.store, append(s.options, observer)...)
	if err != nil {
		t.Fatal(err)
	}
	idempotency.Register[*http.Request](guard, &p)
	var h http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&p, w, r, func(w http.ResponseWriter, r *http.Request) {
			f.runs.Add(1)
			handler(w, r)
		})
	})
	if s.outer != nil {
		h = s.outer(h)
	}
	f.Server = httptest.NewServer(h)
	t.Cleanup(f.Close)
	return f
}

func created(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Location", "/orders/1")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, `{"id":1}`)
}

type answer struct {
	*http.Response
	body string
}

func (f *fixture) request(key, body string, change ...func(*http.Request)) *http.Request {
	f.t.Helper()
	r, err := http.NewRequest("POST", f.URL+"/orders", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	for _, c := range change {
		c(r)
	}
	return r
}

func (f *fixture) post(key, body string, change ...func(*http.Request)) answer {
	f.t.Helper()
	resp, err := f.Client().Do(f.request(key, body, change...))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return answer{resp, string(b)}
}

func (f *fixture) ran(n int64) {
	f.t.Helper()
	if got := f.runs.Load(); got != n {
		f.t.Fatalf("handler ran %d times, want %d", got, n)
	}
}

func (f *fixture) saw(kind idempotency.EventKind) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, e := range f.events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

func (a answer) is(t *testing.T, status int, body string) {
	t.Helper()
	if a.StatusCode != status || a.body != body {
		t.Fatalf("answer is %d %q, want %d %q", a.StatusCode, a.body, status, body)
	}
}

func (a answer) refused(t *testing.T, status int, name string) {
	t.Helper()
	var p struct {
		Type, Title string
		Status      int
	}
	if a.StatusCode != status {
		t.Fatalf("answer is %d %s, want %d %s", a.StatusCode, a.body, status, name)
	}
	if err := json.Unmarshal([]byte(a.body), &p); err != nil {
		t.Fatalf("answer is no problem: %v: %s", err, a.body)
	}
	if p.Type != "urn:oapi-idempotent:"+name || p.Status != status || p.Title == "" || a.Header.Get("Content-Type") != "application/problem+json" {
		t.Fatalf("problem is %+v with %q, want %s", p, a.Header.Get("Content-Type"), name)
	}
	if (status == 503) != (a.Header.Get("Retry-After") != "") && name != "idempotency-in-flight" {
		t.Fatalf("%s has Retry-After %q", name, a.Header.Get("Retry-After"))
	}
}

func (a answer) replayed(t *testing.T, want bool) {
	t.Helper()
	if got := a.Header.Get("Idempotent-Replayed") == "true"; got != want {
		t.Fatalf("replay marker present: %v, want %v", got, want)
	}
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestReplaysTheRecordedAnswer(t *testing.T) {
	f := serve(t, setup{}, created)
	first := f.post("a", `{"item":"tea","n":1}`)
	first.is(t, 201, `{"id":1}`)
	first.replayed(t, false)
	again := f.post("a", `{ "n": 1, "item": "tea" }`)
	again.is(t, 201, `{"id":1}`)
	again.replayed(t, true)
	if again.Header.Get("Location") != "/orders/1" || again.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("replay lost header fields: %v", again.Header)
	}
	f.ran(1)
	f.post("b", `{"item":"tea","n":1}`).replayed(t, false)
	f.ran(2)
}

func TestMissingKey(t *testing.T) {
	for _, key := range []string{"", " \t ", `""`, `"  "`} {
		for _, status := range []int{400, 422} {
			f := serve(t, setup{policy: func(p *idempotency.Policy) { p.OnMissing = idempotency.OnMissing(status) }}, created)
			f.post(key, `{`).refused(t, status, "missing-idempotency-key")
			f.ran(0)
		}
	}
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.OnMissing = idempotency.RunUnguarded }}, created)
	f.post("", `{}`).is(t, 201, `{"id":1}`)
	f.post("", `{}`).is(t, 201, `{"id":1}`)
	f.ran(2)
	if f.saw(idempotency.EventUnguarded) != 2 {
		t.Fatal("the observer did not hear of two unguarded runs")
	}
}

func TestInvalidKey(t *testing.T) {
	for _, test := range []struct {
		name   string
		keys   []string
		policy func(*idempotency.Policy)
	}{
		{"two fields", []string{"a", "a"}, nil},
		{"joined by a comma", []string{"a, a"}, nil},
		{"two quoted strings", []string{`"a", "a"`}, nil},
		{"not closed", []string{`"a`}, nil},
		{"unknown escape", []string{`"a\n"`}, nil},
		{"too long", []string{strings.Repeat("k", 256)}, nil},
		{"longer than an index row", []string{strings.Repeat("k", 3000)}, nil},
		{"too short", []string{"short"}, func(p *idempotency.Policy) { p.Key.MinLength = 6 }},
		{"not ASCII", []string{"schlüssel"}, nil},
		{"byte 0xFF", []string{"a\xffb"}, nil},
		{"not a UUID", []string{"123e4567-e89b-12d3-a456-42661417400x"}, func(p *idempotency.Policy) { p.Key.Format = idempotency.FormatUUID }},
		{"nil UUID", []string{"00000000-0000-0000-0000-000000000000"}, nil},
		{"against the pattern", []string{"abc"}, func(p *idempotency.Policy) { p.Key.Pattern = "^[0-9]+$" }},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := serve(t, setup{policy: test.policy}, created)
			f.post("", `{}`, func(r *http.Request) { r.Header["Idempotency-Key"] = test.keys }).refused(t, 400, "invalid-idempotency-key")
			f.ran(0)
		})
	}
}

// net/http rejects some bytes by itself, before any handler; the guard does not
// rely on it.
func TestControlBytesInKey(t *testing.T) {
	f := serve(t, setup{}, created)
	for _, key := range []string{"a\x00b", "a\x7fb", "a\nb", "a\tb"} {
		r := httptest.NewRequest("POST", "/orders", nil)
		r.Header["Idempotency-Key"] = []string{key}
		w := httptest.NewRecorder()
		f.Config.Handler.ServeHTTP(w, r)
		answer{w.Result(), w.Body.String()}.refused(t, 400, "invalid-idempotency-key")
	}
	f.ran(0)
}

func TestQuotedAndRawAreOneKey(t *testing.T) {
	f := serve(t, setup{}, created)
	f.post("abc", `{}`).replayed(t, false)
	f.post(`"abc"`, `{}`).replayed(t, true)
	f.post(` "abc" `, `{}`).replayed(t, true)
	f.post(`"a, \"b\\"`, `{}`).replayed(t, false)
	f.post(`"a, \"b\\"`, `{}`).replayed(t, true)
	f.ran(2)
}

func TestUUIDKeysCompareInLowerCase(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.Key.Format = idempotency.FormatUUID }}, created)
	f.post("123E4567-E89B-12D3-A456-426614174000", `{}`).replayed(t, false)
	f.post("123e4567-e89b-12d3-a456-426614174000", `{}`).replayed(t, true)
}

func TestAnotherRequestWithTheKey(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*http.Request)
	}{
		{"method", func(r *http.Request) { r.Method = "PATCH" }},
		{"path", func(r *http.Request) { r.URL.Path = "/orders/2" }},
		{"query", func(r *http.Request) { r.URL.RawQuery = "dry_run=true" }},
		{"media type", func(r *http.Request) { r.Header.Set("Content-Type", "application/merge-patch+json") }},
		{"body", func(r *http.Request) { setBody(r, `{"n":2}`) }},
		{"large integer", func(r *http.Request) { setBody(r, `{"n":90071992547409930}`) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := serve(t, setup{}, created)
			f.post("k", `{"n":90071992547409931}`)
			f.post("k", `{"n":90071992547409931}`, test.change).refused(t, 422, "idempotency-key-reused")
			f.ran(1)
		})
	}
	for _, status := range []int{400, 409} {
		f := serve(t, setup{policy: func(p *idempotency.Policy) { p.OnMismatch = idempotency.OnMismatch(status) }}, created)
		f.post("k", `1`)
		f.post("k", `2`).refused(t, status, "idempotency-key-reused")
	}
}

func setBody(r *http.Request, body string) {
	r.Body, r.ContentLength, r.GetBody = io.NopCloser(strings.NewReader(body)), int64(len(body)), nil
}

func TestTheSameRequestOtherwiseWritten(t *testing.T) {
	multipart := func(boundary string) string {
		return "--" + boundary + "\r\nContent-Disposition: form-data; name=\"f\"; filename=\"a.txt\"\r\nContent-Type: text/plain\r\n\r\nhello\r\n--" + boundary + "--\r\n"
	}
	for _, test := range []struct{ name, typeA, a, queryA, typeB, b, queryB string }{
		{"order of members", "application/json", `{"a":1,"b":[{"c":"é","d":2}]}`, "", "application/json", "{\"b\" : [ {\"d\":2, \"c\":\"\\u00e9\"} ],\n\"a\":1}", ""},
		{"order of the query", "application/json", `{}`, "b=2&a=1&a=0", "application/json", `{}`, "a=1&a=%30&b=2"},
		{"case of the media type", "application/json; charset=utf-8", `{}`, "", "Application/JSON;charset=UTF-8", `{}`, ""},
		{"boundary", "multipart/form-data; boundary=AaB", multipart("AaB"), "", "multipart/form-data; boundary=CcD", multipart("CcD"), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := serve(t, setup{}, created)
			with := func(contentType, query string) func(*http.Request) {
				return func(r *http.Request) {
					r.Header.Set("Content-Type", contentType)
					r.URL.RawQuery = query
				}
			}
			f.post("k", test.a, with(test.typeA, test.queryA)).is(t, 201, `{"id":1}`)
			f.post("k", test.b, with(test.typeB, test.queryB)).replayed(t, true)
			f.ran(1)
		})
	}
}

func TestChunkedBodyIsTheSameBody(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.MaxRequestBody = 10 }}, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = w.Write(b)
	})
	chunked := func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(r.Body), -1 }
	f.post("k", `{"n":1}`).is(t, 200, `{"n":1}`)
	f.post("k", `{"n":1}`, chunked).replayed(t, true)
	f.post("k", `{"n":2}`, chunked).refused(t, 422, "idempotency-key-reused")
	f.post("l", `{"n":1}`, chunked).is(t, 200, `{"n":1}`)
	f.post("m", `{"n":100000}`).refused(t, 413, "request-too-large")
	f.post("m", `{"n":100000}`, chunked).refused(t, 413, "request-too-large")
	f.post("m", `{"n":1}`).replayed(t, false) // the key of a refused body is free
}

func TestFormThatAMiddlewareHasParsed(t *testing.T) {
	f := serve(t, setup{outer: func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = r.ParseForm()
			h.ServeHTTP(w, r)
		})
	}}, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.PostFormValue("n")) })
	form := func(r *http.Request) { r.Header.Set("Content-Type", "application/x-www-form-urlencoded") }
	f.post("k", "n=1", form).is(t, 200, "1")
	f.post("k", "n=2", form).refused(t, 422, "idempotency-key-reused")
	f.post("k", "n=1", form).replayed(t, true)
}

func TestIgnoredMembersAndComparedHeaders(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) {
		p.Fingerprint.Ignore = []string{"/sent_at", "/lines/0/a~1b"}
		p.Fingerprint.Headers = []string{"x-tenant"}
	}}, created)
	f.post("k", `{"n":1,"sent_at":1,"lines":[{"a/b":1,"c":1}]}`).is(t, 201, `{"id":1}`)
	f.post("k", `{"lines":[{"c":1}],"n":1,"sent_at":{"x":2}}`).replayed(t, true)
	f.post("k", `{"n":2,"sent_at":1,"lines":[{"a/b":1,"c":1}]}`).refused(t, 422, "idempotency-key-reused")
	f.post("k", `{"n":1,"lines":[{"c":1}]}`, func(r *http.Request) { r.Header.Set("X-Tenant", "b") }).refused(t, 422, "idempotency-key-reused")
}

func TestReplayWhateverTheRequestSays(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) {
		p.OnMismatch = idempotency.ReplayAnyway
		p.Replay.Status = 200
		p.MaxRequestBody = 16
	}}, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(b)
	})
	f.post("k", `{"n":1}`).is(t, 201, `{"n":1}`)
	again := f.post("k", `not json, and longer than the limit`)
	again.is(t, 200, `{"n":1}`)
	again.replayed(t, true)
	f.ran(1)
	f.post("l", `longer than the limit`).refused(t, 413, "request-too-large")
	f.ran(1)
	chunked := func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(r.Body), -1 }
	if a := f.post("l", `longer than the limit`, chunked); a.StatusCode != 400 {
		t.Fatalf("the handler read a body past the limit: %d", a.StatusCode)
	}
	f.post("l", `{"n":2}`).is(t, 201, `{"n":2}`) // the key stayed free
}

func TestInFlight(t *testing.T) {
	release := make(chan struct{})
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		<-release
		created(w, r)
	})
	first := make(chan answer)
	go func() { first <- f.post("k", `{}`) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	a := f.post("k", `{}`)
	a.refused(t, 409, "idempotency-in-flight")
	if a.Header.Get("Retry-After") != "2" {
		t.Fatalf("Retry-After is %q, want 2 while the lease has 30 s left", a.Header.Get("Retry-After"))
	}
	f.post("k", `{"other":1}`).refused(t, 422, "idempotency-key-reused")
	close(release)
	(<-first).is(t, 201, `{"id":1}`)
	f.post("k", `{}`).replayed(t, true)
	f.ran(1)
}

func TestWaitForTheOneInFlight(t *testing.T) {
	release := make(chan struct{})
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.WaitFor = 10 * time.Second }}, func(w http.ResponseWriter, r *http.Request) {
		<-release
		created(w, r)
	})
	answers := make(chan answer)
	for range 20 {
		go func() { answers <- f.post("k", `{}`) }()
	}
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	close(release)
	replays := 0
	for range 20 {
		a := <-answers
		a.is(t, 201, `{"id":1}`)
		if a.Header.Get("Idempotent-Replayed") == "true" {
			replays++
		}
	}
	if f.ran(1); replays != 19 {
		t.Fatalf("%d replays, want 19", replays)
	}
}

func TestWaitEnds(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.WaitFor = 50 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		<-release
	})
	go func() { _, _ = f.Client().Do(f.request("k", `{}`)) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	f.post("k", `{}`).refused(t, 409, "idempotency-in-flight")
}

func TestWhatIsRecorded(t *testing.T) {
	for _, test := range []struct {
		guarantee idempotency.Guarantee
		record    []idempotency.StatusPattern
		status    int
		recorded  bool
	}{
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX"}, 200, true},
		{idempotency.AtLeastOnce, nil, 204, true},
		{idempotency.AtLeastOnce, nil, 302, true},
		{idempotency.AtLeastOnce, nil, 404, false},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX"}, 404, true},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX"}, 402, true},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX"}, 422, false},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX", "422"}, 422, true},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"4XX"}, 500, false},
		{idempotency.AtLeastOnce, []idempotency.StatusPattern{"5XX"}, 500, true},
		{idempotency.AtMostOnce, nil, 500, true},
		{idempotency.AtMostOnce, nil, 400, true},
	} {
		t.Run(fmt.Sprint(test.guarantee, test.record, test.status), func(t *testing.T) {
			f := serve(t, setup{policy: func(p *idempotency.Policy) {
				p.Guarantee, p.Record = test.guarantee, test.record
			}}, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(test.status) })
			client := f.Client()
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			f.post("k", `{}`).is(t, test.status, "")
			again := f.post("k", `{}`)
			again.is(t, test.status, "")
			again.replayed(t, test.recorded)
		})
	}
}

func TestClassesLeaveOutWhatAClientMayMend(t *testing.T) {
	for _, status := range []int{400, 401, 403, 408, 409, 413, 415, 422, 425, 429} {
		if idempotency.StatusPattern("4XX").Matches(status) {
			t.Errorf("4XX matches %d", status)
		}
		if !idempotency.StatusPattern(fmt.Sprint(status)).Matches(status) {
			t.Errorf("%d does not match itself", status)
		}
	}
}

func TestPanicHoldsTheKeyUntilTheLeaseEnds(t *testing.T) {
	for _, value := range []any{"boom", http.ErrAbortHandler} {
		var first atomic.Bool
		lease := 400 * time.Millisecond
		var attempts []int
		f := serve(t, setup{policy: func(p *idempotency.Policy) { p.Lease = lease }}, func(w http.ResponseWriter, r *http.Request) {
			attempts = append(attempts, idempotency.Attempt(r.Context()))
			if first.CompareAndSwap(false, true) {
				panic(value)
			}
			created(w, r)
		})
		f.Config.ErrorLog = discard
		start := time.Now()
		if _, err := f.Client().Transport.RoundTrip(f.request("k", `{}`)); err == nil {
			t.Fatal("the panic did not go on to the server")
		}
		if f.runs.Load() > 1 {
			t.Fatal("the panic freed the key")
		}
		var a answer
		eventually(t, "the key's release", func() bool {
			a = f.post("k", `{}`)
			return a.StatusCode != 409
		})
		a.is(t, 201, `{"id":1}`)
		if held := time.Since(start); held < lease || held > 2*lease+time.Second {
			t.Fatalf("the key was held for %v, the lease is %v", held, lease)
		}
		if fmt.Sprint(attempts) != "[1 2]" {
			t.Fatalf("attempts %v, want [1 2]", attempts)
		}
	}
}

func TestPanicAtMostOnceLeavesTheOutcomeUnknown(t *testing.T) {
	for _, mark := range []bool{false, true} {
		f := serve(t, setup{policy: func(p *idempotency.Policy) {
			p.Lease = 200 * time.Millisecond
			if !mark {
				p.Guarantee = idempotency.AtMostOnce
			}
		}}, func(w http.ResponseWriter, r *http.Request) {
			if mark {
				if err := idempotency.MarkEffect(r.Context()); err != nil {
					t.Error(err)
				}
			}
			panic(http.ErrAbortHandler)
		})
		_, _ = f.Client().Transport.RoundTrip(f.request("k", `{}`))
		var a answer
		eventually(t, "the end of the lease", func() bool {
			a = f.post("k", `{}`)
			return !strings.Contains(a.body, "in-flight")
		})
		a.refused(t, 409, "idempotency-outcome-unknown")
		f.ran(1)
	}
}

func TestMarkedRunRecordsEveryAnswer(t *testing.T) {
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		if err := idempotency.MarkEffect(r.Context()); err != nil {
			t.Error(err)
		}
		http.Error(w, "half done", 500)
	})
	f.post("k", `{}`).is(t, 500, "half done\n")
	f.post("k", `{}`).replayed(t, true)
	f.ran(1)
}

func TestAHandlerOfThreeLeasesRunsOnce(t *testing.T) {
	lease := time.Second // long enough for a machine that stalls
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.Lease = lease }}, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(3 * lease):
			created(w, r)
		case <-r.Context().Done():
			t.Error("cancelled:", context.Cause(r.Context()))
		}
	})
	done := make(chan answer)
	go func() { done <- f.post("k", `{}`) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	for {
		select {
		case a := <-done:
			a.is(t, 201, `{"id":1}`)
			f.ran(1)
			return
		case <-time.After(lease / 10):
			if dup := f.post("k", `{}`); dup.StatusCode == 409 {
				dup.refused(t, 409, "idempotency-in-flight")
			}
		}
	}
}

func TestHangingUpChangesNothing(t *testing.T) {
	hungUp := make(chan struct{})
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		<-hungUp
		if err := r.Context().Err(); err != nil {
			t.Error("the handler was cancelled:", err)
		}
		created(w, r)
	})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := f.Client().Do(f.request("k", `{}`).WithContext(ctx))
		failed <- err
	}()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(hungUp)
	eventually(t, "the record", func() bool { return f.saw(idempotency.EventRecorded) == 1 })
	f.post("k", `{}`).replayed(t, true)
	f.ran(1)
}

func TestDeadlines(t *testing.T) {
	deadline := make(chan time.Duration, 1)
	handler := func(w http.ResponseWriter, r *http.Request) {
		d, _ := r.Context().Deadline()
		deadline <- time.Until(d)
	}
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.Timeout = time.Minute }}, handler)
	f.post("k", `{}`)
	if d := <-deadline; d > time.Minute || d < 30*time.Second {
		t.Fatalf("the handler has %v, want the policy's minute", d)
	}
	f = serve(t, setup{outer: func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), time.Hour)
			defer cancel()
			h.ServeHTTP(w, r.WithContext(ctx))
		})
	}}, handler)
	f.post("k", `{}`)
	if d := <-deadline; d < 59*time.Minute {
		t.Fatalf("the handler has %v, want the caller's hour", d)
	}
}

func TestFidelity(t *testing.T) {
	f := serve(t, setup{outer: func(h http.Handler) http.Handler {
		n := 0
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n++
			w.Header().Set("X-Outer", fmt.Sprint(n))
			w.Header().Set("X-Removed", "outer")
			w.Header().Add("Vary", "Origin")
			w.Header().Set("Access-Control-Allow-Origin", "https://a.example")
			h.ServeHTTP(w, r)
		})
	}}, func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Del("X-Removed")
		h.Add("Vary", "Accept")
		h["Link"] = []string{"</a>; rel=\"next\"", "</b>; rel=\"prev\""}
		h.Set("ETag", `"7"`)
		h.Set("Content-Encoding", "gzip")
		h.Set("Set-Cookie", "session=1")
		h.Set("X-Request-Id", "r1")
		h.Set("X-RateLimit-Remaining", "3")
		h.Set("RateLimit", "x")
		h.Set("Idempotent-Replayed", "no")
		w.WriteHeader(202)
		h.Set("X-Late", "never")
		_, _ = w.Write([]byte{0x1f, 0x8b, 0, 0xff})
	})
	plain := func(r *http.Request) { r.Header.Set("Accept-Encoding", "identity") }
	first, again := f.post("k", `{}`, plain), f.post("k", `{}`, plain)
	for i, a := range []answer{first, again} {
		a.is(t, 202, "\x1f\x8b\x00\xff")
		want := map[string]string{
			"X-Outer": fmt.Sprintf("[%d]", i+1), "X-Removed": "[]", "Vary": "[Origin Accept]", "Etag": `["7"]`,
			"Link": `[</a>; rel="next" </b>; rel="prev"]`, "Content-Encoding": "[gzip]", "X-Late": "[]", "Content-Length": "[4]",
			"Access-Control-Allow-Origin": "[https://a.example]",
		}
		for name, values := range want {
			if got := fmt.Sprint(a.Header[name]); got != values {
				t.Errorf("answer %d: %s is %s, want %s", i, name, got, values)
			}
		}
	}
	again.replayed(t, true)
	for _, name := range []string{"Set-Cookie", "X-Request-Id", "X-Ratelimit-Remaining", "Ratelimit"} {
		if first.Header.Get(name) == "" || again.Header.Get(name) != "" {
			t.Errorf("%s: first %q, replay %q", name, first.Header.Get(name), again.Header.Get(name))
		}
	}
}

func TestStatusesWithoutABody(t *testing.T) {
	for _, status := range []int{204, 304} {
		f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(status)
			if _, err := w.Write([]byte("x")); !errors.Is(err, http.ErrBodyNotAllowed) {
				t.Errorf("write under %d: %v", status, err)
			}
		})
		for range 2 {
			a := f.post("k", `{}`)
			a.is(t, status, "")
			if a.Header.Get("Content-Length") != "" {
				t.Errorf("%d has Content-Length %q", status, a.Header.Get("Content-Length"))
			}
		}
		f.ran(1)
	}
}

func TestInformationalResponsesAreNotFinal(t *testing.T) {
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		created(w, r)
	})
	a := f.post("k", `{}`)
	a.is(t, 201, `{"id":1}`)
	if a.Header.Get("Link") != "" {
		t.Fatal("the hint's header field stayed")
	}
	f.post("k", `{}`).is(t, 201, `{"id":1}`)
	f.ran(1)
}

func TestNotReplayable(t *testing.T) {
	handlers := map[string]http.HandlerFunc{
		"flushed": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				_, _ = io.WriteString(w, "data: x\n\n")
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
			}
		},
		"too large": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				_, _ = io.WriteString(w, "data: x\n\n")
			}
		},
		"hijacked": func(w http.ResponseWriter, r *http.Request) {
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = rw.WriteString("HTTP/1.1 200 OK\r\nContent-Length: 27\r\nContent-Type: text/event-stream\r\n\r\ndata: x\n\ndata: x\n\ndata: x\n\n")
			_ = rw.Flush()
		},
		"replay none": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				_, _ = io.WriteString(w, "data: x\n\n")
			}
		},
	}
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			f := serve(t, setup{policy: func(p *idempotency.Policy) {
				if name == "too large" {
					p.MaxRecordedBody = 20
				}
				p.Replay.None = name == "replay none"
			}}, handler)
			a := f.post("k", `{}`)
			a.is(t, 200, "data: x\n\ndata: x\n\ndata: x\n\n")
			if a.Header.Get("Content-Type") != "text/event-stream" {
				t.Fatalf("header lost: %v", a.Header)
			}
			f.post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
			f.post("k", `{"n":2}`).refused(t, 422, "idempotency-key-reused")
			f.ran(1)
		})
	}
}

func TestFlushedBytesArriveBeforeTheHandlerEnds(t *testing.T) {
	read := make(chan struct{})
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "one\n")
		w.(http.Flusher).Flush()
		<-read
	})
	resp, err := f.Client().Do(f.request("k", `{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if line, _ := bufio.NewReader(resp.Body).ReadString('\n'); line != "one\n" {
		t.Fatalf("read %q", line)
	}
	close(read)
}

func TestPrincipals(t *testing.T) {
	who := idempotency.WithPrincipal(func(r *http.Request) (string, error) {
		switch name := r.Header.Get("X-User"); name {
		case "nobody":
			return "", idempotency.ErrUnauthenticated
		case "revoked":
			return "", fmt.Errorf("no: %w", idempotency.ErrForbidden)
		case "broken":
			return "", errors.New("secret detail")
		default:
			return name, nil
		}
	})
	as := func(name string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("X-User", name) }
	}
	f := serve(t, setup{options: []idempotency.Option{who}, policy: func(p *idempotency.Policy) { p.Secured = true }}, created)
	f.post("k", `{}`, as("ann")).replayed(t, false)
	f.post("k", `{}`, as("bob")).replayed(t, false)
	f.post("k", `{}`, as("ann")).replayed(t, true)
	f.post("k", `{}`, as("")).refused(t, 401, "unauthenticated")
	f.post("k", `{}`, as("nobody")).refused(t, 401, "unauthenticated")
	f.post("k", `{}`, as("revoked")).refused(t, 403, "forbidden")
	a := f.post("k", `{}`, as("broken"))
	a.refused(t, 500, "principal-failed")
	if strings.Contains(a.body, "secret") {
		t.Fatal("the answer holds the error's text")
	}
	f.ran(2)

	for _, scope := range []idempotency.Scope{idempotency.ScopeOperation, idempotency.ScopeGlobal} {
		f := serve(t, setup{options: []idempotency.Option{who}, policy: func(p *idempotency.Policy) {
			p.Scope, p.OnMismatch = scope, idempotency.ReplayAnyway
		}}, created)
		f.post("k", `{}`, as("ann")).replayed(t, false)
		f.post("k", `{}`, as("bob")).refused(t, 422, "idempotency-key-reused")
		f.post("k", `{}`, as("ann")).replayed(t, true)
		f.ran(1)
	}
}

func TestExpiry(t *testing.T) {
	f := serve(t, setup{policy: func(p *idempotency.Policy) { p.TTL = 100 * time.Millisecond }}, created)
	start := time.Now()
	f.post("k", `{}`)
	eventually(t, "expiry", func() bool {
		f.post("k", `{"other":1}`)
		return f.runs.Load() == 2
	})
	if since := time.Since(start); since < 100*time.Millisecond {
		t.Fatalf("expired after %v", since)
	}
}

func TestNestedGuardsPassThrough(t *testing.T) {
	p := idempotency.DefaultPolicy("POST /orders")
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	idempotency.Register[*http.Request](guard, &p)
	runs := 0
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&p, w, r, func(w http.ResponseWriter, r *http.Request) {
			guard.Handle(&p, w, r, func(w http.ResponseWriter, r *http.Request) {
				runs++
				created(w, r)
			})
		})
	})
	for range 2 {
		r := httptest.NewRequest("POST", "/orders", strings.NewReader(`{}`))
		r.Header.Set("Idempotency-Key", "k")
		w := httptest.NewRecorder()
		h(w, r)
		answer{w.Result(), w.Body.String()}.is(t, 201, `{"id":1}`)
	}
	if runs != 1 {
		t.Fatalf("%d runs", runs)
	}
}

func TestInnerMiddlewaresAreRecorded(t *testing.T) {
	var order []string
	middleware := func(name string) func(http.Handler) http.Handler {
		return func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				order = append(order, name)
				w.Header().Set("X-"+name, "yes")
				h.ServeHTTP(w, r)
			})
		}
	}
	f := serve(t, setup{options: []idempotency.Option{idempotency.WithInner(middleware("a"), middleware("b"))}}, created)
	f.post("k", `{}`)
	if a := f.post("k", `{}`); a.Header.Get("X-B") != "yes" || fmt.Sprint(order) != "[a b]" {
		t.Fatalf("%v, %v", order, a.Header)
	}
}

func TestPassthroughGuardsNothing(t *testing.T) {
	guard := idempotency.Passthrough()
	p := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[*http.Request](guard, &p)
	w := httptest.NewRecorder()
	guard.Handle(&p, w, httptest.NewRequest("POST", "/orders", nil), func(w http.ResponseWriter, r *http.Request) {
		if err := idempotency.MarkEffect(r.Context()); err != nil {
			t.Error(err)
		}
		if idempotency.Attempt(r.Context()) != 0 || idempotency.KeyFrom(r.Context()).ID() != "" {
			t.Error("an unguarded run has a key")
		}
		created(w, r)
	})
	answer{w.Result(), w.Body.String()}.is(t, 201, `{"id":1}`)
}

func TestDerivedKeys(t *testing.T) {
	var derived []string
	f := serve(t, setup{}, func(w http.ResponseWriter, r *http.Request) {
		key := idempotency.KeyFrom(r.Context())
		derived = append(derived, idempotency.DeriveKey(r.Context(), "charge"), idempotency.DeriveKey(r.Context(), "ship"), key.ID(), key.String())
		w.WriteHeader(500) // frees the key
	})
	f.post("k", `{}`)
	f.post("k", `{}`)
	if len(derived) != 8 || derived[0] != derived[4] || derived[1] != derived[5] || derived[0] == derived[1] || derived[2] != derived[6] || derived[3] != "k" || len(derived[2]) != 64 {
		t.Fatal(derived)
	}
	if derived[0][14] != '5' {
		t.Fatalf("%s is not a UUID of version 5", derived[0])
	}
}

func TestAllObserversAreCalled(t *testing.T) {
	var seen []string
	see := func(name string) idempotency.Option {
		return idempotency.WithObserver(func(_ context.Context, e idempotency.Event) { seen = append(seen, name+" "+string(e.Kind)) })
	}
	f := serve(t, setup{options: []idempotency.Option{see("a"), see("b")}}, created)
	f.post("k", `{}`)
	if f.saw(idempotency.EventRecorded) != 1 || fmt.Sprint(seen) != "[a recorded b recorded]" {
		t.Fatal(seen)
	}
}

func TestOwnProblems(t *testing.T) {
	f := serve(t, setup{options: []idempotency.Option{
		idempotency.WithProblemBase("https://errors.example/"),
		idempotency.WithProblem(func(_ context.Context, _ *idempotency.Request, p idempotency.Problem) idempotency.Response {
			return idempotency.Response{Status: p.Status, Header: http.Header{"X-Type": {p.Type}}, Body: []byte(p.Name)}
		}),
	}}, created)
	a := f.post("", `{}`)
	a.is(t, 400, "missing-idempotency-key")
	if a.Header.Get("X-Type") != "https://errors.example/missing-idempotency-key" {
		t.Fatal(a.Header)
	}
}

func TestRegisterPanicsClearly(t *testing.T) {
	policy := func(change func(*idempotency.Policy)) *idempotency.Policy {
		p := idempotency.DefaultPolicy("POST /orders")
		change(&p)
		return &p
	}
	fresh := func(options ...idempotency.Option) *idempotency.Guard {
		g, err := idempotency.New(memorystore.New(), options...)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	plain := func(*idempotency.Policy) {}
	for want, register := range map[string]func(){
		"the guard is nil": func() { idempotency.Register[*http.Request](nil) },
		"transaction needs a store": func() {
			idempotency.Register[*http.Request](fresh(), policy(func(p *idempotency.Policy) { p.Guarantee = idempotency.Transaction }))
		},
		"no principal function": func() {
			idempotency.Register[*http.Request](fresh(), policy(func(p *idempotency.Policy) { p.Secured = true }))
		},
		"two packages register": func() {
			idempotency.Register[*http.Request](fresh(), policy(plain), policy(plain))
		},
		"WithInner takes net/http": func() {
			idempotency.Register[string](fresh(idempotency.WithInner(func(h http.Handler) http.Handler { return h })), policy(plain))
		},
		"TTL is not positive": func() {
			idempotency.Register[*http.Request](fresh(), policy(func(p *idempotency.Policy) { p.TTL = 0 }))
		},
		"was not registered": func() {
			fresh().Handle(policy(plain), httptest.NewRecorder(), httptest.NewRequest("POST", "/", nil), created)
		},
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, want) {
					t.Errorf("panic is %q, want %q", got, want)
				}
			}()
			register()
		}()
	}
	g := fresh()
	p := policy(plain)
	idempotency.Register[*http.Request](g, p)
	idempotency.Register[*http.Request](g, p)
}
