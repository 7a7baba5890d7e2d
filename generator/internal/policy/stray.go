package policy

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// strays finds annotations that nothing reads, so that none is lost silently.
type strays struct {
	r    *resolver
	seen map[visit]bool
	// paths is set if the document has paths.
	paths bool
	items map[*document.Node]bool // the resolver's
}

type visit struct {
	node *document.Node
	in   string // "", or why an annotation does nothing here
}

// unsupported are the fields beneath which no annotation can be honoured.
var unsupported = map[string]string{
	"callbacks":            notSupportedOn("a callback that no operation under paths has, for which oapi-codegen generates no code"),
	"query":                notSupportedOn("a query operation, which not every version of kin-openapi reads"),
	"additionalOperations": notSupportedOn("an additional operation, which not every version of kin-openapi reads"),
}

func notSupportedOn(what string) string { return "is not supported on " + what + "; remove it" }

// containers are the fields of the document root beneath which annotations are,
// and verbs those of a path item.
var (
	containers = []string{"paths", "webhooks", "components"}
	verbs      = slices.Sorted(maps.Keys(methods))
)

// lost says why an annotation beneath a field does nothing if its name was
// meant to be one of fields, which n has not.
func lost(n *document.Node, name string, fields []string) string {
	meant := document.Nearest(name, fields)
	if meant == "" || n.FieldMember(meant) != nil {
		return ""
	}
	return "would be lost beneath " + printed(name) + ", which OpenAPI does not have; did you mean " + meant + "?"
}

// free are the fields whose members are named by the document's author; opaque
// those that hold data, not OpenAPI.
var (
	free = map[string]bool{
		"headers": true, "properties": true, "patternProperties": true, "dependentSchemas": true, "$defs": true,
		"definitions": true, "schemas": true, "parameters": true, "responses": true, "requestBodies": true,
		"securitySchemes": true, "links": true, "content": true,
		"mediaTypes": true, "encoding": true, "variables": true, "mapping": true, "scopes": true,
	}
	opaque = map[string]bool{
		"example": true, "examples": true, "default": true, "enum": true, "const": true, "value": true,
		"security": true,
	}
)

func (s *strays) object(n *document.Node, in string) {
	at := visit{n, in}
	if n == nil || s.seen[at] {
		return
	}
	s.seen[at] = true
	for _, item := range n.Items {
		s.object(item, in)
	}
	for i := range n.Members {
		m := &n.Members[i]
		switch {
		case s.found(n, m, in):
		case strings.HasPrefix(m.Name, "x-"), opaque[m.Name]:
		case m.Name == "$ref" && m.Value.Kind != document.String && m.Value.Kind != document.Null:
			s.r.reject(m.Value.Pos, "$ref must be a string, not %s", m.Value.Kind)
		case m.Name == "$ref" && in != "":
			if target, err := s.r.doc.Follow(n); err == nil {
				s.object(target, in)
			}
		case m.Name == "pathItems":
			// A document without paths is there for others to refer to.
			for _, named := range m.Value.Members {
				if s.paths && !s.r.read[named.Value] {
					s.object(named.Value, notSupportedOn("a path item that no path refers to"))
				}
			}
		case free[m.Name] && m.Value.Kind == document.Object:
			// An operation's responses have statuses for names.
			statuses := m.Name == "responses" && s.r.read[n]
			for i := range m.Value.Members {
				named := &m.Value.Members[i]
				if !statuses || !s.found(m.Value, named, in) {
					s.object(named.Value, cmp.Or(unsupported[m.Name], in))
				}
			}
		case s.r.expanded[m.Value]:
			s.object(m.Value, in)
		case n == s.r.doc.Root():
			s.object(m.Value, lost(n, m.Name, containers))
		case s.items[n]:
			s.object(m.Value, cmp.Or(unsupported[m.Name], in, lost(n, m.Name, verbs)))
		default:
			s.object(m.Value, cmp.Or(unsupported[m.Name], in))
		}
	}
}

// found reports whether m of owner is an annotation, or was meant to be one, and
// rejects it unless it has been read.
func (s *strays) found(owner *document.Node, m *document.Member, in string) bool {
	if m.Name != s.r.cfg.Extension {
		return s.r.misspelt(owner, m)
	}
	switch {
	case s.r.read[owner]:
	case in != "":
		s.r.reject(m.Pos, "%s %s", m.Name, in)
	default:
		s.r.reject(m.Pos, "%s has no effect here; write it on an operation, on a path item under paths, or at the document root", m.Name)
	}
	return true
}

// misspelt reports whether the name of n's member m was meant to be the
// extension's, and rejects it then.
//
// A name that differs in case and punctuation only, or in one character behind
// x-, is nobody else's. Others may be another tool's: they are taken for
// misspellings where an annotation would be read, and only if there is none, so
// that one written beside it settles the matter.
func (r *resolver) misspelt(n *document.Node, m *document.Member) bool {
	name, extension := strings.ToLower(strings.TrimSpace(m.Name)), strings.ToLower(r.cfg.Extension)
	if letters(name) == letters(extension) {
		r.reject(m.Pos, "%s is misspelt and would be lost; write %s", printed(m.Name), r.cfg.Extension)
		return true
	}
	if n.Member(r.cfg.Extension) != nil {
		return false
	}
	stem, prefixed := strings.CutPrefix(extension, "x-")
	wrong := len(extension) // characters
	if prefixed && strings.HasPrefix(name, "x-") {
		wrong = document.Distance(name, extension)
	}
	// Short names have neighbours that are words of their own.
	tolerated := len(stem) / 5
	read := r.read[n] && (wrong <= min(tolerated, 2) || letters(name) == letters(stem) || name == extension+"-key")
	if !read && wrong > min(tolerated, 1) {
		return false
	}
	r.reject(m.Pos, "%s would be lost; did you mean %s? If it is another tool's, write %s beside it", printed(m.Name), r.cfg.Extension, r.cfg.Extension)
	return true
}

// letters leaves out all punctuation.
func letters(name string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsLetter(c) || unicode.IsDigit(c) {
			return c
		}
		return -1
	}, name)
}

// printed puts a name in quotes if it would be misread without.
func printed(name string) string {
	if strings.TrimSpace(name) != name {
		return strconv.Quote(name)
	}
	return name
}
