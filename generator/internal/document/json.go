package document

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxExpansion bounds what aliases stand for, in bytes: a document of a few
// lines can have more of them than memory holds.
const maxExpansion = 64 << 20

// JSON returns the root file, which must be YAML, as JSON: what kin-openapi makes
// of YAML before it reads it. Aliases and merge keys are written out, numbers
// are in their plainest form. The error is of type [Findings].
func (d *Document) JSON() ([]byte, error) {
	w := jsonWriter{limit: maxExpansion + 2*d.files[d.root.Pos.File].size}
	w.value(d.root)
	if w.findings != nil {
		return nil, w.findings
	}
	return w.text, nil
}

type jsonWriter struct {
	text     []byte
	limit    int
	findings Findings
}

func (w *jsonWriter) value(n *Node) {
	if len(w.text) > w.limit {
		if w.findings == nil {
			w.findings = Findings{{n.Pos, fmt.Sprintf("the aliases of this document stand for more than %d MiB; write the values out", w.limit>>20)}}
		}
		return
	}
	switch n.Kind {
	case Null:
		w.text = append(w.text, "null"...)
	case Bool:
		w.text = append(w.text, n.Value...)
	case Number:
		w.number(n)
	case String:
		w.string(n.Value)
	case List:
		w.text = append(w.text, '[')
		for i, item := range n.Items {
			if i > 0 {
				w.text = append(w.text, ',')
			}
			w.value(item)
		}
		w.text = append(w.text, ']')
	case Object:
		w.text = append(w.text, '{')
		for i, m := range sorted(n.Members) {
			if i > 0 {
				w.text = append(w.text, ',')
			}
			w.string(m.Name)
			w.text = append(w.text, ':')
			w.value(m.Value)
		}
		w.text = append(w.text, '}')
	}
}

// sorted orders members by name, which decides between those that differ in case
// only.
func sorted(members []Member) []Member {
	byName := func(a, b Member) int { return strings.Compare(a.Name, b.Name) }
	if slices.IsSortedFunc(members, byName) {
		return members
	}
	return slices.SortedFunc(slices.Values(members), byName)
}

// string writes s, which is valid UTF-8, in quotes.
func (w *jsonWriter) string(s string) {
	const hex = "0123456789abcdef"
	w.text = append(w.text, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		w.text = append(w.text, s[from:i]...)
		from = i + 1
		switch c {
		case '"', '\\':
			w.text = append(w.text, '\\', c)
		case '\n':
			w.text = append(w.text, '\\', 'n')
		default:
			w.text = append(w.text, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	w.text = append(w.text, s[from:]...)
	w.text = append(w.text, '"')
}

func (w *jsonWriter) number(n *Node) {
	if v, err := strconv.Atoi(n.Value); err == nil && strconv.Itoa(v) == n.Value {
		w.text = append(w.text, n.Value...)
		return
	}
	text, err := json.Marshal(plainNumber(n.Value))
	if err != nil {
		w.findings = append(w.findings, Finding{n.Pos, fmt.Sprintf("%s is not a number that JSON has; write it in quotes, or another number", n.Value)})
	}
	w.text = append(w.text, text...)
}

// plainNumber is the number that YAML reads in text.
func plainNumber(text string) any {
	var v any
	_ = (&yaml.Node{Kind: yaml.ScalarNode, Value: text}).Decode(&v) // it has been read as a number
	return v
}
