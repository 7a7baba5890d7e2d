//go:build unix

// Package pgtest gives tests a real PostgreSQL.
//
// [DSN] returns a fresh database on the server that OAPI_IDEMPOTENT_TEST_DSN
// names, else on a throw-away cluster made from local binaries: initdb and
// postgres in PATH, else the newest in /usr/lib/postgresql. The cluster is
// shared by the tests of one process, and is stopped and removed when the
// process ends, however it ends. [Start] gives a cluster of a test's own that
// it may stop, start and freeze. Without a PostgreSQL tests fail; they are
// never skipped.
package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/lib/pq"
)

// EnvDSN names the environment variable that holds the DSN, URL or keyword
// style, of a server on which tests may create databases.
const EnvDSN = "OAPI_IDEMPOTENT_TEST_DSN"

// shared starts the cluster of this process.
var shared = sync.OnceValues(func() (*Server, error) { return start(nil) })

// DSN returns the DSN of a fresh, empty database. On a server from the
// environment it is dropped when the test ends.
func DSN(t testing.TB) string {
	t.Helper()
	if dsn := os.Getenv(EnvDSN); dsn != "" {
		name, err := createDatabase(dsn)
		if err != nil {
			t.Fatalf("pgtest: creating a database on the server that %s names: %v", EnvDSN, err)
		}
		t.Cleanup(func() {
			if err := execOn(dsn, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
				t.Errorf("pgtest: dropping database %s: %v", name, err)
			}
		})
		return withDatabase(dsn, name)
	}
	server, err := shared()
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return server.DSN(t)
}

func createDatabase(dsn string) (string, error) {
	name := "t" + strings.ToLower(rand.Text())
	// template0 can be copied by several at once; template1 cannot.
	return name, execOn(dsn, "CREATE DATABASE "+name+" TEMPLATE template0")
}

func execOn(dsn, statement string) error {
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = db.ExecContext(ctx, statement)
	return err
}

// withDatabase returns dsn with another database.
func withDatabase(dsn, name string) string {
	if u, err := url.Parse(dsn); err == nil && strings.HasPrefix(u.Scheme, "postgres") {
		u.Path = "/" + name
		return u.String()
	}
	return fmt.Sprintf("%s dbname=%s", dsn, name)
}
