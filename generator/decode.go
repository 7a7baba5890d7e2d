package generator

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// DecodeConfig reads a config file, YAML or JSON, into the struct that into points
// at, by its yaml tags. A field that the struct does not have is an error, and
// so is a value of another type. The error is of type [Findings], whose
// positions lack the file's name.
func DecodeConfig(data []byte, into any) error {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.KnownFields(true)
	err := decoder.Decode(into)
	if err == nil || errors.Is(err, io.EOF) {
		return nil
	}
	root, syntaxErr := document.Parse("", data)
	if syntaxErr != nil {
		return syntaxErr
	}
	var c configShape
	c.value(root, reflect.TypeOf(into), "")
	if c.findings == nil {
		return Findings{{Pos: root.Pos, Message: "not a config file: " + strings.TrimPrefix(err.Error(), "yaml: ")}}
	}
	return c.findings
}

// A configShape compares a config file with the types that it is read into.
type configShape struct{ findings Findings }

func (c *configShape) reject(pos document.Position, format string, args ...any) {
	c.findings = append(c.findings, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
}

func (c *configShape) value(n *document.Node, t reflect.Type, name string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	what, ok := "text", n.Kind != document.List && n.Kind != document.Object
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		what, ok = "an object", n.Kind == document.Object
	case reflect.Slice:
		what, ok = "a list", n.Kind == document.List
	case reflect.Bool:
		what, ok = "true or false", n.Kind == document.Bool || isYAMLBool(n)
	}
	if !ok && n.Kind != document.Null {
		c.reject(n.Pos, "%s must be %s, not %s", orDefaultName(name), what, n.Describe())
		return
	}
	for _, item := range n.Items {
		c.value(item, t.Elem(), name)
	}
	for _, m := range n.Members {
		inner := strings.TrimPrefix(name+"."+m.Name, ".")
		if t.Kind() == reflect.Map {
			c.value(m.Value, t.Elem(), inner)
		} else if fields := configFields(t); fields[m.Name] != nil {
			c.value(m.Value, fields[m.Name], inner)
		} else {
			c.reject(m.Pos, "%s is not a field%s", inner, instead(m.Name, fields))
		}
	}
}

func orDefaultName(name string) string {
	if name == "" {
		return "the config file"
	}
	return name
}

// isYAMLBool reports whether n is one of the words that a YAML reader takes for a
// boolean where it needs one.
func isYAMLBool(n *document.Node) bool {
	return n.Kind == document.String && slices.Contains([]string{"y", "yes", "on", "n", "no", "off"}, strings.ToLower(n.Value))
}

// configFields are the types of a struct's fields by their names in a config file.
func configFields(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		field := t.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		switch {
		case options == "inline":
			for name, inner := range configFields(field.Type) {
				fields[name] = inner
			}
		case name != "" && name != "-":
			fields[name] = field.Type
		}
	}
	return fields
}

// instead says which field was meant, or which there are.
func instead(name string, fields map[string]reflect.Type) string {
	var names []string
	for field := range fields {
		names = append(names, field)
	}
	slices.Sort(names)
	for _, field := range names {
		if strings.HasPrefix(field, name) && document.Nearest(name, names) == "" {
			return "; did you mean " + field + "?"
		}
	}
	return document.Instead(name, names)
}
