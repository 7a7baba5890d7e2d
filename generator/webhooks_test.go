package generator_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	webhooks "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/webhooks/want"
)

// TestInitiatorsRetryWithOneKey sends every kind of annotated webhook and
// callback, with every kind of body method, to a server that fails twice.
func TestInitiatorsRetryWithOneKey(t *testing.T) {
	ctx := context.Background()
	event := webhooks.Event{Order: "17"}
	const json = "application/json"
	given := "given-by-the-parameter"
	for name, test := range map[string]struct {
		send func(*webhooks.WebhookInitiator, *webhooks.CallbackInitiator, string) (*http.Response, error)
		key  string // "": a UUID
		body string
	}{
		"webhook": {
			func(w *webhooks.WebhookInitiator, _ *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return w.OrderPaid(ctx, to, nil, event)
			}, "", `{"order":"17"}`},
		"webhook with a body": {
			func(w *webhooks.WebhookInitiator, _ *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return w.OrderPaidWithBody(ctx, to, nil, json, strings.NewReader("{}"))
			}, "", `{}`},
		"webhook with a parameter": {
			func(w *webhooks.WebhookInitiator, _ *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return w.OrderPaid(ctx, to, &webhooks.OrderPaidParams{IdempotencyKey: &given}, event)
			}, given, `{"order":"17"}`},
		"webhook with a key in the context": {
			func(w *webhooks.WebhookInitiator, _ *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return w.OrderPaid(idempotentclient.WithKey(ctx, "order-17"), to, &webhooks.OrderPaidParams{IdempotencyKey: &given}, event)
			}, "order-17", `{"order":"17"}`},
		"callback": {
			func(_ *webhooks.WebhookInitiator, c *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return c.OrderDelivered(ctx, to, event)
			}, "", `{"order":"17"}`},
		"callback with a body": {
			func(_ *webhooks.WebhookInitiator, c *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return c.OrderDeliveredWithBody(ctx, to, json, strings.NewReader("{}"))
			}, "", `{}`},
		"callback with a key from an editor": {
			func(_ *webhooks.WebhookInitiator, c *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return c.OrderDelivered(ctx, to, event, func(_ context.Context, r *http.Request) error {
					if r.Header.Get("Idempotency-Key") == "" {
						return errors.New("a signer does not see the key")
					}
					r.Header.Set("Idempotency-Key", "edited")
					return nil
				})
			}, "edited", `{"order":"17"}`},
	} {
		t.Run(name, func(t *testing.T) {
			webhook, err := webhooks.NewWebhookInitiator()
			if err != nil {
				t.Fatal(err)
			}
			callback, err := webhooks.NewCallbackInitiator()
			if err != nil {
				t.Fatal(err)
			}
			to := newFailing(t)
			resp, err := test.send(webhook, callback, to.URL+"/hooks")
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			to.gotOneKey(t, resp, test.key, test.body)
		})
	}
}

// TestInitiatorsFollowTheirPolicies: a natural webhook is retried without a key,
// an unannotated one is sent once, and options reach each kind of initiator.
func TestInitiatorsFollowTheirPolicies(t *testing.T) {
	ctx := context.Background()
	generated := func(context.Context) (string, error) { return "generated", nil }
	webhook, err := webhooks.NewWebhookInitiator(webhooks.WithWebhookIdempotency(idempotentclient.WithGenerator(generated)))
	if err != nil {
		t.Fatal(err)
	}
	callback, err := webhooks.NewCallbackInitiator(webhooks.WithCallbackIdempotency(idempotentclient.WithGenerator(generated), idempotentclient.NoRetry()))
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		send func(string) (*http.Response, error)
		keys []string
	}{
		"natural":              {func(to string) (*http.Response, error) { return webhook.ReplaceOrder(ctx, to, nil) }, []string{"", "", ""}},
		"unannotated webhook":  {func(to string) (*http.Response, error) { return webhook.Heartbeat(ctx, to) }, []string{""}},
		"unannotated callback": {func(to string) (*http.Response, error) { return callback.Unsubscribed(ctx, to) }, []string{""}},
		"generator": {func(to string) (*http.Response, error) { return webhook.OrderPaid(ctx, to, nil, webhooks.Event{}) },
			[]string{"generated", "generated", "generated"}},
		"no retry": {func(to string) (*http.Response, error) { return callback.OrderDelivered(ctx, to, webhooks.Event{}) },
			[]string{"generated"}},
	} {
		t.Run(name, func(t *testing.T) {
			to := newFailing(t)
			resp, err := test.send(to.URL)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if !slices.Equal(to.keys, test.keys) {
				t.Errorf("keys %q; want %q", to.keys, test.keys)
			}
		})
	}
}

// receivers count what they run.
type receivers struct{ paid, replaced, alive, delivered, gone int }

func (r *receivers) HandleOrderPaidWebhook(w http.ResponseWriter, _ *http.Request, _ webhooks.OrderPaidParams) {
	r.paid++
	w.WriteHeader(http.StatusNoContent)
}

func (r *receivers) HandleReplaceOrderWebhook(http.ResponseWriter, *http.Request, webhooks.ReplaceOrderParams) {
	r.replaced++
}

func (r *receivers) HandleHeartbeatWebhook(http.ResponseWriter, *http.Request) { r.alive++ }

func (r *receivers) HandleOrderDeliveredCallback(http.ResponseWriter, *http.Request) { r.delivered++ }

func (r *receivers) HandleUnsubscribedCallback(http.ResponseWriter, *http.Request) { r.gone++ }

// TestReceiversAreGuarded sends each webhook and callback twice with one key.
func TestReceiversAreGuarded(t *testing.T) {
	var r receivers
	guard := newGuard(t)
	mux := http.NewServeMux()
	mux.Handle("/paid", webhooks.OrderPaidWebhookHandler(&r, guard, nil))
	mux.Handle("/replaced", webhooks.ReplaceOrderWebhookHandler(&r, guard, nil))
	mux.Handle("/alive", webhooks.HeartbeatWebhookHandler(&r, guard, nil))
	mux.Handle("/delivered", webhooks.OrderDeliveredCallbackHandler(&r, guard, nil))
	mux.Handle("/gone", webhooks.UnsubscribedCallbackHandler(&r, guard, nil))
	server := httptest.NewServer(mux)
	defer server.Close()
	post := func(path, key string) *http.Response {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, server.URL+path, strings.NewReader(`{"order":"17"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if key != "" {
			req.Header.Set("Idempotency-Key", key)
		}
		resp, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	// One key for all: each operation has keys of its own.
	for _, path := range []string{"/paid", "/replaced", "/alive", "/delivered", "/gone"} {
		first, second := post(path, "k"), post(path, "k")
		if first.StatusCode/100 != 2 || second.StatusCode != first.StatusCode {
			t.Errorf("%s: status %d, then %d; want one of 2xx twice", path, first.StatusCode, second.StatusCode)
		}
	}
	if want := (receivers{paid: 1, replaced: 2, alive: 2, delivered: 1, gone: 2}); r != want {
		t.Errorf("ran %+v; want %+v", r, want)
	}
	if resp := post("/paid", "k"); resp.Header.Get("Idempotent-Replayed") != "true" {
		t.Error("a webhook that came again is not marked as replayed")
	}
	if got := post("/paid", "").StatusCode; got != http.StatusBadRequest {
		t.Errorf("a webhook without a key: %d; want 400", got)
	}
	if got := post("/delivered", "").StatusCode; got != http.StatusUnprocessableEntity {
		t.Errorf("a callback without a key: %d; want 422, as its policy says", got)
	}
}

// TestReceiversNeedAGuard: a nil guard is found where the handler is made.
func TestReceiversNeedAGuard(t *testing.T) {
	for name, handler := range map[string]func(){
		"webhook":  func() { webhooks.OrderPaidWebhookHandler(&receivers{}, nil, nil) },
		"callback": func() { webhooks.OrderDeliveredCallbackHandler(&receivers{}, nil, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if p := recover(); p == nil || !strings.Contains(p.(string), "the guard is nil") {
					t.Errorf("panic %v; want one that says what to pass", p)
				}
			}()
			handler()
		})
	}
	webhooks.OrderPaidWebhookHandler(&receivers{}, idempotency.Passthrough(), nil)
}
