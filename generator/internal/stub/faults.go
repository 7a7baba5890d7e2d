package stub

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// A Fault is something that keeps the source from compiling: the compiler's
// message, and the name of the package-level declaration, or of its receiver,
// that it is in.
type Fault struct{ Message, In string }

// A parameter of a path is a variable of Go's functions.
type parameter struct {
	name, variable string
	operation      string // "POST /orders/{id}"
	pos            document.Position
}

var (
	undefined  = regexp.MustCompile(`^undefined: (\w+)$`)
	redeclared = regexp.MustCompile(`^(\w+) redeclared in this block$`)
	variable   = regexp.MustCompile(`^(\w+) (?:redeclared in this block|hides the package)`)
	// ofBody are names that oapi-codegen makes for what is inside a body. Others
	// that are undefined may be declared by hand.
	ofBody = regexp.MustCompile(`(?:Request|Response)Body`)
)

// faultCures are what helps where what oapi-codegen generates does not compile.
// Every cure here has cured a document.
var faultCures = []struct {
	fault *regexp.Regexp
	cure  string
}{
	{
		regexp.MustCompile(`^invalid receiver type`),
		`generate without strict-server, or say "type: object" in the schema of that response`,
	},
	{
		regexp.MustCompile(`^a text body is converted`),
		`generate without strict-server, or say "type: string" in the schema of that text body`,
	},
	{
		regexp.MustCompile(`^Body redeclared`),
		`generate without strict-server, or keep one of its request body's media types that are not JSON`,
	},
	{
		regexp.MustCompile(`^(?:JSON|XML|YAML)(?:\dXX|\d+|Default) redeclared`),
		`a response has two media types of that kind: keep one`,
	},
	{
		regexp.MustCompile(`^\w+ redeclared$`),
		`two of its names are one in Go: give one an x-go-name`,
	},
	{
		regexp.MustCompile(`^undefined: .*Body`),
		`move that body's schema to components/schemas and refer to it`,
	},
}

// Explain says where in the document the faults of the source have their
// cause, and what cures them. The error is nil if there are none.
func (o *Output) Explain(faults []Fault) error {
	var findings document.Findings
	var unplaced []string
	placed := map[document.Position]bool{}
	for _, fault := range causes(faults) {
		name := ""
		if m := undefined.FindStringSubmatch(fault.Message); m != nil {
			name = m[1]
			if pruned := slices.IndexFunc(o.pruned, func(c component) bool { return c.goName == name }); o.models && pruned >= 0 {
				c := o.pruned[pruned]
				findings = append(findings, document.Finding{Pos: c.pos, Message: fmt.Sprintf(
					`oapi-codegen leaves out %s, which only a webhook or a callback uses, and generates code that needs it; set "output-options: {skip-prune: true}"`, c)})
				continue
			}
			if !o.models || !ofBody.MatchString(name) {
				continue
			}
		}
		if named := o.named(fault.Message); named != nil {
			findings = append(findings, named...)
			continue
		}
		pos, what := o.origin(fault)
		if what == "" {
			unplaced = append(unplaced, fault.Message)
			continue
		}
		if !placed[pos] {
			placed[pos] = true
			findings = append(findings, document.Finding{Pos: pos, Message: fmt.Sprintf(
				"what oapi-codegen generates for %s does not compile (%s)%s", what, fault.Message, faultCure(fault.Message))})
		}
	}
	switch {
	case findings != nil:
		return findings
	case unplaced != nil:
		return fmt.Errorf("what oapi-codegen generates for this document does not compile: %s", strings.Join(unplaced, "; "))
	}
	return nil
}

// causes leaves out the faults that follow from a name that is declared twice.
func causes(faults []Fault) []Fault {
	twice := map[string]bool{}
	for _, fault := range faults {
		if m := redeclared.FindStringSubmatch(fault.Message); m != nil {
			twice[m[1]] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(faults), func(fault Fault) bool {
		isTwice := func(name string) bool { return twice[name] }
		return !redeclared.MatchString(fault.Message) &&
			(twice[fault.In] || slices.ContainsFunc(word.FindAllString(fault.Message, -1), isTwice))
	})
}

func faultCure(message string) string {
	for _, c := range faultCures {
		if c.fault.MatchString(message) {
			return "; " + c.cure
		}
	}
	return ""
}

// named explains a fault by the components and path parameters that bear a
// name that is taken.
func (o *Output) named(message string) document.Findings {
	var findings document.Findings
	if m := variable.FindStringSubmatch(message); m != nil {
		for _, p := range o.parameters {
			if p.variable == m[1] {
				findings = append(findings, document.Finding{Pos: p.pos, Message: fmt.Sprintf(
					"%s: the path parameter %s has a name that oapi-codegen's own code uses, and what it generates does not compile (%s); give the parameter another name in Go with x-go-name",
					p.operation, p.name, m[0])})
			}
		}
	}
	m := redeclared.FindStringSubmatch(message)
	if m == nil {
		return findings
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

var word = regexp.MustCompile(`\w+`)

// origin finds the operation or the component that a fault comes from: the one
// with whose name that of the declaration, or one in the message, begins.
func (o *Output) origin(fault Fault) (pos document.Position, what string) {
	for _, name := range append([]string{fault.In}, word.FindAllString(fault.Message, -1)...) {
		length := 0
		longer := func(outer string) bool {
			if len(outer) <= length || !begins(name, outer) {
				return false
			}
			length = len(outer)
			return true
		}
		for _, c := range o.components {
			if longer(c.goName) {
				pos, what = c.pos, c.String()
			}
		}
		name = strings.TrimPrefix(strings.TrimPrefix(name, "New"), "Parse")
		for _, op := range o.Operations {
			if longer(op.ClientName) {
				pos, what = op.pos, op.Method+" "+op.Place.String()
			}
		}
		if what != "" {
			break
		}
	}
	return pos, what
}
