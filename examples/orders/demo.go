package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

const (
	racers  = 50
	payment = `{"amount":250,"currency":"EUR"}`
)

// A story plays against a server in a process of its own, which it can kill.
type story struct {
	out    io.Writer
	sqlite string
	addr   string
	server *exec.Cmd
}

// play tells the whole story, and fails where the server does not keep to it.
func play(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "orders-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := &story{out: out, sqlite: filepath.Join(dir, "orders.db"), addr: free.Addr().String()}
	free.Close()
	if err := s.start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.kill()) }()

	// With DATABASE_URL the database may know earlier keys and payments.
	key := fmt.Sprintf("tea-%d", time.Now().UnixNano())
	before, err := s.payments(ctx)
	if err != nil {
		return err
	}
	steps := []struct {
		title, key, body string
		status           int
		replayed         bool
	}{
		{"Without a key the request is refused.", "", payment, 400, false},
		{"With a key it is created.", key, payment, 201, false},
		{"Sent again, it is replayed: same answer, no second payment.", key, payment, 201, true},
		{"Another request with the same key is refused.", key, `{"amount":999,"currency":"EUR"}`, 422, false},
	}
	for _, step := range steps {
		if err := s.step(ctx, step.title, step.key, step.body, step.status, step.replayed); err != nil {
			return err
		}
	}
	if err := s.race(ctx, key+"-race"); err != nil {
		return err
	}
	s.title("The server's process is killed with SIGKILL, and started again.")
	if err := s.restart(ctx); err != nil {
		return err
	}
	if err := s.step(ctx, "The new process replays what the old one recorded.", key, payment, 201, true); err != nil {
		return err
	}
	if err := s.outage(ctx); err != nil {
		return err
	}
	after, err := s.payments(ctx)
	if err != nil {
		return err
	}
	if after-before != 3 {
		return fmt.Errorf("%d payments were made, want 3", after-before)
	}
	s.title(fmt.Sprintf("All in all: %d payments, one for each key that was used.", after-before))
	return nil
}

func (s *story) title(text string) { fmt.Fprintf(s.out, "\n# %s\n", text) }

func (s *story) step(ctx context.Context, title, key, body string, status int, replayed bool) error {
	s.title(title)
	fmt.Fprintf(s.out, "POST /payments %s", body)
	if key != "" {
		fmt.Fprintf(s.out, "   Idempotency-Key: %s", key)
	}
	fmt.Fprintln(s.out)
	resp, text, err := s.post(ctx, key, body)
	if err != nil {
		return err
	}
	mark := ""
	if replay(resp) {
		mark = "   Idempotent-Replayed: true"
	}
	fmt.Fprintf(s.out, "  %d %s%s\n", resp.StatusCode, text, mark)
	if resp.StatusCode != status || replay(resp) != replayed {
		return fmt.Errorf("the answer is %d, replayed: %v; want %d, %v", resp.StatusCode, replay(resp), status, replayed)
	}
	return nil
}

func replay(resp *http.Response) bool { return resp.Header.Get("Idempotent-Replayed") == "true" }

func (s *story) post(ctx context.Context, key, body string) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.addr+"/payments", strings.NewReader(body))
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(bytes.TrimSpace(text)), err
}

func (s *story) race(ctx context.Context, key string) error {
	s.title(fmt.Sprintf("%d requests with one new key, all at once: one runs.", racers))
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		answers = map[string]int{}
		failed  error
	)
	for range racers {
		wg.Go(func() {
			resp, text, err := s.post(ctx, key, payment)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				failed = err
			case resp.StatusCode == http.StatusCreated && replay(resp):
				answers["201, replayed"]++
			case resp.StatusCode == http.StatusCreated:
				answers["201, ran"]++
			case resp.StatusCode == http.StatusConflict:
				answers["409, in flight"]++
			default:
				failed = fmt.Errorf("the answer is %d %s", resp.StatusCode, text)
			}
		})
	}
	wg.Wait()
	for _, kind := range []string{"201, ran", "409, in flight", "201, replayed"} {
		fmt.Fprintf(s.out, "  %2d × %s\n", answers[kind], kind)
	}
	if failed == nil && answers["201, ran"] != 1 {
		failed = fmt.Errorf("%d requests ran", answers["201, ran"])
	}
	return failed
}

// outage shows the generated client: one call, made while no server is there,
// that goes through once there is one again.
func (s *story) outage(ctx context.Context) error {
	s.title("The generated client calls while the server is down, and retries with one key until it is up.")
	if err := s.kill(); err != nil {
		return err
	}
	attempts := make(chan idempotentclient.Attempt, 100)
	client, err := api.NewClientWithResponses("http://"+s.addr, api.WithIdempotency(
		idempotentclient.WithObserver(func(_ context.Context, a idempotentclient.Attempt) { attempts <- a }),
		idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 100, Base: 100 * time.Millisecond, Max: 500 * time.Millisecond, MaxElapsed: time.Minute}),
	))
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		resp, err := client.CreatePaymentWithResponse(ctx, api.NewPayment{Amount: 250, Currency: "EUR"})
		if err == nil && resp.JSON201 == nil {
			err = fmt.Errorf("the answer is %s", resp.Status())
		}
		done <- err
	}()
	var tries []idempotentclient.Attempt
	tries = append(tries, <-attempts)
	if err := s.start(ctx); err != nil {
		return err
	}
	if err := <-done; err != nil {
		return err
	}
	for len(attempts) > 0 {
		tries = append(tries, <-attempts)
	}
	for _, a := range tries {
		result := "no answer"
		if a.Err == nil {
			result = fmt.Sprint(a.Status)
		}
		fmt.Fprintf(s.out, "  attempt %d   Idempotency-Key: %s   %s\n", a.Number, a.Key, result)
		if a.Key != tries[0].Key {
			return errors.New("the key changed between attempts")
		}
	}
	return nil
}

func (s *story) payments(ctx context.Context) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr+"/payments", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var payments []api.Payment
	err = json.NewDecoder(resp.Body).Decode(&payments)
	return len(payments), err
}

// start starts a server process and waits until it listens.
func (s *story) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	server := exec.CommandContext(ctx, self, "-addr", s.addr, "-sqlite", s.sqlite, "-delay", "100ms")
	server.Stderr = os.Stderr
	stdout, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		return errors.Join(fmt.Errorf("the server did not start: %w", err), server.Process.Kill(), server.Wait())
	}
	go io.Copy(io.Discard, stdout)
	s.server = server
	fmt.Fprintf(s.out, "  process %d: %s", server.Process.Pid, line)
	return nil
}

// kill kills the server process without a warning.
func (s *story) kill() error {
	if s.server == nil {
		return nil
	}
	err := s.server.Process.Kill()
	_ = s.server.Wait() // "signal: killed" is what was asked for
	fmt.Fprintf(s.out, "  process %d: killed\n", s.server.Process.Pid)
	s.server = nil
	return err
}

func (s *story) restart(ctx context.Context) error {
	if err := s.kill(); err != nil {
		return err
	}
	return s.start(ctx)
}
