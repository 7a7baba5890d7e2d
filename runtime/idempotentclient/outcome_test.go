package idempotentclient_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

func TestCheckNamesTheRefusal(t *testing.T) {
	for _, test := range []struct {
		status int
		kind   string
		want   idempotentclient.Code // empty: the operation's own answer
	}{
		{400, "urn:oapi-idempotent:missing-idempotency-key", idempotentclient.MissingKey},
		{400, "urn:oapi-idempotent:invalid-idempotency-key", idempotentclient.InvalidKey},
		{422, "https://example.com/problems/idempotency-key-reused", idempotentclient.KeyReused},
		{409, "https://example.com/problems#idempotency-in-flight", idempotentclient.InFlight},
		{409, "urn:oapi-idempotent:idempotency-not-replayable", idempotentclient.NotReplayable},
		{503, "urn:oapi-idempotent:idempotency-store-unavailable", idempotentclient.StoreUnavailable},
		{503, "urn:oapi-idempotent:idempotency-outcome-unknown", idempotentclient.OutcomeUnknown},
		{409, "urn:oapi-idempotent:idempotency-outcome-unknown", idempotentclient.OutcomeUnknown},
		{409, "https://example.com/sold-out", ""},
		{201, "urn:oapi-idempotent:idempotency-key-reused", ""},
	} {
		t.Run(test.kind, func(t *testing.T) {
			c := api{
				Client:      &memory{answers: []http.HandlerFunc{problem(test.status, test.kind)}},
				idempotency: idempotentclient.NewConfig(idempotentclient.NoRetry()),
			}
			resp, err := c.CreateOrder(t.Context(), "mine", nil)
			if err != nil {
				t.Fatal(err)
			}
			if text := drain(t, resp); !strings.Contains(text, test.kind) {
				t.Fatalf("the body is %q", text)
			}
			err = idempotentclient.Check(resp) // after the body was read and closed
			if test.want == "" {
				if err != nil {
					t.Fatalf("Check is %v, want nil", err)
				}
				return
			}
			var p *idempotentclient.Problem
			if !errors.As(err, &p) {
				t.Fatalf("Check is %v", err)
			}
			if want := (idempotentclient.Problem{
				Code: test.want, Status: test.status, Type: test.kind,
				Title: "A title.", Detail: "What to do.", Key: "mine",
			}); *p != want {
				t.Errorf("got %+v, want %+v", *p, want)
			}
			for _, part := range []string{string(test.want), "mine", "What to do."} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the text %q lacks %q", err, part)
				}
			}
		})
	}
}

// What a guard says is read whole, however little of other answers is.
func TestASmallBodyLimitHidesNoRefusal(t *testing.T) {
	detail := `,"detail":"` + strings.Repeat("x", 200) + `"}`
	for _, test := range []struct {
		code     idempotentclient.Code
		status   int
		attempts int
	}{
		{idempotentclient.OutcomeUnknown, 503, 1},
		{idempotentclient.KeyReused, 422, 1},
		{idempotentclient.InFlight, 409, 9},
	} {
		server := &memory{}
		for range 9 {
			server.answers = append(server.answers, body(test.status, `{"type":"urn:x:`+string(test.code)+`"`+detail, "Content-Type", "application/problem+json"))
		}
		server.answers = append(server.answers, answer(201))
		c := api{Client: server, idempotency: idempotentclient.NewConfig(idempotentclient.WithBodyLimit(64),
			idempotentclient.WithObserver(func(_ context.Context, a idempotentclient.Attempt) {
				if a.Again != (test.attempts > 1) && a.Status != 201 {
					t.Errorf("%s: attempt %d: again is %v", test.code, a.Number, a.Again)
				}
			}))}
		resp, err := c.CreateOrder(t.Context(), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		var refused *idempotentclient.Problem
		if test.attempts == 1 && (!errors.As(idempotentclient.Check(resp), &refused) || refused.Code != test.code) {
			t.Errorf("%s: Check says %v", test.code, idempotentclient.Check(resp))
		}
		if n := len(server.seen); test.attempts == 1 && n != 1 || test.attempts > 1 && n != 10 {
			t.Errorf("%s: %d attempts", test.code, n)
		}
	}
}

func TestReplayed(t *testing.T) {
	for value, want := range map[string]bool{"true": true, "?1": true, "false": false, "?0": false, "": false} {
		c := api{Client: &memory{answers: []http.HandlerFunc{answer(201, "Idempotent-Replayed", value)}}}
		resp, err := c.CreateOrder(t.Context(), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := idempotentclient.Replayed(resp); got != want {
			t.Errorf("with the marker %q: %v", value, got)
		}
	}
}

func TestAnswersOfOtherCalls(t *testing.T) {
	foreign := &http.Response{StatusCode: 409, Request: &http.Request{}}
	for _, resp := range []*http.Response{nil, {}, foreign} {
		if idempotentclient.Check(resp) != nil || idempotentclient.Replayed(resp) || idempotentclient.KeyOf(resp) != "" {
			t.Errorf("%v is taken for the answer of a call", resp)
		}
	}
}
