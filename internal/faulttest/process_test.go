//go:build unix

package faulttest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// patience bounds every wait for what should come soon.
const patience = 20 * time.Second

// newConfig returns the config of a server on a database, with the defaults of
// the guard and a lease.
func newConfig(d database, lease time.Duration) config {
	policy := idempotency.DefaultPolicy("")
	policy.Lease = lease
	return config{
		Database:     d,
		Process:      1,
		MaxOpenConns: 20,
		StoreTimeout: idempotency.DefaultStoreTimeout,
		Policy:       policy,
	}
}

// A process is a running server.
type process struct {
	cmd    *exec.Cmd
	url    string
	in     io.WriteCloser
	exited chan struct{}

	mu   sync.Mutex
	said map[string]chan struct{} // closed when the line was printed
}

// start starts a server, which ends with the test.
func start(t *testing.T, c config) *process {
	t.Helper()
	settings, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{
		cmd:    exec.Command(os.Args[0]),
		exited: make(chan struct{}),
		said:   map[string]chan struct{}{},
	}
	var stderr bytes.Buffer
	p.cmd.Stderr = &stderr
	p.cmd.Env = append(os.Environ(), envServer+"="+string(settings))
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listening := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if addr, ok := strings.CutPrefix(lines.Text(), "listening "); ok {
				listening <- addr
				continue
			}
			close(p.line(lines.Text()))
		}
		_ = p.cmd.Wait() // most are killed
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.kill(t)
		if t.Failed() || strings.Contains(stderr.String(), "DATA RACE") {
			t.Errorf("server %d wrote:\n%s", c.Process, &stderr)
		}
	})
	select {
	case addr := <-listening:
		p.url = "http://" + addr
	case <-p.exited:
		t.Fatalf("server %d ended while it started", c.Process)
	case <-time.After(patience):
		t.Fatalf("server %d did not start", c.Process)
	}
	return p
}

// kill ends the process without a word, as kill -9 does.
func (p *process) kill(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Kill() // it may have ended
	p.awaitExit(t)
}

func (p *process) awaitExit(t *testing.T) {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		t.Fatal("a server did not end")
	}
}

func (p *process) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

func (p *process) line(text string) chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.said[text] == nil {
		p.said[text] = make(chan struct{})
	}
	return p.said[text]
}

// await returns when the server has printed a line. It prints none twice.
func (p *process) await(t *testing.T, line string) {
	t.Helper()
	select {
	case <-p.line(line):
	case <-p.exited:
		t.Fatalf("the server ended and never said %q", line)
	case <-time.After(patience):
		t.Fatalf("the server does not say %q", line)
	}
}

// release lets the handler of key go on from its step "hold".
func (p *process) release(t *testing.T, key string) {
	t.Helper()
	if _, err := fmt.Fprintln(p.in, key); err != nil {
		t.Fatal(err)
	}
}

// client uses each connection once: on one that breaks when it is used again
// net/http sends a request with a key once more, unasked.
var client = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true},
	Timeout:   patience,
}

// An answer is what became of a request.
type answer struct {
	// kind is "created" or "replayed" for a 201, "<status> <name>" for a
	// problem, else something that no test expects.
	kind string
	body string
	took time.Duration
	// request is the name of the request that is answered.
	request string
}

const (
	created  = "created"
	replayed = "replayed"

	inFlight         = "409 " + wire.InFlight
	unknown          = "409 " + wire.OutcomeUnknown
	unsettled        = "503 " + wire.OutcomeUnknown
	storeUnavailable = "503 " + wire.StoreUnavailable
)

// post sends a request and waits for its answer.
func (p *process) post(path, key, steps string) answer {
	return p.postUntil(context.Background(), path, key, steps)
}

func (p *process) postUntil(ctx context.Context, path, key, steps string) answer {
	return p.send(ctx, path, key, steps, "")
}

func (p *process) send(ctx context.Context, path, key, steps, death string) answer {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+path, strings.NewReader(`{"amount":250,"currency":"EUR"}`))
	if err != nil {
		return answer{kind: err.Error()}
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(wire.HeaderKey, key)
	r.Header.Set(headerSteps, steps)
	r.Header.Set(headerDeath, death)
	request := rand.Text()
	r.Header.Set(headerRequest, request)
	sent := time.Now()
	resp, err := client.Do(r)
	if err != nil {
		return answer{kind: err.Error()}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{kind: err.Error()}
	}
	return answer{kind: kind(resp, path, key, body), body: string(body), took: time.Since(sent), request: request}
}

func kind(resp *http.Response, path, key string, body []byte) string {
	if resp.StatusCode == http.StatusCreated {
		switch {
		case resp.Header.Get("Location") != path+"/"+key:
			return fmt.Sprintf("201 with Location %q", resp.Header.Get("Location"))
		case resp.Header.Get(wire.HeaderReplayed) == "":
			return created
		}
		return replayed
	}
	var problem struct{ Type string }
	if err := json.Unmarshal(body, &problem); err != nil || resp.Header.Get("Content-Type") != wire.ProblemType {
		return fmt.Sprintf("%s: %s", resp.Status, body)
	}
	name := strings.TrimPrefix(problem.Type, wire.ProblemBase)
	what := fmt.Sprintf("%d %s", resp.StatusCode, name)
	// Whoever may send it again is told when.
	again := resp.StatusCode == http.StatusServiceUnavailable || name == wire.InFlight
	if after := resp.Header.Get("Retry-After"); again != (after == "1" || after == "2") {
		what += fmt.Sprintf(" with Retry-After %q", after)
	}
	return what
}

// begin sends a request and delivers its answer.
func (p *process) begin(path, key, steps string) <-chan answer {
	done := make(chan answer, 1)
	go func() { done <- p.post(path, key, steps) }()
	return done
}

// hold sends a request and returns when its handler holds.
func (p *process) hold(t *testing.T, path, key, steps string) <-chan answer {
	t.Helper()
	done := p.begin(path, key, steps)
	select {
	case <-p.line("holding " + key):
	case a := <-done:
		t.Fatalf("%s was answered %s (%s) before its handler held", key, a.kind, a.body)
	}
	return done
}

func receive(t *testing.T, done <-chan answer) answer {
	t.Helper()
	select {
	case a := <-done:
		return a
	case <-time.After(patience):
		t.Fatal("a request is not answered")
		return answer{}
	}
}

// pause lies between two tries of what is not yet so.
const pause = 20 * time.Millisecond

// until sends a request again and again for as long as the answer is of one of
// the kinds of meanwhile, and returns the first that is not.
func (p *process) until(t *testing.T, path, key, steps string, meanwhile ...string) answer {
	t.Helper()
	deadline := time.Now().Add(patience)
again:
	for {
		a := p.post(path, key, steps)
		for _, kind := range meanwhile {
			if a.kind == kind && time.Now().Before(deadline) {
				time.Sleep(pause)
				continue again
			}
		}
		return a
	}
}

func want(t *testing.T, what string, a answer, kind string) {
	t.Helper()
	if a.kind != kind {
		t.Fatalf("%s: %s, want %s", what, a.kind, kind)
	}
}

// wantReplay sends a request whose answer was first.
func wantReplay(t *testing.T, p *process, path, key string, first answer) {
	t.Helper()
	a := p.post(path, key, "effect")
	want(t, "replay", a, replayed)
	if a.body != first.body {
		t.Fatalf("replay of %q is %q", first.body, a.body)
	}
}
