package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// Ranks order what gives values, weakest first.
const (
	rankBuiltIn = iota
	rankHeaderParam
	rankRoot
	rankProfile
	rankPathItem
	rankOperation
)

const (
	levelHeaderParam = "header parameter"
	levelRoot        = "document root"
	levelPathItem    = "path item"
	levelOperation   = "operation"
)

// A resolver collects what one document says and everything that is wrong.
type resolver struct {
	doc      *document.Document
	cfg      Config
	findings document.Findings
	read     map[*document.Node]bool // the objects whose annotation has been read
	expanded map[*document.Node]bool // the callbacks whose operations have been resolved
	root     *annotation             // nil: none
	profiles map[string]layer
	within   string           // what stands between the extension and a field in messages
	items    []*document.Node // the path items, where references lead
}

// A layer is what one level gives.
type layer struct {
	rank     int
	level    string
	settings []setting
}

// An annotation is the extension's value on one object.
type annotation struct {
	layer
	pos     document.Position
	off     bool // false
	broken  bool // neither, and rejected
	profile *document.Node
	applyTo []string // at the root: lower-case methods
}

func (r *resolver) reject(pos document.Position, format string, args ...any) {
	r.findings = append(r.findings, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
}

// full is the name of a field as messages give it.
func (r *resolver) full(name string) string { return r.cfg.Extension + r.within + "." + name }

// mustBe rejects the value of the field name, with what it must be instead and
// perhaps a hint, a clause of its own.
func (r *resolver) mustBe(name string, n *document.Node, what string, hint ...string) {
	if n.Get("$ref") != nil {
		hint = []string{"; $ref is not followed here: name a profile of the document root, or use a YAML anchor"}
	}
	r.reject(n.Pos, "%s must be %s, not %s%s", r.full(name), what, n.Describe(), strings.Join(hint, ""))
}

// document resolves all operations of the document.
func (r *resolver) document() []Operation {
	root := r.doc.Root()
	if root.Kind != document.Object {
		r.reject(root.Pos, "the document is %s; write an object with openapi, info and paths", root.Describe())
		return nil
	}
	has := func(field string) bool { return root.FieldMember(field) != nil }
	if swagger := root.FieldMember("swagger"); swagger != nil && !has("openapi") {
		r.reject(swagger.Pos, "this is a document of Swagger 2.0, which oapi-codegen does not read; convert it to OpenAPI 3.0, which has other fields")
		return nil
	}
	if !has("openapi") && !has("paths") && !has("webhooks") && !has("components") {
		r.reject(root.Pos, "this is not an OpenAPI document; name one that has openapi, info and paths")
		return nil
	}
	if pos, text := r.doc.Second(); strings.Contains(text, r.cfg.Extension) {
		r.reject(pos, "a second document begins here, of which nothing is read, so that its %s would be lost; write it in a file of its own", r.cfg.Extension)
	}
	r.root = r.annotation(root, rankRoot, levelRoot)
	var operations []Operation
	paths := root.Field("paths")
	for i := range members(paths) {
		m := &paths.Members[i]
		if strings.HasPrefix(m.Name, "x-") || paths.Member(m.Name) != m {
			continue
		}
		at := r.pathItem(document.Place{Kind: document.Path, Name: m.Name}, m.Value)
		if !strings.HasPrefix(m.Name, "/") && slices.ContainsFunc(at, func(op Operation) bool { return op.Annotated() }) {
			// No router takes it, and the server would panic when it starts.
			r.reject(m.Pos, "a path begins with a slash; write /%s", m.Name)
		}
		operations = append(operations, at...)
	}
	webhooks := root.Field("webhooks")
	for i := range members(webhooks) {
		m := &webhooks.Members[i]
		if m.Name == r.cfg.Extension || webhooks.Member(m.Name) != m {
			continue
		}
		operations = append(operations, r.pathItem(document.Place{Kind: document.Webhook, Name: m.Name}, m.Value)...)
	}
	s := strays{r, make(map[visit]bool), len(members(paths)) > 0, make(map[*document.Node]bool)}
	for _, item := range r.items {
		s.items[item] = true
	}
	for _, item := range append(r.items, root) {
		s.object(item, "")
	}
	return operations
}

func members(n *document.Node) []document.Member {
	if n == nil {
		return nil
	}
	return n.Members
}

// annotation reads the extension's value on owner, or returns nil if there is none.
func (r *resolver) annotation(owner *document.Node, rank int, level string) *annotation {
	r.read[owner] = true
	m := owner.Member(r.cfg.Extension)
	if m == nil {
		return nil
	}
	r.checkRepeated(owner, r.cfg.Extension)
	a := &annotation{layer: layer{rank: rank, level: level}, pos: m.Pos}
	n := m.Value
	switch n.Kind {
	case document.Bool:
		a.off = n.Value == "false"
		if rank == rankRoot {
			r.reject(m.Pos, "%s at the document root only supplies defaults, so true and false mean nothing there; write applyTo: [post, patch] to annotate every POST and PATCH, or remove it", r.cfg.Extension)
		}
	case document.Object:
		if ref := n.Get("$ref"); ref != nil {
			r.reject(m.Pos, "%s does not follow $ref; name a profile of the document root, or use a YAML anchor", r.cfg.Extension)
			a.broken = true
			return a
		}
		own := []string{"profile"}
		if rank == rankRoot {
			own = []string{"profile", "profiles", "applyTo"}
			r.readProfiles(n.Get("profiles"))
			a.applyTo = r.readApplyTo(n.Get("applyTo"))
		}
		a.settings = r.settings("", n, policyFields, own)
		a.profile = r.readProfileName(n.Get("profile"))
	default:
		a.broken = true
		r.reject(n.Pos, "%s must be true, false or an object with the policy's fields, not %s", r.cfg.Extension, n.Describe())
	}
	return a
}

// checkRepeated reports a member that JSON gives more than once: readers differ
// in which one they take.
func (r *resolver) checkRepeated(n *document.Node, name string) {
	first := true
	for _, m := range n.Members {
		if m.Name != name {
			continue
		}
		if !first {
			r.reject(m.Pos, "%q is given more than once; remove all but one", name)
		}
		first = false
	}
}

func (r *resolver) readProfiles(n *document.Node) {
	if n == nil {
		return
	}
	if n.Kind != document.Object {
		r.mustBe("profiles", n, "an object of named policies")
		return
	}
	r.profiles = make(map[string]layer, len(n.Members))
	for _, m := range n.Members {
		r.checkRepeated(n, m.Name)
		name := "profiles." + m.Name
		if m.Name == "" {
			r.reject(m.Pos, "%s has a profile without a name; write one", r.full("profiles"))
			continue
		}
		if m.Value.Kind != document.Object {
			r.mustBe(name, m.Value, "an object with the policy's fields")
			continue
		}
		if at := m.Value.Member("profile"); at != nil {
			r.reject(at.Pos, "%s.profile means nothing: a profile cannot build on another; write its fields here", r.full(name))
		}
		r.within = "." + name
		r.profiles[m.Name] = layer{
			rank:     rankProfile,
			level:    "profile " + m.Name,
			settings: r.settings("", m.Value, policyFields, []string{"profile"}),
		}
		r.within = ""
	}
}

// readProfileName returns n if it names a profile. The root is read first, so
// that all profiles are known.
func (r *resolver) readProfileName(n *document.Node) *document.Node {
	if n == nil {
		return nil
	}
	if n.Kind != document.String {
		r.mustBe("profile", n, "the name of a profile of the document root")
		return nil
	}
	if _, ok := r.profiles[n.Value]; ok {
		return n
	}
	var names []string
	for name := range r.profiles {
		names = append(names, name)
	}
	slices.Sort(names)
	instead := "; write it under " + r.full("profiles") + " at the document root"
	if len(names) > 0 {
		instead = document.Instead(n.Value, names)
	}
	r.reject(n.Pos, "%s: there is no profile %q%s", r.full("profile"), n.Value, instead)
	return nil
}

func (r *resolver) readApplyTo(n *document.Node) []string {
	if n == nil {
		return nil
	}
	methods := []string{"post", "put", "patch", "delete"}
	values, ok := list(words(methods...), verbatim)(r, "applyTo", n)
	if ok && len(values) == 0 {
		r.reject(n.Pos, "%s is empty and applies to nothing; write methods, such as [post, patch], or remove it", r.full("applyTo"))
	}
	return values
}

// settings reads the fields of the object n, and leaves out those whose names
// are the caller's own.
func (r *resolver) settings(prefix string, n *document.Node, fields []field, own []string) []setting {
	var settings []setting
	for _, m := range n.Members {
		if strings.HasPrefix(m.Name, "x-") || slices.Contains(own, m.Name) {
			continue
		}
		r.checkRepeated(n, m.Name)
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == m.Name })
		if i < 0 {
			r.unknown(prefix, m, fields, own)
			continue
		}
		settings = append(settings, r.setting(prefix+m.Name, m, fields[i])...)
	}
	return settings
}

func (r *resolver) setting(name string, m document.Member, f field) []setting {
	if f.parse != nil {
		if apply := f.parse(r, name, m.Value); apply != nil {
			return []setting{{name, m.Pos, apply}}
		}
		return nil
	}
	if m.Value.Kind == document.Object && m.Value.Get("$ref") == nil {
		settings := r.settings(name+".", m.Value, f.fields, nil)
		if f.off != nil {
			settings = append([]setting{{name, m.Pos, func(o *Operation) { *f.off.at(o) = false }}}, settings...)
		}
		return settings
	}
	var names []string
	for _, sub := range f.fields {
		names = append(names, sub.name)
	}
	what := "an object with " + strings.Join(names, ", ")
	if f.off != nil {
		if m.Value.Kind == f.off.kind && m.Value.Value == f.off.word {
			return []setting{{name, m.Pos, func(o *Operation) { *f.off.at(o) = true }}}
		}
		what = f.off.word + " or " + what
	}
	r.mustBe(name, m.Value, what)
	return nil
}

// unknown reports a member that is no field, with the field that was meant.
func (r *resolver) unknown(prefix string, m document.Member, fields []field, own []string) {
	name := prefix + m.Name
	if prefix == "" && (m.Name == "profiles" || m.Name == "applyTo") {
		r.reject(m.Pos, "%s belongs at the document root; move it there", r.full(name))
		return
	}
	if m.Name == "$ref" {
		r.reject(m.Pos, "%s is not followed; name a profile of the document root, or use a YAML anchor", r.full(name))
		return
	}
	for _, elsewhere := range append(slices.Clone(fieldNames), "fingerprint", "key", "server", "client") {
		if elsewhere == m.Name || strings.HasSuffix(elsewhere, "."+m.Name) && elsewhere != "key.pattern" {
			r.reject(m.Pos, "%s is not a field; write %s", r.full(name), r.full(elsewhere))
			return
		}
	}
	candidates := slices.Clone(own)
	for _, f := range fields {
		candidates = append(candidates, f.name)
	}
	r.reject(m.Pos, "%s is not a field%s", r.full(name), document.Instead(m.Name, candidates))
}
