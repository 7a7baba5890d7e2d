package idempotency_test

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

func TestOutcomesReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		resp := &idempotency.Response{
			Status: rapid.IntRange(200, 599).Draw(t, "status"),
			Header: rapid.MapOf(rapid.SampledFrom([]string{"Location", "x-lower", "Link"}), rapid.SliceOf(rapid.String())).Draw(t, "header"),
		}
		if resp.Status != http.StatusNoContent && resp.Status != http.StatusNotModified {
			resp.Body = rapid.SliceOf(rapid.Byte()).Draw(t, "body")
		}
		outcome, err := idempotency.EncodeOutcome(resp)
		if err != nil {
			t.Fatal(err)
		}
		if outcome.State != idempotency.Completed || outcome.Status != resp.Status {
			t.Fatalf("got %+v", outcome)
		}
		got, err := idempotency.DecodeOutcome(outcome)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, resp) {
			t.Fatalf("got %+v, want %+v", got, resp)
		}
	})
}

func TestOutcomesThatWouldNotBeReplayedAsTheyAre(t *testing.T) {
	for want, resp := range map[string]idempotency.Response{
		"99 is no status":                           {Status: 99},
		"101 is no status":                          {Status: 101},
		"600 is no status":                          {Status: 600},
		"an answer 204 has no body":                 {Status: 204, Body: []byte("b")},
		"an answer 304 has no body":                 {Status: 304, Body: []byte("b")},
		"header field set-cookie is never replayed": {Status: 200, Header: http.Header{"set-cookie": {"a=b"}}},
		"header field Date is never replayed":       {Status: 200, Header: http.Header{"Date": {"now"}}},
	} {
		if outcome, err := idempotency.EncodeOutcome(&resp); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v gives %+v, %v; want an error with %q", resp, outcome, err, want)
		}
	}
	for _, header := range [][]byte{nil, {0}, {1, 200}} {
		if resp, err := idempotency.DecodeOutcome(idempotency.Outcome{Header: header}); err == nil {
			t.Errorf("the header % x is read as %+v", header, resp)
		}
	}
}
