// Package api is what oapi-idempotent generates from openapi.yaml: models, a
// strict server whose annotated operations are guarded, and a client.
package api

//go:generate go run ../../../cmd/oapi-idempotent -config oapi-idempotent.yaml openapi.yaml
