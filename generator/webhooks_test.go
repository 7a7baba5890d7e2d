package generator_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
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
				return c.OrderDelivered(ctx, to, nil, event)
			}, "", `{"order":"17"}`},
		"callback with a body": {
			func(_ *webhooks.WebhookInitiator, c *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return c.OrderDeliveredWithBody(ctx, to, nil, json, strings.NewReader("{}"))
			}, "", `{}`},
		"callback with a key from an editor": {
			func(_ *webhooks.WebhookInitiator, c *webhooks.CallbackInitiator, to string) (*http.Response, error) {
				return c.OrderDelivered(ctx, to, nil, event, func(_ context.Context, r *http.Request) error {
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
		"unannotated webhook":  {func(to string) (*http.Response, error) { return webhook.Heartbeat(ctx, to, nil) }, []string{""}},
		"unannotated callback": {func(to string) (*http.Response, error) { return callback.Unsubscribed(ctx, to, nil) }, []string{""}},
		"generator": {func(to string) (*http.Response, error) { return webhook.OrderPaid(ctx, to, nil, webhooks.Event{}) },
			[]string{"generated", "generated", "generated"}},
		"no retry": {func(to string) (*http.Response, error) {
			return callback.OrderDelivered(ctx, to, nil, webhooks.Event{})
		},
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

func (r *receivers) HandleHeartbeatWebhook(http.ResponseWriter, *http.Request, webhooks.HeartbeatParams) {
	r.alive++
}

func (r *receivers) HandleOrderDeliveredCallback(http.ResponseWriter, *http.Request, webhooks.OrderDeliveredParams) {
	r.delivered++
}

func (r *receivers) HandleUnsubscribedCallback(http.ResponseWriter, *http.Request, webhooks.UnsubscribedParams) {
	r.gone++
}

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

const deliveries = `openapi: 3.1.0
info: {title: Deliveries, version: "1"}
paths:
  /subscriptions:
    post:
      operationId: subscribe
      parameters: [{$ref: '#/components/parameters/Key'}]
      responses: {"201": {description: subscribed}}
      callbacks:
        delivered:
          '{$request.body#/url}':
            parameters: [{$ref: '#/components/parameters/Key'}]
            post: {x-idempotent: true, responses: {"204": {description: noted}}}
webhooks:
  paid:
    post:
      x-idempotent: true
      parameters: [{$ref: '#/components/parameters/Key'}]
      responses: {"204": {description: noted}}
components:
  parameters:
    Key: {name: Idempotency-Key, in: header, required: true, schema: {type: string, format: uuid}}
`

// TestKeyParametersOfWebhooks: what becomes of a declared key parameter becomes of
// it where the annotation reaches, and not beside it.
func TestKeyParametersOfWebhooks(t *testing.T) {
	for mode, want := range map[string]string{
		"relax": "IdempotencyKey *string",
		"keep":  "IdempotencyKey Key",
		"strip": "",
	} {
		cfg := server(map[string]string{"spec.yaml": deliveries})
		cfg.Generate.Client = true
		cfg.Idempotency.HeaderParam = mode
		code := source(t, cfg)
		for _, name := range []string{"PaidParams", "DeliveredParams"} {
			_, after, found := strings.Cut(code, "type "+name+" struct {\n")
			field, _, _ := strings.Cut(after, "`")
			if found != (want != "") || want != "" && strings.Join(strings.Fields(field), " ") != want {
				t.Errorf("%s: %s has %q, want %q", mode, name, field, want)
			}
		}
		if !strings.Contains(code, "type SubscribeParams struct {\n\tIdempotencyKey Key `") {
			t.Errorf("%s: the parameter of an operation that is not annotated has changed", mode)
		}
	}
}

// TestUserTemplatesOfWebhooks refuses templates that would send webhooks without a
// key, or receive them without a guard.
func TestUserTemplatesOfWebhooks(t *testing.T) {
	for name, test := range map[string]struct{ template, text, want string }{
		"no webhook initiator":  {"webhook-initiator.tmpl", "// none\n", "no struct WebhookInitiator"},
		"no callback initiator": {"callback-initiator.tmpl", "// none\n", "no struct CallbackInitiator"},
		"another way to send": {"webhook-initiator.tmpl",
			"type WebhookInitiator struct {\n}\nfunc (p *WebhookInitiator) Paid(ctx context.Context, targetURL string) error {\nreturn nil\n}\n",
			"WebhookInitiator has no method Paid that sends its request as oapi-codegen's does"},
		"no receiver": {"stdhttp/std-http-receiver.tmpl", "// none\n", "no function that takes a WebhookReceiverInterface"},
		"nothing that takes the receiver": {"stdhttp/std-http-receiver.tmpl",
			"type {{.Prefix}}ReceiverInterface interface {\n{{range .Operations}}Handle{{.OperationId}}{{$.Prefix}}(w http.ResponseWriter, r *http.Request)\n{{end}}}\n",
			"no function that takes a WebhookReceiverInterface"},
		"handlers of other names": {"stdhttp/std-http-receiver.tmpl",
			"type {{.Prefix}}ReceiverInterface interface {\nReceive(w http.ResponseWriter, r *http.Request)\n}\n",
			"WebhookReceiverInterface has no method HandlePaidWebhook"},
		"in a function literal": {"stdhttp/std-http-receiver.tmpl",
			"type {{.Prefix}}ReceiverInterface interface {\n{{range .Operations}}Handle{{.OperationId}}{{$.Prefix}}(w http.ResponseWriter, r *http.Request)\n{{end}}}\n" +
				"var {{.Prefix}}Handler = func(si {{.Prefix}}ReceiverInterface) {}\n",
			"takes a WebhookReceiverInterface in a function literal"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := server(map[string]string{"spec.yaml": deliveries, "user.tmpl": test.text})
			cfg.Generate.Client = true
			cfg.OutputOptions.UserTemplates = map[string]string{test.template: "user.tmpl"}
			if _, err := generator.Generate(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

// TestWebhooksAreLinted advises on webhooks and callbacks as on other operations.
func TestWebhooksAreLinted(t *testing.T) {
	cfg := server(map[string]string{"spec.yaml": strings.ReplaceAll(deliveries, "x-idempotent: true", "x-other: 1")})
	advice, err := generator.Lint(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, place := range []string{"POST webhook paid", "POST callback delivered of POST /subscriptions at {$request.body#/url}"} {
		if !strings.Contains(advice.Error(), place+" declares Idempotency-Key") {
			t.Errorf("nothing is said of %s: %v", place, advice)
		}
	}
}

// TestPlacesOfWhichNothingIsWritten: oapi-codegen takes them, and so do we.
func TestPlacesOfWhichNothingIsWritten(t *testing.T) {
	cfg := server(map[string]string{"spec.yaml": `openapi: 3.1.0
info: {title: Deliveries, version: "1"}
paths:
  /nothing:
  /orders:
    post:
      operationId: createOrder
      x-idempotent: true
      responses: {"201": {description: created}}
      callbacks: {none: {}, empty: {'{$url}': }, item: {'{$url}': {}}}
webhooks:
  nothing:
  empty: {}
`})
	cfg.Generate.Client = true
	if code := source(t, cfg); !strings.Contains(code, "func (s GuardedServer) CreateOrder(") {
		t.Error("the operation beside them is not guarded")
	}
}
