package idempotency

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A Problem is a refusal by the guard: RFC 9457 problem details.
type Problem struct {
	// Name says what is wrong: what Type ends in. Clients branch on it.
	Name   string `json:"-"`
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	// RetryAfter is when the request may be sent again with the same key;
	// whole seconds, zero for never or at once.
	RetryAfter time.Duration `json:"-"`
}

var titles = map[string]string{
	wire.MissingKey:        "The idempotency key is missing",
	wire.InvalidKey:        "The idempotency key is not valid",
	wire.KeyReused:         "The idempotency key was used for another request",
	wire.InFlight:          "A request with this idempotency key is in progress",
	wire.NotReplayable:     "The request was processed, but its answer was not recorded",
	wire.StoreUnavailable:  "The idempotency store is not available",
	wire.OutcomeUnknown:    "The outcome of the request is not known",
	wire.RequestTooLarge:   "The request body is too large",
	wire.ResponseTooLarge:  "The answer is too large to be recorded",
	wire.RequestUnreadable: "The request body could not be read",
	wire.Unauthenticated:   "The caller is not authenticated",
	wire.Forbidden:         "The caller may not do this",
	wire.PrincipalFailed:   "The caller could not be identified",
}

// A refusal is what decides before it becomes a Problem.
type refusal struct {
	name       string
	status     int
	detail     string
	retryAfter time.Duration
	err        error // for the observer, never for the answer
}

func (g *Guard) refuse(ctx context.Context, req *Request, r *refusal) *Response {
	p := Problem{
		Name:   r.name,
		Type:   g.problemBase + r.name,
		Title:  titles[r.name],
		Status: r.status,
		Detail: r.detail,
	}
	if r.retryAfter > 0 {
		p.RetryAfter = max(r.retryAfter+time.Second-1, time.Second).Truncate(time.Second)
	}
	var resp Response
	if g.problem != nil {
		if req.http != nil {
			req.Body = req.http.buffer
		}
		resp = g.problem(ctx, req, p)
		resp.Header = resp.Header.Clone() // it may be shared
		if resp.Status == 0 {
			resp.Status = p.Status
		}
	} else {
		body, _ := json.Marshal(p) // strings and an int: it cannot fail
		resp = Response{Status: p.Status, Header: http.Header{"Content-Type": {wire.ProblemType}}, Body: body}
	}
	if p.RetryAfter > 0 && resp.Header.Get("Retry-After") == "" {
		if resp.Header == nil {
			resp.Header = http.Header{}
		}
		resp.Header.Set("Retry-After", strconv.Itoa(int(p.RetryAfter/time.Second)))
	}
	return &resp
}
