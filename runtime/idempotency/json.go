package idempotency

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// canonicalJSON returns an encoding that is equal for two JSON texts exactly
// when they say the same: members in any order, white space and escapes as they
// like. Numbers are kept as they are written, so that two large integers that
// a float64 could not tell apart stay different; 1 and 1.0 are different too.
// Members sort by the bytes of their names, which no locale changes. Members
// and elements that ignore points at are left out. It reports false when src is
// not one JSON text, or is nested deeper than maxNesting.
func canonicalJSON(src []byte, ignore *pointerTree) ([]byte, bool) {
	if nesting(src) > maxNesting || !json.Valid(src) {
		return nil, false
	}
	c := canonicalizer{src: src}
	return c.value(make([]byte, 0, len(src)), ignore), true
}

// maxNesting bounds how often a value is copied while the members around it are
// sorted. What is nested deeper is compared byte for byte.
const maxNesting = 100

func nesting(src []byte) (deepest int) {
	depth, quoted := 0, false
	for i := 0; i < len(src); i++ {
		switch b := src[i]; {
		case quoted && b == '\\':
			i++
		case b == '"':
			quoted = !quoted
		case quoted:
		case b == '{' || b == '[':
			depth++
			deepest = max(deepest, depth)
		case b == '}' || b == ']':
			depth--
		}
	}
	return deepest
}

// A canonicalizer walks a JSON text that is known to be valid.
type canonicalizer struct {
	src []byte
	pos int
}

func (c *canonicalizer) next() byte {
	for c.pos < len(c.src) {
		switch b := c.src[c.pos]; b {
		case ' ', '\t', '\r', '\n':
			c.pos++
		default:
			return b
		}
	}
	return 0
}

func (c *canonicalizer) value(dst []byte, ignore *pointerTree) []byte {
	switch c.next() {
	case '{':
		return c.object(dst, ignore)
	case '[':
		return c.array(dst, ignore)
	case '"':
		return c.text(dst)
	}
	start := c.pos
	for c.pos < len(c.src) && !bytes.ContainsRune([]byte(",]} \t\r\n"), rune(c.src[c.pos])) {
		c.pos++
	}
	return append(dst, c.src[start:c.pos]...)
}

func (c *canonicalizer) object(dst []byte, ignore *pointerTree) []byte {
	type member struct{ name, value []byte }
	var members []member
	c.pos++
	for c.next() != '}' {
		if c.src[c.pos] == ',' {
			c.pos++
			c.next()
		}
		name := c.text(nil)
		c.next()
		c.pos++ // the colon
		child := ignore.child(string(name[1 : len(name)-1]))
		value := c.value(nil, child)
		if !child.ends() {
			members = append(members, member{name, value})
		}
	}
	c.pos++
	slices.SortStableFunc(members, func(a, b member) int { return bytes.Compare(a.name, b.name) })
	dst = append(dst, '{')
	for _, m := range members {
		dst = append(append(append(append(dst, m.name...), ':'), m.value...), ',')
	}
	return append(dst, '}')
}

func (c *canonicalizer) array(dst []byte, ignore *pointerTree) []byte {
	dst = append(dst, '[')
	c.pos++
	for i := 0; c.next() != ']'; i++ {
		if c.src[c.pos] == ',' {
			c.pos++
		}
		child := ignore.child(strconv.Itoa(i))
		before := len(dst)
		dst = append(c.value(dst, child), ',')
		if child.ends() {
			dst = dst[:before]
		}
	}
	c.pos++
	return append(dst, ']')
}

// text copies a string without its escapes. What JSON cannot say without an
// escape keeps one, so that different strings stay different: quotes,
// backslashes, and surrogates that stand alone.
func (c *canonicalizer) text(dst []byte) []byte {
	dst = append(dst, '"')
	for c.pos++; c.src[c.pos] != '"'; c.pos++ {
		if c.src[c.pos] != '\\' {
			dst = append(dst, c.src[c.pos])
			continue
		}
		c.pos++
		switch b := c.src[c.pos]; b {
		case '"', '\\':
			dst = append(dst, '\\', b)
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			dst = c.unicode(dst)
		default: // the solidus
			dst = append(dst, b)
		}
	}
	c.pos++
	return append(dst, '"')
}

// unicode copies the escape whose 'u' is at c.pos and leaves c.pos at its last
// digit.
func (c *canonicalizer) unicode(dst []byte) []byte {
	r := c.hex(c.pos + 1)
	c.pos += 4
	if utf16.IsSurrogate(r) {
		if bytes.HasPrefix(c.src[c.pos+1:], []byte(`\u`)) {
			if pair := utf16.DecodeRune(r, c.hex(c.pos+3)); pair != utf8.RuneError {
				c.pos += 6
				return utf8.AppendRune(dst, pair)
			}
		}
		return fmt.Appendf(dst, `\u%04x`, r)
	}
	if r == '"' || r == '\\' {
		dst = append(dst, '\\')
	}
	return utf8.AppendRune(dst, r)
}

func (c *canonicalizer) hex(at int) rune {
	n, _ := strconv.ParseUint(string(c.src[at:at+4]), 16, 16)
	return rune(n)
}

// A pointerTree holds JSON pointers by their reference tokens. A nil tree holds
// none.
type pointerTree struct {
	leaf     bool
	children map[string]*pointerTree
}

func newPointerTree(pointers []string) (*pointerTree, error) {
	if len(pointers) == 0 {
		return nil, nil
	}
	root := &pointerTree{}
	for _, p := range pointers {
		if !strings.HasPrefix(p, "/") {
			return nil, fmt.Errorf("%q is not a JSON pointer to a member (RFC 6901): it must begin with a slash", p)
		}
		t := root
		for token := range strings.SplitSeq(p[1:], "/") {
			token = strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~")
			// Names are compared in the form in which they are copied.
			token = strings.ReplaceAll(strings.ReplaceAll(token, `\`, `\\`), `"`, `\"`)
			if t.children == nil {
				t.children = map[string]*pointerTree{}
			}
			if t.children[token] == nil {
				t.children[token] = &pointerTree{}
			}
			t = t.children[token]
		}
		t.leaf = true
	}
	return root, nil
}

func (t *pointerTree) child(token string) *pointerTree {
	if t == nil {
		return nil
	}
	return t.children[token]
}

func (t *pointerTree) ends() bool { return t != nil && t.leaf }
