//go:build unix

package pgtest_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func TestDatabasesAreFresh(t *testing.T) {
	a, b := open(t, pgtest.DSN(t)), open(t, pgtest.DSN(t))
	for _, db := range []*sql.DB{a, b} {
		if _, err := db.Exec("CREATE TABLE only_mine ()"); err != nil {
			t.Error(err)
		}
	}
}

func TestServerStopsStartsAndFreezes(t *testing.T) {
	began := time.Now()
	server := pgtest.Start(t, "fsync=on")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("starting took %v", took)
	}
	dsn := server.DSN(t)
	db := open(t, dsn)
	var fsync string
	if err := db.QueryRow("SHOW fsync").Scan(&fsync); err != nil || fsync != "on" {
		t.Fatalf("fsync is %q, %v", fsync, err)
	}
	if _, err := db.Exec("CREATE TABLE kept ()"); err != nil {
		t.Fatal(err)
	}
	for name, stop := range map[string]func(testing.TB){"Stop": server.Stop, "Crash": server.Crash} {
		stop(t)
		if conn, err := net.Dial("tcp", server.Addr()); err == nil {
			conn.Close()
			t.Fatalf("after %s the server still listens", name)
		}
		server.Restart(t)
		if _, err := open(t, dsn).Exec("SELECT FROM kept"); err != nil {
			t.Fatalf("after %s and Restart: %v", name, err)
		}
	}

	server.Freeze(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	answered := make(chan error, 1)
	go func() { answered <- open(t, dsn).PingContext(ctx) }()
	select {
	case err := <-answered:
		if err == nil {
			t.Error("a frozen server answered")
		}
	case <-ctx.Done():
	}
	server.Thaw()
	if err := open(t, dsn).Ping(); err != nil {
		t.Errorf("after Thaw: %v", err)
	}
}

// TestClusterOfKilledProcessIsRemoved runs this test binary again, kills it
// and waits for the end of its cluster.
func TestClusterOfKilledProcessIsRemoved(t *testing.T) {
	if os.Getenv("PGTEST_VICTIM") != "" {
		server := pgtest.Start(t)
		os.Stdout.WriteString("\ncluster " + server.SocketDir() + " " + server.Addr() + "\n")
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestClusterOfKilledProcessIsRemoved$")
	cmd.Env = append(os.Environ(), "PGTEST_VICTIM=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var dir, addr string
	for lines := bufio.NewScanner(out); addr == "" && lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "cluster "); ok {
			dir, addr, _ = strings.Cut(rest, " ")
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if addr == "" {
		t.Fatal("the other process started no cluster")
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, dialErr := net.Dial("tcp", addr)
		if dialErr == nil {
			conn.Close()
		}
		_, statErr := os.Stat(dir)
		if dialErr != nil && errors.Is(statErr, fs.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the cluster is still there: dial %v, directory %v", dialErr, statErr)
		}
	}
}
