// Package api is what oapi-idempotent generates from openapi.yaml: models and a
// strict server whose transfers run in a transaction of the guard's.
package api

//go:generate go run ../../../cmd/oapi-idempotent -config oapi-idempotent.yaml openapi.yaml
