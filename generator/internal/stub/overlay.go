package stub

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/speakeasy-api/openapi/overlay"
	"github.com/speakeasy-api/openapi/overlay/loader"
	"gopkg.in/yaml.v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// Overlay applies the overlay called overlayName to doc, which has been read
// from name, and returns the result. That is what is read under name from then
// on. Its nodes stand where they were written: in the document, or in the
// overlay. What stands in doc at a place that is lost has been dropped before the
// overlay was applied. The error is of type [document.Findings] wherever the
// fault has a place. Strictly, an action that matches nothing is one. With an error
// there may be a result too: of those actions that can be applied.
func (l *Loader) Overlay(name string, doc *document.Document, overlayName string, strict bool) (merged *document.Document, lost func(document.Position) bool, err error) {
	spec, err := l.Load(name, doc)
	if err != nil {
		return nil, nil, err
	}
	// The overlay is applied to what oapi-codegen applies it to: the document
	// as kin-openapi writes it again.
	var buf bytes.Buffer
	encoder := yaml.NewEncoder(&buf)
	encoder.SetIndent(2)
	if err := encoder.Encode(spec); err != nil {
		return nil, nil, fmt.Errorf("writing %s again for its overlay: %w", name, err)
	}
	var node yaml.Node
	if err := yaml.Unmarshal(buf.Bytes(), &node); err != nil {
		return nil, nil, fmt.Errorf("reading %s again for its overlay: %w", name, err)
	}
	own, err := document.Load(l, overlayName)
	if err != nil {
		return nil, nil, fmt.Errorf("the overlay: %w", err)
	}
	form := checkOverlay(own.Root(), strict)
	if form.whole {
		return nil, nil, form.findings
	}
	text, err := l.ReadFile(overlayName)
	if err != nil {
		return nil, nil, err
	}
	root := doc.Root().Pos.File
	from := &sources{
		overlay: own.Root().Pos.File, places: map[*yaml.Node]document.Position{}, kept: map[document.Position]bool{},
		findings: form.findings, skip: form.actions,
	}
	from.document(&node, doc.Root())
	if !from.apply(text, &node, own.Root(), root, strict) {
		return nil, nil, from.findings
	}
	text, err = yaml.Marshal(&node)
	if err != nil {
		return nil, nil, fmt.Errorf("writing %s after its overlay: %w", name, err)
	}
	l.read[canonical(name)] = text
	merged, err = document.Load(l, name)
	if from.findings != nil {
		err = from.findings
	}
	if merged == nil {
		return nil, nil, err
	}
	from.relocate(merged.Root(), node.Content[0], document.Position{File: root, Line: 1, Column: 1})
	merged.Merged(from.overlay)
	return merged, func(at document.Position) bool { return !from.kept[at] && at.File == root }, err
}

// sources tells where the nodes of a document were written that an overlay is
// applied to.
type sources struct {
	overlay  string
	places   map[*yaml.Node]document.Position
	kept     map[document.Position]bool // of what the document has when the overlay is applied
	findings document.Findings
	skip     map[int]bool // the actions that cannot be applied
}

func (s *sources) reject(pos document.Position, format string, args ...any) {
	s.findings = append(s.findings, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
}

// document notes the places of what the document has itself.
func (s *sources) document(y *yaml.Node, n *document.Node) {
	switch {
	case n == nil:
		return
	case y.Kind == yaml.DocumentNode:
		s.document(y.Content[0], n)
		return
	case y.Kind == yaml.MappingNode:
		for i := 0; i+1 < len(y.Content); i += 2 {
			if m := n.FieldMember(y.Content[i].Value); m != nil {
				s.places[y.Content[i]] = m.Pos
				s.kept[m.Pos] = true
				s.document(y.Content[i+1], m.Value)
			}
		}
	case y.Kind == yaml.SequenceNode:
		for i := range min(len(y.Content), len(n.Items)) {
			s.document(y.Content[i], n.Items[i])
		}
	}
	s.places[y] = n.Pos
	if len(n.Members) == 0 || n.Members[0].Pos != n.Pos {
		s.kept[n.Pos] = true // and it is not the place of its first name, too
	}
}

// apply applies the actions of an overlay, one by one, so that each can be told
// from what it changed. It reports whether there is a result.
func (s *sources) apply(text []byte, root *yaml.Node, own *document.Node, name string, strict bool) bool {
	whole, err := loader.LoadOverlayFromReader(bytes.NewReader(text))
	if err == nil && s.findings == nil {
		err = whole.Validate()
	}
	if err != nil {
		if s.findings == nil {
			s.reject(own.Pos, "not an overlay: %v", err)
		}
		return false
	}
	skipped := false // what it would have added, later actions may mean
	for i, action := range whole.Actions {
		if s.skip[i] {
			skipped = true
			continue
		}
		at := own.Get("actions").Items[i]
		query := func(field, path string) []*yaml.Node {
			compiled, err := whole.NewPath(path, nil)
			if err != nil {
				s.reject(at.Get(field).Pos, "%s is not a JSONPath: %v; write one such as $.paths['/orders'].post", path, err)
				return nil
			}
			nodes := compiled.Query(root)
			if len(nodes) == 0 && strict && !skipped {
				s.reject(at.Get(field).Pos, `%s matches nothing in %s; mend it, remove the action, or set "output-options: {overlay: {path: %s, strict: false}}"`, path, name, s.overlay)
			}
			return nodes
		}
		before := len(s.findings)
		targets := query("target", action.Target)
		written, place := &action.Update, s.written
		if action.Update.IsZero() && action.Copy != "" && !action.Remove {
			copied := query("copy", action.Copy)
			if len(copied) > 0 {
				written = clone(copied[0])
			}
			place = func(*yaml.Node) document.Position { return at.Get("copy").Pos }
		}
		if len(s.findings) > before {
			continue
		}
		single := *whole
		single.Actions = []overlay.Action{action}
		if strict {
			_, err = single.ApplyToStrict(root)
		} else {
			err = single.ApplyTo(root)
		}
		if err != nil {
			s.reject(at.Get("target").Pos, "the action cannot be applied: %v", err)
			skipped = true
			continue
		}
		for _, target := range targets {
			s.changed(target, written, place)
		}
	}
	return true
}

// clone copies a node as far as its contents count.
func clone(y *yaml.Node) *yaml.Node {
	c := *y
	c.Content = nil
	for _, item := range y.Content {
		c.Content = append(c.Content, clone(item))
	}
	return &c
}

func (s *sources) written(y *yaml.Node) document.Position {
	return document.Position{File: s.overlay, Line: y.Line, Column: y.Column}
}

// changed notes the places of what an action wrote to y, into which written has
// been merged.
func (s *sources) changed(y, written *yaml.Node, place func(*yaml.Node) document.Position) {
	switch {
	case y.Kind == yaml.MappingNode && written.Kind == yaml.MappingNode:
		for i := 0; i+1 < len(written.Content); i += 2 {
			key, value := written.Content[i], written.Content[i+1]
			j := slices.IndexFunc(y.Content, func(k *yaml.Node) bool { return k.Value == key.Value })
			if j < 0 || j%2 != 0 || j+1 == len(y.Content) {
				continue
			}
			// The name of what was there before, and still is an object, stays
			// the document's.
			if _, known := s.places[y.Content[j]]; !known || value.Kind != yaml.MappingNode {
				s.places[y.Content[j]] = place(key)
			}
			s.changed(y.Content[j+1], value, place)
		}
		if _, known := s.places[y]; !known {
			s.places[y] = place(written)
		}
	case y.Kind == yaml.SequenceNode && len(y.Content) > 0:
		// A list grows by the items of another, or by one that is none.
		items := written.Content
		if written.Kind != yaml.SequenceNode {
			items = []*yaml.Node{written}
		}
		first := max(0, len(y.Content)-len(items))
		for i, item := range y.Content[first:] {
			s.changed(item, items[i], place)
		}
		if _, known := s.places[y]; !known {
			s.places[y] = place(written)
		}
	default:
		s.places[y] = place(written)
		// A new value has the old one's type.
		if err := y.Decode(new(any)); err != nil {
			s.reject(place(written), "%q cannot replace a value of another type; remove that in an action before this one", written.Value)
		}
	}
}

// relocate gives n and what it holds, which was read from y as it was written
// out, the places of y; without one, that of what holds it.
func (s *sources) relocate(n *document.Node, y *yaml.Node, within document.Position) {
	at, known := s.places[y]
	if !known {
		at = within
	}
	n.Pos = at
	switch y.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(y.Content); i += 2 {
			m := n.Member(y.Content[i].Value)
			if m == nil {
				continue
			}
			if m.Pos, known = s.places[y.Content[i]]; !known {
				m.Pos = at
			}
			s.relocate(m.Value, y.Content[i+1], m.Pos)
		}
	case yaml.SequenceNode:
		for i := range min(len(y.Content), len(n.Items)) {
			s.relocate(n.Items[i], y.Content[i], at)
		}
	}
}

// overlayFields are the kinds that the fields of an overlay's objects have; Null
// stands for any.
var (
	overlayFields = map[string]document.Kind{"overlay": document.String, "info": document.Object, "extends": document.String, "actions": document.List}
	infoFields    = map[string]document.Kind{"title": document.String, "version": document.String, "description": document.String}
	actionFields  = map[string]document.Kind{"target": document.String, "description": document.String, "update": document.Null, "remove": document.Bool, "copy": document.String}
)

// A form is what is wrong with the form of an overlay: with all of it, or with
// some of its actions.
type form struct {
	findings document.Findings
	whole    bool
	actions  map[int]bool
}

// checkOverlay finds what is wrong with the form of an overlay, and what the
// specification demands of it.
func checkOverlay(root *document.Node, strict bool) (f form) {
	f.actions = map[int]bool{}
	reject := func(pos document.Position, format string, args ...any) {
		f.findings = append(f.findings, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
	}
	check := func(n *document.Node, name string, fields map[string]document.Kind, required ...string) bool {
		if n.Kind != document.Object {
			reject(n.Pos, "%s must be an object, not %s", name, n.Describe())
			return false
		}
		for _, field := range required {
			if v := n.Get(field); v == nil || v.Kind == document.Null || v.Kind == document.String && v.Value == "" {
				reject(n.Pos, "%s lacks the field %s; write it", name, field)
			}
		}
		for _, m := range n.Members {
			want, known := fields[m.Name]
			scalar := m.Value.Kind == document.Number || m.Value.Kind == document.Bool // read as text
			if !known && !strings.HasPrefix(m.Name, "x-") {
				reject(m.Pos, "%s has no field %s%s", name, m.Name, document.Instead(m.Name, slices.Sorted(maps.Keys(fields))))
			}
			if known && want != document.Null && m.Value.Kind != document.Null && m.Value.Kind != want && !(want == document.String && scalar) {
				reject(m.Value.Pos, "%s must be %s, not %s", m.Name, want, m.Value.Describe())
			}
		}
		return true
	}
	if !check(root, "an overlay", overlayFields, "overlay", "info", "actions") {
		f.whole = true
		return f
	}
	var versions []string
	for _, v := range overlay.SupportedVersions {
		versions = append(versions, v.String())
	}
	if v := root.Get("overlay"); v != nil && v.Kind == document.String && !slices.Contains(versions, v.Value) {
		reject(v.Pos, "overlay is the version of the specification, not %q; write %s", v.Value, strings.Join(versions, " or "))
	}
	if info := root.Get("info"); info != nil && info.Kind == document.Object {
		check(info, "info", infoFields, "title", "version")
	}
	actions := root.Get("actions")
	if actions == nil || actions.Kind != document.List {
		f.whole = true
		return f
	}
	if len(actions.Items) == 0 {
		reject(actions.Pos, "actions is empty; write what the overlay is to do, or generate without it")
	}
	for i, action := range actions.Items {
		before := len(f.findings)
		if !check(action, "an action", actionFields, "target") {
			f.whole = true
			continue
		}
		remove := action.Get("remove")
		switch update, removes := action.Get("update"), remove != nil && remove.Value == "true"; {
		case removes && update != nil:
			reject(update.Pos, "an action that removes its target cannot update it; leave out remove or update")
		case strict && !removes && update == nil && action.Get("copy") == nil && len(f.findings) == before:
			reject(action.Pos, "the action does nothing; write update, remove: true or copy")
		}
		f.actions[i] = len(f.findings) > before
	}
	return f
}
