package laws

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

// blocks returns the README's fenced blocks by their language, in order.
func blocks(t *testing.T) map[string][]string {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]string{}
	for _, m := range fence.FindAllStringSubmatch(string(readme), -1) {
		found[m[1]] = append(found[m[1]], m[2])
	}
	return found
}

// TestREADME does what the README tells a newcomer to do, in a module of its
// own: the document, the commands, the program, the two requests.
func TestREADME(t *testing.T) {
	readme := blocks(t)
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	t.Setenv("GOFLAGS", "-mod=mod") // which is what go get does besides
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	goCommand(t, dir, "mod", "init", "example.com/payments")
	goCommand(t, dir, "mod", "edit", "-require="+module+"@v0.0.0", "-replace="+module+"="+here)
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	write("go.sum", string(sums))
	write("openapi.yaml", readme["yaml"][0])
	write("main.go", readme["go"][1]+readme["go"][0])
	for command := range strings.Lines(readme["sh"][0]) {
		fields := strings.Fields(command)
		if fields[0] != "go" {
			t.Fatalf("do not know how to run %q", command)
		}
		if out := fields[len(fields)-1]; fields[1] == "tool" && out == "openapi.yaml" {
			if err := os.MkdirAll(filepath.Join(dir, "api"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if strings.HasPrefix(command, "go get -tool ") { // what is tested is not published
			goCommand(t, dir, "mod", "edit", "-tool="+fields[3])
			fields = []string{"go", "list", "-deps", "tool"}
		}
		goCommand(t, dir, fields[1:]...)
	}
	if !strings.HasPrefix(readme["console"][0], "$ go mod tidy && go run . ") {
		t.Fatal("the README starts the program in another way than this test")
	}
	goCommand(t, dir, "mod", "tidy")
	goCommand(t, dir, "vet", "./...")
	binary := filepath.Join(dir, "payments")
	goCommand(t, dir, "build", "-o", binary, ".")

	var log bytes.Buffer
	server := exec.Command(binary)
	server.Dir, server.Stdout, server.Stderr = dir, &log, &log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	var answers []string
	for line := range strings.Lines(readme["console"][0]) {
		if command, ok := strings.CutPrefix(line, "$ curl -i "); ok {
			answers = append(answers, curl(t, command, &log))
		}
	}
	if len(answers) != 2 {
		t.Fatalf("%d requests in the README, want 2", len(answers))
	}
	first, firstBody, _ := strings.Cut(answers[0], "\r\n\r\n")
	again, againBody, _ := strings.Cut(answers[1], "\r\n\r\n")
	if !strings.HasPrefix(first, "HTTP/1.1 201 Created") || !strings.Contains(firstBody, `{"paid_at":"`) || strings.Contains(first, "Idempotent-Replayed") {
		t.Errorf("the first answer is\n%s", answers[0])
	}
	if !strings.HasPrefix(again, "HTTP/1.1 201 Created") || againBody != firstBody || !strings.Contains(again, "Idempotent-Replayed: true") {
		t.Errorf("the second answer is\n%s", answers[1])
	}
}

var quoted = regexp.MustCompile(`(-[Hd]) '([^']*)'`)

// curl sends what the arguments of a curl command say, once the server is up.
func curl(t *testing.T, command string, log *bytes.Buffer) string {
	t.Helper()
	address, _, _ := strings.Cut(command, " ")
	for deadline := time.Now().Add(20 * time.Second); ; {
		body := ""
		header := http.Header{}
		for _, m := range quoted.FindAllStringSubmatch(command, -1) {
			if m[1] == "-d" {
				body = m[2]
				continue
			}
			name, value, _ := strings.Cut(m[2], ": ")
			header.Set(name, value)
		}
		req, err := http.NewRequest("POST", "http://"+address, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = header
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			defer resp.Body.Close()
			var b bytes.Buffer
			if err := resp.Write(&b); err != nil && err != io.EOF {
				t.Fatal(err)
			}
			return b.String()
		}
		if time.Now().After(deadline) {
			t.Fatalf("no answer: %v\n%s", err, log)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestREADMETypeScript holds that internal/tstest compiles the README's example,
// with the modules that it has.
func TestREADMETypeScript(t *testing.T) {
	compiled, err := os.ReadFile(filepath.Join(root, "internal/tstest/src/readme.ts"))
	if err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer(
		`"./idempotency.js"`, `"../orders/idempotency.js"`, `"./api.js"; // of openapi-typescript`, `"./orders.js";`,
	).Replace(blocks(t)["ts"][0])
	if !strings.HasSuffix(string(compiled), want) {
		t.Errorf("internal/tstest/src/readme.ts does not end as the README's example:\n%s", want)
	}
}

// TestREADMEBegins holds its shape: everything a newcomer needs in 60 lines.
func TestREADMEBegins(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	begin := strings.Join(lines[:60], "\n")
	for _, want := range []string{"```yaml", "x-idempotent", "go tool oapi-idempotent", "func main()", "$ curl", "Idempotent-Replayed: true", "**Not guaranteed.**"} {
		if !strings.Contains(begin, want) {
			t.Errorf("the first 60 lines lack %q", want)
		}
	}
	if !strings.Contains(string(text), "go run ./examples/orders") || !strings.Contains(string(text), "make test") {
		t.Error("the two commands are not there")
	}
}

var testName = regexp.MustCompile(`\bTest\w+`)

// TestGuaranteesNameTheirTests holds that each cell of the table of guarantees
// names a test that there is, and that the package documentation has the table.
func TestGuaranteesNameTheirTests(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile(filepath.Join(root, "runtime/idempotency/doc.go"))
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]bool{}
	err = filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(readme), "\n| fault |")
	if !ok {
		t.Fatal("the README has no table of guarantees")
	}
	table, _, _ = strings.Cut("| fault |"+table, "\n\n")
	for i, row := range strings.Split(table, "\n") {
		if !strings.Contains(string(doc), "//\t"+row+"\n") {
			t.Errorf("the package documentation lacks the row %s", row)
		}
		if i < 2 {
			continue
		}
		cells := strings.Split(strings.Trim(row, "|"), "|")
		if len(cells) != 4 {
			t.Fatalf("%d cells in %s", len(cells), row)
		}
		for _, cell := range cells[1:] {
			names := testName.FindAllString(cell, -1)
			if len(names) == 0 {
				t.Errorf("no test in the cell %q", cell)
			}
			for _, name := range names {
				if !tests[name] {
					t.Errorf("there is no %s", name)
				}
			}
		}
	}
}
