//go:build deps

package deps

import (
	_ "github.com/getkin/kin-openapi/openapi3"
	_ "github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	_ "github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	_ "github.com/oapi-codegen/runtime"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "go.yaml.in/yaml/v3"
	_ "golang.org/x/tools/imports"
	_ "modernc.org/sqlite"
	_ "pgregory.net/rapid"
)
