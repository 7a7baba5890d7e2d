package idempotency_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// servesFile names the database of a process that is a server of the test below.
const servesFile = "IDEMPOTENCY_TEST_SERVES"

func TestMain(m *testing.M) {
	if file := os.Getenv(servesFile); file != "" {
		fmt.Fprintln(os.Stderr, serveFile(file))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// Each server answers with its process and the number of its run.
func serveFile(file string) error {
	db, err := sql.Open("sqlite", sqlstore.SQLiteDSN(file))
	if err != nil {
		return err
	}
	store, err := sqlstore.NewSQLite(db)
	if err != nil {
		return err
	}
	if err := store.Migrate(context.Background()); err != nil {
		return err
	}
	guard, err := idempotency.New(store, cached)
	if err != nil {
		return err
	}
	brief, inTx := idempotency.DefaultPolicy("POST /brief"), idempotency.DefaultPolicy("POST /tx")
	brief.TTL, inTx.TTL = briefTTL, briefTTL
	inTx.Guarantee = idempotency.Transaction
	idempotency.Register[*http.Request](guard, &brief, &inTx)
	mux, runs := http.NewServeMux(), 0
	for path, policy := range map[string]*idempotency.Policy{"/brief": &brief, "/tx": &inTx} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			guard.Handle(policy, w, r, func(w http.ResponseWriter, r *http.Request) {
				runs++
				fmt.Fprint(w, os.Getpid(), "-", runs)
			})
		})
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	return http.Serve(l, mux)
}

const briefTTL = 500 * time.Millisecond

// TestReplayCacheInTwoProcesses has two processes with a cache each answer for one
// key over several lives of its row: no answer of an earlier life is replayed once
// there is a later one.
func TestReplayCacheInTwoProcesses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.db")
	var servers [2]string
	for i := range servers {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), servesFile+"="+file)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		address, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		servers[i] = "http://" + strings.TrimSpace(address)
	}
	for _, path := range []string{"/brief", "/tx"} {
		post := func(server int) (body string, replayed bool) {
			r, err := http.NewRequest("POST", servers[server]+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Idempotency-Key", "k")
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			text := new(strings.Builder)
			if _, err := bufio.NewReader(resp.Body).WriteTo(text); err != nil || resp.StatusCode != 200 {
				t.Fatalf("%s: %d %s, %v", path, resp.StatusCode, text, err)
			}
			return text.String(), resp.Header.Get("Idempotent-Replayed") != ""
		}
		for life := range 3 {
			runner, reader := life%2, 1-life%2
			// The last life's answer may still be there, in both caches.
			var answer string
			eventually(t, "the end of the last life", func() bool {
				var replayed bool
				answer, replayed = post(runner)
				return !replayed
			})
			if got, _ := post(reader); got == answer {
				continue
			} else if again, _ := post(runner); again == answer {
				t.Fatalf("%s: the row says %q, the other process replays %q", path, answer, got)
			}
		}
	}
}
