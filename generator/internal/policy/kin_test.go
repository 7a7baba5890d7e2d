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

// TestNothingAnnotatedIsMissed compares with the reader that code is generated
// from: whatever operation kin-openapi finds an annotation on is resolved, and
// no other, however the path items refer to one another.
func TestNothingAnnotatedIsMissed(t *testing.T) {
	// Newer versions do not read a method in capitals everywhere.
	post := "Post"
	probe, err := openapi3.NewLoader().LoadFromData([]byte("paths: {/: {Post: {}}}"))
	if err != nil {
		t.Fatal(err)
	}
	if probe.Paths.Value("/").Post == nil {
		post = "post"
	}
	rapid.Check(t, func(t *rapid.T) {
		operations := func() string {
			var members []string
			for _, method := range []string{"get", "put", post, "patch"} {
				if rapid.Bool().Draw(t, method) {
					annotation := ""
					if rapid.Bool().Draw(t, "annotated") {
						annotation = "x-idempotent: {natural: true}, "
					}
					members = append(members, method+": {"+annotation+"responses: {}}")
				}
			}
			return "{" + strings.Join(members, ", ") + "}"
		}
		item := func() string {
			forms := []string{
				operations(),
				"{$ref: '#/components/pathItems/a'}",
				"{$ref: '#/components/pathItems/b'}",
				"{$ref: '#/paths/~1inline'}",
				"{$ref: '#/paths/~1an~0odd%7Bid%7D'}",
				"{$ref: items/whole.yaml}",
				"{$ref: './items/parts.yaml#/x-items/a'}",
				"{$ref: './items/parts.yaml#/x-items/c~1d'}",
				"*anchored",
				"{<<: *anchored}",
				"{$ref: '#/paths/~1inline', description: ''}",
			}
			return rapid.SampledFrom(forms).Draw(t, "item")
		}
		files := map[string]string{
			"spec.yaml": fmt.Sprintf(`openapi: 3.1.0
info: {title: t, version: "1"}
x-anchored: &anchored %s
paths:
  /inline: %s
  /an~odd{id}: %s
  /a: {$ref: '#/components/pathItems/a'}
  /b: {$ref: '#/components/pathItems/b'}
  /x: %s
  /y: %s
  /z: %s
components:
  pathItems:
    a: %s
    b: %s
`, operations(), operations(), operations(), item(), item(), item(), operations(), operations()),
			"items/whole.yaml": operations(),
			"items/parts.yaml": fmt.Sprintf("openapi: 3.1.0\ninfo: {title: t, version: '1'}\npaths: {}\nx-items:\n  a: %s\n  c/d: %s\n", operations(), operations()),
		}
		got := describe(resolve(t, files, policy.Config{}), nil)

		kin := openapi3.NewLoader()
		kin.ReadFromURIFunc = func(_ *openapi3.Loader, at *url.URL) ([]byte, error) { return []byte(files[at.Path]), nil }
		spec, err := kin.LoadFromFile("spec.yaml")
		if err != nil {
			t.Fatal(err)
		}
		var annotated []string
		for path, item := range spec.Paths.Map() {
			for method, operation := range item.Operations() {
				if operation.Extensions[policy.Extension] != nil {
					annotated = append(annotated, path+" "+method)
				}
			}
		}
		slices.Sort(annotated)
		for i, s := range annotated {
			path, method, _ := strings.Cut(s, " ")
			annotated[i] = method + " " + path
		}
		if want := strings.Join(annotated, ", "); got != want {
			t.Fatalf("resolved %s\nkin-openapi has %s\n%v", got, want, files)
		}
	})
}
