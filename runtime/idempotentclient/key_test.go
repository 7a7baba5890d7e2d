package idempotentclient_test

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

const nilUUID = "00000000-0000-0000-0000-000000000000"

var (
	v4 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	v7 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
)

func setKey(key string) editor {
	return func(_ context.Context, r *http.Request) error { r.Header.Set("Idempotency-Key", key); return nil }
}

func addKey(key string) editor {
	return func(_ context.Context, r *http.Request) error { r.Header.Add("Idempotency-Key", key); return nil }
}

func removeKey(_ context.Context, r *http.Request) error {
	r.Header.Del("Idempotency-Key")
	return nil
}

func setKeyInLowerCase(_ context.Context, r *http.Request) error {
	r.Header["idempotency-key"] = []string{"edited"}
	return nil
}

func constant(key string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return key, nil }
}

func TestTheFirstSourceGivesTheKey(t *testing.T) {
	generated := idempotentclient.NewConfig(idempotentclient.WithGenerator(constant("made")))
	v7s := idempotentclient.NewConfig(idempotentclient.WithGenerator(idempotentclient.UUIDv7))
	with := func(key string) context.Context { return idempotentclient.WithKey(t.Context(), key) }
	for _, test := range []struct {
		name    string
		config  idempotentclient.Config
		ctx     context.Context
		param   string
		editors []editor
		want    string // a key, or "v4", "v7", or "" for an error
	}{
		{name: "default", want: "v4"},
		{name: "UUIDv7", config: v7s, want: "v7"},
		{name: "generator", config: generated, want: "made"},
		{name: "editor over generator", config: generated, editors: []editor{setKey("edited")}, want: "edited"},
		{name: "added by editor", config: generated, editors: []editor{addKey("edited")}, want: "edited"},
		{name: "editor in another case", config: generated, editors: []editor{setKeyInLowerCase}, want: "edited"},
		{name: "param over generator", config: generated, param: "param", want: "param"},
		{name: "context over param", config: generated, ctx: with("ctx"), param: "param", want: "ctx"},

		{name: "nil UUID in param", param: nilUUID, want: "v4"},
		{name: "quoted nil UUID in param", param: `"` + nilUUID + `"`, want: "v4"},
		{name: "quoted param", param: `"param"`, want: `"param"`},
		{name: "blank param", param: " ", want: "v4"},
		{name: "generated key removed", editors: []editor{removeKey}, want: "v4"},
		{name: "generated key blanked", editors: []editor{setKey(" ")}, want: "v4"},
		{name: "nil UUID from editor", editors: []editor{setKey(nilUUID)}, want: "v4"},
		{name: "editor repeats the key", ctx: with("ctx"), editors: []editor{addKey("ctx")}, want: "ctx"},

		{name: "editor contradicts context", ctx: with("ctx"), editors: []editor{setKey("edited")}},
		{name: "editor contradicts param", param: "param", editors: []editor{setKey("edited")}},
		{name: "editor adds to param", param: "param", editors: []editor{addKey("edited")}},
		{name: "editor adds to param in another case", param: "param", editors: []editor{setKeyInLowerCase}},
		{name: "editor removes param", param: "param", editors: []editor{removeKey}},
		{name: "editor removes context", ctx: with("ctx"), editors: []editor{removeKey}},
		{name: "two keys from editors", editors: []editor{setKey("a"), addKey("b")}},
		{name: "empty key in context", ctx: with("")},
		{name: "nil UUID in context", ctx: with(nilUUID)},
		{name: "control byte in context", ctx: with("a\nb")},
		{name: "control byte in param", param: "a\x00b"},
		{name: "non-ASCII in context", ctx: with("clé")},
		{name: "control byte from editor", editors: []editor{setKey("a\tb")}},
		{name: "empty key from generator", config: idempotentclient.NewConfig(idempotentclient.WithGenerator(constant("")))},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := &memory{answers: []http.HandlerFunc{answer(503), answer(201)}}
			c := api{Client: server, idempotency: test.config}
			if test.ctx == nil {
				test.ctx = t.Context()
			}
			resp, err := c.CreateOrder(test.ctx, test.param, strings.NewReader("order"), test.editors...)
			if test.want == "" {
				if !errors.Is(err, idempotentclient.ErrNotSent) || len(server.seen) != 0 {
					t.Fatalf("got error %v and %d requests, want ErrNotSent and none", err, len(server.seen))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			key := server.oneKey(t, 2, "order")
			switch test.want {
			case "v4":
				if !v4.MatchString(key) {
					t.Errorf("the key %q is no UUIDv4", key)
				}
			case "v7":
				if !v7.MatchString(key) {
					t.Errorf("the key %q is no UUIDv7", key)
				}
			default:
				if key != test.want {
					t.Errorf("the key is %q, want %q", key, test.want)
				}
			}
			if got := idempotentclient.KeyOf(resp); got != key {
				t.Errorf("KeyOf is %q, but %q was sent", got, key)
			}
		})
	}
}

func TestAFailingGeneratorSendsNothing(t *testing.T) {
	broken := errors.New("no entropy")
	server := &memory{answers: []http.HandlerFunc{answer(201)}}
	c := api{Client: server, idempotency: idempotentclient.NewConfig(
		idempotentclient.WithGenerator(func(context.Context) (string, error) { return "", broken }))}
	_, err := c.CreateOrder(t.Context(), "", nil)
	if !errors.Is(err, broken) || !errors.Is(err, idempotentclient.ErrNotSent) || len(server.seen) != 0 {
		t.Fatalf("got %v and %d requests", err, len(server.seen))
	}
}

func TestEditorsSeeTheKeyOnce(t *testing.T) {
	server := &memory{answers: []http.HandlerFunc{answer(503), answer(503), answer(201)}}
	var signed []string
	c := api{Client: server, RequestEditors: []editor{func(_ context.Context, r *http.Request) error {
		signed = append(signed, r.Header.Get("Idempotency-Key"))
		return nil
	}}}
	if _, err := c.CreateOrder(t.Context(), "", strings.NewReader("order")); err != nil {
		t.Fatal(err)
	}
	if key := server.oneKey(t, 3, "order"); len(signed) != 1 || signed[0] != key {
		t.Fatalf("the editor saw %v, the server %q", signed, key)
	}
}

func TestNoKeyOutlivesItsCall(t *testing.T) {
	server := &memory{answers: []http.HandlerFunc{answer(201)}}
	c := api{Client: server}
	keys := map[string]bool{}
	for range 100 {
		resp, err := c.CreateOrder(t.Context(), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		keys[idempotentclient.KeyOf(resp)] = true
	}
	if len(keys) != 100 {
		t.Fatalf("100 calls had %d keys", len(keys))
	}
}

func TestAKeyInAContextServesOneCall(t *testing.T) {
	server := &memory{answers: []http.HandlerFunc{answer(201)}}
	c := api{Client: server}
	ctx := idempotentclient.WithKey(t.Context(), "mine")
	for range 2 { // the second resumes the first
		if _, err := c.CreateOrder(ctx, "", nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.CancelOrder(ctx); !errors.Is(err, idempotentclient.ErrNotSent) {
		t.Fatalf("another operation with the same context: %v, want ErrNotSent", err)
	}
	if key := server.oneKey(t, 2, ""); key != "mine" {
		t.Fatalf("the key is %q", key)
	}
	if _, err := c.CancelOrder(idempotentclient.WithKey(ctx, "other")); err != nil {
		t.Fatalf("a key of its own: %v", err)
	}
}

func TestANaturalOperationIsRepeatedWithoutAKey(t *testing.T) {
	server := &memory{answers: []http.HandlerFunc{answer(503), answer(200)}}
	c := api{Client: server}
	op := idempotentclient.Operation{ID: "putOrder", Natural: true, Retry: createOrder.Retry}
	resp, err := c.call(idempotentclient.WithKey(t.Context(), "not for this"), &op, "/orders/1", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(server.seen) != 2 || len(server.seen[0].keys)+len(server.seen[1].keys) != 0 || idempotentclient.KeyOf(resp) != "" {
		t.Fatalf("the server saw %v", server.seen)
	}
}

// Without a key there is none to be in flight, nor one to be sent.
func TestANaturalOperationHasNoKey(t *testing.T) {
	op := idempotentclient.Operation{ID: "putOrder", Natural: true, Retry: createOrder.Retry}
	for _, opts := range [][]idempotentclient.Option{nil, {idempotentclient.WithConflictsInFlight()}} {
		for _, refuse := range []http.HandlerFunc{answer(409), problem(409, "urn:x:idempotency-in-flight")} {
			server := &memory{answers: []http.HandlerFunc{refuse, answer(200)}}
			c := api{Client: server, idempotency: idempotentclient.NewConfig(opts...)}
			resp, err := c.call(t.Context(), &op, "/orders/1", "00000000-0000-0000-0000-000000000000", nil)
			if err != nil || resp.StatusCode != 409 {
				t.Fatalf("got %v, %v", resp, err)
			}
			if len(server.seen) != 1 || len(server.seen[0].keys) != 0 {
				t.Fatalf("the server saw %v", server.seen)
			}
			var refused *idempotentclient.Problem
			if errors.As(idempotentclient.Check(resp), &refused) && refused.Type == "" {
				t.Fatalf("Check says %v of a problem that the server did not send", refused)
			}
		}
	}
}

func TestAKeyThatWouldNotArriveIsRefused(t *testing.T) {
	for _, key := range []string{" ab", "ab ", "ab\t"} {
		server := &memory{answers: []http.HandlerFunc{answer(201)}}
		c := api{Client: server}
		if _, err := c.CreateOrder(idempotentclient.WithKey(t.Context(), key), "", nil); !errors.Is(err, idempotentclient.ErrNotSent) {
			t.Errorf("%q: got %v", key, err)
		}
	}
}

func TestAnotherHeaderField(t *testing.T) {
	var got http.Header
	server := &memory{answers: []http.HandlerFunc{func(_ http.ResponseWriter, r *http.Request) { got = r.Header }}}
	c := api{Client: server}
	op := idempotentclient.Operation{Header: "X-Request-Token"}
	if _, err := c.call(idempotentclient.WithKey(t.Context(), "mine"), &op, "/", "", nil); err != nil {
		t.Fatal(err)
	}
	if got.Get("X-Request-Token") != "mine" || got.Get("Idempotency-Key") != "" {
		t.Fatalf("the header is %v", got)
	}
}

func TestUUIDv7BeginsWithTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, _ := idempotentclient.UUIDv7(t.Context())
		time.Sleep(time.Millisecond)
		second, _ := idempotentclient.UUIDv7(t.Context())
		// The bubble's clock starts at 2000-01-01, in milliseconds 0xdc6acfac00.
		if first[:13] != "00dc6acf-ac00" || second[:13] != "00dc6acf-ac01" {
			t.Fatalf("got %s and %s", first, second)
		}
	})
}
