//go:build pgbouncer

package sqlstore_test

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
)

// These tests need pgbouncer, which Debian packages. They have a build tag so
// that the others do not.

// bouncer starts a pgbouncer in transaction pooling before the server of dsn,
// with fewer connections than its clients have, and returns the DSN that leads
// through it.
func bouncer(t *testing.T, dsn string, connections int) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().(*net.TCPAddr)
	listener.Close()
	dir, err := os.MkdirTemp("", "pgbouncer-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := filepath.Join(dir, "pgbouncer.ini")
	if err := os.WriteFile(config, fmt.Appendf(nil, `[databases]
* = host=%s port=%s user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
`, u.Hostname(), u.Port(), u.User.Username(), addr.Port, connections), 0o644); err != nil {
		t.Fatal(err)
	}
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer" // which is in root's PATH only
	}
	cmd := exec.Command(path, config)
	cmd.Dir = dir
	if os.Geteuid() == 0 { // pgbouncer refuses root
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: nobody(t)}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting pgbouncer (Debian: apt-get install pgbouncer): %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("pgbouncer wrote:\n%s", text)
		}
	})
	u.Host = addr.String()
	through := u.String()
	db := open(t, "postgres", through)
	eventually(t, db.Ping)
	return through
}

func nobody(t *testing.T) *syscall.Credential {
	t.Helper()
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
}

// Every promise of a store holds through a pooler that gives each statement
// whatever connection is free, of fewer than there are clients.
func TestPostgresThroughPgBouncer(t *testing.T) {
	db := open(t, "postgres", bouncer(t, pgtest.DSN(t), 3))
	db.SetMaxOpenConns(20)
	db.SetMaxIdleConns(20)
	storetest.Run(t, tables(t, db))
}

func TestTxThroughPgBouncer(t *testing.T) {
	b := txPostgres(t)
	b.dsn = bouncer(t, b.dsn, 3)
	race(t, b)
	sessionIsClean(t, b)
}

// A pool of prepared statements through a pooler is refused, with what to do.
func TestOpenPostgresThroughPgBouncer(t *testing.T) {
	store := openDirect(t, bouncer(t, pgtest.DSN(t), 3))
	if err := store.Migrate(t.Context()); err == nil || !strings.Contains(err.Error(), "NewPostgres") {
		t.Errorf("got %v", err)
	}
}

// sessionIsClean checks that nothing of the store's is left in the connections
// that other clients of the pooler get.
func sessionIsClean(t *testing.T, b txBackend) {
	t.Helper()
	db := open(t, b.driver, b.dsn)
	var locks, prepared int
	if err := db.QueryRow(`SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
		(SELECT count(*) FROM pg_prepared_statements)`).Scan(&locks, &prepared); err != nil {
		t.Fatal(err)
	}
	if locks != 0 || prepared != 0 {
		t.Errorf("%d advisory locks and %d prepared statements are left", locks, prepared)
	}
}
