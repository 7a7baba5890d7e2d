package generator_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
	headerparam "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/header-param-relax/want"
	"github.com/oapi-idempotent/oapi-idempotent/testdata/golden/inheritance/want"
	stdhttpstrict "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/stdhttp-strict/want"
	stdhttp "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/stdhttp/want"
)

// orders implements the golden packages' orders, and counts what runs.
type orders struct{ created, changed, cancelled atomic.Int64 }

func (o *orders) ListOrders(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "[]") }

func (o *orders) CreateOrder(w http.ResponseWriter, r *http.Request, params stdhttp.CreateOrderParams) {
	var body stdhttp.NewOrder
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Location", fmt.Sprintf("/orders/%d", o.created.Add(1)))
	w.WriteHeader(http.StatusCreated)
	json.NewEncoder(w).Encode(stdhttp.Order{Id: fmt.Sprint(o.created.Load()), Item: body.Item})
}

func (o *orders) ChangeOrder(w http.ResponseWriter, r *http.Request, id string) {
	o.changed.Add(1)
	w.WriteHeader(http.StatusNoContent)
}

func (o *orders) CancelOrder(w http.ResponseWriter, r *http.Request, id string) {
	o.cancelled.Add(1)
	w.WriteHeader(http.StatusNoContent)
}

// strictOrders is the same behind a strict handler.
type strictOrders struct{ created, changed, cancelled atomic.Int64 }

func (o *strictOrders) ListOrders(context.Context, stdhttpstrict.ListOrdersRequestObject) (stdhttpstrict.ListOrdersResponseObject, error) {
	return stdhttpstrict.ListOrders200JSONResponse{}, nil
}

func (o *strictOrders) CreateOrder(_ context.Context, request stdhttpstrict.CreateOrderRequestObject) (stdhttpstrict.CreateOrderResponseObject, error) {
	id := fmt.Sprint(o.created.Add(1))
	return stdhttpstrict.CreateOrder201JSONResponse{Id: id, Item: request.Body.Item}, nil
}

func (o *strictOrders) ChangeOrder(context.Context, stdhttpstrict.ChangeOrderRequestObject) (stdhttpstrict.ChangeOrderResponseObject, error) {
	o.changed.Add(1)
	return stdhttpstrict.ChangeOrder204Response{}, nil
}

func (o *strictOrders) CancelOrder(context.Context, stdhttpstrict.CancelOrderRequestObject) (stdhttpstrict.CancelOrderResponseObject, error) {
	o.cancelled.Add(1)
	return stdhttpstrict.CancelOrder204Response{}, nil
}

func newGuard(t *testing.T, options ...idempotency.Option) *idempotency.Guard {
	t.Helper()
	guard, err := idempotency.New(memorystore.New(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return guard
}

// serve starts a server for h and returns its address.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

type answer struct {
	status int
	header http.Header
	body   string
}

// send sends a request; key "" sends none.
func send(t *testing.T, method, url, key, body string) answer {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(data)}
}

func (a answer) expect(t *testing.T, what string, status int, replayed bool) {
	t.Helper()
	if a.status != status || (a.header.Get("Idempotent-Replayed") == "true") != replayed {
		t.Errorf("%s: got %d, replayed %q, %s; want %d, replayed %v", what, a.status, a.header.Get("Idempotent-Replayed"), a.body, status, replayed)
	}
}

// TestServed runs what is generated for net/http over a connection.
func TestServed(t *testing.T) {
	plain, strict := &orders{}, &strictOrders{}
	for _, c := range []struct {
		name                        string
		handler                     http.Handler
		created, changed, cancelled *atomic.Int64
	}{
		{"plain", stdhttp.Handler(plain, newGuard(t)), &plain.created, &plain.changed, &plain.cancelled},
		{"strict", stdhttpstrict.Handler(stdhttpstrict.NewStrictHandler(strict, nil), newGuard(t)), &strict.created, &strict.changed, &strict.cancelled},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := serve(t, c.handler)
			lamp, vase := `{"item":"lamp"}`, `{"item":"vase"}`

			send(t, "GET", url+"/orders", "", "").expect(t, "an operation that is not annotated", 200, false)
			send(t, "POST", url+"/orders", "", lamp).expect(t, "no key", 400, false)
			first := send(t, "POST", url+"/orders", "a", lamp)
			first.expect(t, "first sight", 201, false)
			second := send(t, "POST", url+"/orders", "a", lamp)
			second.expect(t, "the same again", 201, true)
			if second.body != first.body || second.header.Get("Location") != first.header.Get("Location") || first.body == "" {
				t.Errorf("the replay differs: %q %v, first %q %v", second.body, second.header, first.body, first.header)
			}
			send(t, "POST", url+"/orders", "a", vase).expect(t, "another request with the key", 422, false)
			send(t, "POST", url+"/orders?dryRun=true", "a", lamp).expect(t, "another query with the key", 422, false)
			if n := c.created.Load(); n != 1 {
				t.Errorf("%d orders were created, want 1", n)
			}

			send(t, "PATCH", url+"/orders/1", "", lamp).expect(t, "no key where that is allowed", 204, false)
			send(t, "PATCH", url+"/orders/1", "a", lamp).expect(t, "the key of another operation", 204, false)
			send(t, "PATCH", url+"/orders/1", "a", lamp).expect(t, "the same again", 204, true)
			if n := c.changed.Load(); n != 2 {
				t.Errorf("%d changes ran, want 2", n)
			}

			var group sync.WaitGroup
			for range 50 {
				group.Go(func() {
					if a := send(t, "POST", url+"/orders/1/cancel", "race", ""); a.status != 204 && a.status != 409 {
						t.Errorf("in the race: %d %s", a.status, a.body)
					}
				})
			}
			group.Wait()
			if n := c.cancelled.Load(); n != 1 {
				t.Errorf("%d runs in a race for one key, want 1", n)
			}
		})
	}
}

// TestServedClient has the generated client call the generated server through
// an answer that is lost.
func TestServedClient(t *testing.T) {
	strict := &strictOrders{}
	handler := stdhttpstrict.Handler(stdhttpstrict.NewStrictHandler(strict, nil), newGuard(t))
	var attempts atomic.Int64
	url := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if attempts.Add(1) == 1 {
			handler.ServeHTTP(httptest.NewRecorder(), r)
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	client, err := stdhttpstrict.NewClientWithResponses(url, stdhttpstrict.WithIdempotency(
		idempotentclient.WithRetry(idempotentclient.Retry{Base: 1}),
	))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.CreateOrderWithResponse(t.Context(), nil, stdhttpstrict.NewOrder{Item: "lamp"})
	if err != nil {
		t.Fatal(err)
	}
	if resp.JSON201 == nil || resp.JSON201.Id != "1" || resp.HTTPResponse.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("got %s %s, want the first attempt's order, replayed", resp.Status(), resp.Body)
	}
	if created, sent := strict.created.Load(), attempts.Load(); created != 1 || sent != 2 {
		t.Errorf("%d orders in %d attempts, want 1 in 2", created, sent)
	}
	if _, err := client.CreateOrderWithBodyWithResponse(t.Context(), nil, "application/json", strings.NewReader(`{"item":"lamp"}`)); err != nil {
		t.Fatal(err)
	}
	if created := strict.created.Load(); created != 2 {
		t.Errorf("%d orders after a second call, want 2: its key must be another", created)
	}
}

// TestNestedGuard mounts a server that is guarded already.
func TestNestedGuard(t *testing.T) {
	plain, guard := &orders{}, newGuard(t)
	url := serve(t, stdhttp.Handler(stdhttp.GuardServer(plain, guard), guard))
	send(t, "POST", url+"/orders/1/cancel", "a", "").expect(t, "first sight", 204, false)
	send(t, "POST", url+"/orders/1/cancel", "a", "").expect(t, "the same again", 204, true)
	if n := plain.cancelled.Load(); n != 1 {
		t.Errorf("%d runs, want 1", n)
	}
}

// TestRegistrationPanics has mistakes show before the first request.
func TestRegistrationPanics(t *testing.T) {
	expect := func(name, reason string, register func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if message := fmt.Sprint(recover()); !strings.Contains(message, reason) {
				t.Errorf("%s: panicked with %q, want it to say %q", name, message, reason)
			}
		}()
		register()
	}
	expect("nil guard", "guard is nil", func() { stdhttp.Handler(&orders{}, nil) })
	expect("no principal function", "principal", func() { inheritance.Handler(nil, newGuard(t)) })
	expect("two packages", "two packages", func() {
		guard := newGuard(t)
		stdhttp.Handler(&orders{}, guard)
		stdhttpstrict.Handler(stdhttpstrict.NewStrictHandler(&strictOrders{}, nil), guard)
	})
	who := inheritance.PrincipalFrom(func(r *http.Request) (string, error) { return r.Header.Get("Authorization"), nil })
	inheritance.Handler(nil, newGuard(t, who))
	stdhttp.Handler(&orders{}, idempotency.Passthrough())
}

// headers implements the header-param golden.
type headers struct{ keys chan *string }

func (h headers) Inline(w http.ResponseWriter, _ *http.Request, params headerparam.InlineParams) {
	h.keys <- params.IdempotencyKey
	w.WriteHeader(http.StatusNoContent)
}

func (h headers) Referenced(w http.ResponseWriter, _ *http.Request, params headerparam.ReferencedParams) {
	h.keys <- params.IdempotencyKey
	w.WriteHeader(http.StatusNoContent)
}

func (h headers) SharedAnnotated(w http.ResponseWriter, _ *http.Request, params headerparam.SharedAnnotatedParams) {
	h.keys <- params.IdempotencyKey
	w.WriteHeader(http.StatusNoContent)
}

func (h headers) ItemAnnotated(w http.ResponseWriter, _ *http.Request, _ string, params headerparam.ItemAnnotatedParams) {
	h.keys <- params.IdempotencyKey
	w.WriteHeader(http.StatusNoContent)
}

func (headers) SharedUnannotated(w http.ResponseWriter, _ *http.Request, _ headerparam.SharedUnannotatedParams) {
	w.WriteHeader(http.StatusNoContent)
}

func (headers) ItemUnannotated(w http.ResponseWriter, _ *http.Request, _ string, _ headerparam.ItemUnannotatedParams) {
	w.WriteHeader(http.StatusNoContent)
}

// TestRelaxedHeader has the guard, and not the parameter binder, answer for a
// declared key header, and hands the handler what was sent.
func TestRelaxedHeader(t *testing.T) {
	const key = "8e03978e-40d5-43e8-bc93-6894a57f9324"
	keys := make(chan *string, 1)
	url := serve(t, headerparam.Handler(headers{keys}, newGuard(t)))
	for _, path := range []string{"/referenced", "/shared", "/item/1"} {
		for _, bad := range []string{"", " ", "no-uuid"} {
			a := send(t, "POST", url+path, bad, "")
			a.expect(t, path+" with key "+bad, 400, false)
			if a.header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("%s with key %q: answered by the binder: %s", path, bad, a.body)
			}
		}
	}
	for _, path := range []string{"/referenced", "/shared", "/inline", "/item/1"} {
		send(t, "POST", url+path, key, "").expect(t, path, 204, false)
		if got := <-keys; got == nil || *got != key {
			t.Errorf("%s: the handler got another key than was sent", path)
		}
	}
	// What is not annotated binds its parameter as before.
	send(t, "PUT", url+"/shared", "", "").expect(t, "unannotated, no key", 400, false)
	send(t, "DELETE", url+"/item/1", "", "").expect(t, "unannotated, no key", 400, false)
	send(t, "DELETE", url+"/item/1", key, "").expect(t, "unannotated", 204, false)
}

// TestRelaxedHeaderClient has a client that leaves the key out send one.
func TestRelaxedHeaderClient(t *testing.T) {
	keys := make(chan *string, 1)
	client, err := headerparam.NewClient(serve(t, headerparam.Handler(headers{keys}, newGuard(t))))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Referenced(t.Context(), &headerparam.ReferencedParams{})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if sent := <-keys; resp.StatusCode != 204 || sent == nil || *sent == "00000000-0000-0000-0000-000000000000" {
		t.Errorf("got %s with key %v, want a generated key", resp.Status, sent)
	}
	chosen := "2d9e3f1c-7f5f-4f0f-a6ff-52a5f2f2c6f3"
	resp, err = client.Referenced(t.Context(), &headerparam.ReferencedParams{IdempotencyKey: &chosen})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if sent := <-keys; *sent != chosen {
		t.Errorf("sent the key %s, want the field's", *sent)
	}
}
