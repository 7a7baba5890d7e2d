package main

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// pay calls POST /payments by the generated client.
func (s *shop) pay(t *testing.T, key string, amount int64, opts ...idempotentclient.Option) *api.CreatePaymentResponse {
	t.Helper()
	client, err := api.NewClientWithResponses(s.URL, api.WithHTTPClient(s.Client()), api.WithIdempotency(opts...))
	if err != nil {
		t.Error(err)
		return &api.CreatePaymentResponse{}
	}
	ctx := t.Context()
	if key != "" {
		ctx = idempotentclient.WithKey(ctx, key)
	}
	resp, err := client.CreatePaymentWithResponse(ctx, api.NewPayment{Amount: amount, Currency: "EUR"})
	if err != nil {
		t.Error(err)
		return &api.CreatePaymentResponse{}
	}
	return resp
}

// paid checks that resp is a 201, replayed or not, and returns its payment.
func paid(t *testing.T, resp *api.CreatePaymentResponse, replayed bool) api.Payment {
	t.Helper()
	if resp.JSON201 == nil || idempotentclient.Replayed(resp.HTTPResponse) != replayed {
		t.Fatalf("the answer is %s %s, replayed: %v; want 201, %v", resp.Status(), resp.Body, idempotentclient.Replayed(resp.HTTPResponse), replayed)
	}
	return *resp.JSON201
}

// TestPayments holds `x-idempotent: true` over the generated client.
func TestPayments(t *testing.T) {
	onEach(t, "no key", func(t *testing.T, s *shop) {
		s.do(t, s.request(t, "/payments", "", strings.NewReader(payment))).refused(t, http.StatusBadRequest, "missing-idempotency-key")
		if n := s.count(t, "payments"); n != 0 {
			t.Errorf("%d payments were made", n)
		}
	})
	onEach(t, "replay", func(t *testing.T, s *shop) {
		first := paid(t, s.pay(t, "key", 250), false)
		if want := (api.Payment{Id: first.Id, Amount: 250, Currency: "EUR"}); first != want {
			t.Errorf("the payment is %v, want %v", first, want)
		}
		for _, server := range []*shop{s, s.second(t)} {
			if again := paid(t, server.pay(t, "key", 250), true); again != first {
				t.Errorf("the replay is the payment %v, want %v", again, first)
			}
		}
		if n := s.count(t, "payments"); n != 1 {
			t.Errorf("%d payments were made", n)
		}
	})
	onEach(t, "every call has a key of its own", func(t *testing.T, s *shop) {
		one, two := paid(t, s.pay(t, "", 250), false), paid(t, s.pay(t, "", 250), false)
		if n := s.count(t, "payments"); n != 2 || one.Id == two.Id {
			t.Errorf("%d payments were made: %v and %v", n, one, two)
		}
	})
	onEach(t, "mismatch", func(t *testing.T, s *shop) {
		first := paid(t, s.pay(t, "key", 250), false)
		for _, server := range []*shop{s, s.second(t)} {
			resp := server.pay(t, "key", 999)
			problem := resp.ApplicationproblemJSON422
			if problem == nil || problem.Type != "urn:oapi-idempotent:idempotency-key-reused" {
				t.Fatalf("the answer is %s %s, want 422 idempotency-key-reused", resp.Status(), resp.Body)
			}
		}
		if again := paid(t, s.pay(t, "key", 250), true); again != first {
			t.Errorf("the replay is the payment %v, want %v", again, first)
		}
		if n := s.count(t, "payments"); n != 1 {
			t.Errorf("%d payments were made", n)
		}
	})
	onEach(t, "a refused payment frees the key", func(t *testing.T, s *shop) {
		resp := s.pay(t, "key", 0)
		if problem := resp.ApplicationproblemJSON422; problem == nil || problem.Type != "urn:orders:invalid" {
			t.Fatalf("the answer is %s %s, want 422 invalid", resp.Status(), resp.Body)
		}
		paid(t, s.pay(t, "key", 250), false)
	})
	// Each of the calls is answered the one payment: those that meet it in
	// flight are told so, and their clients ask again.
	onEach(t, "a race of 50 on two servers runs once", func(t *testing.T, s *shop) {
		var (
			mu       sync.Mutex
			statuses = map[int]int{}
		)
		observe := idempotentclient.WithObserver(func(_ context.Context, a idempotentclient.Attempt) {
			mu.Lock()
			defer mu.Unlock()
			statuses[a.Status]++
		})
		servers := []*shop{s, s.second(t)}
		responses := race(50, func(i int) *api.CreatePaymentResponse {
			return servers[i%2].pay(t, "key", 250, observe)
		})
		ran := 0
		for _, resp := range responses {
			replayed := idempotentclient.Replayed(resp.HTTPResponse)
			if !replayed {
				ran++
			}
			if got := paid(t, resp, replayed); got != *responses[0].JSON201 {
				t.Errorf("one call got the payment %v, another %v", got, *responses[0].JSON201)
			}
		}
		if n := s.count(t, "payments"); n != 1 || ran != 1 {
			t.Errorf("%d payments were made, %d answers are no replays", n, ran)
		}
		delete(statuses, http.StatusConflict)
		if statuses[http.StatusCreated] != 50 || len(statuses) != 1 {
			t.Errorf("beside 409 the attempts were answered %v (status: how many), want 201 50 times", statuses)
		}
	})
}
