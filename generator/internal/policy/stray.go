package policy

import (
	"cmp"
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
	in   string // "", or one of unsupported
}

// unsupported are the fields beneath which no annotation can be honoured.
var unsupported = map[string]string{
	"webhooks":             "a webhook, whose sender is a client of its own",
	"callbacks":            "a callback, whose sender is a client of its own",
	"query":                "a query operation, for which oapi-codegen generates no code",
	"additionalOperations": "an additional operation, for which oapi-codegen generates no code",
}

// free are the fields whose members are named by the document's author; opaque
// those that hold data, not OpenAPI, and pathItems, which are looked through where a
// path refers to them.
var (
	free = map[string]bool{
		"headers": true, "properties": true, "patternProperties": true, "dependentSchemas": true, "$defs": true,
		"definitions": true, "schemas": true, "parameters": true, "responses": true, "requestBodies": true,
		"securitySchemes": true, "links": true, "callbacks": true, "webhooks": true, "content": true,
		"mediaTypes": true, "encoding": true, "variables": true, "mapping": true, "scopes": true,
	}
	opaque = map[string]bool{
		"example": true, "examples": true, "default": true, "enum": true, "const": true, "value": true,
		"security": true, "pathItems": true,
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
				s.object(named.Value, cmp.Or(unsupported[m.Name], in))
			}
		default:
			s.object(m.Value, cmp.Or(unsupported[m.Name], in))
		}
	}
}

func (s *strays) annotation(owner *document.Node, m *document.Member, in string) {
	switch {
	case in != "":
		s.r.reject(m.Pos, "%s is not supported on %s; remove it", m.Name, in)
	case !s.r.read[owner]:
		s.r.reject(m.Pos, "%s has no effect here; write it on an operation, on a path item under paths, or at the document root", m.Name)
	}
}
