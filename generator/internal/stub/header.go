package stub

import (
	"iter"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// An Endpoint names one operation of a document and the header field that
// carries its key.
type Endpoint struct {
	Method string
	Place  document.Place
	Header string
}

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
		item, op := pathItem(spec, e.Place), operation(spec, e)
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
		item, op := pathItem(spec, e.Place), operation(spec, e)
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

// pathItem returns the path item at a place, or nil.
func pathItem(spec *openapi3.T, at document.Place) *openapi3.PathItem {
	switch at.Kind {
	case document.Webhook:
		return spec.Webhooks[at.Name]
	case document.Callback:
		parent := operation(spec, Endpoint{Method: at.Method, Place: document.Place{Kind: document.Path, Name: at.Path}})
		if parent == nil || parent.Callbacks[at.Name] == nil || parent.Callbacks[at.Name].Value == nil {
			return nil
		}
		return parent.Callbacks[at.Name].Value.Value(at.URL)
	}
	return spec.Paths.Value(at.Name)
}

// operation returns the operation that e names, or nil.
func operation(spec *openapi3.T, e Endpoint) *openapi3.Operation {
	item := pathItem(spec, e.Place)
	if item == nil {
		return nil
	}
	return item.Operations()[e.Method]
}

// pathItems yields the items of paths. One of which nothing is written is nil, and
// left out.
func pathItems(spec *openapi3.T) iter.Seq2[string, *openapi3.PathItem] {
	return func(yield func(string, *openapi3.PathItem) bool) {
		for _, path := range slices.Sorted(maps.Keys(spec.Paths.Map())) {
			if item := spec.Paths.Value(path); item != nil && !yield(path, item) {
				return
			}
		}
	}
}

// places lists where the document has path items that oapi-codegen generates
// code for, in the order in which it does.
func places(spec *openapi3.T) []document.Place {
	var paths, webhooks, callbacks []document.Place
	for path, item := range pathItems(spec) {
		paths = append(paths, document.Place{Kind: document.Path, Name: path})
		operations := item.Operations()
		for _, method := range slices.Sorted(maps.Keys(operations)) {
			for _, name := range slices.Sorted(maps.Keys(operations[method].Callbacks)) {
				callback := operations[method].Callbacks[name]
				if callback == nil || callback.Value == nil {
					continue
				}
				for _, url := range slices.Sorted(maps.Keys(callback.Value.Map())) {
					if callback.Value.Value(url) == nil {
						continue
					}
					callbacks = append(callbacks, document.Place{Kind: document.Callback, Name: name, Method: method, Path: path, URL: url})
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Webhooks)) {
		if spec.Webhooks[name] == nil {
			continue
		}
		webhooks = append(webhooks, document.Place{Kind: document.Webhook, Name: name})
	}
	return slices.Concat(paths, webhooks, callbacks)
}

// parameterUsers lists the operations that each parameter applies to.
func parameterUsers(spec *openapi3.T) map[*openapi3.Parameter][]*openapi3.Operation {
	users := map[*openapi3.Parameter][]*openapi3.Operation{}
	for _, place := range places(spec) {
		item := pathItem(spec, place)
		for _, op := range item.Operations() {
			for _, ref := range slices.Concat(op.Parameters, item.Parameters) {
				users[ref.Value] = append(users[ref.Value], op)
			}
		}
	}
	return users
}

// Has reports whether the document, as kin-openapi reads it, has e.
func Has(spec *openapi3.T, e Endpoint) bool { return operation(spec, e) != nil }
