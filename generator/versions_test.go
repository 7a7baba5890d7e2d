package generator_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"go.yaml.in/yaml/v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// TestVersions has what the versions of OpenAPI write differently: every
// annotated operation is guarded, or there is one error at its place.
func TestVersions(t *testing.T) {
	const done = `responses: {"200": {description: done}}`
	const body = `requestBody: {content: {application/json: {schema: {$ref: '#/components/schemas/Body'}}}}`
	post := func(members string) string {
		return "paths: {/a: {post: {operationId: makeA, x-idempotent: true, " + members + "}}}\n"
	}
	schema := func(text string) string {
		return post(body+", "+done) + "components: {schemas: {Body: " + text + "}}\n"
	}
	made := []string{"POST /a"}
	for name, c := range map[string]struct {
		version, text string
		guarded       []string
		// refused is the error, if an older kin-openapi, or every one, gives it.
		refused string
	}{
		"3.0 nullable":           {"3.0.0", schema("{type: string, nullable: true}"), made, ""},
		"3.0 exclusive bounds":   {"3.0.4", schema("{type: number, minimum: 1, exclusiveMinimum: true}"), made, ""},
		"3.1 types":              {"3.1.0", schema("{type: object, properties: {id: {type: [string, 'null']}, tags: {type: [array, 'null'], items: {type: string}}}}"), made, ""},
		"3.1 constants":          {"3.1.0", schema("{type: object, properties: {kind: {const: card}, n: {type: integer, const: 1}}}"), made, ""},
		"3.1 exclusive bounds":   {"3.1.0", schema("{type: number, exclusiveMinimum: 1}"), made, ""},
		"3.1 examples":           {"3.1.1", schema("{type: object, examples: [{a: 1}, {a: 2}], properties: {a: {type: integer, examples: [1]}}}"), made, ""},
		"3.1 content":            {"3.1.0", schema("{type: string, contentMediaType: image/png, contentEncoding: base64}"), made, ""},
		"3.1 beside $ref":        {"3.1.0", schema("{$ref: '#/components/schemas/Other', description: Other words.}, Other: {type: object}"), made, ""},
		"3.1 definitions":        {"3.1.0", schema("{type: object, $defs: {Part: {type: string}}, properties: {part: {type: string}}}"), made, ""},
		"3.1 false":              {"3.1.0", schema("{type: object, additionalProperties: false, unevaluatedProperties: false}"), made, ""},
		"3.1 true":               {"3.1.0", schema("{type: object, properties: {anything: true}}"), made, "anything must be an object, not true"},
		"3.1 conditions":         {"3.1.0", schema("{type: object, if: {properties: {a: {const: 1}}}, then: {required: [b]}, dependentRequired: {a: [b]}}"), made, ""},
		"3.1 path items":         {"3.1.0", "paths: {/a: {$ref: '#/components/pathItems/A'}}\ncomponents: {pathItems: {A: {post: {operationId: makeA, x-idempotent: true, " + done + "}}}}\n", made, ""},
		"3.1 webhooks":           {"3.1.0", post(done) + "webhooks: {paid: {post: {operationId: paid, x-idempotent: true, " + done + "}}}\n", []string{"POST /a", "POST webhook paid"}, ""},
		"3.1 without responses":  {"3.1.0", "paths: {/a: {post: {operationId: makeA, x-idempotent: true}}}\n", made, ""},
		"3.1 webhooks alone":     {"3.1.0", "paths: {}\nwebhooks: {paid: {post: {operationId: paid, x-idempotent: true, " + done + "}}}\n", []string{"POST webhook paid"}, ""},
		"3.1 dialect":            {"3.1.0", "jsonSchemaDialect: https://spec.openapis.org/oas/3.1/dialect/base\n" + post(done), made, ""},
		"3.2 query":              {"3.2.0", "paths: {/a: {query: {operationId: findA, " + done + "}, post: {operationId: makeA, x-idempotent: true, " + done + "}}}\n", made, ""},
		"3.2 annotated query":    {"3.2.0", "paths: {/a: {query: {operationId: findA, x-idempotent: true, " + done + "}}}\n", nil, "x-idempotent is not supported on a query operation"},
		"3.2 other methods":      {"3.2.0", "paths: {/a: {additionalOperations: {COPY: {operationId: copyA, " + done + "}}, post: {operationId: makeA, x-idempotent: true, " + done + "}}}\n", made, ""},
		"3.2 annotated COPY":     {"3.2.0", "paths: {/a: {additionalOperations: {COPY: {operationId: copyA, x-idempotent: true, " + done + "}}}}\n", nil, "x-idempotent is not supported on an additional operation"},
		"3.2 media type by $ref": {"3.2.0", post("requestBody: {content: {application/json: {$ref: '#/components/mediaTypes/J'}}}, "+done) + "components: {mediaTypes: {J: {schema: {type: object}}}}\n", made, ""},
		"3.2 items that stream":  {"3.2.0", post(`responses: {"200": {description: done, content: {application/json-seq: {itemSchema: {type: object}}}}}`), nil, "declares a response that streams"},
		"3.2 tags and servers":   {"3.2.0", "$self: https://example.com/a.yaml\nservers: [{url: /v1, name: first}]\ntags: [{name: a, summary: A, kind: nav, parent: b}, {name: b}]\n" + post("tags: [a], "+done), made, ""},
		"methods in capitals":    {"3.0.3", "paths: {/a: {Post: {operationId: makeA, x-idempotent: true, " + done + "}}}\n", made, "does not see such an operation"},
	} {
		t.Run(name, func(t *testing.T) {
			text := fmt.Sprintf("openapi: %s\ninfo: {title: Versions, version: \"1\"}\n%s", c.version, c.text)
			var tree any
			if err := yaml.Unmarshal([]byte(text), &tree); err != nil {
				t.Fatal(err)
			}
			asJSON, err := json.MarshalIndent(tree, "", " ")
			if err != nil {
				t.Fatal(err)
			}
			for spec, text := range map[string]string{"spec.yaml": text, "spec.json": string(asJSON)} {
				cfg, err := generator.ParseConfig([]byte("package: api\noutput: api.gen.go\ngenerate: {std-http-server: true, strict-server: true, client: true, models: true, embedded-spec: true}"))
				if err != nil {
					t.Fatal(err)
				}
				cfg.FS, cfg.Spec = fstest.MapFS{spec: {Data: []byte(text)}}, spec
				files, err := generator.Generate(t.Context(), cfg)
				if err != nil {
					if c.refused == "" || !regexp.MustCompile(`^`+regexp.QuoteMeta(spec)+`:\d+:\d+: [^\n]*$`).MatchString(err.Error()) || !strings.Contains(err.Error(), c.refused) {
						t.Errorf("%s: the error is %v, want %q at its place", spec, err, c.refused)
					}
					continue
				}
				if got := policies(files[0].Content); !slices.Equal(got, c.guarded) {
					t.Errorf("%s: %q are guarded, want %q", spec, got, c.guarded)
				}
			}
		})
	}
}

var operationOf = regexp.MustCompile(`(?m)^\tOperation: +"(.*)",$`)

// policies lists the operations that a generated server has policies of.
func policies(source []byte) []string {
	var all []string
	for _, m := range operationOf.FindAllSubmatch(source, -1) {
		all = append(all, string(m[1]))
	}
	return all
}
