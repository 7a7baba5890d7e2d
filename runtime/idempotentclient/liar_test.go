package idempotentclient_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A liar is a guarded server of a profile behind a wire on which its first
// answers are replaced by lies. It counts what it did.
type liar struct {
	profile
	guard  *idempotency.Guard
	policy idempotency.Policy
	acts   bool // the guard gets the request before it is lied about
	runs   atomic.Int32
}

func newLiar(t *testing.T, p profile, acts bool) *liar {
	t.Helper()
	guard, err := idempotency.New(memorystore.New(), p.guard...)
	if err != nil {
		t.Fatal(err)
	}
	l := &liar{profile: p, guard: guard, policy: idempotency.DefaultPolicy("POST /orders"), acts: acts}
	p.policy(&l.policy)
	l.policy.MaxRequestBody = 1 << 24
	idempotency.Register[*http.Request](guard, &l.policy)
	return l
}

// act is the guarded operation.
func (l *liar) act(r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	l.guard.Handle(&l.policy, w, r, func(w http.ResponseWriter, _ *http.Request) {
		l.runs.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, `{"id":1}`)
	})
	return w.Result()
}

// receive reads a request, and acts on it if the liar does.
func (l *liar) receive(r *bufio.Reader, seen *log) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	body, _ := io.ReadAll(req.Body)
	req.Body = io.NopCloser(bytes.NewReader(body))
	seen.add(req)
	req.Body = io.NopCloser(bytes.NewReader(body))
	if l.acts {
		l.act(req)
	}
}

// truth is the step that acts and says so.
func (l *liar) truth(conn *net.TCPConn, r *bufio.Reader, seen *log) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	body, _ := io.ReadAll(req.Body)
	req.Body = io.NopCloser(bytes.NewReader(body))
	seen.add(req)
	req.Body = io.NopCloser(bytes.NewReader(body))
	resp := l.act(req)
	text, _ := io.ReadAll(resp.Body)
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	_ = resp.Write(conn)
}

// A lie is what is said in place of the truth.
type lie struct {
	name           string
	says           string           // after the request was received
	tells          func(*liar) step // in place of says
	closes, resets bool             // the connection, afterwards
	forever        bool             // and is never the truth
	deaf           bool             // nothing is done before the lie, as where the request is not read or is another's to act on

	// What the client makes of it: it asks again, or the lie is its answer.
	again    bool
	conflict bool // it asks again if it takes every 409 for one in flight
	got      int  // the status, where it does not ask again; 0: an error
	text     string
	requests int // on the wire, if not 1, or 2 where it asks again
}

const jsonFields = "Content-Type: application/json\r\n"

// truncated is a JSON answer whose gzip stream lacks its end.
func truncated() string {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, _ = io.WriteString(w, `{"id":"`+strings.Repeat("1", 100)+`"}`)
	_ = w.Close()
	half := packed.Bytes()[:packed.Len()-10]
	return fmt.Sprintf("HTTP/1.1 201 Created\r\n%sContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", jsonFields, len(half), half)
}

func conflict(problemType string) string {
	return http11(409, fmt.Sprintf(`{"type":%q}`, problemType), "Content-Type", "application/problem+json")
}

func retryLater(after string) lie {
	return lie{name: "Retry-After: " + after, says: http11(503, "", "Retry-After", after), again: true}
}

var lies = []lie{
	{name: "reset before the request is read", tells: func(*liar) step { return resetBeforeReading }, deaf: true, again: true, requests: 1},
	{name: "reset after the request was read", resets: true, again: true},
	{name: "closed without an answer", closes: true, again: true},
	{name: "half a status line", says: "HTTP/1.1 20", closes: true, again: true},
	{name: "half a header", says: "HTTP/1.1 201 Created\r\nContent-Le", closes: true, again: true},
	{name: "half a body", says: "HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\nhalf", closes: true, again: true},
	{name: "half a body, then a reset", says: "HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\nhalf", resets: true, again: true},
	{name: "half a chunked body", says: "HTTP/1.1 201 Created\r\n" + jsonFields + "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"id\"\r\n", closes: true, again: true},
	{name: "a chunk that is none", says: "HTTP/1.1 201 Created\r\n" + jsonFields + "Transfer-Encoding: chunked\r\n\r\nnone\r\n", closes: true, again: true},
	{name: "a refusal without an end", tells: endless, again: true},
	{name: "half a gzip stream", says: truncated(), again: true},
	{name: "no gzip stream", says: http11(201, "plain", "Content-Type", "application/json", "Content-Encoding", "gzip"), again: true},
	{name: "a length that is too short", says: "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}garbage", got: 201, text: "{}"},
	{name: "two lengths", says: "HTTP/1.1 201 Created\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", closes: true, again: true},
	{name: "a negative length", says: "HTTP/1.1 201 Created\r\nContent-Length: -2\r\n\r\n{}", closes: true, again: true},
	{name: "a length that is a word", says: "HTTP/1.1 201 Created\r\nContent-Length: two\r\n\r\n{}", closes: true, again: true},
	{name: "a status of four digits", says: "HTTP/1.1 2011 Created\r\n\r\n", closes: true, again: true},
	{name: "not HTTP", says: "SSH-2.0-OpenSSH_9.6\r\n", closes: true, again: true},
	{name: "bytes that no field has", says: "HTTP/1.1 201 Created\r\nA\x00b: c\r\n\r\n", closes: true, again: true},
	{name: "header fields byte by byte", tells: byteByByte, got: 201, text: "{}"},
	{name: "trailers", says: "HTTP/1.1 201 Created\r\n" + jsonFields + "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n", got: 201, text: "{}"},
	{name: "HTTP/1.0 without a length", says: "HTTP/1.0 201 Created\r\n\r\nall", closes: true, got: 201, text: "all"},
	{name: "closed with the answer", says: http11(503, "", "Connection", "close"), closes: true, again: true},
	{name: "kept alive in words only", says: http11(503, "", "Connection", "keep-alive"), closes: true, again: true},
	{name: "closed in words only", says: http11(503, "", "Connection", "close"), again: true},

	{name: "early hints", says: strings.Repeat("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 3) + http11(201, "{}"), got: 201, text: "{}"},
	{name: "a flood of early hints", says: strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 100_000), closes: true, again: true},
	{name: "another protocol", says: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: none\r\nConnection: Upgrade\r\n\r\n", closes: true, got: 101},
	{name: "425", says: http11(425, ""), again: true},
	{name: "429 for ever", says: http11(429, "", "Retry-After", "0"), forever: true, got: 429, requests: 4},
	{name: "503 for ever", says: http11(503, "busy"), forever: true, got: 503, text: "busy", requests: 4},
	{name: "501", says: http11(501, ""), got: 501},
	{name: "401, and then 200", says: http11(401, "", "WWW-Authenticate", "Bearer"), got: 401},
	{name: "408", says: http11(408, "", "Connection", "close"), closes: true, again: true},
	{name: "a replayed 500", says: http11(500, "", "Idempotent-Replayed", "true"), got: 500},
	{name: "a replayed 503 with Retry-After", says: http11(503, "", "Idempotent-Replayed", "true", "Retry-After", "0"), got: 503},
	{name: "a replayed 201 that breaks off", says: "HTTP/1.1 201 Created\r\nIdempotent-Replayed: true\r\nContent-Length: 100\r\n\r\nhalf", closes: true, again: true},
	{name: "an empty marker", says: http11(503, "", "Idempotent-Replayed", ""), again: true},

	{name: "409", says: http11(409, ""), conflict: true, got: 409},
	{name: "409 in HTML", says: http11(409, "<h1>Conflict</h1>", "Content-Type", "text/html"), conflict: true, got: 409, text: "<h1>Conflict</h1>"},
	{name: "409 in broken JSON", says: http11(409, `{"type":`, "Content-Type", "application/json"), conflict: true, got: 409, text: `{"type":`},
	{name: "409 in JSON of another shape", says: http11(409, `["idempotency-in-flight"]`, "Content-Type", "application/json"), conflict: true, got: 409, text: `["idempotency-in-flight"]`},
	{name: "409 with a type that is no string", says: http11(409, `{"type":{"type":"idempotency-in-flight"}}`, "Content-Type", "application/json"), conflict: true, got: 409, text: `{"type":{"type":"idempotency-in-flight"}}`},
	{name: "409, replayed", says: http11(409, "", "Idempotent-Replayed", "true"), got: 409},
	{name: "in flight, as a fragment", says: conflict("https://example.com/problems#idempotency-in-flight"), again: true},
	{name: "in flight, relative", says: conflict("idempotency-in-flight"), again: true},
	{name: "in flight, relative to above", says: conflict("../problems/idempotency-in-flight"), again: true},
	{name: "in flight, a path", says: conflict("/problems/idempotency-in-flight"), again: true},
	{name: "in flight, media type in capitals", says: http11(409, `{"type":"urn:x:idempotency-in-flight"}`, "Content-Type", "APPLICATION/PROBLEM+JSON; Charset=UTF-8"), again: true},
	{name: "in flight in capitals", says: conflict("URN:X:IDEMPOTENCY-IN-FLIGHT"), got: 409, text: `{"type":"URN:X:IDEMPOTENCY-IN-FLIGHT"}`},
	{name: "in flight, but the member's name in capitals", says: http11(409, `{"TYPE":"urn:x:idempotency-in-flight"}`, "Content-Type", "application/problem+json"), conflict: true, got: 409, text: `{"TYPE":"urn:x:idempotency-in-flight"}`},
	{name: "in flight in a query", says: conflict("https://example.com/problems?type=idempotency-in-flight"), got: 409, text: `{"type":"https://example.com/problems?type=idempotency-in-flight"}`},
	{name: "in flight, but with the marker", says: http11(409, `{"type":"urn:x:idempotency-in-flight"}`, "Content-Type", "application/problem+json", "Idempotent-Replayed", "true"), got: 409, text: `{"type":"urn:x:idempotency-in-flight"}`},
	{name: "in flight, but 200", says: http11(200, `{"type":"urn:x:idempotency-in-flight"}`, "Content-Type", "application/problem+json"), got: 200, text: `{"type":"urn:x:idempotency-in-flight"}`},
	{name: "key reused", says: http11(422, `{"type":"urn:x:idempotency-key-reused"}`, "Content-Type", "application/problem+json"), got: 422, text: `{"type":"urn:x:idempotency-key-reused"}`},
	{name: "outcome unknown", says: http11(503, `{"type":"urn:x:idempotency-outcome-unknown"}`, "Content-Type", "application/problem+json", "Retry-After", "0"), got: 503, text: `{"type":"urn:x:idempotency-outcome-unknown"}`},

	retryLater("99999999999999999999999"), retryLater("2147483648"), retryLater("-1"), retryLater("0.5"), retryLater("1e9"), retryLater("soon"), retryLater(""),
	retryLater("Thu, 01 Jan 1970 00:00:00 GMT"), retryLater("Fri, 31 Dec 9999 23:59:59 GMT"), retryLater("Thu, 31 Feb 2026 25:00:00 GMT"), retryLater("0, 0"),

	{name: "307 to itself", says: http11(307, "", "Location", "/orders"), forever: true, got: 307, requests: 10},
	{name: "308 to itself", says: http11(308, "", "Location", "/orders"), forever: true, got: 308, requests: 10},
	{name: "307 elsewhere", says: http11(307, "", "Location", "/elsewhere"), deaf: true, again: true},
	{name: "308 elsewhere", says: http11(308, "", "Location", "/elsewhere"), deaf: true, again: true},
	{name: "307 nowhere", says: http11(307, ""), got: 307},
}

// finals are the statuses that are final, whatever comes with them.
func finals() []lie {
	var finals []lie
	for _, status := range []int{
		200, 202, 204, 400, 402, 403, 404, 405, 406, 407, 410, 411, 412, 413, 414, 415, 416, 417, 418, 421, 422, 423, 424, 426, 428, 431, 451,
		505, 507, 508, 511, 599, 999,
	} {
		finals = append(finals, lie{name: fmt.Sprint(status), says: http11(status, "", "Retry-After", "0"), got: status})
	}
	return finals
}

// endless says 503 and goes on until the client hangs up.
func endless(l *liar) step {
	return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
		l.receive(r, seen)
		_, err := io.WriteString(conn, "HTTP/1.1 503 Busy\r\n"+jsonFields+"\r\n")
		for err == nil {
			_, err = conn.Write(bytes.Repeat([]byte(" "), 1<<16))
		}
		conn.Close()
	}
}

// byteByByte sends each byte of an answer in a packet of its own.
func byteByByte(l *liar) step {
	return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
		l.receive(r, seen)
		for _, b := range []byte(http11(201, "{}")) {
			if _, err := conn.Write([]byte{b}); err != nil {
				return
			}
		}
	}
}

// step is the lie as a liar tells it.
func (lie lie) step(l *liar) step {
	if lie.tells != nil {
		return lie.tells(l)
	}
	return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
		l.receive(r, seen)
		_, _ = io.WriteString(conn, lie.says)
		switch {
		case lie.resets:
			_ = conn.SetLinger(0)
			conn.Close()
		case lie.closes:
			conn.Close()
		}
	}
}

// TestALiarGetsOneEffect tells every lie to every profile's client, by a
// generated method and by a Transport, after the liar has done what was asked and
// without having done it: there is one effect, with one key on every attempt,
// none after an answer that is final, and nothing is left behind.
func TestALiarGetsOneEffect(t *testing.T) {
	for _, p := range profiles {
		for _, lie := range append(finals(), lies...) {
			for _, acts := range []bool{false, true} {
				if acts && lie.deaf {
					continue
				}
				for _, form := range []string{"method", "transport"} {
					t.Run(fmt.Sprintf("%s/%s/acts=%v/%s", p.name, lie.name, acts, form), func(t *testing.T) {
						leavesNothing(t, func(t *testing.T, open *atomic.Int64) { lie.tell(t, newLiar(t, p, acts), form, open) })
					})
				}
			}
		}
	}
}

// leavesNothing fails if test leaves bodies open or goroutines running.
func leavesNothing(t *testing.T, test func(*testing.T, *atomic.Int64)) {
	t.Helper()
	before := runtime.NumGoroutine()
	var open atomic.Int64
	t.Run("call", func(t *testing.T) { test(t, &open) })
	if n := open.Load(); n != 0 {
		t.Errorf("%d bodies are still open", n)
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<16)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// counting counts the bodies of answers that are open.
type counting struct {
	http.RoundTripper
	open *atomic.Int64
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		c.open.Add(1)
		resp.Body = &counted{ReadCloser: resp.Body, open: c.open}
	}
	return resp, err
}

// tell tells the lie to one call.
func (lie lie) tell(t *testing.T, l *liar, form string, open *atomic.Int64) {
	steps := []step{lie.step(l)}
	if !lie.forever {
		steps = append(steps, l.truth)
	}
	url, seen := wire(t, steps...)
	options := append([]idempotentclient.Option{
		idempotentclient.WithRetry(createOrder.Retry),
		idempotentclient.WithObserver(func(_ context.Context, a idempotentclient.Attempt) {
			if a.Wait > createOrder.Retry.Max {
				t.Errorf("waits %v, more than %v", a.Wait, createOrder.Retry.Max)
			}
		}),
	}, l.options...)
	config := idempotentclient.NewConfig(options...)
	inner := netClient(t)
	inner.Transport = counting{inner.Transport, open}
	var resp *http.Response
	var err error
	if form == "method" {
		c := api{Server: url, Client: inner, idempotency: config}
		resp, err = c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	} else {
		inner.Transport = &idempotentclient.Transport{Base: inner.Transport, Config: config}
		resp, err = inner.Post(url+"/orders", "text/plain", strings.NewReader("order"))
	}

	again := lie.again || lie.conflict && len(l.options) > 0
	requests := lie.requests
	switch {
	case requests > 0:
	case again:
		requests = 2
	default:
		requests = 1
	}
	status, text, runs := lie.got, lie.text, int32(0)
	if l.acts || again {
		runs = 1
	}
	if again {
		status, text = http.StatusCreated, `{"id":1}`
		if l.acts {
			status = l.replayed
		}
	}
	if resp != nil && resp.StatusCode != status || status == 0 && err == nil || status > 0 && resp == nil {
		t.Errorf("got %v, %v; want status %d", resp, err, status)
	}
	if resp != nil && err == nil {
		got, readErr := io.ReadAll(resp.Body)
		if readErr != nil || string(got) != text {
			t.Errorf("the body is %q, %v; want %q", got, readErr, text)
		}
		resp.Body.Close()
		if replayed := idempotentclient.Replayed(resp); again && replayed != l.acts {
			t.Errorf("replayed: %v; want %v", replayed, l.acts)
		}
	}
	key := seen.oneKey(t, requests, "order")
	if err == nil && idempotentclient.KeyOf(resp) != key {
		t.Errorf("KeyOf is %q, and %q was sent", idempotentclient.KeyOf(resp), key)
	}
	if got := l.runs.Load(); got != runs {
		t.Errorf("%d effects, want %d", got, runs)
	}
}
