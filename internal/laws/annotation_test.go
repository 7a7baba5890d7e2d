package laws

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestAnnotationPage holds the page about the annotation to the command: every
// field that explain knows is there with its default, no field is there that
// explain does not know, and every example is what it says it is.
func TestAnnotationPage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs", "annotation.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	command := filepath.Join(dir, "oapi-idempotent")
	goCommand(t, root, "build", "-o", command, "./cmd/oapi-idempotent")
	goCommand(t, dir, "mod", "init", "example.com/annotation")
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(command, args...)
		cmd.Dir = dir
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, &stderr)
		}
		return string(out)
	}
	if err := os.Mkdir(filepath.Join(dir, "api"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	var explained string
	documents := 0
	for _, m := range fence.FindAllStringSubmatch(string(page), -1) {
		switch language, text := m[1], m[2]; {
		case language == "yaml" && strings.HasPrefix(text, "openapi:"):
			write("openapi.yaml", text)
			run("-package", "api", "-generate", "types,std-http,client", "openapi.yaml")
			explained = run("explain", "openapi.yaml")
			documents++
		case language == "yaml":
			write("api.yaml", text)
			run("-config", "api.yaml", "openapi.yaml")
		case language == "explain":
			if explained != text {
				t.Errorf("explain prints\n%s\nand the page has\n%s", explained, text)
			}
		default:
			t.Errorf("do not know what to do with a block of %q", language)
		}
	}
	if documents < 4 {
		t.Errorf("%d documents were found", documents)
	}

	write("openapi.yaml", `openapi: 3.0.3
info: {title: Defaults, version: "1"}
paths: {/a: {post: {x-idempotent: true, responses: {"204": {description: done}}}}}
`)
	var operations []struct {
		Values []struct {
			Field string
			Value any
		}
	}
	if err := json.Unmarshal([]byte(run("explain", "-json", "openapi.yaml")), &operations); err != nil {
		t.Fatal(err)
	}
	defaults := map[string]string{}
	for _, v := range operations[0].Values {
		defaults[v.Field] = fmt.Sprint(v.Value)
	}
	if len(defaults) < 20 {
		t.Fatalf("explain gives only %v", defaults)
	}
	// Not values of their own: what gives values, or holds or switches off others.
	groups := []string{"profile", "replay", "client", "client.retry", "key.pattern"}
	_, table, _ := strings.Cut(string(page), "\n## The fields\n")
	table, _, _ = strings.Cut(table, "\n## ")
	row := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| [^|]* \\| ([^|]*) \\|")
	for _, m := range row.FindAllStringSubmatch(table, -1) {
		field, given := m[1], strings.Trim(m[2], " `")
		want, known := defaults[field]
		switch {
		case !known && !slices.Contains(groups, field):
			t.Errorf("the page has %s, which explain does not know", field)
		case known && given != want:
			t.Errorf("the page says that %s is %s by default, and explain %s", field, given, want)
		}
		delete(defaults, field)
	}
	for field := range defaults {
		t.Errorf("the page lacks %s", field)
	}
}
