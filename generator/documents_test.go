//go:build !race

// Generating every document with the race detector takes minutes and finds
// nothing: make documents runs this file without it.

package generator_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	"go.yaml.in/yaml/v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// A realDocument is one that a team has published, in testdata/specs.
type realDocument struct {
	name string
	// options are the output-options that oapi-codegen needs for it.
	options string
	// target is the router that every test compiles it for, beside std-http.
	target string
}

var realDocuments = []realDocument{
	{"adyen-transfers-v4.json", "", "chi"},
	{"camara-qod-bundled.yaml", "", "gorilla"},
	{"coinbase-cdp.yaml", "skip-prune: true", "chi"},
	{"dcsa-booking-v2.yaml", "", "echo"},
	{"moov-paygate.yaml", "", "gin"},
	{"openai-1.2.0.yaml", "response-type-suffix: HTTPResp", "fiber"},
	{"paypal-vault-v3.json", "", "fiber-v3"},
	{"resend.yaml", "skip-prune: true", "echo5"},
	{"resonate.yaml", "", "iris"},
	{"seraf-payment.yaml", "", "iris"},
	{"twilio-messaging-v1.yaml", "", "gin"},
	{"xero-projects.yaml", "", "fiber-v3"},
}

// targets are the names of oapi-codegen's servers in a config file, without
// the "-server" that each ends in.
var targets = []string{"std-http", "chi", "gorilla", "echo", "echo5", "gin", "fiber", "fiber-v3", "iris"}

const specs = "../testdata/specs"

// config returns the config that generates everything for one target from
// name, which files holds.
func documentConfig(t testing.TB, files fs.FS, name, target, options string) generator.Config {
	t.Helper()
	cfg, err := generator.ParseConfig(fmt.Appendf(nil,
		"package: api\noutput: api.gen.go\ngenerate: {%s-server: true, strict-server: true, client: true, models: true, embedded-spec: true}\n%s\n", target, options))
	if err != nil {
		t.Fatal(err)
	}
	cfg.FS, cfg.Spec = files, name
	return cfg
}

func outputOptions(options string) string { return "output-options: {" + options + "}" }

// annotated is a file system in which every POST and PATCH of one document is
// annotated, and everything else is as it was.
type annotated struct {
	fs.FS
	fstest.MapFS
}

func (a annotated) Open(name string) (fs.File, error) {
	if _, ok := a.MapFS[name]; ok {
		return a.MapFS.Open(name)
	}
	return a.FS.Open(name)
}

func (a annotated) ReadFile(name string) ([]byte, error) { return fs.ReadFile(readable{a}, name) }

// readable hides ReadFile, so that fs.ReadFile goes through Open.
type readable struct{ fs.FS }

func annotate(t testing.TB, files fs.FS, name string) fs.FS {
	t.Helper()
	text, err := fs.ReadFile(files, name)
	if err != nil {
		t.Fatal(err)
	}
	var document struct {
		Paths map[string]map[string]yaml.Node
	}
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	for _, item := range document.Paths {
		for method, operation := range item {
			if method != "post" && method != "patch" {
				continue
			}
			// The position of a block is that of its first name. The second
			// annotation of one line would move what the first was put before.
			line := &lines[operation.Line-1]
			at := operation.Column - 1
			if operation.Style&yaml.FlowStyle != 0 {
				*line = (*line)[:at+1] + `"x-idempotent": true, ` + (*line)[at+1:]
			} else {
				*line = strings.Repeat(" ", at) + "x-idempotent: true\n" + *line
			}
		}
	}
	return annotated{files, fstest.MapFS{name: {Data: []byte(strings.Join(lines, "\n"))}}}
}

// writes lists the document's POST and PATCH operations as "METHOD /path",
// read by kin-openapi alone.
func writes(t testing.TB, name string) []string {
	t.Helper()
	loader := openapi3.NewLoader()
	loader.IsExternalRefsAllowed = true
	doc, err := loader.LoadFromFile(filepath.Join(specs, name))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for path, item := range doc.Paths.Map() {
		if item.Post != nil {
			all = append(all, "POST "+path)
		}
		if item.Patch != nil {
			all = append(all, "PATCH "+path)
		}
	}
	slices.Sort(all)
	return all
}

// guarded lists the operations that a generated file guards, by the policies
// that the methods of its guarded server hand to the guard.
func guarded(source []byte) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), "", source, 0)
	if err != nil {
		return nil, err
	}
	operations := map[string]string{} // by the variable that holds the policy
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 {
			return true
		}
		if policy, ok := spec.Values[0].(*ast.CompositeLit); ok {
			for _, element := range policy.Elts {
				field, ok := element.(*ast.KeyValueExpr)
				if !ok {
					continue
				}
				name, isName := field.Key.(*ast.Ident)
				value, isText := field.Value.(*ast.BasicLit)
				if isName && isText && name.Name == "Operation" {
					operations[spec.Names[0].Name], _ = strconv.Unquote(value.Value)
				}
			}
		}
		return true
	})
	var all []string
	for _, decl := range file.Decls {
		method, ok := decl.(*ast.FuncDecl)
		if !ok || method.Recv == nil || !isGuardedServer(method.Recv.List[0].Type) {
			continue
		}
		ast.Inspect(method.Body, func(n ast.Node) bool {
			if ident, ok := n.(*ast.Ident); ok && operations[ident.Name] != "" {
				all = append(all, operations[ident.Name])
			}
			return true
		})
	}
	slices.Sort(all)
	return all, nil
}

func isGuardedServer(receiver ast.Expr) bool {
	ident, ok := receiver.(*ast.Ident)
	return ok && strings.HasPrefix(ident.Name, "GuardedServer")
}

// A module is a temporary one in which generated packages are compiled, with
// every router that oapi-codegen knows.
type module string

func newModule(t *testing.T) module {
	t.Helper()
	const routers = "../internal/routertest"
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	m := module(t.TempDir())
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join(routers, name))
		if err != nil {
			t.Fatal(err)
		}
		text = bytes.Replace(text, []byte("=> ../.."), []byte("=> "+root), 1)
		text = regexp.MustCompile(`(?m)^module .*`).ReplaceAll(text, []byte("module documents"))
		m.write(t, name, text)
	}
	return m
}

func (m module) write(t *testing.T, name string, text []byte) {
	t.Helper()
	name = filepath.Join(string(m), name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// vet compiles and vets every package of the module.
func (m module) vet(t *testing.T) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "vet", "-p", "1", "./...")
	cmd.Dir = string(m)
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("go vet: %v\n%.4000s", err, out)
	}
}

func generate(t testing.TB, cfg generator.Config) []byte {
	t.Helper()
	files, err := generator.Generate(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return files[0].Content
}

// TestDocuments annotates every POST and PATCH of every document. Each is in
// the guarded server, the result compiles, and a second run gives the same.
// With -update it does so for all targets, and writes the table of them.
func TestDocuments(t *testing.T) {
	m := newModule(t)
	var rows []string
	for _, d := range realDocuments {
		t.Run(d.name, func(t *testing.T) {
			want := writes(t, d.name)
			rows = append(rows, row(d, len(want)))
			files := annotate(t, os.DirFS(specs), d.name)
			compiled := []string{"std-http", d.target}
			if *update {
				compiled = targets
			}
			for _, target := range compiled {
				cfg := documentConfig(t, files, d.name, target, outputOptions(d.options))
				source := generate(t, cfg)
				got, err := guarded(source)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Errorf("%s guards %q\nwant %q", target, got, want)
				}
				if target == d.target && !bytes.Equal(source, generate(t, cfg)) {
					t.Errorf("%s: the second run gave other bytes than the first", target)
				}
				m.write(t, path.Join(strings.ReplaceAll(d.name, ".", "-"), target, "api.gen.go"), source)
			}
		})
	}
	m.vet(t)
	if !t.Failed() {
		table(t, rows)
	}
}

const tableFile = "../docs/documents.md"

func row(d realDocument, operations int) string {
	cells := []string{d.name, strconv.Itoa(operations), "none"}
	if d.options != "" {
		cells[2] = "`" + d.options + "`"
	}
	for range targets {
		cells = append(cells, "✓")
	}
	return "| " + strings.Join(cells, " | ") + " |"
}

// table compares the table in the documentation with rows, or writes it.
func table(t *testing.T, rows []string) {
	t.Helper()
	text, err := os.ReadFile(tableFile)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- table -->\n", "<!-- end of table -->\n"
	before, rest, found := strings.Cut(string(text), begin)
	_, after, ends := strings.Cut(rest, end)
	if !found || !ends {
		t.Fatalf("%s has no place for the table, between %q and %q", tableFile, begin, end)
	}
	head := "| document | guarded operations | output-options | " + strings.Join(targets, " | ") + " |\n|---|---|---" + strings.Repeat("|---", len(targets)) + "|\n"
	want := before + begin + head + strings.Join(rows, "\n") + "\n" + end + after
	if *update {
		if err := os.WriteFile(tableFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(text) {
		t.Errorf("%s is out of date (go test ./generator -run TestDocuments -update writes it): %s", tableFile, firstDifference([]byte(want), text))
	}
}

// TestNoWorseThanStock has documents that oapi-codegen fails on, or generates
// code from that does not compile. The message stands at a place in the
// document and proposes what, tried here, cures it.
func TestNoWorseThanStock(t *testing.T) {
	const schemas = "\ncomponents:\n  schemas:\n    "
	body := func(schema string) string {
		return "openapi: 3.0.3\ninfo: {title: Faults, version: \"1\"}\npaths:\n  /a/{id}:\n    post:\n      operationId: createA\n      x-idempotent: true\n" +
			"      parameters: [{in: path, name: id, required: true, schema: {type: string}}]\n" +
			"      requestBody: {content: {application/json: {schema: " + schema + "}}}\n      responses: {\"200\": {description: done}}\n" +
			"  /b:\n    get: {responses: {\"200\": {description: done}}}"
	}
	const merged = "{allOf: [{type: object, properties: {x: {type: string}}}, {type: string}]}"
	for _, fault := range []struct {
		name string
		// document is one of testdata/specs, or its text.
		document string
		want     []string
		// cure is what the message says, as a config, or in place of a part of
		// the document.
		cure        string
		part, cured string
	}{
		{
			name:     "a response and its schema share a name",
			document: "openai-1.2.0.yaml",
			want:     []string{"openai-1.2.0.yaml:2234:5: the schema CreateCompletionResponse and what the client's call of POST /completions returns have one name in Go, CreateCompletionResponse"},
			cure:     "output-options: {response-type-suffix: HTTPResp}",
		},
		{
			name:     "the same, cured otherwise",
			document: "openai-1.2.0.yaml",
			cure:     "output-options: {resolve-type-name-collisions: true}",
		},
		{
			name:     "schemas of webhooks",
			document: "resend.yaml",
			want:     []string{": oapi-codegen leaves out the schema EmailSentEvent, which only a webhook or a callback uses"},
			cure:     "output-options: {skip-prune: true}",
		},
		{
			name:     "two schemas share a name",
			document: body("{oneOf: [{$ref: '#/components/schemas/my-order'}, {$ref: '#/components/schemas/my_order'}]}") + schemas + "my-order: {type: object}\n    my_order: {type: string}\n",
			want:     []string{"spec.yaml:16:5: the schema my-order (spec.yaml:15:5) and the schema my_order (spec.yaml:16:5) have one name in Go, MyOrder"},
			cure:     "output-options: {resolve-type-name-collisions: true}",
		},
		{
			name:     "a schema has the name of another type",
			document: body("{$ref: '#/components/schemas/Client'}") + schemas + "Client: {type: object}\n",
			want:     []string{"spec.yaml:15:5: the schema Client and another type of oapi-codegen's have one name in Go, Client", "x-go-name"},
			part:     "Client: {", cured: "Client: {x-go-name: Customer, ",
		},
		{
			name:     "a schema cannot be merged",
			document: body("{$ref: '#/components/schemas/Both'}") + schemas + "Both: " + merged + "\n",
			want:     []string{"spec.yaml:15:5: oapi-codegen cannot generate the schema Both: ", "can not merge incompatible types"},
			cure:     "compatibility: {old-merge-schemas: true}",
		},
		{
			name:     "a body cannot be merged",
			document: body(merged),
			want:     []string{"spec.yaml:5:5: oapi-codegen cannot generate POST /a/{id}: ", "x-go-type"},
			cure:     "compatibility: {old-merge-schemas: true}",
		},
		{
			name:     "a discriminator of an inline schema",
			document: body("{$ref: '#/components/schemas/U'}") + schemas + "U: {oneOf: [{$ref: '#/components/schemas/X'}, {type: object}], discriminator: {propertyName: k, mapping: {x: '#/components/schemas/X'}}}\n    X: {type: object}\n",
			want:     []string{"spec.yaml:15:5: oapi-codegen cannot generate the schema U: ", "x-go-type"},
			part:     "U: {", cured: "U: {x-go-type: any, ",
		},
		{
			name:     "a path parameter is not declared",
			document: strings.Replace(body("{type: object}"), "name: id", "name: other", 1),
			want:     []string{"spec.yaml:5:5: oapi-codegen cannot generate POST /a/{id}: "},
			cure:     "output-options: {exclude-operation-ids: [createA]}",
		},
		{
			name:     "a name that would end a Go string",
			document: strings.Replace(body("{type: object}"), "parameters: [", `parameters: [{in: query, name: 'q"', schema: {type: string}}, `, 1),
			want:     []string{"spec.yaml:5:5: oapi-codegen cannot generate POST /a/{id}: "},
			cure:     "output-options: {exclude-operation-ids: [createA]}",
		},
	} {
		t.Run(fault.name, func(t *testing.T) {
			load := func(text string) (fs.FS, string) { return fstest.MapFS{"spec.yaml": {Data: []byte(text)}}, "spec.yaml" }
			if path.Ext(fault.document) == ".yaml" {
				load = func(name string) (fs.FS, string) { return annotate(t, os.DirFS(specs), name), name }
			}
			files, name := load(fault.document)
			_, err := generator.Generate(t.Context(), documentConfig(t, files, name, "std-http", ""))
			if err == nil {
				t.Fatal("there is no fault")
			}
			for _, want := range append(fault.want, fault.cure) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %.2000s\nand lacks %q", err, want)
				}
			}
			files, name = load(strings.Replace(fault.document, fault.part, fault.cured, 1))
			generate(t, documentConfig(t, files, name, "std-http", fault.cure))
		})
	}
}

// TestDocumentInSeveralFiles has a document whose types are in two others.
// oapi-codegen must be told where their packages are, and says so otherwise.
func TestDocumentInSeveralFiles(t *testing.T) {
	const (
		name   = "camara-qod/code/API_definitions/quality-on-demand.yaml"
		common = "documents/common"
		events = "documents/events"
	)
	files := annotate(t, os.DirFS(specs), name)
	_, err := generator.Generate(t.Context(), documentConfig(t, files, name, "std-http", ""))
	if err == nil {
		t.Fatal("generated without knowing where the types of the other files are")
	}
	for _, want := range []string{
		name + ":425:5: oapi-codegen cannot generate POST /retrieve-sessions: ",
		`"import-mapping: {../common/CAMARA_common.yaml: example.com/its/package}"`,
	} {
		if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("the error is %q; want one line with %q", err, want)
		}
	}

	// A schema that is merged brings the references of its own file along.
	mapping := fmt.Sprintf("import-mapping: {../common/CAMARA_common.yaml: %[1]s, CAMARA_common.yaml: %[1]s, ../common/CAMARA_event_common.yaml: %[2]s}", common, events)
	cfg := documentConfig(t, files, name, "std-http", mapping)
	_, err = generator.Generate(t.Context(), cfg)
	if want := "generate without embedded-spec"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the error is %v; want %q", err, want)
	}
	cfg.Generate.EmbeddedSpec = false
	m := newModule(t)
	source := generate(t, cfg)
	if got, err := guarded(source); err != nil || !slices.Equal(got, writes(t, name)) {
		t.Errorf("guards %q (%v), want %q", got, err, writes(t, name))
	}
	m.write(t, "sessions/api.gen.go", source)
	// oapi-codegen looks for the types of another file's response headers in
	// this package.
	m.write(t, "sessions/headers.go", fmt.Appendf(nil, "package api\n\nimport %q\n\ntype XCorrelator = common.XCorrelator\n", common))
	for _, types := range []struct {
		pkg, file string
		mapping   map[string]string
	}{
		{common, "CAMARA_common.yaml", nil},
		{events, "CAMARA_event_common.yaml", map[string]string{"CAMARA_common.yaml": common}},
	} {
		cfg := generator.Config{
			Configuration: codegen.Configuration{
				PackageName:   path.Base(types.pkg),
				Generate:      codegen.GenerateOptions{Models: true, StdHTTPServer: true, Strict: true},
				ImportMapping: types.mapping,
				OutputOptions: codegen.OutputOptions{SkipPrune: true},
			},
			Spec: path.Join("camara-qod/code/common", types.file),
			FS:   files,
		}
		m.write(t, path.Join(path.Base(types.pkg), "types.gen.go"), generate(t, cfg))
	}
	m.vet(t)
}
