package policy

import (
	"net/url"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// methods are the fields of a path item that kin-openapi reads as operations.
var methods = map[string]bool{
	"connect": true, "delete": true, "get": true, "head": true, "options": true,
	"patch": true, "post": true, "put": true, "trace": true,
}

// safe are the methods that change nothing (RFC 9110, 9.2.1).
var safe = map[string]bool{"get": true, "head": true, "options": true, "trace": true}

// inheriting are the methods that a path item's value reaches: those that HTTP
// does not call idempotent.
var inheriting = map[string]bool{"post": true, "patch": true}

// A pathContext is what the operations of one path item share.
type pathContext struct {
	place   document.Place
	aliasOf string
	item    *document.Node // where a $ref leads
	above   *annotation    // the path item's, or nil
}

func (r *resolver) pathItem(place document.Place, at *document.Node) []Operation {
	ctx := pathContext{place: place}
	item := at
	seen := make(map[*document.Node]bool)
	for item.Kind == document.Object && item.Ref() != nil {
		ref := item.Ref()
		r.read[item] = true
		if own := item.Member(r.cfg.Extension); own != nil {
			r.reject(own.Pos, "%s beside $ref would be lost; write it in the path item that $ref %q points at", r.cfg.Extension, ref.Value)
		}
		if replaced(item) {
			target, err := r.doc.Follow(item)
			r.read[target] = true // a path does refer to it
			if err == nil && (r.annotates(item) || r.annotates(target)) {
				r.reject(ref.Pos, "what stands beside this $ref replaces what it points at in some versions of kin-openapi, and is merged with it in others, so that %s could be lost; move it to where $ref %q points", r.cfg.Extension, ref.Value)
			}
			break
		}
		if seen[item] {
			r.findings = append(r.findings, document.Circular(item))
			return nil
		}
		seen[item] = true
		if rest, ok := strings.CutPrefix(ref.Value, "#/paths/"); ok && item == at && place.Kind == document.Path {
			ctx.aliasOf = aliased(rest)
		}
		target, err := r.doc.Step(item)
		if err != nil {
			r.findings = append(r.findings, err.(document.Findings)...)
			return nil
		}
		item = target
	}
	if item.Kind != document.Object {
		if item != at {
			r.reject(at.Ref().Pos, "$ref %q leads to %s (%s), where a path item must be; write an object with methods there", at.Ref().Value, item.Kind, item.Pos)
		}
		return nil // kin-openapi's to report
	}
	ctx.item = item
	if item.Ref() == nil {
		ctx.above = r.annotation(item, rankPathItem, levelPathItem)
	}
	var operations []Operation
	reaches := false
	for i := range item.Members {
		m := &item.Members[i]
		method := strings.ToLower(m.Name)
		if !methods[method] || m.Value.Kind != document.Object || item.Member(m.Name) != m {
			continue
		}
		reaches = reaches || inheriting[method]
		op := r.operation(&ctx, method, m)
		operations = append(operations, op)
		if place.Kind == document.Path {
			operations = append(operations, r.callbacks(op, m.Value.Field("callbacks"))...)
		}
	}
	if ctx.above != nil && !reaches {
		r.reject(ctx.above.pos, "%s on a path item reaches its POST and PATCH only, and this one has neither; write it on the operation", r.cfg.Extension)
	}
	r.items = append(r.items, item)
	return operations
}

// callbacks resolves the operations of the callbacks that op has.
func (r *resolver) callbacks(op Operation, callbacks *document.Node) []Operation {
	if callbacks == nil {
		return nil
	}
	r.expanded[callbacks] = true
	var operations []Operation
	for i := range callbacks.Members {
		m := &callbacks.Members[i]
		callback, err := r.doc.Follow(m.Value)
		if err != nil {
			r.findings = append(r.findings, err.(document.Findings)...)
			continue
		}
		if callbacks.Member(m.Name) != m || callback == nil {
			continue
		}
		r.items = append(r.items, callback)
		for i := range callback.Members {
			item := &callback.Members[i]
			if strings.HasPrefix(item.Name, "x-") || callback.Member(item.Name) != item {
				continue
			}
			operations = append(operations, r.pathItem(document.Place{
				Kind: document.Callback, Name: m.Name, Method: op.Method, Path: op.Path, URL: item.Name,
			}, item.Value)...)
		}
	}
	return operations
}

// aliased is the path that a token of a JSON pointer, in its URI form, names.
func aliased(token string) string {
	if plain, err := url.PathUnescape(token); err == nil {
		token = plain
	}
	return document.Unescape(token)
}

// annotates reports whether an operation of the path item may be annotated.
func (r *resolver) annotates(item *document.Node) bool {
	for _, m := range members(item) {
		method := strings.ToLower(m.Name)
		if methods[method] && (m.Value.Member(r.cfg.Extension) != nil || item.Member(r.cfg.Extension) != nil ||
			r.root != nil && slices.Contains(r.root.applyTo, method)) {
			return true
		}
	}
	return false
}

// replaced reports whether item has fields beside its $ref that make
// kin-openapi ignore the $ref, or in newer versions merge the two.
func replaced(item *document.Node) bool {
	for _, m := range item.Members {
		name := strings.ToLower(m.Name)
		switch {
		case methods[name] && m.Value.Kind == document.Object,
			(name == "summary" || name == "description") && m.Value.Value != "",
			(name == "servers" || name == "parameters") && len(m.Value.Items) > 0:
			return true
		}
	}
	return false
}

// operation resolves one operation.
func (r *resolver) operation(ctx *pathContext, method string, at *document.Member) Operation {
	node := at.Value
	verb := strings.ToUpper(method)
	plain := Operation{Method: verb, Path: ctx.place.String(), Place: ctx.place, AliasOf: ctx.aliasOf, Secured: r.secured(node)}
	if id := node.Field("operationId"); id != nil && id.Kind == document.String {
		plain.OperationID = id.Value
	}
	own := r.annotation(node, rankOperation, levelOperation)
	above := ctx.above
	if !inheriting[method] {
		above = nil
	}
	applied := own
	if applied == nil {
		applied = above
	}
	if applied == nil && r.root != nil && slices.Contains(r.root.applyTo, method) {
		applied = r.root
	}
	switch {
	case applied == nil:
		if inheriting[method] && r.cfg.Unannotated == "reject" {
			r.reject(at.Pos, "%s %s has no %s; write true, false or a policy", verb, plain.Path, r.cfg.Extension)
		}
		return plain
	case applied.off, applied.broken:
		plain.Pos = applied.pos
		return plain
	case safe[method] && !r.naturalOnly(verb, own):
		return plain
	}

	layers := r.layers(own, above)
	probe := builtIn(plain)
	for _, l := range layers {
		l.applyTo(&probe)
	}
	param, declared := r.headerParam(ctx, node, probe.Server.Header)

	o := builtIn(plain)
	declared.applyTo(&o)
	for _, l := range layers {
		l.applyTo(&o)
	}
	o.Client.NoRetry = o.Client.NoRetry || o.Client.MaxAttempts == 1
	o.Pos = applied.pos
	o.Streaming = r.streams(node)
	if !o.Natural {
		o.HeaderParam = param
	}
	r.checkPolicy(&o)
	r.checkInheritedNatural(&o, own)
	return o
}

// naturalOnly reports whether the annotation of a safe method says natural:
// true and nothing else, and rejects it if not.
func (r *resolver) naturalOnly(verb string, own *annotation) bool {
	var o Operation
	ok := own.profile == nil
	for _, s := range own.settings {
		s.apply(&o)
		ok = ok && s.field == "natural"
	}
	if ok && o.Natural {
		return true
	}
	r.reject(own.pos, "%s is safe and takes no policy; write %s: {natural: true} or false, or remove it", verb, r.cfg.Extension)
	return false
}

// layers are the document's levels that reach an operation, weakest first.
func (r *resolver) layers(own, above *annotation) []layer {
	var layers []layer
	var profile *document.Node
	for _, a := range []*annotation{r.root, above, own} {
		if a != nil && a.profile != nil {
			profile = a.profile
		}
	}
	if r.root != nil {
		layers = append(layers, r.root.layer)
	}
	if profile != nil {
		layers = append(layers, r.profiles[profile.Value])
	}
	for _, a := range []*annotation{above, own} {
		if a != nil {
			layers = append(layers, a.layer)
		}
	}
	return layers
}

func (l layer) applyTo(o *Operation) {
	for _, s := range l.settings {
		s.apply(o)
		o.Origins[s.field] = Origin{l.level, s.pos, l.rank}
	}
}

// secured reports whether every alternative of an operation's security names a
// scheme.
func (r *resolver) secured(operation *document.Node) bool {
	security := operation.Field("security")
	if security == nil {
		security = r.doc.Root().Field("security")
	}
	if security == nil || len(security.Items) == 0 {
		return false
	}
	for _, alternative := range security.Items {
		if len(alternative.Members) == 0 {
			return false
		}
	}
	return true
}

// streaming are the media types whose bodies are sent as they come into being.
var streaming = map[string]bool{
	"text/event-stream": true, "application/x-ndjson": true, "application/ndjson": true,
	"application/jsonl": true, "application/json-seq": true, "application/stream+json": true,
	"application/x-json-stream": true, "multipart/x-mixed-replace": true,
}

// streams reports whether a response declares a media type that streams, or the
// itemSchema by which OpenAPI 3.2 says so.
func (r *resolver) streams(operation *document.Node) bool {
	for _, m := range members(operation.Field("responses")) {
		response, err := r.doc.Follow(m.Value)
		if err != nil {
			continue // kin-openapi's to report
		}
		for _, content := range members(response.Field("content")) {
			mediaType, _, _ := strings.Cut(content.Name, ";")
			if streaming[strings.ToLower(strings.TrimSpace(mediaType))] || content.Value.Get("itemSchema") != nil {
				return true
			}
		}
	}
	return false
}
