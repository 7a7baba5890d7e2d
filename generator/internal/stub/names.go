package stub

import (
	"fmt"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// clashes finds operations that oapi-codegen gives one Go name. It emits both,
// and the result does not compile.
func clashes(definitions []codegen.OperationDefinition) error {
	first := map[string]codegen.OperationDefinition{}
	var findings document.Findings
	for _, d := range definitions {
		seen, clash := first[d.OperationId]
		if !clash {
			first[d.OperationId] = d
			continue
		}
		findings = append(findings, document.Finding{
			Pos: position(d.Spec),
			Message: fmt.Sprintf("%s %s and %s %s (%s) are both called %s in Go; give each an operationId of its own",
				d.Method, d.Path, seen.Method, seen.Path, position(seen.Spec), d.OperationId),
		})
	}
	if findings == nil {
		return nil
	}
	return findings
}

func position(op *openapi3.Operation) document.Position { return at(op.Origin) }

func at(origin *openapi3.Origin) document.Position {
	if origin == nil || origin.Key == nil {
		return document.Position{}
	}
	return document.Position{File: origin.Key.File, Line: origin.Key.Line, Column: origin.Key.Column}
}

// NameAliased gives the operations of a path item that another path aliases an
// operationId where they have none. oapi-codegen would name each by the path it
// meets it under, and the alias's route would call a method that is not there.
func NameAliased(spec *openapi3.T) {
	for _, item := range spec.Paths.Map() {
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
