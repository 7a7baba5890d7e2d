package main

import (
	"encoding/json"
	"fmt"
)

type object = map[string]any

// synthetic makes a document in JSON, some 8 kB for each resource: an object that
// is composed, enumerated, nested and referred to, and five operations on it. It
// is the same each time.
func synthetic(resources int) ([]byte, error) {
	schemas, paths := object{}, object{}
	for i := range resources {
		name := fmt.Sprintf("Resource%d", i)
		add(schemas, paths, name, fmt.Sprintf("Resource%d", max(0, i-1)))
	}
	return json.MarshalIndent(object{
		"openapi":    "3.0.3",
		"info":       object{"title": "Synthetic", "version": "1"},
		"paths":      paths,
		"components": object{"schemas": schemas},
	}, "", " ")
}

// add adds a resource, which refers to another.
func add(schemas, paths object, name, other string) {
	text := object{"type": "string", "description": "What it says of itself, for " + name + "."}
	ref := func(name string) object { return object{"$ref": "#/components/schemas/" + name} }
	properties := object{
		"kind":    object{"type": "string", "enum": []string{name + "-small", name + "-large", name + "-other"}},
		"amount":  object{"type": "integer", "format": "int64", "minimum": 0},
		"created": object{"type": "string", "format": "date-time"},
		"tags":    object{"type": "array", "items": object{"type": "string"}},
		"parent":  ref(other),
		"address": object{"type": "object", "properties": object{"street": text, "city": text, "zip": text}},
	}
	for i := range 12 {
		properties[fmt.Sprintf("field%d", i)] = text
	}
	schemas[name+"Input"] = object{"type": "object", "required": []string{"kind"}, "properties": properties}
	schemas[name] = object{"allOf": []any{
		ref(name + "Input"),
		object{"type": "object", "required": []string{"id"}, "properties": object{"id": object{"type": "string", "format": "uuid"}}},
	}}
	schemas[name+"Event"] = object{"oneOf": []any{ref(name), ref(name + "Input")}}

	parameter := func(in, name, kind string) object {
		return object{"in": in, "name": name, "required": in == "path", "schema": object{"type": kind}}
	}
	content := func(schema object) object { return object{"application/json": object{"schema": schema}} }
	operation := func(verb string, parameters []any, answer object) object {
		return object{
			"operationId": verb + name,
			"summary":     "What " + verb + " does to " + name,
			"parameters":  parameters,
			"responses": object{
				"200":     object{"description": "done", "content": content(answer)},
				"default": object{"description": "failed", "content": content(object{"type": "object", "properties": object{"message": text}})},
			},
		}
	}
	trace, id := parameter("header", "X-Trace", "string"), parameter("path", "id", "string")
	body := object{"required": true, "content": content(ref(name + "Input"))}
	list := operation("list", []any{trace, parameter("query", "limit", "integer"), parameter("query", "after", "string"), parameter("query", "archived", "boolean")},
		object{"type": "array", "items": ref(name + "Event")})
	create, update := operation("create", []any{trace}, ref(name)), operation("update", []any{trace, id}, ref(name))
	create["requestBody"], update["requestBody"] = body, body
	paths["/"+name] = object{"get": list, "post": create}
	paths["/"+name+"/{id}"] = object{
		"get":    operation("get", []any{trace, id}, ref(name)),
		"patch":  update,
		"delete": operation("delete", []any{trace, id}, ref(name)),
	}
}
