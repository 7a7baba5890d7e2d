package main

import (
	"bufio"
	"database/sql"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// asCommand makes this binary the command instead of a test.
const asCommand = "WORKER_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// serve builds and starts the server of examples/orders and returns its URL.
func serve(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	command := filepath.Join(dir, "orders.exe")
	if out, err := exec.Command("go", "build", "-o", command, "../orders").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	server := exec.Command(command, "-addr", "127.0.0.1:0", "-sqlite", filepath.Join(dir, "orders.db"), "-delay", "10ms")
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
type database struct{ driver, dsn string }

// work runs the worker until it ends or, if it is given a time, is killed after
// that much of its work.
func work(t *testing.T, server string, db database, orders string, life time.Duration) (killed bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-server", server, "-sqlite", db.dsn, "-orders", orders)
	cmd.Env = append(os.Environ(), asCommand+"=1", "DATABASE_URL=")
	if db.driver == "postgres" {
		cmd.Env = append(cmd.Env, "DATABASE_URL="+db.dsn)
	}
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("the worker did not begin: %q, %v, %v", line, err, cmd.Wait())
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, out)
		close(ended)
	}()
	limit := time.After(20 * time.Second)
	if life > 0 {
		limit = time.After(life)
	}
	select {
	case <-ended:
	case <-limit:
		killed = cmd.Process.Kill() == nil
		<-ended
	}
	if err := cmd.Wait(); !killed && err != nil {
		t.Fatalf("the worker failed: %v", err)
	}
	if killed && life == 0 {
		t.Fatal("the worker did not end in time")
	}
	return killed
}

// TestKilledAtRandomItChargesEachOrderOnce kills thirty workers in the midst of
// their work.
func TestKilledAtRandomItChargesEachOrderOnce(t *testing.T) {
	t.Run("SQLite", func(t *testing.T) {
		chargesEachOrderOnce(t, database{"sqlite", filepath.Join(t.TempDir(), "worker.db")})
	})
	t.Run("PostgreSQL", func(t *testing.T) { chargesEachOrderOnce(t, database{"postgres", pgtest.DSN(t)}) })
}

// quiet waits until PostgreSQL has noticed that all workers are gone: it commits
// what they asked for last.
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

func chargesEachOrderOnce(t *testing.T, in database) {
	server := serve(t)
	kills := 0
	// On a busy machine a process takes long to begin: then fewer do.
	for begun := time.Now(); kills < 30 && time.Since(begun) < 20*time.Second; {
		if work(t, server, in, "4", rand.N(120*time.Millisecond)+time.Millisecond) {
			kills++
		}
	}
	dsn := in.dsn
	if in.driver == "sqlite" {
		dsn = sqlstore.SQLiteDSN(dsn)
	}
	db, err := sql.Open(in.driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if in.driver == "postgres" {
		quiet(t, db)
	}
	work(t, server, in, "0", 0)
	if kills < 10 {
		t.Errorf("only %d workers were killed", kills)
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
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if orders == 0 || len(paid) != orders {
		t.Errorf("%d orders were charged by %d payments", orders, len(paid))
	}
	t.Logf("%d workers were killed over %d orders", kills, orders)
}
