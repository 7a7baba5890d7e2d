package main

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// stockFiles are what the command lines below generate from. Nothing is
// annotated.
var stockFiles = map[string]string{
	"go.mod": "module example.com/api\n\ngo 1.26.0\n",
	"openapi.yaml": `openapi: 3.0.3
info: {title: Orders, version: "1"}
servers: [{url: https://example.com/v1}]
paths:
  /z-orders:
    get:
      operationId: listOrders
      tags: [public]
      parameters: [{name: page, in: query, schema: {type: integer}}]
      responses: {"200": {description: done, content: {application/json: {schema: {type: array, items: {$ref: '#/components/schemas/Order'}}}}}}
    post:
      operationId: create_order
      tags: [public, write]
      requestBody: {content: {application/json: {schema: {$ref: '#/components/schemas/Order'}}}}
      responses: {"201": {description: done, content: {application/json: {schema: {$ref: '#/components/schemas/Order'}}}}}
  /admin/{id}:
    parameters: [{name: id, in: path, required: true, schema: {type: string, format: uuid}}]
    delete:
      operationId: purge
      tags: [internal]
      responses: {"204": {description: done}}
components:
  schemas:
    Order: {type: object, required: [id], properties: {id: {type: string}, state: {type: string, enum: [open, paid]}, note: {type: string, nullable: true}}}
    Unused: {type: object, properties: {a: {type: number}}}
`,
	"split.yaml": `openapi: 3.0.3
info: {title: Orders in two files, version: "1"}
paths:
  /orders:
    post:
      operationId: createOrder
      requestBody: {content: {application/json: {schema: {$ref: 'common.yaml#/components/schemas/Order'}}}}
      responses: {"201": {description: done}}
`,
	"common.yaml": "openapi: 3.0.3\ninfo: {title: Common, version: \"1\"}\npaths: {}\ncomponents: {schemas: {Order: {type: object, properties: {id: {type: string}}}}}\n",
	"overlay.yaml": "overlay: 1.0.0\ninfo: {title: Fewer, version: \"1\"}\nactions:\n  - {target: \"$.paths['/admin/{id}']\", remove: true}\n" +
		"  - {target: $.info, update: {title: Changed}}\n",
	"templates/constants.tmpl":                  "// Constants by a template.\n",
	"templates/stdhttp/std-http-interface.tmpl": "// ServerInterface by a template.\ntype ServerInterface interface{ {{range .}}\n{{.OperationId}}(w http.ResponseWriter, r *http.Request{{genParamArgs .PathParams}}{{if .RequiresParamObject}}, params {{.OperationId}}Params{{end}}){{end}}\n}\n",
	"models.cfg.yaml":                           "package: api\noutput: api/models.gen.go\ngenerate: {models: true}\noutput-options: {skip-prune: true}\n",
	"server.cfg.yaml":                           "package: api\noutput: api/server.gen.go\ngenerate: {std-http-server: true, strict-server: true}\n",
	"client.cfg.yaml":                           "package: api\noutput: api/client.gen.go\ngenerate: {client: true}\n",
	"apart.cfg.yaml":                            "package: server\noutput: server/server.gen.go\ngenerate: {chi-server: true, models: false}\nimport-mapping: {}\nadditional-imports: [{alias: ., package: example.com/api/models}]\n",
	"mapped.cfg.yaml":                           "package: api\ngenerate: {std-http-server: true, models: true, client: true}\nimport-mapping: {common.yaml: example.com/api/common}\n",
	"overlaid.cfg.yaml":                         "package: api\ngenerate: {gin-server: true, models: true}\noutput-options: {overlay: {path: overlay.yaml}}\n",
	"filtered.cfg.yaml":                         "package: api\ngenerate: {echo-server: true, models: true}\noutput-options: {include-tags: [public], exclude-operation-ids: [listOrders], exclude-schemas: [Unused]}\n",
	"templated.cfg.yaml":                        "package: api\ngenerate: {std-http-server: true, models: true}\noutput-options: {user-templates: {constants.tmpl: templates/constants.tmpl, stdhttp/std-http-middleware.tmpl: \"// Middlewares,\\n// by a text.\\n\"}}\n",
	"named.cfg.yaml":                            "package: api\ngenerate: {fiber-server: true, models: true, embedded-spec: true}\noutput-options: {name-normalizer: ToCamelCaseWithInitialisms, response-type-suffix: Reply, nullable-type: true}\ncompatibility: {always-prefix-enum-values: true}\n",
	"old.yaml":                                  "package: fromfile\ngenerate: [types, chi-server, spec]\noutput: old.gen.go\nexclude-tags: [internal]\nexclude-schemas: [Unused]\n",
	"old-mapped.yaml":                           "package: api\ngenerate: [types, client]\nimport-mapping: {common.yaml: example.com/api/common}\n",
}

// TestStockCommandLines compares with oapi-codegen itself: for every flag, with
// one dash and two, and for every way in which a config is used, what is
// printed and what is written, the version line aside.
func TestStockCommandLines(t *testing.T) {
	bin := t.TempDir()
	stock := filepath.Join(bin, "oapi-codegen")
	if out, err := exec.Command("go", "build", "-o", stock, "github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ours := filepath.Join(bin, "oapi-idempotent") // the name that TestMain goes by
	if err := os.Symlink(self, ours); err != nil {
		t.Fatal(err)
	}
	tried := map[string]bool{}
	for name, lines := range map[string][]string{
		"defaults":        {"-package api openapi.yaml"},
		"standard output": {"-package api -generate types,std-http openapi.yaml"},
		"-o":              {"-package api -generate types -o api/types.gen.go openapi.yaml"},
		"-generate, all targets": {
			"-package a -generate types,client,chi-server,spec openapi.yaml", "-package a -generate types,server,strict-server openapi.yaml",
			"-package a -generate types,echo5,strict-server openapi.yaml", "-package a -generate types,gin,skip-prune openapi.yaml", "-package a -generate types,gorilla,skip-fmt openapi.yaml",
			"-package a -generate types,fiber openapi.yaml", "-package a -generate types,fiber-v3,strict-server openapi.yaml", "-package a -generate types,iris openapi.yaml",
			"-package a -generate std-http,strict-server,types openapi.yaml",
		},
		"tags":                             {"-package api -generate types,chi-server -include-tags public,write openapi.yaml", "--package=api --generate=types,chi-server --exclude-tags=internal openapi.yaml"},
		"operation ids":                    {"-package api -generate types,client -include-operation-ids purge openapi.yaml", "-package api -generate types,client -exclude-operation-ids purge,listOrders openapi.yaml"},
		"-exclude-schemas":                 {"-package api -generate types,skip-prune -exclude-schemas Unused openapi.yaml"},
		"-response-type-suffix":            {"-package api -generate types,client -response-type-suffix Reply openapi.yaml"},
		"-import-mapping":                  {"-package api -generate types,client -import-mapping common.yaml:example.com/api/common split.yaml"},
		"-templates":                       {"-package api -generate types,std-http -templates templates openapi.yaml", "-config server.cfg.yaml -templates templates openapi.yaml"},
		"-config and flags":                {"-config server.cfg.yaml -package other -o elsewhere.go openapi.yaml", "--config client.cfg.yaml --generate types openapi.yaml", "-config=filtered.cfg.yaml -include-tags internal -exclude-tags none openapi.yaml"},
		"two dashes":                       {"--package api --generate types,std-http,client,spec --o two.gen.go openapi.yaml"},
		"-output-config":                   {"-output-config -package api -generate types,client -include-tags public openapi.yaml", "--output-config --config named.cfg.yaml openapi.yaml"},
		"old styles":                       {"-config old.yaml openapi.yaml", "-old-config-style -config old.yaml -package flag openapi.yaml", "--old-config-style --config old-mapped.yaml split.yaml", "-config old-mapped.yaml split.yaml"},
		"several configs into one package": {"-config models.cfg.yaml openapi.yaml", "-config server.cfg.yaml openapi.yaml", "-config client.cfg.yaml openapi.yaml"},
		"models apart":                     {"-package models -generate types,skip-prune -o models/models.gen.go openapi.yaml", "-config apart.cfg.yaml openapi.yaml"},
		"import mapping":                   {"-config mapped.cfg.yaml split.yaml"},
		"overlay":                          {"-config overlaid.cfg.yaml openapi.yaml"},
		"filters":                          {"-config filtered.cfg.yaml openapi.yaml"},
		"user templates":                   {"-config templated.cfg.yaml openapi.yaml"},
		"names":                            {"-config named.cfg.yaml openapi.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			want, got := inFolder(t, stock, lines), inFolder(t, ours, lines)
			for _, file := range slices.Sorted(maps.Keys(want)) {
				if got[file] != want[file] {
					t.Errorf("%s differs: %s", file, firstDifference(want[file], got[file]))
				}
			}
			for file := range got {
				if _, ok := want[file]; !ok {
					t.Errorf("%s is not oapi-codegen's", file)
				}
			}
			for _, line := range lines {
				for _, word := range strings.Fields(line) {
					if flag, ok := strings.CutPrefix(word, "-"); ok {
						flag, _, _ = strings.Cut(strings.TrimPrefix(flag, "-"), "=")
						tried[flag] = true
					}
				}
			}
		})
	}
	// The rest do not generate.
	for _, flag := range []string{"alias-types", "help", "h", "version"} {
		tried[flag] = true
	}
	out, err := exec.Command(stock, "-help").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile(`(?m)^  -([a-z-]+)`).FindAllSubmatch(out, -1)
	if len(flags) < 18 {
		t.Errorf("only %d flags in oapi-codegen's help:\n%s", len(flags), out)
	}
	for _, flag := range flags {
		if !tried[string(flag[1])] {
			t.Errorf("-%s is not compared", flag[1])
		}
	}
}

var versionLine = regexp.MustCompile(`(?m)^// Code generated by .* DO NOT EDIT\.$`)

// inFolder runs command lines one after the other and returns what they have
// written, and by their numbers what they have printed.
func inFolder(t *testing.T, command string, lines []string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range stockFiles {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// oapi-codegen does not make the folder that it writes to.
	for _, folder := range []string{"api", "models", "server"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	written := map[string]string{}
	for _, line := range lines {
		cmd := exec.Command(command, strings.Fields(line)...)
		cmd.Dir = dir
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", filepath.Base(command), line, err, &stderr)
		}
		written["what "+line+" prints"] = versionLine.ReplaceAllString(string(out), "")
	}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		written[name] = versionLine.ReplaceAllString(string(text), "")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return written
}

func firstDifference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(w), len(g)) {
		if w[i] != g[i] {
			return "line " + g[i] + ", want " + w[i]
		}
	}
	return "one is a beginning of the other"
}
