package generator_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// TestFaultsOfTheBaseGenerator has what real documents made oapi-codegen generate
// code from that does not compile, reduced. The message stands at its place, in
// YAML and in JSON, and proposes what, tried here, cures it.
func TestFaultsOfTheBaseGenerator(t *testing.T) {
	const options = "package: api\noutput: api.gen.go\ngenerate: {std-http-server: true, client: true, models: true, strict-server: "
	operation := func(members string) string {
		return `{"openapi": "3.0.3", "info": {"title": "Faults", "version": "1"},
 "paths": {"/a": {"post": {"operationId": "createA", "x-idempotent": true,
  ` + members + `}}},
 "components": {
  "schemas": {"Pair": {"type": "object"}},
  "responses": {"Done": {"description": "done"}}}}
`
	}
	const done = `"responses": {"200": {"description": "done"}}`
	answer := func(content string) string {
		return operation(`"responses": {"200": {"description": "done", "content": {` + content + `}}}`)
	}
	component := func(from, to string) string {
		return strings.Replace(operation(`"responses": {"200": {"$ref": "#/components/responses/Done"}}, "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pair"}}}}`), from, to, 1)
	}
	const strict, plain = "true}", "false}"
	for _, fault := range []struct {
		name, text string
		at, want   string // in spec.json
		cured      string // the text, if another cures it
		config     string // the option that does
	}{
		{
			name: "a response of any type, strictly",
			text: answer(`"application/json": {"schema": {}}`),
			at:   "2:19", want: `POST /a does not compile (invalid receiver type CreateA200JSONResponse (pointer or interface type)); generate without strict-server, or say "type: object"`,
			config: plain,
		},
		{
			name: "the same, cured otherwise",
			text: answer(`"application/json": {"schema": {}}`),
			at:   "2:19", want: `say "type: object" in the schema of that response`,
			cured: answer(`"application/json": {"schema": {"type": "object"}}`), config: strict,
		},
		{
			name: "two bodies that are not JSON, strictly",
			text: operation(`"requestBody": {"content": {"application/x-jsonnet": {"schema": {"type": "string"}}, "text/yml": {"schema": {"type": "string"}}}}, ` + done),
			at:   "2:19", want: "POST /a does not compile (Body redeclared); generate without strict-server",
			config: plain,
		},
		{
			name: "the same, cured otherwise",
			text: operation(`"requestBody": {"content": {"application/x-jsonnet": {"schema": {"type": "string"}}, "text/yml": {"schema": {"type": "string"}}}}, ` + done),
			at:   "2:19", want: "keep one of its request body's media types that are not JSON",
			cured: operation(`"requestBody": {"content": {"text/yml": {"schema": {"type": "string"}}}}, ` + done), config: strict,
		},
		{
			name: "a text body that is an object, strictly",
			text: operation(`"requestBody": {"content": {"text/plain": {"schema": {"type": "object"}}}}, ` + done),
			at:   "2:19", want: `POST /a does not compile (a text body is converted to CreateATextRequestBody, which is no string); generate without strict-server, or say "type: string"`,
			config: plain,
		},
		{
			name: "the same, cured otherwise",
			text: operation(`"requestBody": {"content": {"text/plain": {"schema": {"type": "object"}}}}, ` + done),
			at:   "2:19", want: `say "type: string" in the schema of that text body`,
			cured: operation(`"requestBody": {"content": {"text/plain": {"schema": {"type": "string"}}}}, ` + done), config: strict,
		},
		{
			name: "a text body that refers to an object, strictly",
			text: component(`"application/json"`, `"text/plain"`),
			at:   "2:19", want: "a text body is converted to CreateATextRequestBody, which is no string",
			config: plain,
		},
		{
			name: "two kinds of XML",
			text: answer(`"application/xml": {"schema": {"type": "string"}}, "text/xml": {"schema": {"type": "string"}}`),
			at:   "2:19", want: "POST /a does not compile (XML200 redeclared); a response has two media types of that kind: keep one",
			cured: answer(`"text/xml": {"schema": {"type": "string"}}`), config: plain,
		},
		{
			name: "two properties with one name in Go",
			text: component(`"type": "object"`, `"type": "object", "properties": {"createdBy": {"type": "string"}, "created_by": {"type": "string"}}`),
			at:   "5:15", want: "the schema Pair does not compile (CreatedBy redeclared); two of its names are one in Go: give one an x-go-name",
			cured: component(`"type": "object"`, `"type": "object", "properties": {"createdBy": {"type": "string", "x-go-name": "Creator"}, "created_by": {"type": "string"}}`), config: plain,
		},
		{
			name: "two parameters with one name in Go",
			text: operation(`"parameters": [{"in": "header", "name": "Not-After", "schema": {"type": "string"}}, {"in": "header", "name": "not-after", "schema": {"type": "string"}}], ` + done),
			at:   "2:19", want: "POST /a does not compile (NotAfter redeclared)",
			cured: operation(`"parameters": [{"in": "header", "name": "Not-After", "schema": {"type": "string"}}, {"in": "header", "name": "not-after", "x-go-name": "Other", "schema": {"type": "string"}}], ` + done), config: plain,
		},
		{
			name: "an enumeration inside a response, strictly",
			text: component(`"description": "done"`, `"description": "done", "content": {"application/json": {"schema": {"type": "object", "properties": {"op": {"type": "string", "enum": ["a", "b"]}}}}}`),
			at:   "6:17", want: "the response Done does not compile (undefined: DoneJSONResponseBodyOp); move that body's schema to components/schemas and refer to it",
			cured: strings.Replace(
				component(`"description": "done"`, `"description": "done", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Op"}}}`),
				`"Pair"`, `"Op": {"type": "object", "properties": {"op": {"type": "string", "enum": ["a", "b"]}}}, "Pair"`, 1), config: strict,
		},
		{
			name: "an enumeration inside a schema has a schema's name",
			text: component(`"Pair": {"type": "object"}`, `"Pair": {"type": "object", "properties": {"state": {"type": "string", "enum": ["a"]}, "other": {"$ref": "#/components/schemas/PairState"}}}, "PairState": {"type": "object"}`),
			at:   "5:156", want: "the schema PairState has a name in Go, PairState, that oapi-codegen gives what is inside another one too, and it cannot generate that; give it another with x-go-name",
			cured: component(`"Pair": {"type": "object"}`, `"Pair": {"type": "object", "properties": {"state": {"type": "string", "enum": ["a"]}, "other": {"$ref": "#/components/schemas/PairState"}}}, "PairState": {"x-go-name": "Condition", "type": "object"}`), config: plain,
		},
		{
			name: "an enumeration with another type's value",
			text: component(`{"type": "object"}`, `{"type": "object", "properties": {"state": {"type": "boolean", "enum": [true, null]}}}`),
			at:   "5:15", want: "the schema Pair: error generating code for type enums: ",
			cured: component(`{"type": "object"}`, `{"type": "object", "properties": {"state": {"type": "boolean", "enum": [true]}}}`), config: plain,
		},
		{
			name: "one of several types",
			text: component(`{"type": "object"}`, `{"type": ["string", "integer"]}`),
			at:   "5:15", want: `give it a Go type of your own with x-go-type, such as "x-go-type: any"`,
			cured: component(`{"type": "object"}`, `{"type": ["string", "integer"], "x-go-type": "any"}`), config: plain,
		},
		{
			name: "a reference into a path",
			text: answer(`"application/json": {"schema": {"type": "object", "properties": {"x": {"$ref": "#/paths/~1a/post/responses/201/content/application~1json/schema"}}}}}}, "201": {"description": "made", "content": {"application/json": {"schema": {"type": "string"}}`),
			at:   "2:19", want: "move what that $ref points at to a component of its own, and refer to it there",
			cured: answer(`"application/json": {"schema": {"type": "object", "properties": {"x": {"$ref": "#/components/schemas/Pair"}}}}}}, "201": {"description": "made", "content": {"application/json": {"schema": {"type": "string"}}`), config: plain,
		},
	} {
		t.Run(fault.name, func(t *testing.T) {
			run := func(name, text, config string) error {
				cfg, err := generator.ParseConfig([]byte(options + config))
				if err != nil {
					t.Fatal(err)
				}
				cfg.FS, cfg.Spec = fstest.MapFS{name: {Data: []byte(text)}}, name
				_, err = generator.Generate(t.Context(), cfg)
				return err
			}
			// JSON with a comment is YAML.
			for name, comment := range map[string]string{"spec.json": "", "spec.yaml": "# YAML\n"} {
				err := run(name, fault.text+comment, strict)
				if err == nil || !strings.HasPrefix(err.Error(), name+":"+fault.at+": ") || !strings.Contains(err.Error(), fault.want) {
					t.Errorf("%s: the error is %v\nwant %s at %s", name, err, fault.want, fault.at)
				}
			}
			cured := fault.cured
			if cured == "" {
				cured = fault.text
			}
			if err := run("spec.json", cured, fault.config); err != nil {
				t.Errorf("not cured: %v", err)
			}
		})
	}
}

// TestParametersThatClash has path parameters whose names oapi-codegen's own code
// has, too: some only in bodies, which are read for their sake.
func TestParametersThatClash(t *testing.T) {
	generate := func(name string) error {
		cfg, err := generator.ParseConfig([]byte("package: api\noutput: api.gen.go\ngenerate: {std-http-server: true, client: true, models: true}\n"))
		if err != nil {
			t.Fatal(err)
		}
		cfg.Spec = "spec.yaml"
		cfg.FS = fstest.MapFS{cfg.Spec: {Data: []byte(strings.ReplaceAll(`openapi: 3.0.3
info: {title: Clashes, version: "1"}
paths:
  /a/{NAME}:
    post:
      operationId: createA
      x-idempotent: true
      parameters: [{name: NAME, in: path, required: true, schema: {type: string}}, {name: q, in: query, schema: {type: string}}]
      responses: {"201": {description: done}}
`, "NAME", name))}}
		_, err = generator.Generate(t.Context(), cfg)
		return err
	}
	for _, name := range []string{
		"w", "r", "params", "server", "c", // parameters
		"req", "err", "queryURL", "operationPath", "pathParam0", "handler", // variables of bodies
		"http", "url", "fmt", // packages
	} {
		want := "spec.yaml:8:21: POST /a/{" + name + "}: the path parameter " + name + " has a name that oapi-codegen's own code uses"
		if err := generate(name); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for _, name := range []string{"id", "body", "orders"} {
		if err := generate(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
