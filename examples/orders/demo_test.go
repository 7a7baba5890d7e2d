package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// command returns the command itself, to run in an empty directory. It is
// interrupted when the test ends, if not before.
func command(t *testing.T, postgres string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), asCommand+"=1", "DATABASE_URL="+postgres)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 15 * time.Second
	return cmd
}

// told is the demo's story, with what differs from one to the next numbered.
const told = `  process 1: listening on http://address 1

# Without a key the request is refused.
POST /payments {"amount":250,"currency":"EUR"}
  400 {"type":"urn:oapi-idempotent:missing-idempotency-key","title":"The idempotency key is missing","status":400,"detail":"This operation needs the header field Idempotency-Key."}

# With a key it is created.
POST /payments {"amount":250,"currency":"EUR"}   Idempotency-Key: key 1
  201 {"amount":250,"currency":"EUR","id": 1}

# Sent again, it is replayed: same answer, no second payment.
POST /payments {"amount":250,"currency":"EUR"}   Idempotency-Key: key 1
  201 {"amount":250,"currency":"EUR","id": 1}   Idempotent-Replayed: true

# Another request with the same key is refused.
POST /payments {"amount":999,"currency":"EUR"}   Idempotency-Key: key 1
  422 {"type":"urn:oapi-idempotent:idempotency-key-reused","title":"The idempotency key was used for another request","status":422,"detail":"Use a new key for a new request, and send the same request again with its key."}

# 50 requests with one new key, all at once: one runs.
   1 × 201, ran
  some × 409, in flight
  some × 201, replayed

# The server's process is killed with SIGKILL, and started again.
  process 1: killed
  process 2: listening on http://address 1

# The new process replays what the old one recorded.
POST /payments {"amount":250,"currency":"EUR"}   Idempotency-Key: key 1
  201 {"amount":250,"currency":"EUR","id": 1}   Idempotent-Replayed: true

# The generated client calls while the server is down, and retries with one key until it is up.
  process 2: killed
  process 3: listening on http://address 1
  attempt 1   Idempotency-Key: UUID 1   no answer
  attempt last   Idempotency-Key: UUID 1   201

# All in all: 3 payments, one for each key that was used.
  process 3: killed
`

// number replaces what matches pattern in text by name and a number, equal
// matches by equal numbers.
func number(text, pattern, name string) string {
	var known []string
	return regexp.MustCompile(pattern).ReplaceAllStringFunc(text, func(match string) string {
		if !slices.Contains(known, match) {
			known = append(known, match)
		}
		return fmt.Sprintf("%s %d", name, slices.Index(known, match)+1)
	})
}

func playDemo(t *testing.T, postgres string) {
	t.Helper()
	cmd := command(t, postgres, "-demo")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, stdout, &stderr)
	}
	text := number(string(stdout), `process \d+`, "process")
	text = number(text, `127\.0\.0\.1:\d+`, "address")
	text = number(text, `tea-\d+`, "key")
	text = number(text, `"id":\d+`, `"id":`)
	text = number(text, `[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`, "UUID")
	text = regexp.MustCompile(`[ \d]\d × (409, in flight|201, replayed)`).ReplaceAllString(text, "some × $1")
	text = regexp.MustCompile(`(?:  attempt \d+   Idempotency-Key: UUID 1   no answer\n)*  attempt \d+(   Idempotency-Key: UUID 1   201)`).
		ReplaceAllString(text, "  attempt 1   Idempotency-Key: UUID 1   no answer\n  attempt last$1")
	if text != told {
		t.Errorf("the story is\n%s\nwant\n%s", text, told)
	}
	if left, err := os.ReadDir(cmd.Dir); err != nil || len(left) > 0 {
		t.Errorf("the demo left %v, %v", left, err)
	}
}

func TestDemo(t *testing.T) {
	t.Run("SQLite", func(t *testing.T) { playDemo(t, "") })
	t.Run("PostgreSQL", func(t *testing.T) {
		dsn := pgtest.DSN(t)
		playDemo(t, dsn)
		// The second time the tables are there, and hold the first story.
		playDemo(t, dsn)
		if n := newShop(t, dsn, "").count(t, "payments"); n != 6 {
			t.Errorf("two stories made %d payments, want 6", n)
		}
	})
}

// TestServe starts a server in an empty directory and tries what it says.
func TestServe(t *testing.T) {
	cmd := command(t, "", "-addr", "127.0.0.1:0")
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Cancel() // if it has ended already, Wait says how
		_, _ = io.Copy(io.Discard, stdout)
		if err := cmd.Wait(); err != nil {
			t.Errorf("interrupted, the server ended with: %v", err)
		}
	}()

	var lines []string
	for out := bufio.NewScanner(stdout); len(lines) < 3 && out.Scan(); {
		if strings.HasPrefix(out.Text(), "  curl ") {
			lines = append(lines, out.Text())
		}
	}
	if len(lines) != 3 {
		t.Fatalf("the server says to try %q, want three lines", lines)
	}
	keyless, pay, order := lines[0], lines[1], lines[2]

	shell(t, keyless).refused(t, http.StatusBadRequest, "missing-idempotency-key")
	first := shell(t, pay)
	first.created(t)
	ordered := shell(t, order)
	ordered.created(t)
	send(t, pay).replays(t, http.StatusCreated, first)
	send(t, strings.Replace(pay, "250", "251", 1)).refused(t, http.StatusUnprocessableEntity, "idempotency-key-reused")
	send(t, order).replays(t, http.StatusOK, ordered)
	if _, err := os.Stat(filepath.Join(cmd.Dir, "orders.db")); err != nil {
		t.Error(err)
	}
}

// shell runs the line, or sends it where there is no curl.
func shell(t *testing.T, line string) answer {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		return send(t, line)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", line)
	cmd.Env = append(os.Environ(), "no_proxy=*")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(out)), nil)
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return read(t, resp)
}

var curl = regexp.MustCompile(`^  curl -i (http://\S+) -d '([^']*)' -H 'Content-Type: ([^']*)'(?: -H 'Idempotency-Key: ([^']*)')?$`)

// send sends what curl would.
func send(t *testing.T, line string) answer {
	t.Helper()
	parts := curl.FindStringSubmatch(line)
	if parts == nil {
		t.Fatalf("not a line of the form %s: %s", curl, line)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, parts[1], strings.NewReader(parts[2]))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", parts[3])
	if parts[4] != "" {
		req.Header.Set("Idempotency-Key", parts[4])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, resp)
}
