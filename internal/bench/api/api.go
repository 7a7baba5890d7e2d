// Package api holds the code that oapi-codegen generates for a document, and
// the code that this module generates for it.
package api

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen -package stock -generate types,std-http -o stock/api.gen.go openapi.yaml
//go:generate go run github.com/oapi-idempotent/oapi-idempotent/cmd/oapi-idempotent -package woven -generate types,std-http -o woven/api.gen.go openapi.yaml
