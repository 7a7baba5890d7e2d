package generator_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const errorsDir = "../testdata/errors"

// TestFindings holds the text of every finding, beside the document that has
// it, and its config and overlay, if it has them.
func TestFindings(t *testing.T) {
	features, err := os.ReadDir(errorsDir)
	if err != nil {
		t.Fatal(err)
	}
	if len(features) < 80 {
		t.Fatalf("only %d wrong documents were found", len(features))
	}
	for _, feature := range features {
		t.Run(feature.Name(), func(t *testing.T) {
			dir := filepath.Join(errorsDir, feature.Name())
			specs, err := filepath.Glob(filepath.Join(dir, "spec.*"))
			if err != nil || len(specs) != 1 {
				t.Fatalf("%s has %d files spec.*: %v; want one", dir, len(specs), err)
			}
			config, err := os.ReadFile(filepath.Join(dir, "config.yaml"))
			if errors.Is(err, os.ErrNotExist) {
				config = []byte("package: api\ngenerate: {std-http-server: true, client: true, models: true}\n")
			} else if err != nil {
				t.Fatal(err)
			}
			cfg, err := generator.ParseConfig(config)
			if err != nil {
				t.Fatal(err)
			}
			cfg.FS, cfg.Spec = os.DirFS(dir), filepath.Base(specs[0])
			files, err := generator.Generate(t.Context(), cfg)
			if len(files) != 0 {
				t.Error("something was generated")
			}
			var findings generator.Findings
			if !errors.As(err, &findings) {
				t.Fatalf("got the error %v; want findings", err)
			}
			got := findings.Error() + "\n"
			wantFile := filepath.Join(dir, "want.txt")
			if *update {
				if err := os.WriteFile(wantFile, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(wantFile)
			if err != nil {
				t.Fatalf("%v; write it with -update", err)
			}
			if got != string(want) {
				t.Errorf("findings differ from %s; look at them, then write them with -update\ngot:\n%s\nwant:\n%s", wantFile, got, want)
			}
		})
	}
}
