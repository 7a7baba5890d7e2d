package stub

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// cures are what helps where oapi-codegen says that it cannot go on, by what it
// says. Every cure here has cured a document.
var cures = []struct {
	failure *regexp.Regexp
	cure    string
}{
	{
		regexp.MustCompile(`unrecognized external reference '([^']+)'`),
		`say which package has the types of that document, by "import-mapping: {$1: example.com/its/package}"`,
	},
	{
		regexp.MustCompile(`unexpected reference depth`),
		`move what that $$ref points at to a component of its own, and refer to it there`,
	},
	{
		regexp.MustCompile(`unhandled Schema type`),
		`give it a Go type of your own with x-go-type, such as "x-go-type: any"`,
	},
	{
		regexp.MustCompile(`is not a number or boolean literal`),
		`remove that value from its enum, or write it as what it is`,
	},
	{
		regexp.MustCompile(`error merging schemas`),
		`try "compatibility: {old-merge-schemas: true}", or give it a Go type of your own with x-go-type`,
	},
	{
		regexp.MustCompile(`panic: unable to resolve reference to name`),
		`generate without embedded-spec, which does not bear every document in several files`,
	},
	{
		regexp.MustCompile(`error generating type for (?:anyOf|oneOf)`),
		`give it a Go type of your own with x-go-type`,
	},
}

// A names is what the document calls its parts. oapi-codegen changes that.
type names struct {
	doc        *document.Document
	components []component
	operations map[*openapi3.Operation]string // operationIds
}

func namesOf(spec *openapi3.T, doc *document.Document) names {
	n := names{doc, components(spec, doc), map[*openapi3.Operation]string{}}
	for _, item := range pathItems(spec) {
		for _, op := range item.Operations() {
			n.operations[op] = op.OperationID
		}
	}
	return n
}

// explain says where in the document err, which oapi-codegen gave, has its
// cause, and what cures it.
func (n names) explain(spec *openapi3.T, err error) error {
	var findings document.Findings
	for line := range strings.SplitSeq(err.Error(), "\n") {
		finding, ok := n.explainLine(spec, line)
		if !ok {
			return fmt.Errorf("oapi-codegen: %w%s", err, cure(err.Error()))
		}
		findings = append(findings, finding)
	}
	return findings
}

var duplicateType = regexp.MustCompile(`^.*duplicate typename '([^']+)' detected`)

func (n names) explainLine(spec *openapi3.T, line string) (document.Finding, bool) {
	if m := duplicateType.FindStringSubmatch(line); m != nil {
		return sharedName(n.components, m[1])
	}
	finding := document.Finding{}
	what, otherwise := "", ""
	if c, ok := failedComponent(n.components, line); ok {
		finding.Pos, what = c.pos, c.String()
	} else if e, op := failedOperation(spec, line); op != nil {
		finding.Pos, what = positionOf(n.doc, e.Method, e.Place), e.Method+" "+e.Place.String()
		if id := n.operations[op]; id != "" {
			otherwise = fmt.Sprintf(`; mend it, or leave it out by "output-options: {exclude-operation-ids: [%s]}"`, id)
		}
	} else if pos, ok := n.quoted(line); ok {
		finding.Pos, what, otherwise = pos, "this", "; write something else"
	} else {
		return finding, false
	}
	finding.Message = fmt.Sprintf("oapi-codegen cannot generate %s: %s", what, line)
	if known := cure(line); known != "" {
		otherwise = known
	}
	finding.Message += otherwise
	return finding, true
}

var quotedValue = regexp.MustCompile(`: ("(?:[^"\\]|\\.)*")$`)

// quoted finds the name or the value that oapi-codegen quotes at the end of what
// it says.
func (n names) quoted(line string) (document.Position, bool) {
	m := quotedValue.FindStringSubmatch(line)
	if m == nil {
		return document.Position{}, false
	}
	text, err := strconv.Unquote(m[1])
	if err != nil {
		return document.Position{}, false
	}
	seen := map[*document.Node]bool{}
	var find func(*document.Node) *document.Position
	find = func(at *document.Node) *document.Position {
		if at == nil || seen[at] {
			return nil
		}
		seen[at] = true
		if at.Kind == document.String && at.Value == text {
			return &at.Pos
		}
		for _, item := range at.Items {
			if pos := find(item); pos != nil {
				return pos
			}
		}
		for i := range at.Members {
			if at.Members[i].Name == text {
				return &at.Members[i].Pos
			}
			if pos := find(at.Members[i].Value); pos != nil {
				return pos
			}
		}
		return nil
	}
	if pos := find(n.doc.Root()); pos != nil {
		return *pos, true
	}
	return document.Position{}, false
}

// cure returns what cures a failure, or nothing.
func cure(failure string) string {
	for _, c := range cures {
		if m := c.failure.FindStringSubmatchIndex(failure); m != nil {
			return "; " + string(c.failure.ExpandString(nil, c.cure, failure, m))
		}
	}
	return ""
}

// sharedName explains that several components have one Go name.
func sharedName(components []component, name string) (document.Finding, bool) {
	var called []string
	var last component
	for _, c := range components {
		if c.goName == name {
			called = append(called, fmt.Sprintf("%s (%s)", c, c.pos))
			last = c
		}
	}
	switch len(called) {
	case 0:
		return document.Finding{}, false
	case 1:
		return document.Finding{Pos: last.pos, Message: fmt.Sprintf(
			`%s has a name in Go, %s, that oapi-codegen gives what is inside another one too, and it cannot generate that; give it another with x-go-name`,
			last, name)}, true
	}
	return document.Finding{Pos: last.pos, Message: fmt.Sprintf(
		`%s have one name in Go, %s, and oapi-codegen cannot generate that; set "output-options: {resolve-type-name-collisions: true}", or give each an x-go-name of its own`,
		strings.Join(called, " and "), name)}, true
}

// componentFailures are the words in which oapi-codegen names a component.
var componentFailures = []struct {
	kind  string
	words *regexp.Regexp
}{
	{"schema", regexp.MustCompile(`converting Schema (\S+) to Go type:`)},
	{"schema", regexp.MustCompile(`in schema "([^"]+)"`)},
	{"parameter", regexp.MustCompile(`in parameter (\S+):`)},
	{"response", regexp.MustCompile(`in response (\S+):`)},
	{"request body", regexp.MustCompile(`in body (\S+):`)},
}

// enumType is how oapi-codegen names the type of an enumeration, in Go.
var enumType = regexp.MustCompile(`enum value .* of (\w+) is not`)

func failedComponent(components []component, line string) (component, bool) {
	for _, f := range componentFailures {
		if m := f.words.FindStringSubmatch(line); m != nil {
			i := slices.IndexFunc(components, component{kind: f.kind, name: m[1]}.is)
			if i >= 0 {
				return components[i], true
			}
		}
	}
	if m := enumType.FindStringSubmatch(line); m != nil {
		var found component
		for _, c := range components {
			if begins(m[1], c.goName) && len(c.goName) > len(found.goName) {
				found = c
			}
		}
		return found, found.goName != ""
	}
	return component{}, false
}

// begins reports whether the name in Go of what is inside something else begins
// with that one's.
func begins(name, outer string) bool {
	rest, ok := strings.CutPrefix(name, outer)
	return ok && (rest == "" || rest[0] < 'a' || rest[0] > 'z')
}

var operationPath = regexp.MustCompile(`\b([A-Z]+) path "(/[^"]*)"`)

// failedOperation finds the operation that oapi-codegen names, or without one
// fails on.
func failedOperation(spec *openapi3.T, line string) (Endpoint, *openapi3.Operation) {
	if m := operationPath.FindStringSubmatch(line); m != nil {
		if e := (Endpoint{Method: m[1], Place: document.Place{Kind: document.Path, Name: m[2]}}); Has(spec, e) {
			return e, operation(spec, e)
		}
	}
	for path, item := range pathItems(spec) {
		operations := item.Operations()
		for _, method := range slices.Sorted(maps.Keys(operations)) {
			op := operations[method]
			only := &openapi3.PathItem{Parameters: item.Parameters}
			only.SetOperation(method, op)
			alone := *spec
			alone.Paths = openapi3.NewPaths(openapi3.WithPath(path, only))
			if _, err := operationDefinitions(&alone); err != nil && strings.Contains(line, err.Error()) {
				return Endpoint{Method: method, Place: document.Place{Kind: document.Path, Name: path}}, op
			}
		}
	}
	return Endpoint{}, nil
}

// A component is a named part of the document that becomes a Go type.
type component struct {
	kind, name string
	goName     string
	extensions map[string]any
	pos        document.Position
}

func (c component) is(other component) bool { return c.kind == other.kind && c.name == other.name }

func (c component) String() string { return "the " + c.kind + " " + c.name }

// inGo names the components as oapi-codegen has, which must have run: how it
// does is among its globals.
func (n names) inGo() {
	for i, c := range n.components {
		n.components[i].goName = codegen.SchemaNameToTypeName(c.name)
		if renamed, ok := c.extensions["x-go-name"].(string); ok {
			n.components[i].goName = renamed
		}
	}
}

// components lists what is under components, sorted by position.
func components(spec *openapi3.T, doc *document.Document) []component {
	if spec.Components == nil {
		return nil
	}
	var all []component
	add := func(kind, field, name string, extensions map[string]any) {
		c := component{kind: kind, name: name, extensions: extensions}
		if m := doc.Lookup("components", field, name); m != nil {
			c.pos = m.Pos
		}
		all = append(all, c)
	}
	for name, ref := range spec.Components.Schemas {
		add("schema", "schemas", name, ref.Value.Extensions)
	}
	for name, ref := range spec.Components.Parameters {
		add("parameter", "parameters", name, ref.Value.Extensions)
	}
	for name, ref := range spec.Components.RequestBodies {
		add("request body", "requestBodies", name, ref.Value.Extensions)
	}
	for name, ref := range spec.Components.Responses {
		add("response", "responses", name, ref.Value.Extensions)
	}
	slices.SortFunc(all, func(a, b component) int { return cmp.Or(a.pos.Compare(b.pos), strings.Compare(a.name, b.name)) })
	return all
}

// positionOf returns where the operation's method stands.
func positionOf(doc *document.Document, method string, place document.Place) document.Position {
	if m := operationMember(doc, method, place); m != nil {
		return m.Pos
	}
	return document.Position{}
}

func operationMember(doc *document.Document, method string, place document.Place) *document.Member {
	method = strings.ToLower(method)
	switch place.Kind {
	case document.Webhook:
		return doc.Lookup("webhooks", place.Name, method)
	case document.Callback:
		return doc.Lookup("paths", place.Path, strings.ToLower(place.Method), "callbacks", place.Name, place.URL, method)
	}
	return doc.Lookup("paths", place.Name, method)
}

// parameterPosition returns where an operation, or its path item, names a path
// parameter; failing that, where the operation's method stands.
func parameterPosition(doc *document.Document, method string, place document.Place, name string) document.Position {
	op := operationMember(doc, method, place)
	if op == nil {
		return document.Position{}
	}
	lists := []*document.Node{op.Value.Field("parameters")}
	if item := doc.Lookup("paths", place.Name, "parameters"); place.Kind == document.Path && item != nil {
		lists = append(lists, item.Value)
	}
	for _, list := range lists {
		if list == nil {
			continue
		}
		for _, item := range list.Items {
			node, err := doc.Follow(item)
			if err != nil {
				continue
			}
			declared, in := node.Member("name"), node.Get("in")
			if declared != nil && declared.Value.Value == name && in != nil && in.Value == "path" {
				return declared.Pos
			}
		}
	}
	return op.Pos
}
