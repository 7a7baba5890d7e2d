package generator_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// TestTypeScript compares modules with those that internal/tstest compiles and
// runs. -update rewrites them.
func TestTypeScript(t *testing.T) {
	for _, module := range []struct{ dir, spec, want string }{
		{"../internal/tstest/golden", "spec.yaml", "../internal/tstest/golden/idempotency.ts"},
		{"../examples/orders/api", "openapi.yaml", "../internal/tstest/orders/idempotency.ts"},
	} {
		cfg := generator.Config{FS: os.DirFS(module.dir), Spec: module.spec}
		cfg.PackageName, cfg.Generate.Models = "api", true
		got, err := generator.TypeScript(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(module.want, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(module.want)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is out of date: run make generate", module.want)
		}
	}
}

func TestTypeScriptReportsFindings(t *testing.T) {
	cfg := generator.Config{FS: os.DirFS("../testdata/errors/annotation-value"), Spec: "spec.yaml"}
	cfg.PackageName, cfg.Generate.Models = "api", true
	_, err := generator.TypeScript(t.Context(), cfg)
	if _, ok := err.(generator.Findings); !ok {
		t.Errorf("got %v", err)
	}
}
