package policy_test

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
)

var update = flag.Bool("update", false, "write what was found to want.txt")

const errorsDir = "../../../testdata/errors"

// configs are of the features whose findings depend on one.
var configs = map[string]policy.Config{
	"extension-name":    {Extension: "x-once"},
	"unannotated":       {Unannotated: "reject"},
	"misspelt":          {Unannotated: "reject"},
	"header-param-keep": {HeaderParam: "keep"},
}

// TestFindings holds the text of every finding, beside the document that has it.
func TestFindings(t *testing.T) {
	features, err := os.ReadDir(errorsDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, feature := range features {
		t.Run(feature.Name(), func(t *testing.T) {
			dir := filepath.Join(errorsDir, feature.Name())
			specs, err := filepath.Glob(filepath.Join(dir, "spec.*"))
			if err != nil || len(specs) != 1 {
				t.Fatalf("%s has %d files spec.*: %v; want one", dir, len(specs), err)
			}
			err = findings(dir, filepath.Base(specs[0]), configs[feature.Name()])
			var found document.Findings
			if !errors.As(err, &found) {
				t.Fatalf("got the error %v; want findings", err)
			}
			got := found.Error() + "\n"
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

func findings(dir, name string, cfg policy.Config) error {
	doc, err := document.Load(os.DirFS(dir), name)
	if err != nil {
		return err
	}
	_, err = policy.Resolve(doc, cfg)
	return err
}
