package generator_test

import (
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const document = `openapi: 3.0.3
info: {title: Orders, version: "1"}
paths:
  /orders:
    post:
      operationId: createOrder
      x-idempotent: true
      responses: {"204": {description: done}}
`

func files(named map[string]string) fstest.MapFS {
	fsys := fstest.MapFS{}
	for name, text := range named {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return fsys
}

// server is the config of an std-http server for spec.yaml among named.
func server(named map[string]string) generator.Config {
	return generator.Config{
		Configuration: codegen.Configuration{PackageName: "api", Generate: codegen.GenerateOptions{StdHTTPServer: true, Models: true}},
		Spec:          "spec.yaml",
		FS:            files(named),
	}
}

func source(t *testing.T, cfg generator.Config) string {
	t.Helper()
	out, err := generator.Generate(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return string(out[0].Content)
}

func ExampleGenerate() {
	cfg, err := generator.ParseConfig([]byte("package: api\noutput: api/api.gen.go\ngenerate: {std-http-server: true}\n"))
	if err != nil {
		fmt.Println(err)
		return
	}
	cfg.FS = files(map[string]string{"openapi.yaml": document})
	cfg.Spec = "openapi.yaml"
	generated, err := generator.Generate(context.Background(), cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	for line := range strings.Lines(string(generated[0].Content)) {
		if strings.HasPrefix(line, "func HandlerFromMux(") {
			fmt.Print(generated[0].Name, ": ", line)
		}
	}
	// Output: api/api.gen.go: func HandlerFromMux(si ServerInterface, guard *idempotency.Guard, m ServeMux) http.Handler {
}

// TestReferences finds annotations where references lead.
func TestReferences(t *testing.T) {
	root := "openapi: 3.0.3\ninfo: {title: t, version: \"1\"}\npaths:\n  /orders: {$ref: 'paths/orders.yaml'}\n"
	item := "post:\n  operationId: createOrder\n  x-idempotent: true\n  responses: {\"204\": {description: done}}\n"
	named := map[string]string{"spec.yaml": root, "paths/orders.yaml": item}
	want := source(t, server(named))
	if !strings.Contains(want, "func (s GuardedServer) CreateOrder(") {
		t.Error("the annotation in a referenced path item was not honoured")
	}

	windows := map[string]string{
		"spec.yaml":         "\uFEFF" + strings.ReplaceAll(strings.ReplaceAll(root, "paths/", `paths\`), "\n", "\r\n"),
		"paths/orders.yaml": strings.ReplaceAll(item, "\n", "\r\n"),
	}
	if got := source(t, server(windows)); got != want {
		t.Errorf("with a byte order mark, CRLF and backslashes: %s", firstDifference([]byte(want), []byte(got)))
	}

	named["paths/orders.yaml"] = strings.Replace(item, "true", "yes please", 1)
	_, err := generator.Generate(t.Context(), server(named))
	var findings generator.Findings
	if !errors.As(err, &findings) || !strings.HasPrefix(err.Error(), "paths/orders.yaml:3:") {
		t.Errorf("got %v, want a finding in the referenced file", err)
	}
}

// TestURL generates from a document on the web, which refers to another.
func TestURL(t *testing.T) {
	web := httptest.NewServer(http.FileServerFS(files(map[string]string{
		"api/spec.yaml":   "openapi: 3.0.3\ninfo: {title: t, version: \"1\"}\npaths:\n  /orders: {$ref: 'orders.yaml'}\n",
		"api/orders.yaml": "post:\n  operationId: createOrder\n  x-idempotent: true\n  responses: {\"204\": {description: done}}\n",
	})))
	t.Cleanup(web.Close)
	cfg := server(nil)
	cfg.Spec = web.URL + "/api/spec.yaml"
	if !strings.Contains(source(t, cfg), "func GuardServer(") {
		t.Error("the annotation in a document on the web was not honoured")
	}
	cfg.AllowRemoteRefsFrom = []string{}
	if _, err := generator.Generate(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "orders.yaml") {
		t.Errorf("got %v, want the reference refused that allow-remote-refs-from does not list", err)
	}
}

// TestOverlay has an overlay annotate what the document does not.
func TestOverlay(t *testing.T) {
	overlay := "overlay: 1.0.0\ninfo: {title: t, version: \"1\"}\nactions:\n  - target: $.paths['/orders'].post\n    update: {x-idempotent: %s}\n"
	plain := strings.Replace(document, "      x-idempotent: true\n", "", 1)
	named := map[string]string{"spec.yaml": plain, "idempotent.yaml": fmt.Sprintf(overlay, "true")}
	cfg := server(named)
	cfg.OutputOptions.Overlay.Path = "idempotent.yaml"
	if !strings.Contains(source(t, cfg), "func GuardServer(") {
		t.Error("the annotation of the overlay was not honoured")
	}
	named["idempotent.yaml"] = fmt.Sprintf(overlay, "[1]")
	cfg.FS = files(named)
	if _, err := generator.Generate(t.Context(), cfg); err == nil || !strings.HasPrefix(err.Error(), "idempotent.yaml:5:28: ") {
		t.Errorf("got %v, want a finding in the overlay", err)
	}
}

// TestSkipFmt leaves the formatting to the user, as oapi-codegen does.
func TestSkipFmt(t *testing.T) {
	cfg := server(map[string]string{"spec.yaml": document})
	cfg.Generate.Client = true
	cfg.OutputOptions.SkipFmt = true
	got := source(t, cfg)
	if _, err := parser.ParseFile(token.NewFileSet(), "", got, parser.AllErrors); err != nil {
		t.Error(err)
	}
	if !strings.Contains(got, "GuardServer(si, guard)") || !strings.Contains(got, "call.Do(c.Client)") {
		t.Error("the unformatted source is not woven")
	}
}

// TestConcurrent runs several generations at once, whose options differ.
func TestConcurrent(t *testing.T) {
	cfg := server(map[string]string{"spec.yaml": document})
	cfg.Generate.Client = true
	suffixed := cfg
	suffixed.OutputOptions.ResponseTypeSuffix = "Reply"
	want, wantSuffixed := source(t, cfg), source(t, suffixed)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			if source(t, cfg) != want {
				t.Error("another output beside other generations than alone")
			}
		})
		group.Go(func() {
			if source(t, suffixed) != wantSuffixed {
				t.Error("another output beside other generations than alone")
			}
		})
	}
	group.Wait()
}

// TestUserTemplates refuses templates that would leave calls without a key.
func TestUserTemplates(t *testing.T) {
	cfg := server(map[string]string{"spec.yaml": document, "client.tmpl": "// no client\n"})
	cfg.Generate = codegen.GenerateOptions{Client: true, Models: true}
	cfg.OutputOptions.UserTemplates = map[string]string{"client.tmpl": "client.tmpl"}
	if _, err := generator.Generate(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "would carry no key") {
		t.Errorf("got %v, want an error", err)
	}
}

// TestUserTemplatesPastTheGuard refuses templates that would hand out handlers
// that nothing guards, and quotes where.
func TestUserTemplatesPastTheGuard(t *testing.T) {
	const contract = "type ServerInterface interface {\nCreateOrder(w http.ResponseWriter, r *http.Request)\n}\n"
	generate := func(code string) error {
		cfg := server(map[string]string{"spec.yaml": document, "interface.tmpl": contract + code})
		cfg.OutputOptions.UserTemplates = map[string]string{"stdhttp/std-http-interface.tmpl": "interface.tmpl"}
		_, err := generator.Generate(t.Context(), cfg)
		return err
	}
	if err := generate(""); err != nil {
		t.Fatal(err)
	}
	const line = `return map[string]http.HandlerFunc{"createOrder": si.CreateOrder}`
	for name, test := range map[string]struct{ code, quoted string }{
		"in a variable": {"var Routes = func(si ServerInterface) map[string]http.HandlerFunc {\n" + line + "\n}\n", "`var Routes = func(si ServerInterface) map[string]http.HandlerFunc {`"},
		"in a function": {"func Routes() func(ServerInterface) map[string]http.HandlerFunc {\nreturn func(si ServerInterface) map[string]http.HandlerFunc {\n" + line + "\n}\n}\n", "`return func(si ServerInterface) map[string]http.HandlerFunc {`"},
		"by name":       {"func Routes(si ServerInterface) map[string]http.HandlerFunc {\n" + line + "\n}\n", "`" + line + "`"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := generate(test.code); err == nil || !strings.Contains(err.Error(), test.quoted) {
				t.Errorf("got %v, want an error that quotes %s", err, test.quoted)
			}
		})
	}
}

// TestEveryServerIsGuarded has no target generate an unprotected stub.
func TestEveryServerIsGuarded(t *testing.T) {
	for _, target := range []string{"std-http", "chi", "gorilla", "echo", "echo5", "gin", "fiber", "fiber-v3", "iris"} {
		for _, strict := range []string{"", ", strict-server: true"} {
			cfg, err := generator.ParseConfig([]byte("package: api\ngenerate: {models: true, " + target + "-server: true" + strict + "}\n"))
			if err != nil {
				t.Fatal(err)
			}
			cfg.Spec, cfg.FS = "spec.yaml", files(map[string]string{"spec.yaml": document})
			generated, err := generator.Generate(t.Context(), cfg)
			if err != nil {
				t.Errorf("%s%s: %v", target, strict, err)
				continue
			}
			if !regexp.MustCompile(`\sHandler +GuardedServer\n`).Match(generated[0].Content) {
				t.Errorf("%s%s: the wrapper holds an unguarded server", target, strict)
			}
		}
	}
}

// TestImportLaws holds who may import whom.
func TestImportLaws(t *testing.T) {
	const module = "github.com/oapi-idempotent/oapi-idempotent/"
	laws := map[string][]string{
		"templates":                 {},
		"generator/internal/weave":  {},
		"generator/internal/model":  {"generator/internal/policy", "generator/internal/weave"},
		"generator/internal/render": {"generator/internal/model", "templates"},
		"generator/internal/stub":   {"generator/internal/document", "runtime/idempotency"},
	}
	for name, may := range laws {
		out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, module+name).Output()
		if err != nil {
			t.Fatal(err)
		}
		imported := strings.Fields(string(out))
		if len(imported) == 0 {
			t.Errorf("%s imports nothing; the list is not what it should be", name)
		}
		for _, path := range imported {
			if strings.HasPrefix(path, "github.com/oapi-codegen/") && name != "generator/internal/stub" {
				t.Errorf("%s imports %s; only stub may", name, path)
			}
			own, ok := strings.CutPrefix(path, module)
			if ok && !slices.Contains(may, own) {
				t.Errorf("%s imports %s", name, own)
			}
		}
	}
}

// TestGoldenVets vets the golden packages, which ./... does not reach.
func TestGoldenVets(t *testing.T) {
	if out, err := exec.Command("go", "vet", "../testdata/golden/...").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
