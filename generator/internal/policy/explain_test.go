package policy_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestValuesReadBack writes what Values returns as an annotation, which must
// resolve to the same policy.
func TestValuesReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var fields []string
		give := func(field string, values ...string) {
			if rapid.Bool().Draw(t, field) {
				fields = append(fields, field+": "+rapid.SampledFrom(values).Draw(t, field))
			}
		}
		group := func(name string, give func()) {
			outer := fields
			fields = nil
			give()
			if len(fields) > 0 {
				outer = append(outer, name+": {"+strings.Join(fields, ", ")+"}")
			}
			fields = outer
		}
		durations := []string{"24h", "1d", "2d", "49h", "1d2h3m4s5ms", "90s", "60000ms", "106751d"}
		if rapid.Bool().Draw(t, "natural") {
			fields = append(fields, "natural: true")
		} else {
			give("header", "X-Key")
			give("onMissing", "400", "422", "run")
			group("key", func() {
				give("format", "any", "uuid")
				give("minLength", "1", "36")
				give("maxLength", "36", "300")
			})
			give("scope", "principal", "operation", "global")
			give("ttl", append(durations, "1ms")...)
			if rapid.Bool().Draw(t, "replayed whatever it says") {
				fields = append(fields, "onMismatch: replay")
			} else {
				give("onMismatch", "400", "409", "422")
				group("fingerprint", func() {
					give("body", "auto", "json")
					give("query", "false")
					give("mediaType", "false")
					give("headers", "[]", "[X-A, X-B]")
					give("ignore", "[]", "[/a, /b~1c]")
				})
				give("replay", "none", "{status: 200}", "{status: original, marker: X-M}")
			}
			give("record", "[]", "[4XX, 5XX, 409]")
			group("server", func() {
				give("guarantee", "atLeastOnce", "transaction")
				give("lease", append(durations, "100ms")...)
				give("timeout", append(durations, "1ms")...)
				give("maxRequestBody", "1B", "1500B", "3KiB", "2MiB", "1024MiB", "5GiB")
			})
		}
		give("client", "false", "{retry: false}", "{retry: {maxAttempts: 1}}", "{retry: {maxAttempts: 7, base: 1s, max: 2s, maxElapsed: 3s}}")

		first := resolveOne(t, "paths: {/orders: {post: {x-idempotent: {"+strings.Join(fields, ", ")+"}}}}")
		annotation := map[string]any{}
		for _, v := range first.Values() {
			origin, ok := first.Origins[v.Field]
			if !ok {
				t.Fatalf("%s has no origin", v.Field)
			}
			if origin.Level == "built-in" {
				continue
			}
			object, names := annotation, strings.Split(v.Field, ".")
			for _, name := range names[:len(names)-1] {
				if object[name] == nil {
					object[name] = map[string]any{}
				}
				object = object[name].(map[string]any)
			}
			object[names[len(names)-1]] = v.Value
		}
		text, err := json.Marshal(annotation)
		if err != nil {
			t.Fatal(err)
		}
		again := resolveOne(t, "paths: {/orders: {post: {x-idempotent: "+string(text)+"}}}")
		first.Origins, again.Origins = nil, nil
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("%v reads\n%+v\nand written again, %s,\n%+v", fields, first, text, again)
		}
	})
}

// TestValuesAreAllFields finds a field of the extension that Values forgot.
func TestValuesAreAllFields(t *testing.T) {
	seen := map[string]bool{}
	for _, annotation := range []string{"true", "{replay: none, client: {retry: false}}", "{client: false}"} {
		op := resolveOne(t, "paths: {/orders: {post: {x-idempotent: "+annotation+", "+
			"parameters: [{name: Idempotency-Key, in: header, schema: {type: string, pattern: '^a'}}]}}}")
		for _, v := range op.Values() {
			seen[v.Field] = true
		}
		for field := range op.Origins {
			if annotation == "{client: false}" && !seen[field] {
				t.Errorf("Values never tells %s", field)
			}
		}
	}
}
