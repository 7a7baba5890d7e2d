//go:build unix

package idempotentclient_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// envWorker makes this binary a worker instead of a test.
const envWorker = "IDEMPOTENTCLIENT_TEST_WORKER"

func TestMain(m *testing.M) {
	if settings := os.Getenv(envWorker); settings != "" {
		var w worker
		err := json.Unmarshal([]byte(settings), &w)
		if err == nil {
			err = w.run()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// A worker charges orders and notes each in a file before it is done.
type worker struct {
	Server, Dir string
	Orders      int
	Die         string // the step after which it kills itself
}

func (w worker) reached(step string) {
	if w.Die == step {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // which does not return
	}
}

func (w worker) journal() string { return filepath.Join(w.Dir, "journal") }

func (w worker) noted() ([]string, error) {
	text, err := os.ReadFile(filepath.Join(w.Dir, "noted"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(text)), err
}

func (w worker) run() error {
	journal, err := idempotentclient.OpenJournal(w.journal(), 0)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	notes, err := os.OpenFile(filepath.Join(w.Dir, "noted"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	client := api{Server: w.Server, Client: http.DefaultClient}
	for i := range w.Orders {
		name := fmt.Sprintf("order-%d", i)
		call, err := journal.Begin(context.Background(), name)
		if err != nil {
			return err
		}
		w.reached("Begin")
		noted, err := w.noted()
		if err != nil {
			return err
		}
		if !slices.Contains(noted, name) {
			resp, err := client.CreateOrder(call, "", strings.NewReader(name))
			if err != nil {
				return err
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusCreated {
				return fmt.Errorf("%s: %s %s %w", name, resp.Status, text, err)
			}
			w.reached("answer")
			if _, err := fmt.Fprintln(notes, name); err != nil {
				return err
			}
			w.reached("note")
		}
		if err := journal.Done(name); err != nil {
			return err
		}
		w.reached("Done")
	}
	if calls := journal.Pending(); len(calls) > 0 {
		return fmt.Errorf("all orders are charged, and pending are %v", calls)
	}
	return journal.Close()
}

// A charger is a guarded server that remembers what it did for which key.
type charger struct {
	*httptest.Server
	mu    sync.Mutex
	ran   map[string]int // how often each body was charged
	asked chan struct{}  // gets a value when a request has arrived
}

func newCharger(t *testing.T, hold func()) *charger {
	t.Helper()
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		t.Fatal(err)
	}
	policy := idempotency.DefaultPolicy("POST /orders")
	idempotency.Register[*http.Request](guard, &policy)
	c := &charger{ran: map[string]int{}, asked: make(chan struct{}, 1)}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard.Handle(&policy, w, r, func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			c.mu.Lock()
			c.ran[string(body)]++
			c.mu.Unlock()
			select {
			case c.asked <- struct{}{}:
			default:
			}
			hold()
			w.WriteHeader(http.StatusCreated)
		})
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *charger) once(t *testing.T, orders int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range orders {
		if n := c.ran[fmt.Sprintf("order-%d", i)]; n != 1 {
			t.Errorf("order %d was charged %d times", i, n)
		}
	}
	if len(c.ran) != orders {
		t.Errorf("%d orders were charged, want %d", len(c.ran), orders)
	}
}

// A process is a worker with a process of its own.
type process struct {
	cmd   *exec.Cmd
	ready chan bool // true once it has its journal, false if it ended before
	ended chan error
}

func (w worker) start(t *testing.T) *process {
	t.Helper()
	settings, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(os.Args[0]), ready: make(chan bool, 1), ended: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), envWorker+"="+string(settings))
	p.cmd.Stderr = t.Output()
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := io.ReadFull(out, make([]byte, len("ready\n")))
		p.ready <- err == nil
		_, _ = io.Copy(io.Discard, out)
		p.ended <- p.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // if it still runs
		<-ended
	})
	return p
}

func (p *process) await(t *testing.T, patience <-chan time.Time) error {
	t.Helper()
	select {
	case err := <-p.ended:
		return err
	case <-patience:
		t.Fatal("the worker did not end in time")
		return nil
	}
}

// TestJournalSurvivesAKillAtEachStep kills a worker where it is most tempting to
// lose a key or to make a second one.
func TestJournalSurvivesAKillAtEachStep(t *testing.T) {
	for _, step := range []string{"Begin", "answer", "note", "Done"} {
		t.Run(step, func(t *testing.T) {
			patience := time.After(20 * time.Second)
			c := newCharger(t, func() {})
			w := worker{Server: c.URL, Dir: t.TempDir(), Orders: 2, Die: step}
			if err := w.start(t).await(t, patience); err == nil {
				t.Fatal("the worker was not killed")
			}
			w.Die = ""
			if err := w.start(t).await(t, patience); err != nil {
				t.Fatal(err)
			}
			c.once(t, 2)
		})
	}
	t.Run("first byte", func(t *testing.T) {
		patience := time.After(20 * time.Second)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		if err := listener.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		w := worker{Server: "http://" + listener.Addr().String(), Dir: t.TempDir(), Orders: 1}
		p := w.start(t)
		conn, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := p.await(t, patience); err == nil {
			t.Fatal("the worker was not killed")
		}
		head, err := io.ReadAll(conn)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		calls := openJournal(t, w.journal()).Pending()
		if len(calls) != 1 || calls[0].Name != "order-0" || !strings.Contains(string(head), "\r\nIdempotency-Key: "+calls[0].Key+"\r\n") {
			t.Fatalf("in the journal are %v, and on the wire was %q", calls, head)
		}
	})
	t.Run("request", func(t *testing.T) {
		patience := time.After(20 * time.Second)
		killed := make(chan struct{})
		c := newCharger(t, func() { <-killed })
		w := worker{Server: c.URL, Dir: t.TempDir(), Orders: 2}
		first := w.start(t)
		select {
		case <-c.asked:
		case <-patience:
			t.Fatal("no request came")
		}
		if err := first.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := first.await(t, patience); err == nil {
			t.Fatal("the worker was not killed")
		}
		close(killed)
		if err := w.start(t).await(t, patience); err != nil {
			t.Fatal(err)
		}
		c.once(t, 2)
	})
}

func TestJournalSurvivesKillsAtRandom(t *testing.T) {
	patience := time.After(40 * time.Second)
	const orders, kills = 60, 20
	c := newCharger(t, func() {})
	w := worker{Server: c.URL, Dir: t.TempDir(), Orders: orders}
	for range kills {
		p := w.start(t)
		if !<-p.ready {
			t.Fatal("the worker did not open its journal")
		}
		select {
		case err := <-p.ended:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(rand.N(40 * time.Millisecond)):
			_ = p.cmd.Process.Kill() // if it did not end meanwhile
			_ = p.await(t, patience)
		}
	}
	if err := w.start(t).await(t, patience); err != nil {
		t.Fatal(err)
	}
	c.once(t, orders)
}

func TestJournalLocksOutASecondProcess(t *testing.T) {
	patience := time.After(20 * time.Second)
	killed := make(chan struct{})
	c := newCharger(t, func() { <-killed })
	defer close(killed)
	w := worker{Server: c.URL, Dir: t.TempDir(), Orders: 1}
	p := w.start(t)
	if !<-p.ready {
		t.Fatal("the worker did not open its journal")
	}
	if _, err := idempotentclient.OpenJournal(w.journal(), 0); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatalf("a journal was opened by two processes: %v", err)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.await(t, patience)
	openJournal(t, w.journal()) // a killed process leaves no lock
}
