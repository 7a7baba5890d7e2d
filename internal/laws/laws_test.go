// Package laws holds what is true of the whole module as tests: what it may
// require and import, and that its README says what happens.
package laws

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template/parse"
)

const (
	root   = "../.."
	module = "github.com/oapi-idempotent/oapi-idempotent"
)

func goCommand(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := err.(*exec.ExitError); ok {
			t.Fatalf("go %s: %v\n%s%s", strings.Join(args, " "), err, out, exit.Stderr)
		}
		t.Fatal(err)
	}
	return string(out)
}

// Every requirement lifts the versions of whoever requires this module.
func TestRequirementsAreFloors(t *testing.T) {
	var mod struct {
		Go        string
		Toolchain string
		Require   []struct {
			Path, Version string
		}
		Replace []any
	}
	if err := json.Unmarshal([]byte(goCommand(t, root, "mod", "edit", "-json")), &mod); err != nil {
		t.Fatal(err)
	}
	if mod.Go != "1.26.0" || mod.Toolchain != "" || len(mod.Replace) > 0 {
		t.Errorf("go %s, toolchain %q, replace %v; want go 1.26.0 and nothing else", mod.Go, mod.Toolchain, mod.Replace)
	}
	versions := map[string]string{}
	for _, r := range mod.Require {
		versions[r.Path] = r.Version
		for _, heavy := range []string{"go-chi/chi", "gorilla/mux", "labstack/echo", "gin-gonic/gin", "gofiber/fiber", "kataras/iris"} {
			if strings.Contains(r.Path, heavy) {
				t.Errorf("%s is a router: only nested modules may require it", r.Path)
			}
		}
	}
	base := goCommand(t, root, "mod", "download", "-json", "github.com/oapi-codegen/oapi-codegen/v2@"+versions["github.com/oapi-codegen/oapi-codegen/v2"])
	var download struct{ GoMod string }
	if err := json.Unmarshal([]byte(base), &download); err != nil {
		t.Fatal(err)
	}
	floor := goCommand(t, filepath.Dir(download.GoMod), "mod", "edit", "-json", download.GoMod)
	if want := `"Version": "` + versions["github.com/getkin/kin-openapi"] + `"`; !strings.Contains(floor, want) {
		t.Errorf("kin-openapi %s is not what oapi-codegen requires", versions["github.com/getkin/kin-openapi"])
	}
}

// imports returns what the packages depend on, outside the standard library.
func imports(t *testing.T, patterns ...string) []string {
	t.Helper()
	args := append([]string{"list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}"}, patterns...)
	return strings.Fields(goCommand(t, root, args...))
}

func TestWhatMayImportWhat(t *testing.T) {
	for _, law := range []struct {
		why      string
		packages []string
		banned   func(path string) bool
	}{
		{
			"the command links no SQLite",
			[]string{"./cmd/..."},
			func(path string) bool { return strings.HasPrefix(path, "modernc.org/") },
		},
		{
			"the generator reads of the runtime only its version and the wire's names",
			[]string{"./generator/..."},
			func(path string) bool {
				return strings.HasPrefix(path, module+"/runtime/") && path != module+"/runtime/idempotency"
			},
		},
		{
			"stores know the guard and nothing of the generator",
			[]string{"./runtime/memorystore", "./runtime/sqlstore", "./runtime/idempotencytest/..."},
			func(path string) bool {
				return strings.HasPrefix(path, module+"/generator") || strings.HasPrefix(path, module+"/templates") || strings.Contains(path, "kin-openapi")
			},
		},
		{
			"sqlstore links no SQLite, which is large; lib/pq it needs for its own pool",
			[]string{"./runtime/sqlstore"},
			func(path string) bool { return strings.HasPrefix(path, "modernc.org/") },
		},
		{
			"servers and clients inherit the standard library alone",
			[]string{"./runtime/idempotency", "./runtime/idempotentclient"},
			func(path string) bool { return !strings.HasPrefix(path, module+"/") },
		},
	} {
		if i := slices.IndexFunc(imports(t, law.packages...), law.banned); i >= 0 {
			t.Errorf("%s, but it imports %s", law.why, imports(t, law.packages...)[i])
		}
	}
}

// Templates are data: a rule that a template knew would have two homes. They may
// print fields, and repeat or leave out what a field says.
func TestTemplatesOnlyPrint(t *testing.T) {
	var walk func(path string, n parse.Node)
	pipe := func(path string, p *parse.PipeNode) {
		if len(p.Decl) > 0 || len(p.Cmds) != 1 || len(p.Cmds[0].Args) != 1 {
			t.Errorf("%s: {{%s}} computes", path, p)
			return
		}
		switch p.Cmds[0].Args[0].(type) {
		case *parse.DotNode, *parse.FieldNode, *parse.VariableNode, *parse.NilNode:
		default:
			t.Errorf("%s: {{%s}} is no field", path, p)
		}
	}
	walk = func(path string, n parse.Node) {
		switch n := n.(type) {
		case *parse.ListNode:
			if n != nil {
				for _, child := range n.Nodes {
					walk(path, child)
				}
			}
		case *parse.ActionNode:
			pipe(path, n.Pipe)
		case *parse.IfNode:
			pipe(path, n.Pipe)
			walk(path, n.List)
			walk(path, n.ElseList)
		case *parse.RangeNode:
			pipe(path, n.Pipe)
			walk(path, n.List)
			walk(path, n.ElseList)
		case *parse.WithNode:
			pipe(path, n.Pipe)
			walk(path, n.List)
			walk(path, n.ElseList)
		case *parse.TemplateNode:
			if n.Pipe != nil {
				pipe(path, n.Pipe)
			}
		}
	}
	count := 0
	err := filepath.WalkDir(filepath.Join(root, "templates"), func(path string, entry os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".tmpl") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		tree := parse.New(path)
		tree.Mode = parse.SkipFuncCheck
		trees := map[string]*parse.Tree{}
		if _, err := tree.Parse(string(text), "", "", trees); err != nil {
			return err
		}
		for _, tree := range trees {
			count++
			walk(path, tree.Root)
		}
		return nil
	})
	if err != nil || count == 0 {
		t.Fatalf("%d templates: %v", count, err)
	}
}
