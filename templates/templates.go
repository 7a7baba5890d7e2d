// Package templates holds the text of what is generated. The templates print
// what package model resolved; they compute, default and validate nothing.
package templates

import "embed"

// Files are the templates: server.tmpl for what every server has, one file per
// router family for what its handlers look like, client.tmpl for the Go client,
// and typescript.tmpl for the TypeScript one.
//
//go:embed *.tmpl
var Files embed.FS
