package idempotentclient_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// quiet takes what net/http's server logs of handshakes that fail on purpose.
var quiet = stdlog.New(io.Discard, "", 0)

var (
	created = say(http11(201, `{"id":1}`, "Content-Type", "application/json"))
	busy    = say(http11(503, "busy"))
)

func TestServersThatMisbehave(t *testing.T) {
	const half = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n"
	for _, test := range []struct {
		name  string
		steps []step
		seen  int // requests that the server read
	}{
		{"reset after reading the request", []step{resetAfterReading, created}, 2},
		{"reset before reading the request", []step{resetBeforeReading, created}, 1},
		{"no answer", []step{sayAndClose(""), created}, 2},
		{"half a status line", []step{sayAndClose("HTTP/1.1 201 Cre"), created}, 2},
		{"half a header", []step{sayAndClose(half), created}, 2},
		{"half a body", []step{sayAndClose(half + "Content-Length: 8\r\n\r\n{\"id\""), created}, 2},
		{"half a chunked body", []step{sayAndClose(half + "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"id\"\r\n"), created}, 2},
		{"not HTTP", []step{sayAndClose("SSH-2.0-OpenSSH_9.6\r\n"), created}, 2},
		{"half of a 503", []step{sayAndClose("HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nbu"), created}, 2},
		{"all of it", []step{resetAfterReading, busy, sayAndClose(half), created}, 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			url, seen := wire(t, test.steps...)
			c := api{Server: url, Client: netClient(t)}
			resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
			if err != nil {
				t.Fatal(err)
			}
			if text := drain(t, resp); resp.StatusCode != 201 || text != `{"id":1}` {
				t.Fatalf("got %d %q", resp.StatusCode, text)
			}
			if key := seen.oneKey(t, test.seen, "order"); idempotentclient.KeyOf(resp) != key {
				t.Fatalf("KeyOf is %q, but %q was sent", idempotentclient.KeyOf(resp), key)
			}
		})
	}
}

func TestASlowAttemptIsGivenUpByTheClientsTimeout(t *testing.T) {
	url, seen := wire(t, silence, created)
	client := netClient(t)
	client.Timeout = 2 * time.Second
	c := api{Server: url, Client: client}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 2, "order")
}

func TestAServerThatNeverAnswers(t *testing.T) {
	url, seen := wire(t, resetAfterReading)
	c := api{Server: url, Client: netClient(t)}
	_, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	var lost *idempotentclient.Error
	if !errors.As(err, &lost) || lost.Attempts != 4 || errors.Is(err, idempotentclient.ErrNotSent) {
		t.Fatalf("got %#v", err)
	}
	if key := seen.oneKey(t, 4, "order"); lost.Key != key || !strings.Contains(err.Error(), key) {
		t.Fatalf("the error %q does not have the key %q", err, key)
	}
}

func TestAnAnswerThatAlwaysBreaksOff(t *testing.T) {
	url, seen := wire(t, sayAndClose("HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\nhalf"))
	c := api{Server: url, Client: netClient(t)}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); string(text) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("the body is %q, %v", text, err)
	}
	seen.oneKey(t, 4, "order")
}

func TestAFinalAnswerThatBreaksOffIsNotRepeated(t *testing.T) {
	url, seen := wire(t, sayAndClose("HTTP/1.1 422 No\r\nContent-Length: 8\r\n\r\nhalf"))
	c := api{Server: url, Client: netClient(t)}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 422 {
		t.Fatalf("got %v, %v", resp, err)
	}
	resp.Body.Close()
	seen.oneKey(t, 1, "order")
}

// Whoever reads the body may never see the answer, as the callers of
// ClientWithResponses.
func TestABodyThatBreaksOffNamesTheKey(t *testing.T) {
	url, seen := wire(t, sayAndClose("HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"))
	c := api{Server: url, Client: netClient(t)}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	var lost *idempotentclient.Error
	if string(text) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) || !errors.As(err, &lost) || lost.Attempts != 1 {
		t.Fatalf("got %q, %v", text, err)
	}
	if key := seen.oneKey(t, 1, "order"); lost.Key != key {
		t.Errorf("the error names the key %q, want %q", lost.Key, key)
	}
}

// It may have said that the key is in flight.
func TestAConflictThatBreaksOffIsRepeated(t *testing.T) {
	url, seen := wire(t, sayAndClose("HTTP/1.1 409 Conflict\r\nContent-Type: application/problem+json\r\nContent-Length: 50\r\n\r\n{\"type\":"), created)
	c := api{Server: url, Client: netClient(t)}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 2, "order")

	// Nor is it taken for one that said nothing.
	url, seen = wire(t, sayAndClose("HTTP/1.1 409 Conflict\r\nContent-Type: application/problem+json\r\nContent-Length: 50\r\n\r\n{\"type\":"))
	c = api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(idempotentclient.WithConflictsInFlight())}
	if resp, err = c.CreateOrder(t.Context(), "", strings.NewReader("order")); err != nil || idempotentclient.Check(resp) != nil {
		t.Fatalf("got %v, %v, %v", resp, err, idempotentclient.Check(resp))
	}
	resp.Body.Close()
	seen.oneKey(t, 4, "order")
}

func TestTrailersOfABodyThatIsSentOnce(t *testing.T) {
	got := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		got <- r.Trailer.Get("Digest")
	}))
	defer server.Close()
	c := api{Server: server.URL, Client: netClient(t), idempotency: idempotentclient.NewConfig(idempotentclient.NoRetry())}
	resp, err := c.CreateOrder(t.Context(), "", unrewindable{strings.NewReader("order")}, func(_ context.Context, r *http.Request) error {
		r.Trailer = http.Header{"Digest": nil}
		r.Body = atEnd{r.Body, func() { r.Trailer.Set("Digest", "sum") }}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	if digest := <-got; digest != "sum" {
		t.Fatalf("the trailer is %q", digest)
	}
}

// atEnd is a body that does something at its end.
type atEnd struct {
	io.ReadCloser
	do func()
}

func (b atEnd) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.do()
	}
	return n, err
}

func TestAStreamIsNotReadAhead(t *testing.T) {
	url, _ := wire(t, func(c *net.TCPConn, r *bufio.Reader, seen *log) {
		say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata:\n\r\n")(c, r, seen)
		r.Peek(1) // the stream stays open
	})
	c := api{Server: url, Client: netClient(t)}
	resp, err := c.CreateOrder(t.Context(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
}

func TestAnAnswerOverTheLimitIsWhole(t *testing.T) {
	text := `"` + strings.Repeat("x", 1000) + `"`
	url, _ := wire(t, sayAndClose("HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n\r\n"+text))
	c := api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(idempotentclient.WithBodyLimit(64))}
	resp, err := c.CreateOrder(t.Context(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := drain(t, resp); got != text {
		t.Fatalf("the body has %d bytes, want %d", len(got), len(text))
	}
}

func TestADeadlineEndsACall(t *testing.T) {
	url, seen := wire(t, silence)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	c := api{Server: url, Client: netClient(t)}
	_, err := c.CreateOrder(ctx, "", strings.NewReader("order"))
	var lost *idempotentclient.Error
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &lost) || lost.Attempts != 1 {
		t.Fatalf("got %v", err)
	}
	if n := len(seen.requests()); n > 1 {
		t.Fatalf("the server saw %d requests", n)
	}
}

// net/http sends a request with an Idempotency-Key again by itself when the
// kept-alive connection breaks before the first byte of an answer.
func TestWhatNetHTTPRepeatsCountsAsAttempts(t *testing.T) {
	url, seen := wire(t, busy, resetAfterReading, busy)
	var attempts int
	c := api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(
		idempotentclient.WithObserver(func(context.Context, idempotentclient.Attempt) { attempts++ }))}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
	if attempts != 3 {
		t.Fatalf("%d attempts of ours, want 3: net/http repeated none by itself", attempts)
	}
}

func TestNetHTTPNeverRepeatsABodyThatAnEditorReplaced(t *testing.T) {
	url, seen := wire(t, busy, resetAfterReading, busy)
	c := api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(idempotentclient.NoRetry())}
	for range 2 { // the second on the connection of the first
		resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("orders"), replaceBody("sealed"))
		if err == nil {
			drain(t, resp)
		}
	}
	for _, r := range seen.requests() {
		if r.body != "sealed" {
			t.Fatalf("the server saw %v", seen.requests())
		}
	}
}

// A token is a transport that asks for one before each request, in the request's
// context.
type token struct{ http.RoundTripper }

func (t token) RoundTrip(r *http.Request) (*http.Response, error) {
	ask, err := http.NewRequestWithContext(r.Context(), http.MethodGet, "http://"+r.URL.Host+"/token", nil)
	if err != nil {
		return nil, err
	}
	resp, err := t.RoundTripper.RoundTrip(ask)
	if err != nil {
		return nil, err
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return t.RoundTripper.RoundTrip(r)
}

func TestRequestsOfOthersAreNoAttempts(t *testing.T) {
	ok := say(http11(200, "token"))
	url, seen := wire(t, ok, busy, ok, busy, ok, busy, ok, created)
	c := api{Server: url, Client: &http.Client{Transport: token{netClient(t).Transport}}}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v after %v", resp, err, seen.requests())
	}
	drain(t, resp)
}

// When all connections that were kept alive break, net/http tries one after the
// other. One attempt is left for a new one.
func TestNetHTTPRepeatsNoMoreThanTheCallMay(t *testing.T) {
	const idle = 8
	for name, status := range map[string]int{"a new one, too": 0, "no new one": http.StatusCreated} {
		t.Run(name, func(t *testing.T) {
			type warmed struct{}
			var together sync.WaitGroup
			together.Add(idle)
			var sent atomic.Int32
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				warm := r.Context().Value(warmed{}).(*atomic.Bool)
				if r.URL.Path == "/warm" {
					warm.Store(true)
					together.Done()
					together.Wait()
					return
				}
				io.Copy(io.Discard, r.Body)
				sent.Add(1)
				if warm.Load() || status == 0 {
					panic(http.ErrAbortHandler)
				}
				w.WriteHeader(status)
			}))
			server.Config.ErrorLog = quiet
			server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
				return context.WithValue(ctx, warmed{}, new(atomic.Bool))
			}
			server.Start()
			defer server.Close()
			client := netClient(t)
			client.Transport.(*http.Transport).MaxIdleConnsPerHost = idle
			var warm sync.WaitGroup
			for range idle {
				warm.Go(func() {
					resp, err := client.Get(server.URL + "/warm")
					if err != nil {
						t.Error(err)
						return
					}
					drain(t, resp)
				})
			}
			warm.Wait()
			c := api{Server: server.URL, Client: client}
			resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
			if status != 0 {
				if err != nil || resp.StatusCode != status {
					t.Fatalf("got %v, %v", resp, err)
				}
				drain(t, resp)
			} else if lost := new(idempotentclient.Error); !errors.As(err, &lost) || lost.Attempts != 2 || errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			if n := sent.Load(); n != 4 {
				t.Errorf("%d requests on the wire, want 4: %v", n, err)
			}
		})
	}
}

// A retrier is a client that sends each request four times, and counts them.
type retrier struct {
	*http.Client
	sent int
}

func (d *retrier) Do(r *http.Request) (resp *http.Response, err error) {
	for range 4 {
		if resp != nil {
			resp.Body.Close()
		}
		r.Body, _ = r.GetBody()
		d.sent++
		resp, err = d.Client.Do(r)
	}
	return resp, err
}

func TestAClientThatRetriesByItselfIsNotMultiplied(t *testing.T) {
	url, seen := wire(t, busy)
	c := api{Server: url, Client: &retrier{Client: netClient(t)}}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 503 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
}

func TestWhatAClientRepeatsBeforeItIsInFlightCounts(t *testing.T) {
	inFlight := say(http11(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "application/problem+json"))
	url, seen := wire(t, busy, busy, busy, inFlight, created)
	c := api{Server: url, Client: &retrier{Client: netClient(t)}, idempotency: idempotentclient.NewConfig(
		idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 3}))}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 409 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
}

func TestARedirectToAnErrorIsOneAttempt(t *testing.T) {
	temporarily := say(http11(307, "", "Location", "/elsewhere", "Connection", "close"))
	url, seen := wire(t, temporarily, resetAfterReading, temporarily, created)
	c := api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(
		idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 2}))}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
}

func TestRedirects(t *testing.T) {
	temporarily := say(http11(307, "", "Location", "/elsewhere"))
	url, seen := wire(t, temporarily, busy, temporarily, created)
	c := api{Server: url, Client: netClient(t), idempotency: idempotentclient.NewConfig(
		idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 2}))}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	if key := seen.oneKey(t, 4, "order"); idempotentclient.KeyOf(resp) != key {
		t.Fatalf("KeyOf is %q, but %q was sent", idempotentclient.KeyOf(resp), key)
	}
}

func TestARefusedRedirectIsFinal(t *testing.T) {
	url, seen := wire(t, say(http11(307, "", "Location", "/elsewhere")))
	client, refusal := netClient(t), errors.New("no redirects here")
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return refusal }
	c := api{Server: url, Client: client}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if !errors.Is(err, refusal) || resp == nil || resp.StatusCode != 307 {
		t.Fatalf("got %v, %v; want h2, as from http.Client", resp, err)
	}
	seen.oneKey(t, 1, "order")
}

func TestAnAnswerThatSwitchesProtocolsIsWrittenTo(t *testing.T) {
	url, _ := wire(t, func(c *net.TCPConn, r *bufio.Reader, seen *log) {
		say("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")(c, r, seen)
		io.Copy(c, r)
	})
	var attempt context.Context
	client := netClient(t)
	c := api{Server: url, Client: doerFunc(func(r *http.Request) (*http.Response, error) {
		attempt = r.Context()
		return client.Do(r)
	})}
	resp, err := c.CreateOrder(t.Context(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	conn, ok := resp.Body.(io.ReadWriteCloser)
	if !ok {
		t.Fatalf("the body is a %T", resp.Body)
	}
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if attempt.Err() != nil {
		t.Error("the attempt ended before its body")
	}
	conn.Close()
	if attempt.Err() == nil {
		t.Error("the attempt outlives its body")
	}
	if resp.Request.Context().Err() != nil {
		t.Error("the context of an answer's request ends with its body")
	}
}

func TestErrorsThatAnotherAttemptCannotMend(t *testing.T) {
	untrusted := httptest.NewTLSServer(http.NotFoundHandler())
	untrusted.Config.ErrorLog = quiet
	defer untrusted.Close()
	badField := func(_ context.Context, r *http.Request) error { r.Header.Set("X-Bad", "a\nb"); return nil }
	for name, test := range map[string]struct {
		server  string
		editors []editor
	}{
		"scheme":       {server: "gopher://127.0.0.1"},
		"no host":      {server: "http://"},
		"header field": {server: untrusted.URL, editors: []editor{badField}},
		"certificate":  {server: untrusted.URL},
	} {
		t.Run(name, func(t *testing.T) {
			c := api{Server: test.server, Client: netClient(t)}
			_, err := c.CreateOrder(t.Context(), "", nil, test.editors...)
			var failed *idempotentclient.Error
			if !errors.As(err, &failed) || failed.Attempts != 1 {
				t.Fatalf("got %v, want an error after one attempt", err)
			}
		})
	}
}

func TestNobodyListening(t *testing.T) {
	retrying := &retrier{Client: netClient(t)}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	c := api{Server: "http://" + listener.Addr().String(), Client: netClient(t)}
	_, err = c.CreateOrder(t.Context(), "", nil)
	var lost *idempotentclient.Error
	if !errors.As(err, &lost) || lost.Attempts != 4 {
		t.Fatalf("got %v, want an error after four attempts", err)
	}
	c.Client = retrying
	if _, err := c.CreateOrder(t.Context(), "", nil); err == nil || retrying.sent != 4 {
		t.Fatalf("got %v after %d attempts of a client that retries by itself, want 4", err, retrying.sent)
	}
}

// Answers that are given up are read and closed, so that their connection
// serves the next attempt.
func TestAttemptsShareAConnection(t *testing.T) {
	url, seen := wire(t,
		busy,
		say(http11(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "application/problem+json")),
		say("HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
		func(c *net.TCPConn, r *bufio.Reader, seen *log) {
			say("HTTP/1.1 503 Busy\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n")(c, r, seen)
			io.WriteString(c, "0\r\n\r\n")
		},
		created)
	client, dials := netClient(t), 0
	client.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		dials++
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	c := api{Server: url, Client: client, idempotency: idempotentclient.NewConfig(
		idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 5, Max: 300 * time.Millisecond}))}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	seen.oneKey(t, 5, "order")
	if dials != 1 {
		t.Fatalf("%d connections, want 1", dials)
	}
}

func TestHTTP2(t *testing.T) {
	type conn struct{}
	var seen log
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch seen.add(r) {
		case 1: // GOAWAY behind the answer
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2: // RST_STREAM
			panic(http.ErrAbortHandler)
		case 3:
			r.Context().Value(conn{}).(net.Conn).Close()
		default:
			w.WriteHeader(http.StatusCreated)
		}
	}))
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	server.Config.Protocols, server.Config.ErrorLog = h2, quiet
	server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, conn{}, c) }
	server.Start()
	defer server.Close()
	client := netClient(t)
	client.Transport.(*http.Transport).Protocols = h2
	c := api{Server: server.URL, Client: client}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	if resp.StatusCode != 201 || resp.ProtoMajor != 2 {
		t.Fatalf("got %d over %s", resp.StatusCode, resp.Proto)
	}
	seen.oneKey(t, 4, "order")
}

// counted counts bodies that are open.
type counted struct {
	io.ReadCloser
	open *atomic.Int64
	once sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.ReadCloser.Close()
}

func TestNothingLeaks(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("calls", func(t *testing.T) {
		url, _ := wire(t, busy, resetAfterReading, sayAndClose("HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\nhalf"),
			say("HTTP/1.1 503 Busy\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n"), // never ends
			say(http11(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "application/problem+json")),
			created)
		var open atomic.Int64
		inner := netClient(t)
		c := api{Server: url, Client: doerFunc(func(r *http.Request) (*http.Response, error) {
			resp, err := inner.Do(r)
			if resp != nil {
				open.Add(1)
				resp.Body = &counted{ReadCloser: resp.Body, open: &open}
			}
			return resp, err
		}), idempotency: idempotentclient.NewConfig(idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 10}))}
		keys := map[string]bool{}
		for range 20 {
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := c.CreateOrder(ctx, "", unrewindable{strings.NewReader("order")})
			if err != nil {
				t.Fatal(err)
			}
			keys[idempotentclient.KeyOf(resp)] = true
			drain(t, resp)
			cancel()
		}
		if len(keys) != 20 {
			t.Errorf("20 calls had %d keys", len(keys))
		}
		if n := open.Load(); n != 0 {
			t.Errorf("%d bodies are still open", n)
		}
	})
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<16)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
		runtime.Gosched()
	}
}

func TestCallsOfOneClientAtTheSameTime(t *testing.T) {
	var mu sync.Mutex
	tries := map[string]int{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		key := r.Header.Get("Idempotency-Key")
		if tries[key]++; tries[key] == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()
	c := api{Server: server.URL, Client: netClient(t)}
	var calls sync.WaitGroup
	for range 50 {
		calls.Go(func() {
			resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
	}
	calls.Wait()
	if len(tries) != 50 {
		t.Fatalf("50 calls had %d keys", len(tries))
	}
	for key, n := range tries {
		if n != 2 {
			t.Errorf("key %s was sent %d times, want 2", key, n)
		}
	}
}
