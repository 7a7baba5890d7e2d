package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
)

// asCommand has the test binary be the command itself: the demo starts servers
// from the executable that it is.
const asCommand = "ORDERS_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// paymentTakes is long enough for a payment to be met in flight.
const paymentTakes = 50 * time.Millisecond

// A shop is one server of the example over HTTP, and a look into its database.
type shop struct {
	*httptest.Server
	db     *sqlx.DB
	second func(t *testing.T) *shop // one more server on the same database
}

// onEach runs test as name, with a database of its own for each kind.
func onEach(t *testing.T, name string, test func(t *testing.T, s *shop)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Run("SQLite", func(t *testing.T) {
			test(t, newShop(t, "", filepath.Join(t.TempDir(), "orders.db")))
		})
		t.Run("PostgreSQL", func(t *testing.T) {
			test(t, newShop(t, pgtest.DSN(t), ""))
		})
	})
}

func newShop(t *testing.T, postgres, sqlite string) *shop {
	t.Helper()
	db, store, err := open(t.Context(), postgres, sqlite)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	handler, err := newHandler(db, store, paymentTakes)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &shop{server, db, func(t *testing.T) *shop { return newShop(t, postgres, sqlite) }}
}

// An answer is a response with its body read.
type answer struct {
	*http.Response
	body string
}

// request returns a POST of a JSON body; without a key if it is empty.
func (s *shop) request(t *testing.T, path, key string, body io.Reader) *http.Request {
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+path, body) // it has a method, and a URL that parses
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return req
}

// do sends the request. It may be called from any goroutine.
func (s *shop) do(t *testing.T, req *http.Request) answer {
	t.Helper()
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Error(err)
		return answer{Response: &http.Response{}}
	}
	return read(t, resp)
}

func read(t *testing.T, resp *http.Response) answer {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return answer{resp, string(body)}
}

// order posts an order as JSON, after any change to the request.
func (s *shop) order(t *testing.T, key, body string, change ...func(*http.Request)) answer {
	t.Helper()
	req := s.request(t, "/orders", key, strings.NewReader(body))
	for _, c := range change {
		c(req)
	}
	return s.do(t, req)
}

// holds checks the whole table of orders.
func (s *shop) holds(t *testing.T, want ...api.Order) {
	t.Helper()
	var got []api.Order
	if err := s.db.SelectContext(t.Context(), &got, `SELECT id, item, quantity, price FROM orders ORDER BY id`); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the table holds the orders %v, want %v", got, want)
	}
}

// count returns the number of a table's rows.
func (s *shop) count(t *testing.T, table string) (n int) {
	t.Helper()
	if err := s.db.GetContext(t.Context(), &n, `SELECT count(*) FROM `+table); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 20 s not yet: %s", what)
		}
	}
}

// race calls f n times at once and returns what it returned.
func race[T any](n int, f func(i int) T) []T {
	var (
		wg      sync.WaitGroup
		start   = make(chan struct{})
		results = make([]T, n)
	)
	for i := range n {
		wg.Go(func() {
			<-start
			results[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	return results
}

// created returns the order of a 201 that is no replay.
func (a answer) created(t *testing.T) api.Order {
	t.Helper()
	if a.StatusCode != http.StatusCreated || a.marker() != "" || a.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("the answer is %s, want a 201 with JSON that is no replay", a)
	}
	var order api.Order
	if err := json.Unmarshal([]byte(a.body), &order); err != nil {
		t.Fatal(err)
	}
	return order
}

// replays checks that a is the replay of first, with the status.
func (a answer) replays(t *testing.T, status int, first answer) {
	t.Helper()
	if a.StatusCode != status || a.marker() != "true" || a.body != first.body || a.Header.Get("Content-Type") != first.Header.Get("Content-Type") {
		t.Errorf("the answer is %s, want the replay as %d of %s", a, status, first)
	}
}

// refused checks that a is a problem whose type ends in name.
func (a answer) refused(t *testing.T, status int, name string) {
	t.Helper()
	var problem api.Problem
	err := json.Unmarshal([]byte(a.body), &problem)
	if err != nil || a.StatusCode != status || problem.Status != status || !strings.HasSuffix(problem.Type, ":"+name) ||
		a.Header.Get("Content-Type") != "application/problem+json" || a.marker() != "" {
		t.Errorf("the answer is %s, want the problem %d %s", a, status, name)
	}
}

func (a answer) marker() string { return a.Header.Get("Idempotent-Replayed") }

func (a answer) String() string {
	return a.Status + " (" + a.Header.Get("Content-Type") + ", replayed: " + a.marker() + ") " + a.body
}
