package generator_test

import (
	"bytes"
	"context"
	"flag"
	"go/format"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// goldenRoots hold one directory per feature: spec.yaml, one or more configs
// called config*.yaml, and the package want that they generate. What needs a
// router lives in the module that has it.
var goldenRoots = []string{"../testdata/golden", "../internal/routertest/golden"}

// A golden is one config of one feature.
type golden struct {
	dir    string
	config generator.Config
}

func goldens(t *testing.T) []golden {
	t.Helper()
	var all []golden
	for _, root := range goldenRoots {
		configs, err := filepath.Glob(filepath.Join(root, "*", "config*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range configs {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			cfg, err := generator.ParseConfig(data)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			dir := filepath.Dir(name)
			cfg.FS, cfg.Spec = os.DirFS(dir), "spec.yaml"
			all = append(all, golden{dir, cfg})
		}
	}
	if len(all) == 0 {
		t.Fatal("no golden files were found")
	}
	return all
}

func (g golden) name() string { return path.Join(filepath.Base(g.dir), g.config.Output) }

func (g golden) generate(t *testing.T) []byte {
	t.Helper()
	files, err := generator.Generate(context.Background(), g.config)
	if err != nil {
		t.Fatalf("%s: %v", g.dir, err)
	}
	if len(files) != 1 || files[0].Name != g.config.Output {
		t.Fatalf("%s: generated %d files, the first is %q", g.dir, len(files), files[0].Name)
	}
	return files[0].Content
}

// TestGolden compares what is generated with packages that other tests import,
// so that they compile, and run. -update rewrites them.
func TestGolden(t *testing.T) {
	for _, g := range goldens(t) {
		t.Run(g.name(), func(t *testing.T) {
			got := g.generate(t)
			if again := g.generate(t); !bytes.Equal(got, again) {
				t.Fatal("the second run gave other bytes than the first")
			}
			if formatted, err := format.Source(got); err != nil || !bytes.Equal(got, formatted) {
				t.Errorf("not formatted: %v %s", err, firstDifference(formatted, got))
			}
			file := filepath.Join(g.dir, g.config.Output)
			if *update {
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatalf("%v (go test ./generator -run TestGolden -update writes it)", err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s is out of date: %s", file, firstDifference(want, got))
			}
		})
	}
}

// TestGoldenHasNothingStale finds generated files that no config generates.
func TestGoldenHasNothingStale(t *testing.T) {
	expected := map[string]bool{}
	for _, g := range goldens(t) {
		expected[filepath.Join(g.dir, g.config.Output)] = true
	}
	for _, root := range goldenRoots {
		err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(name, ".gen.go") && !expected[name] {
				t.Errorf("%s: no config generates it", name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func firstDifference(want, got []byte) string {
	w, g := strings.Split(string(want), "\n"), strings.Split(string(got), "\n")
	for i := range min(len(w), len(g)) {
		if w[i] != g[i] {
			return "line " + g[i] + ", want " + w[i]
		}
	}
	return "one is a beginning of the other"
}
