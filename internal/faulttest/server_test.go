//go:build unix

// Package faulttest breaks what surrounds the guard, for real: it kills,
// suspends and shuts down servers, stops their PostgreSQL, silences their
// connections and hangs up on them, and holds the guard's promises meanwhile.
//
// The servers are processes of their own: the test binary runs itself again.
package faulttest

import (
	"bufio"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// envServer makes the test binary a server: its value is a config in JSON.
const envServer = "OAPI_IDEMPOTENT_FAULTTEST_SERVER"

func TestMain(m *testing.M) {
	if settings := os.Getenv(envServer); settings != "" {
		if err := serve(settings); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Every server has these operations, which differ in their guarantee.
const (
	atLeastOnce = "/at-least-once"
	atMostOnce  = "/at-most-once"
	transaction = "/transaction"
)

// headerSteps says what a handler does: a list of steps separated by commas. It
// is no part of the fingerprint, so that the same request may go another way.
const headerSteps = "Test-Steps"

// headerRequest names one request among all, and headerDeath the instant at
// which its server is to die of it.
const (
	headerRequest = "Test-Request"
	headerDeath   = "Test-Death"
)

// A config is all that a server is told.
type config struct {
	Database     database
	Process      int // tells the servers of a test apart in the table effects
	MaxOpenConns int // which are kept when they are idle
	StoreTimeout time.Duration
	Policy       idempotency.Policy // but for its operation and guarantee
}

// A server is the program under test: a guard, a store and a handler.
type server struct {
	process int
	db      *sql.DB
	insert  string

	mu    sync.Mutex
	gates map[string]chan struct{}
}

// serve serves until SIGTERM, and then finishes what is in flight.
func serve(settings string) error {
	var c config
	if err := json.Unmarshal([]byte(settings), &c); err != nil {
		return err
	}
	db, store, err := c.Database.open(c.MaxOpenConns)
	if err != nil {
		return err
	}
	guard, err := idempotency.New(mortal{store}, idempotency.WithStoreTimeout(c.StoreTimeout))
	if err != nil {
		return err
	}
	s := &server{process: c.Process, db: db, insert: c.Database.insert(), gates: map[string]chan struct{}{}}
	mux := http.NewServeMux()
	for path, guarantee := range map[string]idempotency.Guarantee{
		atLeastOnce: idempotency.AtLeastOnce,
		atMostOnce:  idempotency.AtMostOnce,
		transaction: idempotency.Transaction,
	} {
		p := c.Policy
		p.Operation, p.Guarantee = "POST "+path, guarantee
		idempotency.Register[*http.Request](guard, &p)
		mux.HandleFunc(p.Operation, func(w http.ResponseWriter, r *http.Request) {
			r = r.WithContext(context.WithValue(r.Context(), deathKey{}, r.Header.Get(headerDeath)))
			guard.Handle(&p, mortalWriter{w, r}, r, s.handle)
		})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	terminated, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go s.obey(os.Stdin)
	fmt.Println("listening", listener.Addr())

	srv := &http.Server{Handler: mux}
	finished := make(chan error, 1)
	go func() {
		<-terminated.Done()
		fmt.Println("stopping")
		finished <- srv.Shutdown(context.Background())
	}()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-finished
}

// obey opens the gates whose keys the test writes on lines. It ends the process
// with the test's, which may have been killed.
func (s *server) obey(in io.Reader) {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		close(s.gate(lines.Text()))
	}
	os.Exit(1)
}

func (s *server) gate(key string) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gates[key] == nil {
		s.gates[key] = make(chan struct{})
	}
	return s.gates[key]
}

// handle does its steps and answers 201 with a body that no other run has. It
// does not watch its context: a guard has to do with handlers that do not.
func (s *server) handle(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	key, attempt := idempotency.KeyFrom(ctx).String(), idempotency.Attempt(ctx)
	run, padding := rand.Text(), ""
	dieIf(ctx, inHandler)
	for step := range strings.SplitSeq(r.Header.Get(headerSteps), ",") {
		verb, argument, _ := strings.Cut(step, "=")
		var err error
		switch verb {
		case "effect": // what must not happen twice
			exec := s.db.ExecContext
			if tx, ok := sqlstore.Tx(ctx); ok {
				exec = tx.ExecContext
			}
			_, err = exec(ctx, s.insert, run, r.Header.Get(headerRequest), key, s.process, attempt, time.Now().UTC())
			dieIf(ctx, afterEffect)
		case "mark":
			err = idempotency.MarkEffect(ctx)
		case "hold": // until the test lets go
			fmt.Println("holding", key)
			<-s.gate(key)
		case "sleep":
			var d time.Duration
			if d, err = time.ParseDuration(argument); err == nil {
				time.Sleep(d)
			}
		case "pad": // the answer with so many bytes
			var n int
			if n, err = strconv.Atoi(argument); err == nil {
				padding = strings.Repeat("x", n)
			}
		case "connection": // is taken from the pool until the handler returns
			var conn *sql.Conn
			if conn, err = s.db.Conn(ctx); err == nil {
				defer conn.Close()
			}
		case "panic":
			panic(http.ErrAbortHandler)
		case "fail":
			err = errors.New("the test wants it")
		default:
			err = fmt.Errorf("%q is no step", step)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	w.Header().Set("Location", fmt.Sprintf("%s/%s", r.URL.Path, key))
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, "process %d, attempt %d, run %s%s", s.process, attempt, run, padding)
}
