package stub

import (
	"fmt"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// A definition is what oapi-codegen made of one operation.
type definition struct {
	codegen.OperationDefinition
	place document.Place
}

// clashes finds operations that oapi-codegen gives one Go name. It emits both,
// and the result does not compile; nor does it for webhooks and for callbacks if
// it emits functions.
func clashes(doc *document.Document, definitions []definition, functions bool) error {
	type name struct{ kind, operationID string }
	first := map[name]definition{}
	var findings document.Findings
	for _, d := range definitions {
		if d.place.Kind != document.Path && !functions {
			continue
		}
		called := name{d.place.Kind, d.OperationId}
		seen, clash := first[called]
		if !clash {
			first[called] = d
			continue
		}
		findings = append(findings, document.Finding{
			Pos: positionOf(doc, d.Method, d.place),
			Message: fmt.Sprintf("%s %s and %s %s (%s) are both called %s in Go; give each an operationId of its own",
				d.Method, d.place, seen.Method, seen.place, positionOf(doc, seen.Method, seen.place), d.OperationId),
		})
	}
	if findings == nil {
		return nil
	}
	return findings
}

// NameAliased gives the operations of a path item that another path aliases an
// operationId where they have none. oapi-codegen would name each by the path it
// meets it under, and the alias's route would call a method that is not there.
func NameAliased(spec *openapi3.T) {
	for _, item := range pathItems(spec) {
		target, ok := strings.CutPrefix(item.Ref, "#/paths/")
		if !ok {
			continue
		}
		path := strings.NewReplacer("~1", "/", "~0", "~").Replace(target)
		for method, op := range item.Operations() {
			if op.OperationID == "" {
				segments := slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" })
				op.OperationID = strings.Join(append([]string{strings.ToLower(method)}, segments...), "-")
			}
		}
	}
}
