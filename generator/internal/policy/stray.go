package policy

import (
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// strays finds annotations that nothing reads, so that none is lost silently.
type strays struct {
	r    *resolver
	seen map[visit]bool
}

type visit struct {
	node *document.Node
	in   string // "", "webhook" or "callback"
}

func newStrays(r *resolver) *strays { return &strays{r, make(map[visit]bool)} }

// document looks through everything but the shared path items, which are looked
// through where a path refers to them.
func (s *strays) document(root *document.Node) { s.object(root, "") }

func (s *strays) pathItem(item *document.Node) { s.object(item, "") }

// free are the fields whose members are named by the document's author; opaque
// those that hold data, not OpenAPI.
var (
	free = map[string]bool{
		"headers": true, "properties": true, "patternProperties": true, "dependentSchemas": true, "$defs": true,
		"definitions": true, "schemas": true, "parameters": true, "responses": true, "requestBodies": true,
		"securitySchemes": true, "links": true, "callbacks": true, "webhooks": true, "content": true,
		"mediaTypes": true, "encoding": true, "variables": true, "mapping": true, "scopes": true,
	}
	opaque = map[string]bool{
		"example": true, "examples": true, "default": true, "enum": true, "const": true, "value": true,
		"pathItems": true,
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
		extension := s.r.cfg.Extension
		switch {
		case m.Name == extension:
			s.annotation(n, m, in)
		case strings.EqualFold(m.Name, extension):
			s.r.reject(m.Pos, "%s is misspelt and would be lost; write %s", m.Name, extension)
		case strings.HasPrefix(m.Name, "x-"), opaque[m.Name]:
		case m.Name == "$ref" && in != "":
			if target, err := s.r.doc.Follow(n); err == nil {
				s.object(target, in)
			}
		case free[m.Name] && m.Value.Kind == document.Object:
			for _, named := range m.Value.Members {
				s.object(named.Value, inside(m.Name, in))
			}
		default:
			s.object(m.Value, in)
		}
	}
}

func inside(field, in string) string {
	switch field {
	case "webhooks":
		return "webhook"
	case "callbacks":
		return "callback"
	}
	return in
}

func (s *strays) annotation(owner *document.Node, m *document.Member, in string) {
	switch {
	case in != "":
		s.r.reject(m.Pos, "%s is not supported on a %s, whose caller is a client of its own; remove it", m.Name, in)
	case !s.r.read[owner]:
		s.r.reject(m.Pos, "%s has no effect here; write it on an operation, on a path item under paths, or at the document root", m.Name)
	}
}
