package idempotency

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// canonicalJSON hashes an encoding that is equal for two JSON texts exactly
// when they say the same: members in any order, white space and escapes as they
// like. Numbers are kept as they are written, so that two large integers that
// a float64 could not tell apart stay different; 1 and 1.0 are different too.
// Members sort by the bytes of their names, which no locale changes. Members
// and elements that ignore points at are left out. It reports false, and hashes
// nothing, when src is not one JSON text, is nested deeper than maxNesting, or
// has four gibibytes.
//
// The encoding is never held: a first walk through src measures it, a second one
// hashes it piece by piece.
func (d *digester) canonicalJSON(src []byte, ignore *pointerTree) bool {
	if len(src) > math.MaxUint32 || !json.Valid(src) {
		return false
	}
	c := canonicalizer{src: src, out: d, jsonSpace: d.json}
	c.containers, c.members = c.containers[:0], c.members[:0]
	fits := c.measure(ignore, 0)
	if fits {
		d.text("json")
		d.number(c.size)
		c.pos, c.container = 0, 0
		c.emit(ignore)
	}
	d.json = c.jsonSpace
	return fits
}

// maxNesting bounds how deep the walks go. What is nested deeper is compared
// byte for byte.
const maxNesting = 100

// A canonicalizer walks a JSON text that is known to be valid.
type canonicalizer struct {
	src []byte
	pos int
	// container is the number of the next object or array, in their order.
	container int
	size      int // of the encoding
	out       *digester
	jsonSpace
}

// A jsonSpace is what a canonicalizer needs beside the text.
type jsonSpace struct {
	// containers are the large objects and arrays, in the order in which they
	// begin.
	containers []container
	// members are those of the objects that are being hashed, the innermost's
	// last.
	members []member
	// names holds names of members without their escapes, text any other text.
	names, text []byte
}

// shrink leaves no more behind than most texts need.
func (s *jsonSpace) shrink() {
	if cap(s.containers) > 1<<10 || cap(s.members) > 1<<10 || cap(s.names) > 1<<13 || cap(s.text) > 1<<13 {
		*s = jsonSpace{}
	}
}

// A container says where an object or array begins and ends, and which is the
// first that begins behind it. Thus what is sorted last is not looked through by
// each object around it.
type container struct{ start, end, next uint32 }

// largeContainer is from what size on containers are noted. What is smaller is
// soon looked through again.
const largeContainer = 128

// A member says where a member's name begins and ends, with its quotes, in the
// text or among the names, where its value begins, and which container is the
// first that begins there.
type member struct {
	name, nameEnd, value, container uint32
	unescaped                       bool
}

func (c *canonicalizer) name(m *member) []byte {
	if m.unescaped {
		return c.names[m.name:m.nameEnd]
	}
	return c.src[m.name:m.nameEnd]
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

// nextItem goes to the next member or element, or behind the container that
// closing ends.
func (c *canonicalizer) nextItem(closing byte) bool {
	b := c.next()
	if b == ',' {
		c.pos++
		b = c.next()
	}
	if b == closing {
		c.pos++
		return false
	}
	return true
}

// measure adds up the size of the value's encoding and notes its containers. It
// reports false when the value is nested too deep.
func (c *canonicalizer) measure(ignore *pointerTree, depth int) bool {
	b := c.next()
	switch b {
	case '"':
		text := c.unquoted()
		c.size += len(text)
		return true
	case '{', '[':
	default:
		c.size += len(c.scalar())
		return true
	}
	if depth == maxNesting {
		return false
	}
	start, number := c.pos, len(c.containers)
	c.containers = append(c.containers, container{})
	c.pos++
	c.size += len("{}")
	for i := 0; c.nextItem(b + 2); i++ { // braces and brackets are two apart
		before := c.size
		var child *pointerTree
		if b == '{' {
			name := c.unquoted()
			c.colon()
			c.size += len(name) + len(":")
			child = ignore.member(name)
		} else {
			child = ignore.element(i)
		}
		if !c.measure(child, depth+1) {
			return false
		}
		c.size += len(",")
		if child.ends() {
			c.size = before
		}
	}
	if c.pos-start < largeContainer {
		c.containers = c.containers[:number] // it holds no large ones
		return true
	}
	c.containers[number] = container{uint32(start), uint32(c.pos), uint32(len(c.containers))}
	return true
}

// emit hashes the value.
func (c *canonicalizer) emit(ignore *pointerTree) {
	switch c.next() {
	case '"':
		c.out.add(c.unquoted())
	case '{':
		c.emitObject(ignore)
	case '[':
		c.enter()
		c.out.addByte('[')
		for i := 0; c.nextItem(']'); i++ {
			child := ignore.element(i)
			if child.ends() {
				c.skip()
				continue
			}
			c.emit(child)
			c.out.addByte(',')
		}
		c.out.addByte(']')
	default:
		c.out.add(c.scalar())
	}
}

func (c *canonicalizer) emitObject(ignore *pointerTree) {
	c.enter()
	first, firstName := len(c.members), len(c.names)
	ordered := true
	for c.nextItem('}') {
		m := member{name: uint32(c.pos)}
		if end, escaped := c.quoted(); escaped {
			m.name, m.unescaped = uint32(len(c.names)), true
			c.names = c.unescape(c.names)
			m.nameEnd = uint32(len(c.names))
		} else {
			c.pos = end
			m.nameEnd = uint32(end)
		}
		c.colon()
		c.next()
		m.value, m.container = uint32(c.pos), uint32(c.container)
		c.skip()
		ordered = ordered && (len(c.members) == first || bytes.Compare(c.name(&c.members[len(c.members)-1]), c.name(&m)) <= 0)
		c.members = append(c.members, m)
	}
	end, behind := c.pos, c.container
	if !ordered {
		slices.SortFunc(c.members[first:], func(a, b member) int {
			return cmp.Or(bytes.Compare(c.name(&a), c.name(&b)), cmp.Compare(a.value, b.value))
		})
	}
	c.out.addByte('{')
	for i := first; i < len(c.members); i++ {
		m := c.members[i]
		name := c.name(&m)
		child := ignore.member(name)
		if child.ends() {
			continue
		}
		c.out.add(name)
		c.out.addByte(':')
		c.pos, c.container = int(m.value), int(m.container)
		c.emit(child)
		c.out.addByte(',')
	}
	c.out.addByte('}')
	c.members, c.names = c.members[:first], c.names[:firstName]
	c.pos, c.container = end, behind
}

// enter goes behind the brace or bracket at c.pos.
func (c *canonicalizer) enter() {
	if c.large() != nil {
		c.container++
	}
	c.pos++
}

// large returns the container at c.pos if it is large.
func (c *canonicalizer) large() *container {
	if c.container < len(c.containers) && c.containers[c.container].start == uint32(c.pos) {
		return &c.containers[c.container]
	}
	return nil
}

// skip goes behind the value at c.pos.
func (c *canonicalizer) skip() {
	switch c.next() {
	case '"':
		end, _ := c.quoted()
		c.pos = end
		return
	case '{', '[':
	default:
		c.scalar()
		return
	}
	if at := c.large(); at != nil {
		c.pos, c.container = int(at.end), int(at.next)
		return
	}
	for depth := 0; ; c.pos++ {
		switch c.src[c.pos] {
		case '"':
			end, _ := c.quoted()
			c.pos = end - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				c.pos++
				return
			}
		}
	}
}

func (c *canonicalizer) colon() {
	c.next()
	c.pos++
}

// scalar returns the number or word at c.pos and goes behind it.
func (c *canonicalizer) scalar() []byte {
	start := c.pos
	for c.pos < len(c.src) {
		switch c.src[c.pos] {
		case ',', ']', '}', ' ', '\t', '\r', '\n':
			return c.src[start:c.pos]
		}
		c.pos++
	}
	return c.src[start:]
}

// quoted returns where the string at c.pos ends, and whether it has escapes.
func (c *canonicalizer) quoted() (end int, escaped bool) {
	at := c.pos + 1
	for near := min(at+32, len(c.src)); at < near; at++ { // most are short
		switch c.src[at] {
		case '"':
			return at + 1, escaped
		case '\\':
			escaped = true
			at++
		}
	}
	for quote := at; ; {
		if quote <= at {
			quote = at + bytes.IndexByte(c.src[at:], '"')
		}
		escape := bytes.IndexByte(c.src[at:quote], '\\')
		if escape < 0 {
			return quote + 1, escaped
		}
		escaped = true
		at += escape + 2
	}
}

// unquoted returns the string at c.pos, with its quotes and without its escapes,
// and goes behind it. What it returns is valid until it is called again.
func (c *canonicalizer) unquoted() []byte {
	start := c.pos
	end, escaped := c.quoted()
	if escaped {
		c.text = c.unescape(c.text[:0])
		return c.text
	}
	c.pos = end
	return c.src[start:end]
}

// unescape appends the string at c.pos without its escapes. What JSON cannot say without an
// escape keeps one, so that different strings stay different: quotes,
// backslashes, and surrogates that stand alone.
func (c *canonicalizer) unescape(dst []byte) []byte {
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

// member returns what is ignored below the member whose name, in quotes, is
// given.
func (t *pointerTree) member(name []byte) *pointerTree {
	if t == nil {
		return nil
	}
	return t.children[string(name[1:len(name)-1])]
}

// element returns what is ignored below an element.
func (t *pointerTree) element(i int) *pointerTree {
	if t == nil {
		return nil
	}
	return t.children[strconv.Itoa(i)]
}

func (t *pointerTree) ends() bool { return t != nil && t.leaf }
