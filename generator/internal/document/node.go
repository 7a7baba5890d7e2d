package document

import (
	"strconv"
	"strings"
)

// A Kind is the JSON type of a node.
type Kind uint8

// The kinds of nodes.
const (
	Null Kind = iota
	Bool
	Number
	String
	List
	Object
)

// String names the kind as an author of a document would, with its article.
func (k Kind) String() string {
	return [...]string{"null", "a boolean", "a number", "a string", "a list", "an object"}[k]
}

// A Node is one value of a document. YAML aliases and merge keys are resolved:
// a node that is reached through an alias is the anchor's own, shared and at
// the anchor's position. All methods accept a nil Node and find nothing in it.
type Node struct {
	Pos  Position
	Kind Kind
	home int32
	// Value is the text of a scalar: "true" or "false" of a Bool, a Number as
	// it was written, a String without its quotes.
	Value string
	// Members are an Object's, in the order of the document; those that a merge
	// key brings come last. Only JSON has more than one of a name.
	Members []Member
	// Items are a List's.
	Items []*Node
}

// A Member is a name and a value of an Object.
type Member struct {
	Name  string
	Pos   Position // of the name
	Value *Node
}

// Describe names the value in a message.
func (n *Node) Describe() string {
	switch n.Kind {
	case Bool:
		return n.Value
	case Number:
		return "the number " + n.Value
	case String:
		const most = 60 // characters: whoever reads the message knows the rest
		if text := []rune(n.Value); len(text) > most {
			return "the string " + strconv.Quote(string(text[:most])+"…")
		}
		return "the string " + strconv.Quote(n.Value)
	}
	return n.Kind.String()
}

// Get returns the value of the member name, the last one if JSON repeats it,
// or nil.
func (n *Node) Get(name string) *Node {
	if m := n.Member(name); m != nil {
		return m.Value
	}
	return nil
}

// Member is [Node.Get] with the name's position.
func (n *Node) Member(name string) *Member {
	if n == nil {
		return nil
	}
	for i := len(n.Members) - 1; i >= 0; i-- {
		if n.Members[i].Name == name {
			return &n.Members[i]
		}
	}
	return nil
}

// Ref returns the value of n's $ref, or nil if it has none. An empty string is
// none, as kin-openapi has it.
func (n *Node) Ref() *Node {
	if ref := n.Get("$ref"); ref != nil && (ref.Kind != String || ref.Value != "") {
		return ref
	}
	return nil
}

// Home is the line of the name that an object in YAML is the value of, or, if it
// is an item of a list or a whole file, of its own first name. It is 0 in JSON,
// and negative of an object with a merge key, which stands in several places.
func (n *Node) Home() int { return int(n.home) }

// FieldMember is [Node.Field] with the name's position.
func (n *Node) FieldMember(name string) *Member {
	if m := n.Member(name); m != nil || n == nil {
		return m
	}
	for i := len(n.Members) - 1; i >= 0; i-- {
		if strings.EqualFold(n.Members[i].Name, name) {
			return &n.Members[i]
		}
	}
	return nil
}

// Field is [Node.Get] as kin-openapi reads the fields of OpenAPI's own objects:
// failing the exact name, one that differs in case only.
func (n *Node) Field(name string) *Node {
	if m := n.FieldMember(name); m != nil {
		return m.Value
	}
	return nil
}
