//go:build unix

package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// TestKeys runs the scripts that settle keys, each on a PostgreSQL database of
// its own, with guarded requests (see shop) in between.
func TestKeys(t *testing.T) {
	scripts, err := filepath.Glob("../../testdata/script/keys/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("%d scripts: %v", len(scripts), err)
	}
	for _, script := range scripts {
		dsn := pgtest.DSN(t)
		s := openShop(t, dsn)
		testscript.Run(t, testscript.Params{
			Files:               []string{script},
			UpdateScripts:       *update,
			RequireExplicitExec: true,
			Setup: func(env *testscript.Env) error {
				env.Setenv("DATABASE_URL", dsn)
				return nil
			},
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"request": s.request,
				"finish":  s.finish,
			},
		})
	}
}

// A shop has guarded operations whose handlers do what a script says.
type shop struct {
	guards   map[string]*idempotency.Guard
	policies map[string]*idempotency.Policy

	mu      sync.Mutex
	pending map[string]*pending // by key
}

// pending is a request whose handler waits to be told to go on.
type pending struct {
	goOn   chan struct{}
	answer chan string
}

func openShop(t *testing.T, dsn string) *shop {
	t.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	store, err := sqlstore.NewPostgres(db)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := store.Migrate(ctx); err != nil {
		t.Fatal(err)
	}
	sealer, err := idempotency.NewSealer(idempotency.Secret{ID: "one", Key: []byte("sixteen bytes...")})
	if err != nil {
		t.Fatal(err)
	}
	s := &shop{
		guards:   map[string]*idempotency.Guard{},
		policies: map[string]*idempotency.Policy{},
		pending:  map[string]*pending{},
	}
	add := func(name string, change func(*idempotency.Policy), options ...idempotency.Option) {
		policy := idempotency.DefaultPolicy("POST /" + name)
		change(&policy)
		guard, err := idempotency.New(store, options...)
		if err != nil {
			t.Fatal(err)
		}
		idempotency.Register[*http.Request](guard, &policy)
		s.guards[name], s.policies[name] = guard, &policy
	}
	add("orders", func(p *idempotency.Policy) { p.Lease = shortLease })
	add("charges", func(p *idempotency.Policy) { p.Guarantee, p.Lease = idempotency.AtMostOnce, shortLease })
	add("payments", func(p *idempotency.Policy) { p.Guarantee = idempotency.AtMostOnce })
	add("secrets", func(p *idempotency.Policy) { p.Guarantee = idempotency.AtMostOnce }, idempotency.WithSealer(sealer))
	add("moments", func(p *idempotency.Policy) { p.TTL = time.Millisecond })
	add("unrecorded", func(p *idempotency.Policy) { p.Replay.None = true })
	return s
}

const shortLease = 100 * time.Millisecond

// request sends a request: request <operation> <key> <what the handler does>.
// It prints the answer's status, header fields and body, or "died" or "failed".
func (s *shop) request(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: request <operation> <key> answers|dies|fails|waits|must-not-run")
	}
	operation, key, does := args[0], args[1], args[2]
	started := make(chan struct{})
	p := &pending{goOn: make(chan struct{}), answer: make(chan string, 1)}
	handler := func(w http.ResponseWriter, r *http.Request) {
		close(started)
		switch does {
		case "answers":
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Location", "/"+operation+"/1")
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, "%s made\n", operation)
		case "dies":
			panic(http.ErrAbortHandler)
		case "waits":
			<-p.goOn
		default:
			w.WriteHeader(http.StatusTeapot)
		}
	}
	go func() {
		defer func() {
			if recover() != nil {
				p.answer <- "died\n"
			}
		}()
		r := httptest.NewRequest("POST", "/"+operation, strings.NewReader(`{"amount":1}`))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", key)
		guard, policy := s.guards[operation], s.policies[operation]
		if does == "fails" {
			_, err := guard.Do(r.Context(), policy, idempotency.NewRequest(r, r), func(context.Context) (*idempotency.Response, error) {
				return nil, errors.New("failed")
			})
			p.answer <- fmt.Sprintln(err)
			return
		}
		w := httptest.NewRecorder()
		guard.Handle(policy, w, r, handler)
		var out bytes.Buffer
		fmt.Fprintln(&out, w.Code)
		w.Header().Write(&out) // sorted; a Buffer does not fail
		out.WriteString(w.Body.String())
		p.answer <- strings.ReplaceAll(out.String(), "\r\n", "\n")
	}()
	if does != "waits" {
		ts.Stdout().Write([]byte(<-p.answer))
		if does == "dies" && s.policies[operation].Lease == shortLease {
			time.Sleep(shortLease) // now it is stuck, by any clock of this machine
		}
		return
	}
	<-started
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending[key] = p
}

// finish lets a handler that waits go on and prints the answer.
func (s *shop) finish(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: finish <key>")
	}
	s.mu.Lock()
	p := s.pending[args[0]]
	s.mu.Unlock()
	close(p.goOn)
	ts.Stdout().Write([]byte(<-p.answer))
}
