// Package document reads OpenAPI documents as trees of nodes that know where
// they stand, so that whatever is wrong can be reported at its file, line and
// column. It understands YAML and JSON, and of OpenAPI only references.
package document

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path"
	"strconv"
	"strings"
	"syscall"
)

// A Document is one root file and the files that its references reach. Files
// are read once, when first needed. A Document is not safe for concurrent use.
type Document struct {
	fsys  fs.FS
	name  string // of the root file
	root  *Node
	files map[string]*file
	// merged are the names of files that nodes of the root file were written in.
	merged map[string]bool
}

// A file is what was read under a name: a tree, or the error that reading gave.
type file struct {
	size int // bytes
	root *Node
	err  error
}

// Load reads and parses the file name, a slash-separated path within fsys. The
// error is of type [Findings] for faults of syntax, and wraps fsys's otherwise.
func Load(fsys fs.FS, name string) (*Document, error) {
	name = path.Clean(name)
	doc := &Document{fsys: fsys, name: name, files: make(map[string]*file)}
	root, err := doc.open(name)
	if findings, ok := err.(Findings); ok {
		return nil, findings
	}
	if err != nil {
		return nil, fmt.Errorf("read document: %w", err)
	}
	doc.root = root
	return doc, nil
}

// Merged says that what stands in the file name is part of the root file, into
// which it has been merged: references there are the root file's.
func (d *Document) Merged(name string) { d.merged = map[string]bool{name: true} }

// Second returns where in the root file a second YAML document begins, and its
// text, of which nothing is parsed. Without one the text is empty.
func (d *Document) Second() (Position, string) {
	data, err := fs.ReadFile(d.fsys, d.name)
	if err != nil {
		return Position{}, "" // it has been read before
	}
	return second(d.name, data)
}

// Root is the document's outermost value.
func (d *Document) Root() *Node { return d.root }

func (d *Document) open(name string) (*Node, error) {
	if f, ok := d.files[name]; ok {
		return f.root, f.err
	}
	f := new(file)
	d.files[name] = f
	data, err := fs.ReadFile(d.fsys, name)
	if errors.Is(err, syscall.EISDIR) {
		f.err = fmt.Errorf("%s is a directory; name a file", name)
	} else if err != nil {
		f.err = err
	} else {
		f.size = len(data)
		f.root, f.err = Parse(name, data)
	}
	return f.root, f.err
}

// Follow returns the node that the $ref of n leads to, through any number of
// references, and n itself if it has none. References that run in a circle end
// at nil. Errors are those of [Document.Step].
func (d *Document) Follow(n *Node) (*Node, error) {
	seen := make(map[*Node]bool)
	for n.Ref() != nil {
		if seen[n] {
			return nil, nil
		}
		seen[n] = true
		next, err := d.Step(n)
		if err != nil {
			return nil, err
		}
		n = next
	}
	return n, nil
}

// Step returns the node that the $ref of n, which has one, points at. The error, of type
// [Findings], stands at the reference if it cannot be followed, or in the file
// where it leads if that cannot be parsed.
//
// A reference is resolved against the file it stands in. Its fragment is looked
// up in the file it names, and one without a file (`#/…`) also in the root
// file, as kin-openapi does for elements that are files of their own. A
// reference to a URL, or from one, opens the URL with `:/` in place of `://`,
// so that an fs.FS can serve it.
func (d *Document) Step(n *Node) (*Node, error) {
	ref := n.Ref()
	if ref.Kind != String {
		return nil, Findings{{ref.Pos, fmt.Sprintf("$ref must be a string, not %s", ref.Kind)}}
	}
	return d.lookUp(ref)
}

func (d *Document) lookUp(ref *Node) (*Node, error) {
	fail := func(format string, args ...any) error {
		return Findings{{Pos: ref.Pos, Message: fmt.Sprintf("$ref %q ", ref.Value) + fmt.Sprintf(format, args...)}}
	}
	// Documents written on Windows separate with backslashes.
	location, fragment, _ := strings.Cut(ref.Value, "#")
	location = strings.ReplaceAll(location, `\`, "/")
	target, err := url.Parse(location + "#" + fragment)
	if err != nil || target.Opaque != "" {
		return nil, fail("is not a URI reference; write a path and a fragment, such as other.yaml#/pathItems/orders")
	}
	name := ref.Pos.File
	if d.merged[name] {
		name = d.root.Pos.File
	}
	switch {
	case target.Host != "":
		name = path.Join(target.Scheme+":", target.Host, target.Path)
		if target.RawQuery != "" {
			name += "?" + target.RawQuery
		}
	case path.IsAbs(target.Path):
		name = path.Clean(target.Path)
	case target.Path != "":
		name = path.Join(path.Dir(name), target.Path)
	}
	root, err := d.open(name)
	if findings, ok := err.(Findings); ok {
		return nil, findings
	}
	if err != nil {
		return nil, fail("cannot be read: %v", err)
	}
	if n := root.at(target.Fragment); n != nil {
		return n, nil
	}
	if location == "" {
		if n := d.root.at(target.Fragment); n != nil {
			return n, nil
		}
	}
	return nil, fail("points at nothing: %s has no %q", name, "#"+target.Fragment)
}

// Lookup returns the member that names lead to from the root, one inside the
// other and through references, or nil.
func (d *Document) Lookup(names ...string) *Member {
	var found *Member
	n := d.root
	for _, name := range names {
		target, err := d.Follow(n)
		if err != nil {
			return nil
		}
		if found = target.Member(name); found == nil {
			return nil
		}
		n = found.Value
	}
	return found
}

// Circular is the finding of a node whose references end at none.
func Circular(n *Node) Finding {
	return Finding{n.Ref().Pos, fmt.Sprintf("$ref %q leads back to itself; write what is meant in one of the places that refer to one another", n.Ref().Value)}
}

// Unresolved lists the references that lead nowhere, as [Document.Follow] finds
// them.
func (d *Document) Unresolved() Findings {
	var findings Findings
	d.EachReference(func(n *Node) {
		if end, err := d.Follow(n); err != nil {
			findings = append(findings, err.(Findings)...)
		} else if end == nil {
			findings = append(findings, Circular(n))
		}
	})
	return findings.Sorted()
}

// EachReference calls visit with the objects that have a $ref, in the root file
// and in what it refers to. Extensions and data, such as examples, are left out:
// a $ref in them is none.
func (d *Document) EachReference(visit func(n *Node)) {
	seen := make(map[*Node]bool)
	var walk func(n *Node)
	walk = func(n *Node) {
		if n == nil || seen[n] {
			return
		}
		seen[n] = true
		for _, item := range n.Items {
			walk(item)
		}
		for _, m := range n.Members {
			switch {
			case strings.HasPrefix(m.Name, "x-"):
			case m.Name == "example", m.Name == "default", m.Name == "enum", m.Name == "const", m.Name == "value":
			default:
				walk(m.Value)
			}
		}
		if n.Ref() == nil {
			return
		}
		visit(n)
		if target, err := d.Step(n); err == nil {
			walk(target)
		}
	}
	walk(d.root)
}

// at evaluates a JSON pointer (RFC 6901), unescaped from its URI form.
func (n *Node) at(pointer string) *Node {
	if pointer == "" {
		return n
	}
	rest, ok := strings.CutPrefix(pointer, "/")
	if !ok {
		return nil
	}
	for token := range strings.SplitSeq(rest, "/") {
		if n == nil {
			return nil
		}
		if n.Kind == List {
			i, err := strconv.ParseUint(token, 10, 31)
			if err != nil || int(i) >= len(n.Items) {
				return nil
			}
			n = n.Items[i]
			continue
		}
		n = n.Get(Unescape(token))
	}
	return n
}

// Unescape decodes one token of a JSON pointer.
func Unescape(token string) string {
	return strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~")
}
