package generator_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// TestHostile has documents that would take all memory, or the stack, if they
// were read as they ask to be.
func TestHostile(t *testing.T) {
	const head = "openapi: 3.0.3\ninfo: {title: t, version: \"1\"}\n"
	const deep = 1_000_000
	steps := head + "paths:\n"
	for i := range 200 {
		steps += fmt.Sprintf("  /%d: {$ref: '#/paths/~1%d'}\n", i, (i+1)%200)
	}
	for name, test := range map[string]struct{ document, want string }{
		"nested lists":          {head + "x-deep: " + strings.Repeat("[", deep), "spec.yaml:3:1: not valid YAML: exceeded max depth"},
		"nested objects":        {head + "x-deep: " + strings.Repeat("{a: ", deep), "spec.yaml:3:1: not valid YAML: exceeded max depth"},
		"lists in one line":     {head + "x-deep:\n  " + strings.Repeat("- ", deep), "spec.yaml:3:1: not valid YAML: exceeded max depth"},
		"JSON":                  {strings.Repeat("[", deep), "spec.yaml:1:10001: not valid JSON: "},
		"JSON in order":         {strings.Repeat(`{"a":`, deep) + "1" + strings.Repeat("}", deep), "spec.yaml:1:50001: not valid JSON: "},
		"a circle of many":      {steps, "spec.yaml:4:14: $ref \"#/paths/~11\" leads back to itself"},
		"one long line":         {head + "paths: " + strings.Repeat(" ", deep) + "[]\n", "spec.yaml:3:1000008: paths must be an object"},
		"a value of a megabyte": {head + "paths: {/a: {post: {x-idempotent: " + strings.Repeat("a", deep) + ", responses: {}}}}\n", "spec.yaml:3:35: x-idempotent must be true, false or an object with the policy's fields, not the string \"" + strings.Repeat("a", 60) + "…\""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := generator.Generate(t.Context(), server(map[string]string{"spec.yaml": test.document}))
			var findings generator.Findings
			if !errors.As(err, &findings) || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %.200s\nwant %s", fmt.Sprint(err), test.want)
			}
		})
	}
}
