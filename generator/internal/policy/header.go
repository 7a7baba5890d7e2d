package policy

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// headerParam finds the header parameter called name that an operation or its
// path item declares, and what it says as the policy's defaults: whether a key
// is required, its length, format and pattern.
func (r *resolver) headerParam(ctx *pathContext, operation *document.Node, name string) (*HeaderParam, layer) {
	declared := layer{rank: rankHeaderParam, level: levelHeaderParam}
	param, node := r.findHeader(operation.Field("parameters"), name)
	if param == nil {
		if param, node = r.findHeader(ctx.item.Field("parameters"), name); param == nil {
			return nil, declared
		}
		param.PathLevel = true
	}
	give := func(field string, pos document.Position, apply func(*Operation)) {
		declared.settings = append(declared.settings, setting{field, pos, apply})
	}
	if !param.Required {
		give("onMissing", param.Pos, func(o *Operation) { o.Server.OnMissing = 0 })
	}
	schema := node.Field("schema")
	if schema == nil {
		return param, declared
	}
	schema, err := r.doc.Follow(schema)
	if err != nil {
		return param, declared // kin-openapi's to report
	}
	if n := schema.Field("minLength"); n != nil {
		if v, err := strconv.Atoi(n.Value); err == nil && v > 0 {
			give("key.minLength", n.Pos, func(o *Operation) { o.Server.KeyMinLength = v })
		}
	}
	if n := schema.Field("maxLength"); n != nil {
		if v, err := strconv.Atoi(n.Value); err == nil && v > 0 {
			give("key.maxLength", n.Pos, func(o *Operation) { o.Server.KeyMaxLength = v })
		}
	}
	if n := schema.Field("format"); n != nil && n.Value == "uuid" {
		give("key.format", n.Pos, func(o *Operation) { o.Server.KeyFormat = "uuid" })
	}
	if n := schema.Field("pattern"); n != nil && n.Kind == document.String {
		// OpenAPI's patterns are ECMAScript's; what RE2 cannot express is left
		// to whoever validates the request.
		if _, err := regexp.Compile(n.Value); err == nil {
			give("key.pattern", n.Pos, func(o *Operation) { o.Server.KeyPattern = n.Value })
		}
	}
	return param, declared
}

func (r *resolver) findHeader(parameters *document.Node, name string) (*HeaderParam, *document.Node) {
	if parameters == nil {
		return nil, nil
	}
	for _, item := range parameters.Items {
		node, err := r.doc.Follow(item)
		if err != nil {
			continue // kin-openapi's to report
		}
		in, declared, required := node.Field("in"), node.Field("name"), node.Field("required")
		if in == nil || in.Value != "header" || declared == nil || !strings.EqualFold(declared.Value, name) {
			continue
		}
		param := &HeaderParam{
			Pos:      node.Pos,
			Name:     declared.Value,
			Required: required != nil && required.Kind == document.Bool && required.Value == "true",
		}
		if ref := item.Ref(); ref != nil {
			param.Ref = ref.Value
		}
		return param, node
	}
	return nil, nil
}
