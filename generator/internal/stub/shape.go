package stub

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// explainLoading says where in doc err, which kin-openapi gave for it, has its
// cause: kin-openapi names no places.
func explainLoading(doc *document.Document, err error) error {
	s := shapes{doc: doc, seen: map[visit]bool{}, findings: doc.Unresolved()}
	s.value(doc.Root(), reflect.TypeFor[openapi3.T](), "the document")
	if _, err := doc.JSON(); err != nil {
		s.findings = append(s.findings, err.(document.Findings)...)
	}
	if m := badTarget.FindStringSubmatch(err.Error()); m != nil && s.findings == nil {
		doc.EachReference(func(n *document.Node) {
			if n.Ref().Value == m[1] {
				s.findings = append(s.findings, document.Finding{Pos: n.Ref().Pos, Message: fmt.Sprintf("$ref %q does not lead to what must be here, a %s", m[1], m[2])})
			}
		})
	}
	if s.findings == nil {
		message := readerNames.ReplaceAllString(err.Error(), "")
		s.findings = document.Findings{{Pos: doc.Root().Pos, Message: "the document cannot be read: " + message}}
	}
	return s.findings
}

// badTarget matches what kin-openapi says of a reference to something else.
var badTarget = regexp.MustCompile(`bad data in "(.*)" \(expecting (?:ref to )?(\w+) object\)`)

// readerNames is what kin-openapi's messages say of its insides.
var readerNames = regexp.MustCompile(`failed to unmarshal data: |json error: .*, yaml error: |error (?:converting YAML to JSON|unmarshaling JSON): |while decoding JSON: |\b(?:json|yaml): |\bopenapi3\.|Go (?:value|struct field) |Bis\b`)

// shapes compares a document with the types that kin-openapi reads it into, and
// finds every value that is not of the type that OpenAPI has there.
type shapes struct {
	doc      *document.Document
	seen     map[visit]bool
	findings document.Findings
}

type visit struct {
	node *document.Node
	as   reflect.Type
}

// choices are the kinds of values that kin-openapi reads with code of its own.
var choices = map[reflect.Type][]document.Kind{
	reflect.TypeFor[openapi3.Types]():          {document.String, document.List},
	reflect.TypeFor[openapi3.ExclusiveBound](): {document.Bool, document.Number},
	reflect.TypeFor[openapi3.BoolSchema]():     {document.Bool, document.Object},
}

func (s *shapes) value(n *document.Node, t reflect.Type, name string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if s.seen[visit{n, t}] || t.Kind() == reflect.Interface {
		return
	}
	s.seen[visit{n, t}] = true
	if target, ok := refersTo(t); ok && n.Kind != document.Null {
		if n.Ref() == nil {
			s.value(n, target, name)
		} else {
			s.reference(n, target, name)
		}
		return
	}
	if n.Ref() != nil && t == reflect.TypeFor[openapi3.PathItem]() {
		s.reference(n, t, name)
		return
	}
	want, ok := choices[t]
	if !ok {
		want = kindsOf(t)
	}
	switch {
	case n.Kind == document.Null:
		if _, ok := refersTo(t); ok {
			s.findings = append(s.findings, document.Finding{Pos: n.Pos, Message: name + " is empty; write an object"})
		}
	case !slices.Contains(want, n.Kind):
		s.reject(n, name, want)
	case n.Kind == document.Number && isCount(t) && !count.MatchString(n.Value):
		s.findings = append(s.findings, document.Finding{Pos: n.Pos, Message: fmt.Sprintf("%s must be a whole number and not negative, not %s", name, n.Value)})
	case n.Kind == document.List && t.Kind() == reflect.Slice:
		for i, item := range n.Items {
			s.value(item, t.Elem(), fmt.Sprintf("%s[%d]", name, i))
		}
	case n.Kind == document.Object:
		s.members(n, t, name)
	}
}

func (s *shapes) members(n *document.Node, t reflect.Type, name string) {
	if t == reflect.TypeFor[openapi3.BoolSchema]() {
		t = reflect.TypeFor[openapi3.Schema]()
	}
	element := func(m document.Member) reflect.Type { return fieldType(t, m.Name) }
	if t.Kind() == reflect.Map {
		element = func(document.Member) reflect.Type { return t.Elem() }
	} else if byName, ok := reflect.PointerTo(t).MethodByName("Map"); ok {
		element = func(document.Member) reflect.Type { return byName.Type.Out(0).Elem() }
	}
	for _, m := range n.Members {
		if strings.HasPrefix(m.Name, "x-") {
			continue
		}
		if of := element(m); of != nil {
			s.value(m.Value, of, m.Name)
		}
	}
}

func isCount(t reflect.Type) bool { return t.Kind() == reflect.Uint64 }

// count is a whole number, perhaps with a fraction or an exponent that changes
// nothing.
var count = regexp.MustCompile(`^\+?[0-9_]+(?:\.0*)?(?:[eE]\+?[0-9]+)?$`)

// sections are where components of a type are.
var sections = map[reflect.Type]string{
	reflect.TypeFor[openapi3.Callback]():       "callbacks",
	reflect.TypeFor[openapi3.Example]():        "examples",
	reflect.TypeFor[openapi3.Header]():         "headers",
	reflect.TypeFor[openapi3.Link]():           "links",
	reflect.TypeFor[openapi3.Parameter]():      "parameters",
	reflect.TypeFor[openapi3.RequestBody]():    "requestBodies",
	reflect.TypeFor[openapi3.Response]():       "responses",
	reflect.TypeFor[openapi3.Schema]():         "schemas",
	reflect.TypeFor[openapi3.SecurityScheme](): "securitySchemes",
}

// reference checks that a reference leads to what may stand in its place.
func (s *shapes) reference(n *document.Node, t reflect.Type, name string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	ref := n.Ref()
	_, pointer, _ := strings.Cut(ref.Value, "#/components/")
	section, rest, found := strings.Cut(pointer, "/")
	if want, known := sections[t]; known && found && section != want && !strings.Contains(rest, "/") {
		s.findings = append(s.findings, document.Finding{Pos: ref.Pos, Message: fmt.Sprintf("$ref %q leads to one of the %s, where one of the %s must be; write #/components/%s/…", ref.Value, section, want, want)})
		return
	}
	target, err := s.doc.Follow(n)
	switch {
	case err != nil || target == nil: // Unresolved reports it
	case target.Kind == document.List || target.Kind == document.Number || target.Kind == document.String:
		s.findings = append(s.findings, document.Finding{Pos: ref.Pos, Message: fmt.Sprintf("$ref %q leads to %s (%s), where an object must be", ref.Value, target.Kind, target.Pos)})
	default:
		s.value(target, t, name)
	}
}

// refersTo returns the type of what may stand in place of a reference.
func refersTo(t reflect.Type) (reflect.Type, bool) {
	if t.Kind() != reflect.Struct || !strings.HasSuffix(t.Name(), "Ref") {
		return nil, false
	}
	value, ok := t.FieldByName("Value")
	return value.Type, ok
}

// fieldType returns the type of an object's field by its name in documents.
func fieldType(object reflect.Type, name string) reflect.Type {
	for i := range object.NumField() {
		field := object.Field(i)
		if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag != "-" && tag != "" && strings.EqualFold(tag, name) {
			return field.Type
		}
	}
	return nil
}

func kindsOf(t reflect.Type) []document.Kind {
	switch t.Kind() {
	case reflect.String:
		return []document.Kind{document.String}
	case reflect.Bool:
		return []document.Kind{document.Bool}
	case reflect.Slice:
		return []document.Kind{document.List}
	case reflect.Map, reflect.Struct:
		return []document.Kind{document.Object}
	}
	return []document.Kind{document.Number}
}

func (s *shapes) reject(n *document.Node, name string, want []document.Kind) {
	var words []string
	for _, kind := range want {
		words = append(words, kind.String())
	}
	hint := ""
	switch {
	case want[0] == document.String && (n.Kind == document.Number || n.Kind == document.Bool):
		hint = fmt.Sprintf("; write it in quotes: %q", n.Value)
	case want[0] == document.Bool && len(want) == 1:
		hint = "; write true or false"
	}
	s.findings = append(s.findings, document.Finding{Pos: n.Pos, Message: fmt.Sprintf("%s must be %s, not %s%s", name, strings.Join(words, " or "), n.Describe(), hint)})
}
