// Package integrations holds that every example does what its page says.
package integrations

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// folders returns those that hold the file.
func folders(t *testing.T, file string) []string {
	t.Helper()
	found, err := filepath.Glob("*/" + file)
	if err != nil || len(found) == 0 {
		t.Fatalf("no folder holds %s: %v", file, err)
	}
	for i, path := range found {
		found[i] = filepath.Dir(path)
	}
	return found
}

// build builds the commands and returns the folder that they are in.
func build(t *testing.T, names ...string) string {
	t.Helper()
	bin := t.TempDir() + "/"
	args := []string{"build", "-o", bin}
	for _, name := range names {
		args = append(args, "./"+name)
	}
	if out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return bin
}

// TestServers starts each server as a process and sees one payment made for
// each caller and key.
func TestServers(t *testing.T) {
	names := folders(t, "main.go")
	bin := build(t, names...)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			url, _ := start(t, bin+name, t.Output())
			first := pay(t, url, "alice", "tea", "1", "250")
			if first.status != http.StatusCreated || first.replayed || !strings.Contains(first.body, `"paid_at":`) {
				t.Fatalf("the payment is answered %v", first)
			}
			if again, want := pay(t, url, "alice", "tea", "1", "250"), (answer{first.status, true, first.body}); again != want {
				t.Errorf("the same payment is answered %v, want %v", again, want)
			}
			if bobs := pay(t, url, "bob", "coffee", "1", "250"); bobs.status != http.StatusCreated || bobs.replayed || bobs.body == first.body {
				t.Errorf("the payment of another caller is answered %v", bobs)
			}
			for _, refused := range []struct {
				user, password, key, amount string
				status                      int
			}{
				{"alice", "tea", "1", "999", http.StatusUnprocessableEntity},
				{"alice", "tea", "", "250", http.StatusBadRequest},
				{"alice", "coffee", "1", "250", http.StatusUnauthorized},
			} {
				if got := pay(t, url, refused.user, refused.password, refused.key, refused.amount); got.status != refused.status || got.replayed {
					t.Errorf("%v is answered %v", refused, got)
				}
			}
		})
	}
}

// TestObserved looks at what the observers made of a payment, its replay and a
// refusal.
func TestObserved(t *testing.T) {
	var stderr bytes.Buffer
	url, stop := start(t, build(t, "observed")+"observed", &stderr)
	for _, amount := range []string{"250", "250", "999"} {
		pay(t, url, "alice", "tea", "1", amount)
	}
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	metrics, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	stop()
	for _, want := range []string{
		`idempotency_events_total{kind="recorded",operation="POST /payments",problem=""} 1`,
		`idempotency_events_total{kind="replayed",operation="POST /payments",problem=""} 1`,
		`idempotency_events_total{kind="refused",operation="POST /payments",problem="idempotency-key-reused"} 1`,
		`idempotency_store_seconds_count{operation="POST /payments"} 3`,
	} {
		if !strings.Contains(string(metrics), want+"\n") {
			t.Errorf("the metrics lack %s:\n%s", want, metrics)
		}
	}
	for _, want := range []string{
		"INFO idempotency: recorded operation=\"POST /payments\"",
		"INFO idempotency: replayed operation=\"POST /payments\"",
		"INFO idempotency: refused operation=\"POST /payments\"",
		`"Name":"idempotency recorded"`,
		`"Name":"idempotency replayed"`,
		`"Name":"idempotency refused"`,
	} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, &stderr)
		}
	}
}

// start returns the URL of a server that runs until it is stopped, or the test
// ends. What it wrote is in stderr when stop returns.
func start(t *testing.T, command string, stderr io.Writer) (url string, stop func()) {
	t.Helper()
	cmd := exec.Command(command, "-addr", "127.0.0.1:0")
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill() // fails if it is dead already
		_ = cmd.Wait()         // says that it was killed
	})
	t.Cleanup(stop)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the server did not start: %q, %v", line, err)
	}
	return strings.TrimSpace(strings.TrimPrefix(line, "listening on ")), stop
}

type answer struct {
	status   int
	replayed bool
	body     string
}

func pay(t *testing.T, url, user, password, key, amount string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/payments", strings.NewReader(`{"amount":`+amount+`}`))
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth(user, password)
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header.Get("Idempotent-Replayed") == "true", string(body)}
}

// TestGenerated holds that the committed code is what the document generates.
func TestGenerated(t *testing.T) {
	for _, name := range folders(t, "oapi-idempotent.yaml") {
		data, err := os.ReadFile(name + "/oapi-idempotent.yaml")
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := generator.ParseConfig(data)
		if err != nil {
			t.Fatal(err)
		}
		cfg.FS, cfg.Spec = os.DirFS("."), "openapi.yaml"
		files, err := generator.Generate(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			want, err := os.ReadFile(name + "/" + file.Name)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(file.Content, want) {
				t.Errorf("%s/%s is out of date: run go generate ./... in this module", name, file.Name)
			}
		}
	}
}

// TestPage holds that the README names every server.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range folders(t, "main.go") {
		if row := "| `go run ./" + name + "` |"; !strings.Contains(string(page), row) {
			t.Errorf("README.md has no row %s", row)
		}
	}
}
