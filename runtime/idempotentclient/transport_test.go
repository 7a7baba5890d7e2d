package idempotentclient_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

var quick = idempotentclient.NewConfig(idempotentclient.WithRetry(idempotentclient.Retry{Base: time.Millisecond}))

func TestTransportKeepsOneKey(t *testing.T) {
	url, seen := wire(t, busy, resetAfterReading, created)
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick}, Timeout: 30 * time.Second}
	req, err := http.NewRequest(http.MethodPatch, url, strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	if key := seen.oneKey(t, 3, "order"); !v4.MatchString(key) || idempotentclient.KeyOf(resp) != key {
		t.Fatalf("the key is %q, KeyOf %q", key, idempotentclient.KeyOf(resp))
	}
	if len(req.Header) != 0 {
		t.Fatalf("the caller's request was changed: %v", req.Header)
	}
}

func TestTransportRefusesTwoKeys(t *testing.T) {
	req, err := http.NewRequest(http.MethodPost, "http://127.0.0.1:1", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header["Idempotency-Key"] = []string{"a", "b"}
	if _, err := (&http.Client{Transport: &idempotentclient.Transport{}}).Do(req); !errors.Is(err, idempotentclient.ErrNotSent) {
		t.Fatalf("got %v, want ErrNotSent", err)
	}
}

func TestTransportRefusals(t *testing.T) {
	url, _ := wire(t, say(http11(422, `{"type":"urn:x:idempotency-key-reused"}`, "Content-Type", "application/problem+json")))
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport}, Timeout: 30 * time.Second}
	resp, err := client.Post(url, "text/plain", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	var p *idempotentclient.Problem
	if !errors.As(idempotentclient.Check(resp), &p) || p.Code != idempotentclient.KeyReused {
		t.Fatalf("Check is %v", idempotentclient.Check(resp))
	}
}

func TestTransportFollowsARedirectWithOneKey(t *testing.T) {
	temporarily := say(http11(307, "", "Location", "/elsewhere"))
	for name, key := range map[string]string{"made": "", "in the context": "mine"} {
		t.Run(name, func(t *testing.T) {
			url, seen := wire(t, busy, temporarily, busy, created)
			client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick}}
			ctx := t.Context()
			if key != "" {
				ctx = idempotentclient.WithKey(ctx, key)
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("order"))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			drain(t, resp)
			if got := seen.oneKey(t, 4, "order"); key != "" && got != key {
				t.Fatalf("the key is %q, want %q", got, key)
			}
		})
	}
}

func TestTransportCountsBehindARedirect(t *testing.T) {
	url, seen := wire(t, say(http11(307, "", "Location", "/elsewhere")), busy, resetAfterReading, busy) // the last by net/http itself
	three := idempotentclient.NewConfig(idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 3, Base: time.Millisecond}))
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: three}}
	resp, err := client.Post(url, "text/plain", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
}

func TestTransportRepeatsNoMoreBehindRedirects(t *testing.T) {
	temporarily := say(http11(307, "", "Location", "/elsewhere"))
	url, seen := wire(t, busy, busy, temporarily, busy, busy, busy)
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick}}
	resp, err := client.Post(url, "text/plain", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 503 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 5, "order") // four, and the redirect
}

// What was redirected was sent, with the key.
func TestTransportNeverSaysUnsentBehindARedirect(t *testing.T) {
	url, seen := wire(t, say(http11(307, "", "Location", "/elsewhere")))
	ctx, cancel := context.WithCancel(t.Context())
	client := &http.Client{
		Transport:     &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick},
		CheckRedirect: func(*http.Request, []*http.Request) error { cancel(); return nil },
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.Do(req)
	var lost *idempotentclient.Error
	if key := seen.oneKey(t, 1, "order"); !errors.As(err, &lost) || lost.Key != key || errors.Is(err, idempotentclient.ErrNotSent) || !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestTransportFollowsARedirectToFewerAttempts(t *testing.T) {
	url, seen := wire(t, busy, busy, say(http11(307, "", "Location", "/few")), created)
	many, few := createOrder, createOrder
	few.Retry.MaxAttempts = 2
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Operation: func(r *http.Request) *idempotentclient.Operation {
		if r.URL.Path == "/few" {
			return &few
		}
		return &many
	}}}
	resp, err := client.Post(url, "text/plain", strings.NewReader("order"))
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("got %v, %v", resp, err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")
}

// An answer's context may be that of the next request.
func TestTransportTakesUpNoCallThatIsOver(t *testing.T) {
	url, seen := wire(t, created, busy, created)
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick}}
	var keys []string
	ctx := t.Context()
	for range 2 {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("order"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil || resp.StatusCode != 201 {
			t.Fatalf("got %v, %v", resp, err)
		}
		drain(t, resp)
		keys, ctx = append(keys, idempotentclient.KeyOf(resp)), resp.Request.Context()
	}
	requests := seen.requests()
	if len(requests) != 3 || keys[0] == keys[1] || requests[0].keys[0] != keys[0] || requests[2].keys[0] != keys[1] {
		t.Fatalf("the keys are %v, and the server saw %v", keys, requests)
	}
}

func TestTransportClosesIdleConnections(t *testing.T) {
	closed := make(chan struct{})
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			close(closed)
		}
	}
	server.Start()
	defer server.Close()
	client := &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport}}
	resp, err := client.Post(server.URL, "text/plain", nil)
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	client.CloseIdleConnections()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Fatal("the connection is still open")
	}
}

func TestTransportLeavesOtherRequestsAlone(t *testing.T) {
	url, seen := wire(t, busy)
	onlyOrders := func(r *http.Request) *idempotentclient.Operation {
		if r.URL.Path == "/orders" {
			return &createOrder
		}
		return nil
	}
	base := netClient(t).Transport
	for _, test := range []struct {
		transport    idempotentclient.Transport
		method, path string
		sent         int
	}{
		{idempotentclient.Transport{Base: base, Config: quick}, http.MethodGet, "/", 1},
		{idempotentclient.Transport{Base: base, Config: quick}, http.MethodPut, "/", 1},
		{idempotentclient.Transport{Base: base, Operation: onlyOrders}, http.MethodPost, "/other", 1},
		{idempotentclient.Transport{Base: base, Operation: onlyOrders}, http.MethodPost, "/orders", 4},
	} {
		before := len(seen.requests())
		req, err := http.NewRequest(test.method, url+test.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: &test.transport}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		drain(t, resp)
		requests := seen.requests()[before:]
		if len(requests) != test.sent || test.sent == 1 && len(requests[0].keys) != 0 {
			t.Errorf("%s %s: the server saw %v", test.method, test.path, requests)
		}
	}
}

func TestTransportBelowAGeneratedMethodPassesThrough(t *testing.T) {
	url, seen := wire(t, busy)
	c := api{Server: url, Client: &http.Client{Transport: &idempotentclient.Transport{Base: netClient(t).Transport, Config: quick}}}
	resp, err := c.CreateOrder(idempotentclient.WithKey(t.Context(), "mine"), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	seen.oneKey(t, 4, "order")

	natural := idempotentclient.Operation{Natural: true, NoRetry: true}
	if resp, err = c.call(t.Context(), &natural, "/", "", nil); err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	if requests := seen.requests()[4:]; len(requests) != 1 || len(requests[0].keys) != 0 {
		t.Fatalf("of a natural operation the server saw %v", requests)
	}
}

func TestTransportClosesTheBodyItDoesNotSend(t *testing.T) {
	b := &closing{Reader: strings.NewReader("order")}
	req, err := http.NewRequestWithContext(idempotentclient.WithKey(t.Context(), "a\nb"), http.MethodPost, "http://127.0.0.1:1", io.Reader(b))
	if err != nil {
		t.Fatal(err)
	}
	_, err = (&http.Client{Transport: &idempotentclient.Transport{}}).Do(req)
	if !errors.Is(err, idempotentclient.ErrNotSent) || b.closed == 0 {
		t.Fatalf("got %v, closed: %v", err, b.closed)
	}
}
