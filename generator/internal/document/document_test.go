package document_test

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"pgregory.net/rapid"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

func load(t interface{ Fatal(...any) }, name, text string) *document.Node {
	doc, err := document.Load(fstest.MapFS{name: {Data: []byte(text)}}, name)
	if err != nil {
		t.Fatal(err)
	}
	return doc.Root()
}

// dump writes a tree with its positions, in a form that is easy to compare.
func dump(n *document.Node) string {
	var b strings.Builder
	var walk func(n *document.Node)
	walk = func(n *document.Node) {
		fmt.Fprintf(&b, "%d:%d ", n.Pos.Line, n.Pos.Column)
		switch n.Kind {
		case document.Object:
			b.WriteString("{")
			for _, m := range n.Members {
				fmt.Fprintf(&b, "%d:%d %q: ", m.Pos.Line, m.Pos.Column, m.Name)
				walk(m.Value)
			}
			b.WriteString("} ")
		case document.List:
			b.WriteString("[")
			for _, item := range n.Items {
				walk(item)
			}
			b.WriteString("] ")
		default:
			fmt.Fprintf(&b, "%v %q ", n.Kind, n.Value)
		}
	}
	walk(n)
	return strings.TrimSpace(b.String())
}

func TestScalars(t *testing.T) {
	tests := map[string]struct {
		kind  document.Kind
		value string
	}{
		"": {document.Null, ""}, "~": {document.Null, "~"}, "null": {document.Null, "null"},
		"true": {document.Bool, "true"}, "False": {document.Bool, "false"},
		"yes": {document.String, "yes"}, "on": {document.String, "on"}, `"true"`: {document.String, "true"},
		"24": {document.Number, "24"}, "010": {document.Number, "010"}, "1e3": {document.Number, "1e3"},
		"24:00:00": {document.String, "24:00:00"}, "24h": {document.String, "24h"}, "2024-01-01": {document.String, "2024-01-01"},
	}
	for text, want := range tests {
		n := load(t, "a.yaml", "a: "+text).Get("a")
		if n.Kind != want.kind || n.Value != want.value {
			t.Errorf("%q is %v %q, want %v %q", text, n.Kind, n.Value, want.kind, want.value)
		}
	}
}

func TestAnchorsAndMergeKeys(t *testing.T) {
	root := load(t, "a.yaml", `
base: &base {a: 1, b: 2}
more: &more {b: 3, c: 4}
one: {<<: *base, b: 0}
both: {<<: [*more, *base], d: 5}
inline: {<<: {a: 9}}
quoted: {"<<": plain}
alias: *base
`)
	want := map[string]string{
		"one":    `4:6 {4:18 "b": 4:21 a number "0" 2:14 "a": 2:17 a number "1" }`,
		"both":   `5:7 {5:28 "d": 5:31 a number "5" 3:14 "b": 3:17 a number "3" 3:20 "c": 3:23 a number "4" 2:14 "a": 2:17 a number "1" }`,
		"inline": `6:9 {6:15 "a": 6:18 a number "9" }`,
		"quoted": `7:9 {7:10 "<<": 7:16 a string "plain" }`,
		"alias":  `2:7 {2:14 "a": 2:17 a number "1" 2:20 "b": 2:23 a number "2" }`,
	}
	for name, text := range want {
		if got := dump(root.Get(name)); got != text {
			t.Errorf("%s\ngot  %s\nwant %s", name, got, text)
		}
	}
	if root.Get("alias") != root.Get("base") {
		t.Error("an alias is not its anchor's node")
	}
}

func TestValuesLeftOutAtTheEndStandInTheLastLine(t *testing.T) {
	for text, want := range map[string]string{
		"a:":         `1:1 {1:1 "a": 1:3 null "" }`,
		"a: 1\r\nb:": `1:1 {1:1 "a": 1:4 a number "1" 2:1 "b": 2:3 null "" }`,
		"---":        `1:1 null ""`,
	} {
		if got := dump(load(t, "a.yaml", text)); got != want {
			t.Errorf("%q\ngot  %s\nwant %s", text, got, want)
		}
	}
}

// TestBombsStaySmall holds that aliases are shared, not copied.
func TestBombsStaySmall(t *testing.T) {
	text := "a0: &a0 [x]\n"
	for i := 1; i < 64; i++ {
		text += fmt.Sprintf("a%d: &a%d [*a%d, *a%d]\n", i, i, i-1, i-1)
	}
	root := load(t, "a.yaml", text)
	if n := root.Get("a63"); n.Items[0] != n.Items[1] || n.Items[0] != root.Get("a62") {
		t.Error("an alias was copied")
	}
}

func TestByteOrderMarksAndLineEndsChangeNothing(t *testing.T) {
	for name, text := range map[string]string{
		"a.yaml": "a:\n  b: [1,\n    ü, 2]\n",
		"a.json": "{\"a\":\n  {\"b\": [1,\n    \"ü\", 2]}}\n",
	} {
		want := dump(load(t, name, text))
		for _, variant := range []string{"\ufeff" + text, strings.ReplaceAll(text, "\n", "\r\n"), "\ufeff" + strings.ReplaceAll(text, "\n", "\r\n")} {
			if got := dump(load(t, name, variant)); got != want {
				t.Errorf("%q\ngot  %s\nwant %s", variant, got, want)
			}
		}
	}
}

func TestJSONIsReadAsJSON(t *testing.T) {
	got := dump(load(t, "a.json", "{\"\\ud83d\\ude00\":\t1.50, \"😀\": \"\\ud83d\\ude00\", \"a\": null, \"a\": [true,{}]}"))
	want := `1:1 {1:2 "😀": 1:18 a number "1.50" 1:24 "😀": 1:29 a string "😀" 1:45 "a": 1:50 null "" 1:56 "a": 1:61 [1:62 a boolean "true" 1:67 {} ] }`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestReadersAgree reads the same text as JSON and, by a comment that JSON does
// not have, as YAML.
func TestReadersAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		space := rapid.SampledFrom([]string{"", " ", "\n", "\n  ", "\r\n "})
		text := rapid.SampledFrom([]string{`"a"`, `"ü"`, `"x-idempotent"`, `"a b"`, `"\n"`, `""`, `"null"`})
		var value func(depth int) string
		value = func(depth int) string {
			kinds := 6
			if depth == 0 {
				kinds = 4
			}
			switch rapid.IntRange(0, kinds-1).Draw(t, "kind") {
			case 0:
				return "null"
			case 1:
				return rapid.SampledFrom([]string{"true", "false"}).Draw(t, "bool")
			case 2:
				return fmt.Sprint(rapid.IntRange(-20, 20).Draw(t, "number"))
			case 3:
				return text.Draw(t, "string")
			case 4:
				items := make([]string, rapid.IntRange(0, 3).Draw(t, "items"))
				for i := range items {
					items[i] = space.Draw(t, "space") + value(depth-1) + space.Draw(t, "space")
				}
				return "[" + strings.Join(items, ",") + "]"
			default:
				members := make([]string, rapid.IntRange(0, 3).Draw(t, "members"))
				for i := range members {
					members[i] = fmt.Sprintf("%s\"k%d\":%s%s", space.Draw(t, "space"), i, space.Draw(t, "space"), value(depth-1))
				}
				return "{" + strings.Join(members, ",") + "}"
			}
		}
		json := "{\"a\": " + value(4) + "}"
		asJSON := dump(load(t, "a", json))
		// A YAML null is the word, in JSON nothing is kept of it.
		asYAML := strings.ReplaceAll(dump(load(t, "a", json+" # YAML")), `null "null"`, `null ""`)
		if asJSON != asYAML {
			t.Fatalf("%s\nJSON %s\nYAML %s", json, asJSON, asYAML)
		}
	})
}

func TestErrorsOfFilesAreKept(t *testing.T) {
	_, err := document.Load(fstest.MapFS{}, "nowhere.yaml")
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "nowhere.yaml") {
		t.Errorf("got the error %v, want one that wraps fs.ErrNotExist and names the file", err)
	}
	_, err = document.Load(fstest.MapFS{"dir/a.yaml": {}}, "dir")
	if err == nil || errors.As(err, new(document.Findings)) {
		t.Errorf("a directory gave %v, want an error of the file system", err)
	}
}

func TestSyntaxErrorsStandInTheirLine(t *testing.T) {
	for text, want := range map[string]string{
		"a: 1\nb: {c: *x\n":                   `2:8: not valid YAML: *x stands before its anchor`,
		"a: \"*x\" # *x\r\nü: [*x, {c: 1\r\n": `2:5: not valid YAML: *x stands before its anchor`,
		"a: [*x]\nb: &x 1\n":                  `1:5: not valid YAML: *x stands before its anchor`,
		"a: 1\nb:\n  c: {d: 1\n  e: 2\n":      `3:3: not valid YAML: did not find expected ',' or '}'`,
		"a: 1\nb: {c: 1\n":                    `2:1: not valid YAML: did not find expected ',' or '}'`,
		"a: 1\nb: [c,\n":                      `2:1: not valid YAML: did not find expected node content`,
		"a:\n  b: 1\n c: 2\n":                 `3:2: not valid YAML: did not find expected key`,
		"a: 1\nb: c: d\n":                     `2:5: not valid YAML: mapping values are not allowed in this context`,
		"a: 1\nb: 'c\nd: 2\n":                 `2:4: not valid YAML: found unexpected end of stream`,
	} {
		_, err := document.Load(fstest.MapFS{"a.yaml": {Data: []byte(text)}}, "a.yaml")
		if err == nil || !strings.HasPrefix(err.Error(), "a.yaml:"+want) {
			t.Errorf("%q\ngot  %v\nwant a.yaml:%s", text, err, want)
		}
	}
}

func TestFollow(t *testing.T) {
	fsys := fstest.MapFS{
		"api/spec.yaml": {Data: []byte("a: {$ref: '#/b/0'}\nb: [{$ref: '../other.yaml#/x~1y'}]\nloop: {$ref: '#/loop'}\nbroken: {$ref: ../bad.yaml}\nopaque: {$ref: 'urn:x:y'}\nnumber: {$ref: 1}\npast: {$ref: '#/b/1'}\nroot: {found: true}\n")},
		"other.yaml":    {Data: []byte("x/y: {$ref: '#/root'}\n")},
		"bad.yaml":      {Data: []byte("a: [\n")},
	}
	doc, err := document.Load(fsys, "api/spec.yaml")
	if err != nil {
		t.Fatal(err)
	}
	n, err := doc.Follow(doc.Root().Get("a"))
	if err != nil || n.Get("found") == nil {
		t.Errorf("following a gave %v, %v; want root", n, err)
	}
	if n, err := doc.Follow(doc.Root().Get("loop")); n != nil || err != nil {
		t.Errorf("following a circle gave %v, %v; want nil", n, err)
	}
	for name, want := range map[string]string{
		"broken": "bad.yaml:1:1: not valid YAML: did not find expected node content; close every [ and {, and put a comma between what is in them",
		"opaque": `api/spec.yaml:5:16: $ref "urn:x:y" is not a URI reference; write a path and a fragment, such as other.yaml#/pathItems/orders`,
		"number": "api/spec.yaml:6:16: $ref must be a string, not a number",
		"past":   `api/spec.yaml:7:14: $ref "#/b/1" points at nothing: api/spec.yaml has no "#/b/1"`,
	} {
		if _, err := doc.Follow(doc.Root().Get(name)); err == nil || err.Error() != want {
			t.Errorf("following %s gave the error\n%v\nwant\n%s", name, err, want)
		}
	}
}

func TestUnresolved(t *testing.T) {
	fsys := fstest.MapFS{
		"spec.yaml": {Data: []byte(`
paths: {/a: {$ref: 'items.yaml#/a'}, /b: {$ref: nowhere.yaml}}
schemas:
  A: {$ref: '#/schemas/B'}
  B: {properties: {a: {$ref: '#/schemas/A'}, c: {$ref: '#/schemas/C'}}}
  D: {example: {$ref: '#/not/one'}, x-note: {$ref: '#/nor/this'}}
`)},
		"items.yaml": {Data: []byte("a: {post: {parameters: [{$ref: '#/gone'}]}}\nb: {$ref: '#/unused'}\n")},
	}
	doc, err := document.Load(fsys, "spec.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := `items.yaml:1:32: $ref "#/gone" points at nothing: items.yaml has no "#/gone"
spec.yaml:2:49: $ref "nowhere.yaml" cannot be read: open nowhere.yaml: file does not exist
spec.yaml:5:56: $ref "#/schemas/C" points at nothing: spec.yaml has no "#/schemas/C"`
	if got := doc.Unresolved().Error(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestFindingsComeSortedAndOnce(t *testing.T) {
	at := func(file string, line, column int) document.Position {
		return document.Position{File: file, Line: line, Column: column}
	}
	found := document.Findings{
		{Pos: at("b", 1, 1), Message: "last"},
		{Pos: at("a", 10, 1), Message: "third"},
		{Pos: at("a", 2, 3), Message: "second"},
		{Pos: at("a", 2, 3), Message: "second"},
		{Pos: at("a", 2, 1), Message: "first\nin one line"},
	}
	want := "a:2:1: first\\nin one line\na:2:3: second\na:10:1: third\nb:1:1: last"
	if got := found.Error(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
