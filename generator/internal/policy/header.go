package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// headerParam finds the header parameter called name that an operation or its
// path item declares, and what it says as the policy's defaults: whether a key
// is required, its length, format and pattern. A schema that allows no strings,
// a pattern that RE2 cannot express, and lists of keys give no defaults, and are
// Ignored.
func (r *resolver) headerParam(ctx *pathContext, operation *document.Node, name string) (*HeaderParam, layer) {
	declared := layer{rank: rankHeaderParam, level: levelHeaderParam}
	found := append(
		r.headers(operation.Field("parameters"), name, false),
		r.headers(ctx.item.Field("parameters"), name, true)...)
	if len(found) == 0 {
		return nil, declared
	}
	param, node := found[0].param, found[0].node
	for _, other := range found[1:] {
		// An operation's parameter replaces its path item's of the same name.
		if other.param.PathLevel == param.PathLevel || other.param.Name != param.Name {
			r.reject(other.at, "%s declares the header field that %s at %s declares already (case does not count); remove one of them", other.param.Name, param.Name, found[0].at)
		}
	}
	ignore := func(pos document.Position, format string, args ...any) {
		param.Ignored = append(param.Ignored, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
	}
	give := func(field string, pos document.Position, apply func(*Operation)) {
		declared.settings = append(declared.settings, setting{field, pos, apply})
	}
	if !param.Required {
		give("onMissing", param.Pos, func(o *Operation) { o.Server.OnMissing = 0 })
	}
	schema := node.Field("schema")
	if content := node.Member("content"); schema == nil && content != nil {
		ignore(content.Pos, "the content of %s is not applied: a key is plain text; declare a schema instead", param.Name)
	}
	if schema == nil {
		return param, declared
	}
	schema, err := r.doc.Follow(schema)
	if err != nil {
		return param, declared // kin-openapi's to report
	}
	if n := schema.Field("type"); n != nil && !allowsStrings(n) {
		ignore(n.Pos, "the schema of %s is not applied: a key is a string", param.Name)
		return param, declared
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
		// OpenAPI's patterns are ECMAScript's, and real documents use what RE2
		// lacks, such as lookahead.
		if _, err := regexp.Compile(n.Value); err != nil {
			ignore(n.Pos, "the pattern of %s is not applied: %v; check it in a middleware if it matters", param.Name, err)
		} else {
			give("key.pattern", n.Pos, func(o *Operation) { o.Server.KeyPattern = n.Value })
		}
	}
	for _, listed := range []string{"enum", "const"} {
		if m := schema.Member(listed); m != nil {
			ignore(m.Pos, "the %s of %s is not applied: every call needs a key of its own; remove it", listed, param.Name)
		}
	}
	return param, declared
}

// allowsStrings reports whether a schema's type, or one of its types, is string.
func allowsStrings(n *document.Node) bool {
	isString := func(n *document.Node) bool { return n.Value == "string" }
	return isString(n) || slices.ContainsFunc(n.Items, isString)
}

// A declaredHeader is a header parameter, and where it is declared or referred to.
type declaredHeader struct {
	at    document.Position
	param *HeaderParam
	node  *document.Node
}

// headers lists the header parameters called name, in any case.
func (r *resolver) headers(parameters *document.Node, name string, pathLevel bool) []declaredHeader {
	if parameters == nil {
		return nil
	}
	var found []declaredHeader
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
			Pos:       node.Pos,
			Name:      declared.Value,
			PathLevel: pathLevel,
			Required:  required != nil && required.Kind == document.Bool && required.Value == "true",
		}
		if ref := item.Ref(); ref != nil {
			param.Ref = ref.Value
		}
		found = append(found, declaredHeader{item.Pos, param, node})
	}
	return found
}
