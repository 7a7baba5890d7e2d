package policy_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"unicode/utf8"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
)

// FuzzResolve holds that no document makes Resolve panic, that every finding
// stands within the file, and that findings and operations exclude each other.
func FuzzResolve(f *testing.F) {
	seeds, err := filepath.Glob("../../../testdata/errors/*/spec.*")
	if err != nil || len(seeds) == 0 {
		f.Fatalf("found %d documents to begin with: %v", len(seeds), err)
	}
	for _, seed := range seeds {
		data, err := os.ReadFile(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		const name = "spec.yaml"
		doc, err := document.Load(fstest.MapFS{name: {Data: data}}, name)
		if err == nil {
			var operations []policy.Operation
			operations, err = policy.Resolve(doc, policy.Config{Unannotated: "reject"})
			if err != nil && operations != nil {
				t.Fatalf("%d operations beside the error %v", len(operations), err)
			}
		}
		if err == nil {
			return
		}
		var found document.Findings
		if !errors.As(err, &found) || len(found) == 0 {
			t.Fatalf("got the error %v, want findings", err)
		}
		lines := 1
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} {
			lines += strings.Count(string(data), end)
		}
		for _, finding := range found {
			pos := finding.Pos
			if pos.File != name || pos.Line < 1 || pos.Column < 1 {
				t.Fatalf("%v has no position", finding)
			}
			// UTF-16 has its line ends elsewhere.
			if utf8.Valid(data) && (pos.Line > lines || pos.Column > len(data)+1) {
				t.Fatalf("%v is outside of the file, which has %d lines", finding, lines)
			}
		}
		if got := strings.Count(found.Error(), "\n"); got != len(found.Sorted())-1 {
			t.Fatalf("%d findings in %d lines:\n%v", len(found.Sorted()), got+1, found)
		}
	})
}
