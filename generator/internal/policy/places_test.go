package policy_test

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"pgregory.net/rapid"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
)

// TestNoWebhookOrCallbackIsMissed compares with the reader that code is generated
// from: whatever webhook it finds an annotation on is resolved, and whatever
// callback of an operation under paths, and no other, however they refer to one
// another.
func TestNoWebhookOrCallbackIsMissed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		annotation := func() string {
			if rapid.Bool().Draw(t, "annotated") {
				return "x-idempotent: {natural: true}, "
			}
			return ""
		}
		plain := func() string {
			var members []string
			for _, method := range []string{"get", "put", "post"} {
				if rapid.Bool().Draw(t, method) {
					members = append(members, method+": {"+annotation()+"responses: {}}")
				}
			}
			return "{" + strings.Join(members, ", ") + "}"
		}
		item := func() string {
			return rapid.SampledFrom([]string{
				plain(), "{$ref: '#/components/pathItems/a'}", "{$ref: item.yaml}", "{$ref: 'parts.yaml#/x-items/a'}", "*anchored",
			}).Draw(t, "item")
		}
		callback := func() string {
			return fmt.Sprintf("{x-other: 1, '{$request.body#/url}': %s, 'http://example.com/{$request.query.a}': %s}", item(), item())
		}
		callbacks := func() string {
			var members []string
			for _, name := range []string{"paid", "x-paid", "example"} {
				if rapid.Bool().Draw(t, name) {
					members = append(members, name+": "+rapid.SampledFrom([]string{
						callback(), "{$ref: '#/components/callbacks/a'}", "{$ref: callback.yaml}",
					}).Draw(t, "callback"))
				}
			}
			return "{" + strings.Join(members, ", ") + "}"
		}
		files := map[string]string{
			"spec.yaml": fmt.Sprintf(`openapi: 3.1.0
info: {title: t, version: "1"}
x-anchored: &anchored %s
paths:
  /a: {post: {%sresponses: {}, callbacks: %s}, get: {responses: {}, callbacks: %s}}
  /b: {$ref: '#/components/pathItems/b'}
  /c: {post: {responses: {}, callbacks: {a: {$ref: '#/components/callbacks/a'}}}}
  /d: {$ref: '#/components/pathItems/a'}
webhooks:
  a: %s
  x-b: %s
components:
  callbacks:
    a: %s
  pathItems:
    a: %s
    b: {post: {responses: {}, callbacks: %s}}
`, plain(), annotation(), callbacks(), callbacks(), item(), item(), callback(), plain(), callbacks()),
			"item.yaml":     plain(),
			"callback.yaml": fmt.Sprintf("{'{$request.body#/url}': %s}", plain()),
			"parts.yaml":    fmt.Sprintf("openapi: 3.1.0\ninfo: {title: t, version: '1'}\npaths: {}\nx-items:\n  a: %s\n", plain()),
		}
		var got []string
		for _, op := range resolve(t, files, policy.Config{}) {
			if op.Annotated() {
				got = append(got, op.Method+" "+op.Path)
			}
		}

		kin := openapi3.NewLoader()
		kin.IsExternalRefsAllowed = true
		kin.ReadFromURIFunc = func(_ *openapi3.Loader, at *url.URL) ([]byte, error) { return []byte(files[at.Path]), nil }
		spec, err := kin.LoadFromFile("spec.yaml")
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		add := func(item *openapi3.PathItem, place string) {
			for method, operation := range item.Operations() {
				if operation.Extensions[policy.Extension] != nil {
					want = append(want, method+" "+place)
				}
			}
		}
		for path, item := range spec.Paths.Map() {
			add(item, path)
			for method, operation := range item.Operations() {
				for name, callback := range operation.Callbacks {
					for at, item := range callback.Value.Map() {
						add(item, fmt.Sprintf("callback %s of %s %s at %s", name, method, path, at))
					}
				}
			}
		}
		for name, item := range spec.Webhooks {
			add(item, "webhook "+name)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("resolved %q\nkin-openapi has %q\n%v", got, want, files)
		}
	})
}
