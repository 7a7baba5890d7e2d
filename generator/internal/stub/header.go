package stub

import (
	"net/http"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// An Endpoint names one operation of a document and the header field that
// carries its key.
type Endpoint struct{ Method, Path, Header string }

// RelaxHeader makes the header parameter that declares the key an optional
// plain string, on these operations only: the guard answers for a missing or
// malformed key, and a client that leaves it out sends none of its own.
func RelaxHeader(spec *openapi3.T, endpoints []Endpoint) {
	users := parameterUsers(spec)
	annotated := map[*openapi3.Operation]bool{}
	for _, e := range endpoints {
		annotated[operation(spec, e)] = true
	}
	others := func(p *openapi3.Parameter) bool {
		return slices.ContainsFunc(users[p], func(op *openapi3.Operation) bool { return !annotated[op] })
	}
	for _, e := range endpoints {
		item, op := spec.Paths.Value(e.Path), operation(spec, e)
		for i, ref := range op.Parameters {
			if !declares(ref, e.Header) {
				continue
			}
			// A component keeps its name, and with it the type that users know,
			// unless an operation uses it that is none of ours.
			if strings.HasPrefix(ref.Ref, "#/") && !others(ref.Value) {
				*ref.Value = *relaxed(ref.Value)
			} else {
				op.Parameters[i] = &openapi3.ParameterRef{Value: relaxed(ref.Value)}
			}
		}
		for _, ref := range item.Parameters {
			if !declares(ref, e.Header) || op.Parameters.GetByInAndName(ref.Value.In, ref.Value.Name) != nil {
				continue
			}
			if !others(ref.Value) && (ref.Ref == "" || strings.HasPrefix(ref.Ref, "#/")) {
				*ref.Value = *relaxed(ref.Value)
			} else {
				op.Parameters = append(op.Parameters, &openapi3.ParameterRef{Value: relaxed(ref.Value)})
			}
		}
	}
}

// StripHeader removes that parameter from these operations.
func StripHeader(spec *openapi3.T, endpoints []Endpoint) {
	for _, e := range endpoints {
		item, op := spec.Paths.Value(e.Path), operation(spec, e)
		declared := func(ref *openapi3.ParameterRef) bool { return declares(ref, e.Header) }
		op.Parameters = slices.DeleteFunc(op.Parameters, declared)
		for _, ref := range item.Parameters {
			if !declared(ref) {
				continue
			}
			// The path's other operations keep it.
			for _, other := range item.Operations() {
				if other != op && other.Parameters.GetByInAndName(ref.Value.In, ref.Value.Name) == nil {
					other.Parameters = append(other.Parameters, ref)
				}
			}
		}
		item.Parameters = slices.DeleteFunc(item.Parameters, declared)
	}
}

func relaxed(p *openapi3.Parameter) *openapi3.Parameter {
	relaxed := *p
	relaxed.Required = false
	relaxed.Content = nil
	relaxed.Style = ""
	relaxed.Explode = nil
	relaxed.Schema = openapi3.NewStringSchema().NewRef()
	return &relaxed
}

func declares(ref *openapi3.ParameterRef, header string) bool {
	return ref.Value != nil && ref.Value.In == openapi3.ParameterInHeader &&
		http.CanonicalHeaderKey(ref.Value.Name) == http.CanonicalHeaderKey(header)
}

func operation(spec *openapi3.T, e Endpoint) *openapi3.Operation {
	return spec.Paths.Value(e.Path).Operations()[e.Method]
}

// parameterUsers lists the operations that each parameter applies to.
func parameterUsers(spec *openapi3.T) map[*openapi3.Parameter][]*openapi3.Operation {
	users := map[*openapi3.Parameter][]*openapi3.Operation{}
	for _, item := range spec.Paths.Map() {
		for _, op := range item.Operations() {
			for _, ref := range slices.Concat(op.Parameters, item.Parameters) {
				users[ref.Value] = append(users[ref.Value], op)
			}
		}
	}
	return users
}

// Has reports whether the document, as kin-openapi reads it, has e.
func Has(spec *openapi3.T, e Endpoint) bool {
	item := spec.Paths.Value(e.Path)
	return item != nil && item.Operations()[e.Method] != nil
}
