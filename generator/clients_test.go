package generator_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	aliases "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/aliases/want"
	clientonly "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/client-only/want"
	collisions "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/collisions/want"
	keep "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/header-param-keep/want"
	strip "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/header-param-strip/want"
	natural "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/natural/want"
	parameters "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/parameters/want"
	threeconfigs "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/three-configs/want"
)

// A failing is a server that fails twice and then answers, and remembers the
// key and the body of every request.
type failing struct {
	*httptest.Server
	mu           sync.Mutex
	keys, bodies []string
}

func newFailing(t *testing.T) *failing {
	s := &failing{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.keys = append(s.keys, r.Header.Get("Idempotency-Key"))
		s.bodies = append(s.bodies, string(body))
		if len(s.keys) < 3 {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(s.Close)
	return s
}

// gotOneKey fails unless the server got three requests with the key, or one UUID,
// and the body, and resp is its last answer.
func (s *failing) gotOneKey(t *testing.T, resp *http.Response, key, body string) {
	t.Helper()
	if resp.StatusCode != http.StatusNoContent || len(s.keys) != 3 {
		t.Fatalf("status %d after %d requests; want 204 after 3", resp.StatusCode, len(s.keys))
	}
	if keys := slices.Compact(slices.Clone(s.keys)); len(keys) != 1 || key != "" && keys[0] != key || key == "" && !isUUIDv4(keys[0]) {
		t.Errorf("keys %q; want one, %q or a UUID", keys, key)
	}
	if bodies := slices.Compact(slices.Clone(s.bodies)); len(bodies) != 1 || bodies[0] != body {
		t.Errorf("bodies %q; want one, %q", bodies, body)
	}
	if got := idempotentclient.KeyOf(resp); got != s.keys[0] {
		t.Errorf("KeyOf is %q, and %q was sent", got, s.keys[0])
	}
}

func isUUIDv4(key string) bool {
	return len(key) == 36 && key[14] == '4' && strings.Trim(key, "0-") != ""
}

// TestEveryMethodRetriesWithOneKey calls the methods of generated clients of every
// kind: with every body, of an alias, generated apart from their server, with
// parameters that have the names of what was woven in, and with a declared key
// that is optional, required, or not there any more.
func TestEveryMethodRetriesWithOneKey(t *testing.T) {
	ctx := context.Background()
	quick := idempotentclient.WithRetry(idempotentclient.Retry{Base: time.Millisecond})
	const given = "2d9e3f1c-7f5f-4f0f-a6ff-52a5f2f2c6f3"
	var uuid keep.IdempotencyKey
	if err := uuid.UnmarshalText([]byte(given)); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		call func(url string) (*http.Response, error)
		key  string // "": a UUID
		body string
	}{
		"JSON": {body: `{"item":"tea"}`, call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.CreateOrder(ctx, nil, clientonly.CreateOrderJSONRequestBody{Item: "tea"})
		}},
		"any body": {body: "tea", call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.CreateOrderWithBody(ctx, nil, "text/plain", io.MultiReader(strings.NewReader("tea"))) // without a GetBody
		}},
		"text": {body: "tea", call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.ChangeOrderWithTextBody(ctx, "1", "tea")
		}},
		"form": {body: "item=tea", call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.ChangeOrderWithFormdataBody(ctx, "1", clientonly.ChangeOrderFormdataRequestBody{Item: "tea"})
		}},
		"no body": {call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.CancelOrder(ctx, "1")
		}},
		"of three configs": {body: `{"item":"tea"}`, call: func(url string) (*http.Response, error) {
			c, err := threeconfigs.NewClient(url, threeconfigs.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.CreateOrder(ctx, nil, threeconfigs.CreateOrderJSONRequestBody{Item: "tea"})
		}},
		"with responses": {body: `{"item":"tea"}`, call: func(url string) (*http.Response, error) {
			c, err := threeconfigs.NewClientWithResponses(url, threeconfigs.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			resp, err := c.CreateOrderWithResponse(ctx, nil, threeconfigs.CreateOrderJSONRequestBody{Item: "tea"})
			if err != nil {
				return nil, err
			}
			return resp.HTTPResponse, nil
		}},
		"alias": {body: `"tea"`, call: func(url string) (*http.Response, error) {
			c, err := aliases.NewClient(url, aliases.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.PostOrdersAlias0(ctx, "tea")
		}},
		"names that are taken": {body: "tea", call: func(url string) (*http.Response, error) {
			c, err := collisions.NewClient(url, collisions.WithIdempotency_(quick))
			if err != nil {
				return nil, err
			}
			return c.CreateThingWithBody(ctx, "text/plain", strings.NewReader("tea"))
		}},
		"parameters": {call: func(url string) (*http.Response, error) {
			c, err := parameters.NewClient(url, parameters.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.ManyNames(ctx, "a", "b", "c", "d", "e", "f", "g", "h")
		}},
		"a required key that is not set": {call: func(url string) (*http.Response, error) {
			c, err := keep.NewClient(url, keep.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.Referenced(ctx, &keep.ReferencedParams{})
		}},
		"a required key that is set": {key: given, call: func(url string) (*http.Response, error) {
			c, err := keep.NewClient(url, keep.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.Referenced(ctx, &keep.ReferencedParams{IdempotencyKey: uuid})
		}},
		"an optional key that is not set": {call: func(url string) (*http.Response, error) {
			c, err := keep.NewClient(url, keep.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.Inline(ctx, nil)
		}},
		"a key that was stripped": {call: func(url string) (*http.Response, error) {
			c, err := strip.NewClient(url, strip.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.Referenced(ctx)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			server := newFailing(t)
			resp, err := test.call(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			server.gotOneKey(t, resp, test.key, test.body)
		})
	}
}

// TestOtherMethodsSendNoKey: what is idempotent by itself is repeated without a
// key, and what is not annotated is sent once.
func TestOtherMethodsSendNoKey(t *testing.T) {
	quick := idempotentclient.WithRetry(idempotentclient.Retry{Base: time.Millisecond})
	for name, test := range map[string]struct {
		call     func(url string) (*http.Response, error)
		requests int
	}{
		"natural": {requests: 3, call: func(url string) (*http.Response, error) {
			c, err := natural.NewClient(url, natural.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.PutThing(t.Context(), "1")
		}},
		"unannotated": {requests: 1, call: func(url string) (*http.Response, error) {
			c, err := clientonly.NewClient(url, clientonly.WithIdempotency(quick))
			if err != nil {
				return nil, err
			}
			return c.ListOrders(t.Context())
		}},
	} {
		t.Run(name, func(t *testing.T) {
			server := newFailing(t)
			resp, err := test.call(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if len(server.keys) != test.requests || strings.Join(server.keys, "") != "" {
				t.Errorf("keys %q; want %d requests without one", server.keys, test.requests)
			}
		})
	}
}
