package generator_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// inside matches what a message must not say: names of Go's types and of the
// packages that read documents.
var inside = regexp.MustCompile(`unmarshal errors|openapi3\.|codegen\.[A-Z]|generator\.[A-Z]|Go value|Go struct|nil pointer`)

// FuzzGenerate holds that no document makes Generate panic, and that whatever is
// wrong with it is said in lines that begin with a place.
func FuzzGenerate(f *testing.F) {
	seeds, err := filepath.Glob(errorsDir + "/*/spec.*")
	if err != nil || len(seeds) == 0 {
		f.Fatalf("found %d documents to begin with: %v", len(seeds), err)
	}
	for _, seed := range append(seeds, "../testdata/golden/stdhttp/spec.yaml", "../testdata/golden/webhooks/spec.yaml") {
		data, err := os.ReadFile(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 20_000 {
			return // finding faults takes variety, not size
		}
		cfg := server(nil)
		cfg.FS = fstest.MapFS{"spec.yaml": {Data: data}}
		_, err := generator.Generate(t.Context(), cfg)
		if err == nil {
			return
		}
		var findings generator.Findings
		if !errors.As(err, &findings) {
			if !strings.HasPrefix(err.Error(), "oapi-codegen: ") {
				t.Errorf("not findings: %v", err)
			}
			return
		}
		for _, finding := range findings {
			if finding.Pos.File == "" || finding.Pos.Line == 0 || finding.Pos.Column == 0 {
				t.Errorf("no place: %v", finding)
			}
			if inside.MatchString(finding.Message) {
				t.Errorf("not for authors of documents: %v", finding)
			}
		}
	})
}
