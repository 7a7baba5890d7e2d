package stub

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
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
	components []component
	operations map[*openapi3.Operation]string // operationIds
}

func namesOf(spec *openapi3.T) names {
	n := names{components(spec), map[*openapi3.Operation]string{}}
	for _, item := range spec.Paths.Map() {
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
		finding.Pos, what = position(op), e.Method+" "+e.Place.String()
		if id := n.operations[op]; id != "" {
			otherwise = fmt.Sprintf(`; mend it, or leave it out by "output-options: {exclude-operation-ids: [%s]}"`, id)
		}
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
	if len(called) < 2 {
		return document.Finding{}, false
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
	{"parameter", regexp.MustCompile(`in parameter (\S+):`)},
	{"response", regexp.MustCompile(`in response (\S+):`)},
	{"request body", regexp.MustCompile(`in body (\S+):`)},
}

func failedComponent(components []component, line string) (component, bool) {
	for _, f := range componentFailures {
		if m := f.words.FindStringSubmatch(line); m != nil {
			i := slices.IndexFunc(components, component{kind: f.kind, name: m[1]}.is)
			if i >= 0 {
				return components[i], true
			}
		}
	}
	return component{}, false
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
	for _, path := range spec.Paths.Keys() {
		operations := spec.Paths.Value(path).Operations()
		for _, method := range slices.Sorted(maps.Keys(operations)) {
			op := operations[method]
			item := &openapi3.PathItem{Parameters: spec.Paths.Value(path).Parameters}
			item.SetOperation(method, op)
			alone := *spec
			alone.Paths = openapi3.NewPaths(openapi3.WithPath(path, item))
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
func components(spec *openapi3.T) []component {
	if spec.Components == nil {
		return nil
	}
	var all []component
	add := func(kind, name string, extensions map[string]any, origin *openapi3.Origin) {
		all = append(all, component{kind: kind, name: name, extensions: extensions, pos: at(origin)})
	}
	for name, ref := range spec.Components.Schemas {
		add("schema", name, ref.Value.Extensions, ref.Value.Origin)
	}
	for name, ref := range spec.Components.Parameters {
		add("parameter", name, ref.Value.Extensions, ref.Value.Origin)
	}
	for name, ref := range spec.Components.RequestBodies {
		add("request body", name, ref.Value.Extensions, ref.Value.Origin)
	}
	for name, ref := range spec.Components.Responses {
		add("response", name, ref.Value.Extensions, ref.Value.Origin)
	}
	slices.SortFunc(all, func(a, b component) int { return a.pos.Compare(b.pos) })
	return all
}

// A parameter of a path is a variable of Go's functions.
type parameter struct {
	name, variable string
	operation      string // "POST /orders/{id}"
	pos            document.Position
}

var redeclared = regexp.MustCompile(`\b(\w+) (?:redeclared in this block|hides the package)`)

// Redeclared explains err, which package weave gave for the source, by the
// components and path parameters that bear the names. It returns err where
// there are none.
func (o *Output) Redeclared(err error) error {
	var findings document.Findings
	for _, m := range redeclared.FindAllStringSubmatch(err.Error(), -1) {
		for _, p := range o.parameters {
			if p.variable == m[1] {
				findings = append(findings, document.Finding{Pos: p.pos, Message: fmt.Sprintf(
					"%s: the path parameter %s has a name that oapi-codegen's own code uses, and what it generates does not compile (%s); give the parameter another name in Go with x-go-name",
					p.operation, p.name, m[0])})
			}
		}
		for _, c := range o.components {
			if c.goName != m[1] {
				continue
			}
			other, cure := "another type of oapi-codegen's", `give it another name with x-go-name`
			if called := o.calls(strings.TrimSuffix(m[1], o.responseSuffix)); called != "" && strings.HasSuffix(m[1], o.responseSuffix) {
				other = "what the client's call of " + called + " returns"
				cure = `set "output-options: {response-type-suffix: HTTPResp}" or "output-options: {resolve-type-name-collisions: true}"`
			}
			findings = append(findings, document.Finding{Pos: c.pos, Message: fmt.Sprintf(
				"%s and %s have one name in Go, %s, and oapi-codegen cannot generate that; %s", c, other, m[1], cure)})
			break
		}
	}
	if findings == nil {
		return err
	}
	return findings
}

// calls returns the method and path of the operation with a client method of
// this name.
func (o *Output) calls(name string) string {
	for _, op := range o.Operations {
		if op.Place.Kind == document.Path && op.ClientName == name {
			return op.Method + " " + op.Place.String()
		}
	}
	return ""
}

// Undefined explains names that the source uses and does not declare, where
// oapi-codegen has pruned what they stand for. Others may be declared by hand.
func (o *Output) Undefined(names []string) error {
	var findings document.Findings
	for _, c := range o.pruned {
		if slices.Contains(names, c.goName) {
			findings = append(findings, document.Finding{Pos: c.pos, Message: fmt.Sprintf(
				`oapi-codegen leaves out %s, which only a webhook or a callback uses, and generates code that needs it; set "output-options: {skip-prune: true}"`, c)})
		}
	}
	if findings == nil {
		return nil
	}
	return findings
}
