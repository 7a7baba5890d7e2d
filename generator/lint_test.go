package generator_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const lintDir = "../testdata/lint"

func linted(feature string) generator.Config {
	cfg := generator.Config{FS: os.DirFS(filepath.Join(lintDir, feature)), Spec: "spec.yaml"}
	cfg.PackageName = "api"
	cfg.Generate = codegen.GenerateOptions{StdHTTPServer: true, Client: true, Models: true}
	return cfg
}

// TestLint holds the text of all advice, beside the document that it is about,
// and that none of it stops generate.
func TestLint(t *testing.T) {
	features, err := os.ReadDir(lintDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, feature := range features {
		t.Run(feature.Name(), func(t *testing.T) {
			cfg := linted(feature.Name())
			advice, err := generator.Lint(context.Background(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := generator.Generate(context.Background(), cfg); err != nil {
				t.Errorf("what is advised on cannot be generated: %v", err)
			}
			got := advice.Error() + "\n"
			wantFile := filepath.Join(lintDir, feature.Name(), "want.txt")
			if *update {
				if err := os.WriteFile(wantFile, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(wantFile)
			if err != nil {
				t.Fatalf("%v (go test ./generator -run TestLint -update writes it)", err)
			}
			if got != string(want) {
				t.Errorf("the advice differs from %s; look at it, then write it with -update\ngot:\n%s\nwant:\n%s", wantFile, got, want)
			}
		})
	}
}
