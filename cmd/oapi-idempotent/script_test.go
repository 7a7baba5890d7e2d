package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

var update = flag.Bool("update", false, "rewrite what scripts compare with")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"oapi-idempotent": main})
}

// TestScripts runs the command as users do.
func TestScripts(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "../../testdata/script",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// The go command of scripts that build finds what this one found.
			for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOPROXY", "GOFLAGS", "GOTOOLCHAIN"} {
				value, err := exec.Command("go", "env", name).Output()
				if err != nil {
					return err
				}
				env.Setenv(name, strings.TrimSpace(string(value)))
			}
			env.Setenv("ROOT", root)
			sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(env.WorkDir, "root.sum"), sums, 0o644)
		},
	})
}

// TestDoesNotLinkSQLite keeps the command small: stores are the server's.
func TestDoesNotLinkSQLite(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 50 {
		t.Fatalf("only %d packages are linked; the list is not what it should be", len(deps))
	}
	for _, dep := range deps {
		if strings.HasPrefix(dep, "modernc.org/") {
			t.Errorf("the command links %s", dep)
		}
	}
}
