package main

import (
	"bufio"
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// commands are the worker and its server, built for these tests: without the race
// detector, so that a worker that is started again has a dead one's commit to meet.
var commands struct{ worker, orders string }

func TestMain(m *testing.M) { os.Exit(withCommands(m)) }

func withCommands(m *testing.M) int {
	dir, err := os.MkdirTemp("", "worker-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if out, err := exec.Command("go", "build", "-o", dir+string(filepath.Separator), ".", "../orders").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v: %s", err, out)
		return 1
	}
	built, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(built) != 2 {
		fmt.Fprintf(os.Stderr, "built were %q, %v\n", built, err)
		return 1
	}
	commands.orders, commands.worker = built[0], built[1]
	return m.Run()
}

// serve starts the server of examples/orders and returns its URL.
func serve(t *testing.T) string {
	t.Helper()
	server := exec.Command(commands.orders, "-addr", "127.0.0.1:0", "-sqlite", filepath.Join(t.TempDir(), "orders.db"), "-delay", "10ms")
	server.Env = append(os.Environ(), "DATABASE_URL=")
	server.Stderr = t.Output()
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait() // "signal: killed" is what was asked for
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out)
	return strings.TrimSpace(strings.TrimPrefix(line, "listening on "))
}

// A database is what a worker keeps its orders in.
type database struct {
	driver, dsn string
	life        time.Duration // in which a worker charges some orders
}

func (d database) open(t *testing.T) *sql.DB {
	t.Helper()
	dsn := d.dsn
	if d.driver == "sqlite" {
		dsn = sqlstore.SQLiteDSN(dsn)
	}
	db, err := sql.Open(d.driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// onDatabases runs a test on a fresh database of each kind. PostgreSQL's commits
// take so long that a worker that was killed often has one under way when the
// next begins.
func onDatabases(t *testing.T, test func(*testing.T, database)) {
	t.Run("SQLite", func(t *testing.T) {
		test(t, database{"sqlite", filepath.Join(t.TempDir(), "worker.db"), 50 * time.Millisecond})
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		test(t, database{"postgres", pgtest.Start(t, "fsync=on", "commit_delay=50000", "commit_siblings=0").DSN(t), 400 * time.Millisecond})
	})
}

// work runs the worker until it ends or, if it is given a life, is killed after
// that much of its work. The error is the worker's, with what it said of it.
func work(server string, db database, orders string, life time.Duration) (killed bool, err error) {
	cmd := exec.Command(commands.worker, "-server", server, "-sqlite", db.dsn, "-orders", orders)
	cmd.Env = append(os.Environ(), "DATABASE_URL=")
	if db.driver == "postgres" {
		cmd.Env = append(cmd.Env, "DATABASE_URL="+db.dsn)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil {
		return false, fmt.Errorf("the worker did not begin: %q, %w: %s", line, errors.Join(err, cmd.Wait()), &said)
	}
	limit := 60 * time.Second
	if life > 0 {
		limit = life
	}
	kill := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	_, _ = io.Copy(io.Discard, lines) // ends with the worker
	err = cmd.Wait()
	killed = !kill.Stop() && !cmd.ProcessState.Exited()
	switch {
	case killed && life == 0:
		return true, fmt.Errorf("the worker did not end in %v: %s", limit, &said)
	case killed:
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%w: %s", err, &said)
	}
	return false, nil
}

// supervise keeps a worker running until so many were killed, and starts the next
// at once.
func supervise(t *testing.T, server string, db database, kills int) {
	// On a busy machine a process takes long to begin: then fewer are killed.
	left := kills
	for begun, starts := time.Now(), 0; left > 0 && time.Since(begun) < 20*time.Second; starts++ {
		// Most take no order, and so come at once to the one that the last was at.
		orders := "0"
		if starts%4 == 0 {
			orders = "3"
		}
		killed, err := work(server, db, orders, rand.N(db.life)+time.Millisecond)
		if err != nil {
			t.Error(err)
			return
		}
		if killed {
			left--
		}
	}
	if left > kills*2/3 {
		t.Errorf("only %d workers were killed", kills-left)
	}
}

func TestKilledAtRandomItChargesEachOrderOnce(t *testing.T) {
	onDatabases(t, func(t *testing.T, db database) {
		server := serve(t)
		supervise(t, server, db, 40)
		chargedOnce(t, server, db)
	})
}

func TestThreeAtOnceKilledAtRandomChargeEachOrderOnce(t *testing.T) {
	onDatabases(t, func(t *testing.T, db database) {
		server := serve(t)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { supervise(t, server, db, 15) })
		}
		wg.Wait()
		chargedOnce(t, server, db)
	})
}

func TestManyStartedAtOnceOnAFreshDatabase(t *testing.T) {
	onDatabases(t, func(t *testing.T, db database) {
		server := serve(t)
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if _, err := work(server, db, "2", 0); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		chargedOnce(t, server, db)
	})
}

// quiet waits until PostgreSQL has noticed that all workers are gone: it commits
// the orders that they took last.
func quiet(t *testing.T, db *sql.DB) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var others int
		err := db.QueryRow(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`).Scan(&others)
		if err != nil {
			t.Fatal(err)
		}
		if others == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d connections of workers that were killed are still there", others)
		}
	}
}

// chargedOnce has a last worker charge what is left, and demands that each order
// has a payment of its own and the server no other.
func chargedOnce(t *testing.T, server string, in database) {
	t.Helper()
	db := in.open(t)
	if in.driver == "postgres" {
		quiet(t, db)
	}
	if _, err := work(server, in, "0", 0); err != nil {
		t.Fatal(err)
	}
	client, err := api.NewClientWithResponses(server)
	if err != nil {
		t.Fatal(err)
	}
	payments, err := client.ListPaymentsWithResponse(t.Context())
	if err != nil || payments.JSON200 == nil {
		t.Fatalf("listing the payments: %v, %v", payments, err)
	}
	paid := map[int64]int64{} // payment: amount
	for _, p := range *payments.JSON200 {
		paid[p.Id] = p.Amount
	}
	rows, err := db.Query(`SELECT id, amount, coalesce(payment, 0) FROM orders`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	orders := 0
	for ; rows.Next(); orders++ {
		var order, amount, payment int64
		if err := rows.Scan(&order, &amount, &payment); err != nil {
			t.Fatal(err)
		}
		if paid[payment] != amount {
			t.Errorf("order %d of %d is charged by payment %d of %d", order, amount, payment, paid[payment])
		}
		delete(paid, payment)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if orders == 0 || len(paid) > 0 {
		t.Errorf("%d orders were charged, and for none of them the payments %v", orders, paid)
	}
}

// TestOneBadOrderHoldsUpNoOther has a server answer by the amount.
func TestOneBadOrderHoldsUpNoOther(t *testing.T) {
	answers := map[int64]struct {
		status     int
		kind, todo string
	}{
		101: {422, "idempotency-key-reused", "mend this program"},
		102: {409, "idempotency-not-replayable", "look for the payment"},
		103: {409, "idempotency-outcome-unknown", "look for the payment"},
		104: {422, "urn:orders:invalid", "decide what becomes of the order"},
		106: {503, "idempotency-outcome-unknown", "mend what is wrong, if anything is, and start a worker again"},
		107: {401, "urn:orders:unauthenticated", "mend what is wrong, if anything is, and start a worker again"},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asked api.NewPayment
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/json")
		if bad, ok := answers[asked.Amount]; ok {
			w.WriteHeader(bad.status)
			fmt.Fprintf(w, `{"type":%q,"title":"No","status":%d}`, bad.kind, bad.status)
			return
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, `{"id":7,"amount":%d,"currency":"EUR"}`, asked.Amount)
	}))
	defer server.Close()
	onDatabases(t, func(t *testing.T, in database) {
		_, err := work(server.URL, in, "9", 0)
		if err == nil || !strings.Contains(err.Error(), "6 of 9 calls stay pending") {
			t.Fatalf("the worker ended with %v", err)
		}
		for amount, bad := range answers {
			_, said, _ := strings.Cut(err.Error(), fmt.Sprintf("charge order %d: ", amount-99)) // the first order's is 100
			if _, said, _ = strings.Cut(said, "\t"); !strings.HasPrefix(said, bad.todo) {
				t.Errorf("of %s %d it does not say %q: %v", bad.kind, bad.status, bad.todo, err)
			}
		}
		var charged, left int
		err = in.open(t).QueryRow(`SELECT (SELECT count(payment) FROM orders), (SELECT count(*) FROM idempotent_calls)`).Scan(&charged, &left)
		if err != nil || charged != 3 || left != len(answers) {
			t.Errorf("%d orders are charged, and %d calls pending, %v", charged, left, err)
		}
	})
}
