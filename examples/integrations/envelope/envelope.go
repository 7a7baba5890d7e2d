// Package envelope answers refusals in an error envelope of one's own.
package envelope

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// Problem is what [idempotency.WithProblem] takes. Clients that oapi-idempotent
// generates tell refusals apart by the member type of a JSON object, so the
// envelope keeps it.
func Problem(_ context.Context, _ *idempotency.Request, p idempotency.Problem) idempotency.Response {
	var envelope struct {
		Type  string `json:"type"`
		Error struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	envelope.Type = p.Type
	envelope.Error.Code = p.Name
	envelope.Error.Message = p.Title
	body, _ := json.Marshal(envelope) // strings: it cannot fail
	return idempotency.Response{
		Status: p.Status,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   body,
	}
}
