package stub_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"
	"pgregory.net/rapid"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/stub"
)

// load reads a document as the generator does.
func load(files fs.FS, name string) (*openapi3.T, error) {
	loader := stub.NewLoader(files, http.DefaultClient, name, nil)
	doc, err := loader.Document(name)
	if err != nil {
		return nil, err
	}
	return loader.Load(name, doc)
}

// seen is what oapi-codegen sees of a document: what is in it, and the lines by
// which it orders routes.
func seen(t interface{ Fatal(...any) }, spec *openapi3.T) string {
	text, err := spec.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	lines := map[string]int{}
	for path, item := range spec.Paths.Map() {
		if item.Origin != nil {
			lines[path] = item.Origin.Key.Line
		}
	}
	sorted, err := json.MarshalIndent([]any{value, lines}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(sorted)
}

// TestLoadPublished has oapi-codegen see of published documents what it sees
// when it reads them itself.
func TestLoadPublished(t *testing.T) {
	const specs = "../../../testdata/specs"
	names, err := filepath.Glob(specs + "/*.*")
	if err != nil {
		t.Fatal(err)
	}
	names = append(names, specs+"/camara-qod/code/API_definitions/quality-on-demand.yaml")
	read := 0
	for _, name := range names {
		if filepath.Ext(name) == ".tsv" {
			continue
		}
		read++
		name, err := filepath.Rel(specs, name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := util.LoadSwagger(filepath.Join(specs, name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := load(os.DirFS(specs), filepath.ToSlash(name))
		if err != nil {
			t.Fatal(err)
		}
		if seen(t, got) != seen(t, want) {
			t.Errorf("%s is not what oapi-codegen reads", name)
		}
	}
	if read < 10 {
		t.Fatalf("only %d documents were read", read)
	}
}

// TestLoadAnything does the same with whatever YAML has to say: numbers, dates,
// tags, anchors, merge keys, and names that are no strings.
func TestLoadAnything(t *testing.T) {
	dir := t.TempDir()
	// Newer versions of kin-openapi leave dates, and numbers that are names, as
	// they are written.
	probe, err := openapi3.NewLoader().LoadFromData([]byte("paths: {}\nx-names: {0x10: 1}\n"))
	if err != nil {
		t.Fatal(err)
	}
	_, plainer := probe.Extensions["x-names"].(map[string]any)["16"]
	rapid.Check(t, func(t *rapid.T) {
		scalar := func() string {
			scalars := []string{
				"1", "-1", "+1", "0", "007", "010", "0o17", "0x1F", "0b11", "1_000", "12345678901234567890", "123456789012345678901234567890",
				"1.0", "1.10", ".5", "1e3", "-1.5E-7", "1e400", "true", "False", "yes", "on", "~", "null", "", "2020-01-02", "2020-01-02T03:04:05Z", "12:30:45",
				"text", `"a\tb\u00e9\x07"`, `'it''s'`, `"\""`, `"<&>"`, `"\u2028"`, "日本", "!!str 12", "!!int 0x10", "!!float 3", "!!bool true", "!!binary aGk=", "!local x", `"<<"`,
			}
			if plainer {
				scalars = append(scalars, "!!timestamp 2020-01-02")
			}
			return rapid.SampledFrom(scalars).Draw(t, "scalar")
		}
		anchors, mergeable := 0, true
		name := func(i int) string {
			names := []string{
				fmt.Sprintf("k%d", i), fmt.Sprintf("K%d", i), fmt.Sprintf("%d", 200+i), fmt.Sprintf("'%d'", i), fmt.Sprintf("2020-01-0%d", i+1), fmt.Sprintf(`"a/%d\\"`, i),
			}
			if !mergeable && plainer {
				// oapi-codegen reads these in two ways, by where they are merged.
				names = append(names, fmt.Sprintf("0x%d", 10+i), fmt.Sprintf("%d.50", i))
			}
			return rapid.SampledFrom(names).Draw(t, "name")
		}
		var value func(depth int) string
		object := func(depth int) string {
			var members []string
			if anchors > 0 && rapid.IntRange(0, 3).Draw(t, "merge") == 0 {
				members = append(members, fmt.Sprintf("<<: *a%d", rapid.IntRange(1, anchors).Draw(t, "merged")))
			}
			for i := range rapid.IntRange(0, 3).Draw(t, "members") {
				members = append(members, name(i)+": "+value(depth-1))
			}
			return "{" + strings.Join(members, ", ") + "}"
		}
		value = func(depth int) string {
			switch choice := rapid.IntRange(0, 5).Draw(t, "value"); {
			case depth == 0 || choice < 3:
				return scalar()
			case choice == 3:
				return "[" + value(depth-1) + ", " + value(depth-1) + "]"
			case choice == 4 && anchors > 0:
				return fmt.Sprintf("*a%d", rapid.IntRange(1, anchors).Draw(t, "alias"))
			}
			return object(depth)
		}
		anchored := ""
		for range rapid.IntRange(0, 3).Draw(t, "anchors") {
			text := object(2)
			anchors++
			anchored += fmt.Sprintf("x-a%d: &a%d %s\n", anchors, anchors, text)
		}
		mergeable = false
		item := func() string {
			return rapid.SampledFrom([]string{"*item", "{<<: *item, summary: s}", "{get: {responses: {200: {description: d}}}}", "{Get: {x-n: 1, responses: {}}, get: {x-n: 2, responses: {}}}", "&again {put: {responses: {}}}", "{}"}).Draw(t, "item")
		}
		text := fmt.Sprintf("openapi: 3.0.3\ninfo: {title: t, version: '1'}\nx-item: &item {post: {responses: {'204': {description: d}}}}\n%sx-value: %s\npaths:\n  /b: %s\n  /a: %s\n\n  /c: {get: {responses: {}, x-list: [%s]}}\n",
			anchored, value(3), item(), item(), value(3))
		if err := os.WriteFile(filepath.Join(dir, "spec.yaml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		want, wantErr := util.LoadSwagger(filepath.Join(dir, "spec.yaml"))
		got, err := load(fstest.MapFS{"spec.yaml": {Data: []byte(text)}}, "spec.yaml")
		if wantErr != nil || err != nil {
			// What is a finding here may be none there, such as a name given twice.
			if err == nil {
				t.Fatalf("oapi-codegen cannot read this: %v\n%s", wantErr, text)
			}
			return
		}
		if g, w := seen(t, got), seen(t, want); g != w {
			t.Fatalf("%s\nis read as\n%s\nnot as oapi-codegen does:\n%s", text, g, w)
		}
	})
}
