package idempotentclient_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// A client without generated methods: the Transport gives each POST and PATCH a
// key of its own and keeps it over the attempts.
func ExampleTransport() {
	var attempts atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if attempts.Add(1) < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusCreated)
	}))
	defer server.Close()

	client := &http.Client{Transport: &idempotentclient.Transport{
		Config: idempotentclient.NewConfig(
			idempotentclient.WithRetry(idempotentclient.Retry{Base: 10 * time.Millisecond}),
		),
	}}
	resp, err := client.Post(server.URL+"/orders", "application/json", strings.NewReader(`{"item":"tea"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, "after", attempts.Load(), "attempts")
	// Output: 201 Created after 3 attempts
}

// A call whose answer was lost is resumed with its key.
func ExampleWithKey() {
	var orders sync.Map
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, known := orders.LoadOrStore(r.Header.Get("Idempotency-Key"), true); !known {
			panic(http.ErrAbortHandler) // the order is in, and the answer is lost
		}
		w.Header().Set("Idempotent-Replayed", "true")
		w.WriteHeader(http.StatusCreated)
	}))
	defer server.Close()
	client := &http.Client{Transport: &idempotentclient.Transport{
		Config: idempotentclient.NewConfig(idempotentclient.NoRetry()),
	}}
	order := func(ctx context.Context) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/orders", strings.NewReader(`{"item":"tea"}`))
		if err != nil {
			return nil, err
		}
		return client.Do(req)
	}

	_, err := order(context.Background())
	var lost *idempotentclient.Error
	if !errors.As(err, &lost) {
		fmt.Println("expected a lost answer")
		return
	}
	resp, err := order(idempotentclient.WithKey(context.Background(), lost.Key))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, "replayed:", idempotentclient.Replayed(resp))
	// Output: 201 Created replayed: true
}

// Callers branch on what the server's guard refused.
func ExampleCheck() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"type":"urn:oapi-idempotent:idempotency-key-reused","title":"The key was used for another request."}`)
	}))
	defer server.Close()
	client := &http.Client{Transport: &idempotentclient.Transport{}}
	ctx := idempotentclient.WithKey(context.Background(), "order-42")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/orders", strings.NewReader(`{"item":"tea"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()

	var refused *idempotentclient.Problem
	if errors.As(idempotentclient.Check(resp), &refused) {
		switch refused.Code {
		case idempotentclient.KeyReused:
			fmt.Println("another request has the key", refused.Key)
		case idempotentclient.OutcomeUnknown:
			fmt.Println("ask whether it happened")
		}
	}
	// Output: another request has the key order-42
}
