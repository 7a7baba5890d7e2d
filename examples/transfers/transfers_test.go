package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// asCommand has the test binary be the command itself, as a process that can be
// killed.
const asCommand = "TRANSFERS_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A bank is a database that outlives its servers.
type bank struct{ postgres, sqlite string }

func onEach(t *testing.T, test func(*testing.T, bank)) {
	t.Run("SQLite", func(t *testing.T) { test(t, bank{sqlite: filepath.Join(t.TempDir(), "transfers.db")}) })
	t.Run("PostgreSQL", func(t *testing.T) { test(t, bank{postgres: pgtest.DSN(t)}) })
}

// A process is a running server.
type process struct {
	cmd *exec.Cmd
	url string
	log *bufio.Scanner
}

func (b bank) start(t *testing.T, delay time.Duration) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], "-addr", "127.0.0.1:0", "-sqlite", b.sqlite, "-delay", delay.String())}
	p.cmd.Env = append(os.Environ(), asCommand+"=1", "DATABASE_URL="+b.postgres)
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	p.log = bufio.NewScanner(errs)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		for p.log.Scan() {
			t.Log(p.log.Text())
		}
		t.Fatalf("the server did not start: %v", err)
	}
	p.url = strings.TrimSpace(strings.TrimPrefix(line, "listening on "))
	return p
}

// kill sends SIGKILL.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it is dead already
	_ = p.cmd.Wait()
}

// logged returns when the server's log has a line that begins so.
func (p *process) logged(t *testing.T, prefix string) {
	t.Helper()
	for p.log.Scan() {
		if strings.HasPrefix(p.log.Text(), "transfers: "+prefix) {
			return
		}
	}
	t.Fatalf("the log ended without %q", prefix)
}

// transfer returns the status, or 0 if the server died, and whether the answer
// is a replay.
func (p *process) transfer(key, body string) (status int, replayed bool) {
	req, err := http.NewRequest(http.MethodPost, p.url+"/transfers", strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Idempotency-Key", key)
	req.Header.Set("Content-Type", "application/json")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return 0, false
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, resp.Header.Get("Idempotent-Replayed") == "true"
}

func (p *process) transfers(t *testing.T, key, body string, status int, replayed bool) {
	t.Helper()
	if s, r := p.transfer(key, body); s != status || r != replayed {
		t.Fatalf("transfer %s: %d, replayed: %v; want %d, %v", body, s, r, status, replayed)
	}
}

func (p *process) accounts(t *testing.T, want ...Account) {
	t.Helper()
	resp, err := http.Get(p.url + "/accounts")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got []Account
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("the accounts are %v, want %v", got, want)
	}
}

// moved returns the number of transfers.
func (b bank) moved(t *testing.T) (n int) {
	t.Helper()
	db, _, err := open(t.Context(), b.postgres, b.sqlite)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow("SELECT count(*) FROM transfers").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

const rent = `{"from":"alice","to":"bob","amount":30}`

func TestTransfers(t *testing.T) {
	onEach(t, func(t *testing.T, b bank) {
		p := b.start(t, 0)
		p.transfers(t, "rent", rent, 201, false)
		p.transfers(t, "rent", rent, 201, true)
		p.accounts(t, Account{"alice", 70}, Account{"bob", 30})

		// Each refusal comes after alice's account was written.
		const gift = `{"from":"alice","to":"carol","amount":30}`
		p.transfers(t, "gift", gift, 404, false)
		p.transfers(t, "gift", gift, 404, true)
		const much = `{"from":"bob","to":"alice","amount":50}`
		p.transfers(t, "much", much, 422, false)
		p.accounts(t, Account{"alice", 70}, Account{"bob", 30})
		p.transfers(t, "more", rent, 201, false)
		p.transfers(t, "much", much, 201, false)
		p.accounts(t, Account{"alice", 90}, Account{"bob", 10})
		p.transfers(t, "none", `{"from":"bob","to":"alice","amount":-5}`, 422, false)
		if n := b.moved(t); n != 3 {
			t.Errorf("there are %d transfers", n)
		}
	})
}

// A process that dies in the middle of a transfer has done nothing, and holds
// the key no longer than it lived.
func TestKilledInMidTransfer(t *testing.T) {
	onEach(t, func(t *testing.T, b bank) {
		p := b.start(t, time.Hour)
		answer := make(chan int, 1)
		go func() {
			status, _ := p.transfer("rent", rent)
			answer <- status
		}()
		p.logged(t, "moving 30")
		p.kill()
		if status := <-answer; status != 0 {
			t.Fatalf("the killed server answered %d", status)
		}

		p = b.start(t, 0)
		p.accounts(t, Account{"alice", 100}, Account{"bob", 0})
		// PostgreSQL may take a moment to notice.
		status, replayed := p.transfer("rent", rent)
		for deadline := time.Now().Add(10 * time.Second); status == 409 && time.Now().Before(deadline); {
			status, replayed = p.transfer("rent", rent)
		}
		if status != 201 || replayed {
			t.Fatalf("the retry: %d, replayed: %v", status, replayed)
		}
		p.transfers(t, "rent", rent, 201, true)
		p.accounts(t, Account{"alice", 70}, Account{"bob", 30})
	})
}

// A process that dies as soon as the money has moved, whether it answered or
// not, leaves the answer for the retry.
func TestKilledAfterTheCommit(t *testing.T) {
	onEach(t, func(t *testing.T, b bank) {
		p := b.start(t, 0)
		answer := make(chan int, 1)
		go func() {
			status, _ := p.transfer("rent", rent)
			answer <- status
		}()
		for deadline := time.Now().Add(20 * time.Second); b.moved(t) == 0; {
			if time.Now().After(deadline) {
				t.Fatal("no money was moved")
			}
		}
		p.kill()
		t.Logf("the client got %d", <-answer)

		p = b.start(t, 0)
		p.transfers(t, "rent", rent, 201, true)
		p.accounts(t, Account{"alice", 70}, Account{"bob", 30})
		if n := b.moved(t); n != 1 {
			t.Errorf("there are %d transfers", n)
		}
	})
}
