//go:build unix

// Package profiles holds servers that are generated from a policy against the
// rules of the system that the policy claims to reproduce. A profile that runs
// with an example is held there: NENE2's is POST /orders of examples/orders.
package profiles

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
	phpprofile "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/php-profile/want"
)

const (
	day = 24 * time.Hour
	tea = `{"title":"Tea","draft":false}`

	reused   = "idempotency-key-reused"
	inFlight = "idempotency-in-flight"
)

// articles are the handlers of the document. They know nothing of keys.
type articles struct {
	runs atomic.Int64
	// handle answers every operation. Tests set it before the first request.
	handle func(w http.ResponseWriter, r *http.Request, run int64)
}

func (a *articles) run(w http.ResponseWriter, r *http.Request) { a.handle(w, r, a.runs.Add(1)) }

func (a *articles) CreateArticle(w http.ResponseWriter, r *http.Request)             { a.run(w, r) }
func (a *articles) ReplaceArticle(w http.ResponseWriter, r *http.Request, id string) { a.run(w, r) }
func (a *articles) ChangeArticle(w http.ResponseWriter, r *http.Request, id string)  { a.run(w, r) }

// created answers 201, and says which run it is and what it was asked.
func created(w http.ResponseWriter, r *http.Request, run int64) {
	answerAs(w, r, run, http.StatusCreated)
}

func answerAs(w http.ResponseWriter, r *http.Request, run int64, status int) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("Location", fmt.Sprintf("/articles/%d", run))
	w.WriteHeader(status)
	// Fails where the status allows no body.
	_, _ = io.WriteString(w, answerOf(run, r.Method, r.URL.Path, string(body)))
}

func answerOf(run int64, method, path, body string) string {
	return fmt.Sprintf("run %d: %s %s %s", run, method, path, body)
}

// hold makes the first run wait, once it runs, until the function that it
// returns is called or the test ends.
func (a *articles) hold(t *testing.T) (running <-chan struct{}, release func()) {
	entered, leave := make(chan struct{}), make(chan struct{})
	release = sync.OnceFunc(func() { close(leave) })
	t.Cleanup(release)
	a.handle = func(w http.ResponseWriter, r *http.Request, run int64) {
		if run == 1 {
			close(entered)
			<-leave
		}
		created(w, r, run)
	}
	return entered, release
}

// A site is a server of the articles, and a look into its database.
type site struct {
	*articles
	url    string
	db     *sqlx.DB
	second func(t *testing.T) *site // another server of the same articles on the same database
}

// onEach runs test as name, with a database of its own for each kind.
func onEach(t *testing.T, name string, test func(t *testing.T, s *site)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Run("SQLite", func(t *testing.T) {
			test(t, newSite(t, &articles{handle: created}, "sqlite", sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "keys.db"))))
		})
		t.Run("PostgreSQL", func(t *testing.T) {
			test(t, newSite(t, &articles{handle: created}, "postgres", pgtest.DSN(t)))
		})
	})
}

func newSite(t *testing.T, a *articles, driver, dsn string) *site {
	t.Helper()
	db, err := sqlx.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(16) // two servers share a PostgreSQL's hundred connections
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	newStore := sqlstore.NewSQLite
	if driver == "postgres" {
		newStore = sqlstore.NewPostgres
	}
	store, err := newStore(db.DB)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	guard, err := idempotency.New(store, phpprofile.PrincipalFrom(func(r *http.Request) (string, error) {
		return r.Header.Get("Authorization"), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(phpprofile.Handler(a, guard))
	t.Cleanup(server.Close)
	return &site{a, server.URL, db, func(t *testing.T) *site { return newSite(t, a, driver, dsn) }}
}

// client follows no redirect, and uses each connection once: net/http sends a
// request that has a key again by itself when a used connection breaks.
var client = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       time.Minute,
}

// An answer is a response with its body read.
type answer struct {
	status int
	header http.Header
	body   string
}

func (s *site) request(t *testing.T, method, target, key, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return req
}

// do sends the request. It may be called from any goroutine.
func do(t *testing.T, req *http.Request) answer {
	t.Helper()
	resp, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return answer{}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return answer{resp.StatusCode, resp.Header, string(body)}
}

// send sends JSON, without a key if it is empty, after any change to the request.
func (s *site) send(t *testing.T, method, target, key, body string, change ...func(*http.Request)) answer {
	t.Helper()
	req := s.request(t, method, target, key, body)
	for _, c := range change {
		c(req)
	}
	return do(t, req)
}

// create posts an article with the key.
func (s *site) create(t *testing.T, body string, change ...func(*http.Request)) answer {
	t.Helper()
	return s.send(t, "POST", "/articles", "key", body, change...)
}

func header(name string, values ...string) func(*http.Request) {
	return func(r *http.Request) { r.Header[name] = values }
}

// isRun checks that a is what created answers in its run.
func (a answer) isRun(t *testing.T, run int64, method, path, body string) {
	t.Helper()
	if want := answerOf(run, method, path, body); a.status != http.StatusCreated || a.marked() || a.body != want {
		t.Errorf("the answer is %v, want a 201 that is no replay with %q", a, want)
	}
}

// replays checks that a is the recorded answer: its status, header and body.
func (a answer) replays(t *testing.T, first answer) {
	t.Helper()
	got, want := maps.Clone(a.header), maps.Clone(first.header)
	for _, ofOneExchange := range []string{"Date", "Idempotent-Replayed"} {
		delete(got, ofOneExchange)
		delete(want, ofOneExchange)
	}
	if a.status != first.status || !a.marked() || a.body != first.body || !reflect.DeepEqual(got, want) {
		t.Errorf("the answer is %v, want the replay of %v", a, first)
	}
}

// conflicts checks that a is a 409 problem whose type ends in name.
func (a answer) conflicts(t *testing.T, name string) {
	t.Helper()
	var problem struct {
		Type   string
		Status int
	}
	err := json.Unmarshal([]byte(a.body), &problem)
	if err != nil || a.status != http.StatusConflict || problem.Status != a.status || !strings.HasSuffix(problem.Type, ":"+name) ||
		a.header.Get("Content-Type") != "application/problem+json" || a.marked() {
		t.Errorf("the answer is %v, want the problem 409 %s", a, name)
	}
	if later := a.header.Get("Retry-After") != ""; later != (name == inFlight) {
		t.Errorf("the answer %v has Retry-After %q", a, a.header.Get("Retry-After"))
	}
}

func (a answer) marked() bool { return a.header.Get("Idempotent-Replayed") == "true" }

// ran checks how many requests reached a handler.
func (s *site) ran(t *testing.T, want int64) {
	t.Helper()
	if got := s.runs.Load(); got != want {
		t.Errorf("%d requests ran, want %d", got, want)
	}
}

// hasStates checks the state of every key: 0 is processing, 1 completed.
func (s *site) hasStates(t *testing.T, want ...int16) {
	t.Helper()
	var got []int16
	if err := s.db.SelectContext(t.Context(), &got, `SELECT state FROM idempotency_keys`); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the keys' states are %v, want %v", got, want)
	}
}

// age makes every key older.
func (s *site) age(t *testing.T, by time.Duration) {
	t.Helper()
	amount := fmt.Sprint(by.Microseconds())
	if s.db.DriverName() == "postgres" {
		amount = "interval '" + amount + " microseconds'"
	}
	_, err := s.db.ExecContext(t.Context(), `UPDATE idempotency_keys SET created_at = created_at - `+amount+
		`, lease_until = lease_until - `+amount+`, expires_at = expires_at - `+amount)
	if err != nil {
		t.Fatal(err)
	}
}

// TestPHPArticle holds the rules of an article's idempotency middleware for PHP:
// a key is global, and stands for one method, path and body, byte for byte. The
// policy is in testdata/golden/php-profile. Two rules are the guard's own: a
// recorded answer is sent to the caller who caused it alone, and a key's time
// counts from completion.
func TestPHPArticle(t *testing.T) {
	onEach(t, "without a key every request runs, and none is recorded", func(t *testing.T, s *site) {
		s.send(t, "POST", "/articles", "", tea).isRun(t, 1, "POST", "/articles", tea)
		s.send(t, "POST", "/articles", "", tea).isRun(t, 2, "POST", "/articles", tea)
		for i, blank := range []string{"", " ", `""`} {
			s.send(t, "POST", "/articles", "", tea, header("Idempotency-Key", blank)).isRun(t, int64(3+i), "POST", "/articles", tea)
		}
		s.ran(t, 5)
		s.hasStates(t)
	})
	onEach(t, "the first request runs and is recorded, the next is its replay", func(t *testing.T, s *site) {
		first := s.create(t, tea)
		first.isRun(t, 1, "POST", "/articles", tea)
		s.hasStates(t, 1)
		s.create(t, tea).replays(t, first)
		s.second(t).create(t, tea).replays(t, first)
		s.ran(t, 1)
		s.send(t, "POST", "/articles", "another key", tea).isRun(t, 2, "POST", "/articles", tea)
	})
	onEach(t, "every status is recorded", func(t *testing.T, s *site) {
		var status int
		s.handle = func(w http.ResponseWriter, r *http.Request, run int64) { answerAs(w, r, run, status) }
		want := int64(0)
		for status = http.StatusOK; status < 600; status++ {
			if http.StatusText(status) == "" {
				continue
			}
			want++
			key := fmt.Sprint("key-", status)
			first := s.send(t, "POST", "/articles", key, tea)
			if first.status != status || first.marked() {
				t.Fatalf("the answer is %v, want the handler's %d", first, status)
			}
			s.send(t, "POST", "/articles", key, tea).replays(t, first)
		}
		s.ran(t, want)
	})
	onEach(t, "another body is a conflict, also one that only looks different", func(t *testing.T, s *site) {
		first := s.create(t, tea)
		for _, body := range []string{
			`{"title":"Coffee","draft":false}`,
			`{"draft":false,"title":"Tea"}`,
			`{"title": "Tea", "draft": false}`,
			`{"title":"\u0054ea","draft":false}`,
			tea + "\n",
			``,
		} {
			s.create(t, body).conflicts(t, reused)
		}
		s.create(t, tea).replays(t, first)
		s.ran(t, 1)
	})
	onEach(t, "another query alone is the same request", func(t *testing.T, s *site) {
		first := s.send(t, "POST", "/articles?notify=1", "key", tea)
		for _, query := range []string{"", "?notify=1", "?notify=2", "?notify=1&dryRun=true"} {
			s.send(t, "POST", "/articles"+query, "key", tea).replays(t, first)
		}
		s.ran(t, 1)
	})
	onEach(t, "another media type alone is the same request", func(t *testing.T, s *site) {
		first := s.create(t, tea)
		for _, mediaType := range [][]string{nil, {"text/plain"}, {"application/json; charset=utf-8"}, {"multipart/form-data; boundary=b"}} {
			s.create(t, tea, header("Content-Type", mediaType...)).replays(t, first)
		}
		s.ran(t, 1)
	})
	onEach(t, "another path is a conflict", func(t *testing.T, s *site) {
		first := s.send(t, "PATCH", "/articles/1", "key", tea)
		s.send(t, "PATCH", "/articles/2", "key", tea).conflicts(t, reused)
		s.send(t, "PATCH", "/articles/1", "key", tea).replays(t, first)
		s.ran(t, 1)
	})
	onEach(t, "another method is a conflict", func(t *testing.T, s *site) {
		first := s.send(t, "PATCH", "/articles/1", "key", tea)
		s.send(t, "PUT", "/articles/1", "key", tea).conflicts(t, reused)
		s.send(t, "PATCH", "/articles/1", "key", tea).replays(t, first)
		s.ran(t, 1)
	})
	onEach(t, "a key is global over operations", func(t *testing.T, s *site) {
		first := s.create(t, tea)
		s.send(t, "PUT", "/articles/1", "key", tea).conflicts(t, reused)
		s.send(t, "PATCH", "/articles/1", "key", tea).conflicts(t, reused)
		s.create(t, tea).replays(t, first)
		s.ran(t, 1)
	})
	onEach(t, "a key is global over callers, and its answer is its owner's", func(t *testing.T, s *site) {
		alice, bob := header("Authorization", "alice"), header("Authorization", "bob")
		first := s.create(t, tea, alice)
		s.create(t, tea, bob).conflicts(t, reused)
		s.create(t, tea).conflicts(t, reused)
		s.create(t, tea, alice).replays(t, first)
		s.ran(t, 1)
	})
	onEach(t, "in flight is a conflict, until it is completed", func(t *testing.T, s *site) {
		running, release := s.hold(t)
		done := make(chan answer, 1)
		req := s.request(t, "POST", "/articles", "key", tea)
		go func() { done <- do(t, req) }()
		<-running

		s.hasStates(t, 0)
		s.create(t, tea).conflicts(t, inFlight)
		s.second(t).create(t, tea).conflicts(t, inFlight)
		s.create(t, "another body").conflicts(t, reused)
		s.send(t, "PUT", "/articles/1", "key", tea).conflicts(t, reused)
		s.create(t, tea, header("Authorization", "bob")).conflicts(t, reused)

		release()
		first := <-done
		first.isRun(t, 1, "POST", "/articles", tea)
		s.hasStates(t, 1)
		s.create(t, tea).replays(t, first)
		s.ran(t, 1)
	})
	// The winner's handler returns when everybody else has an answer.
	onEach(t, "a race of 50 on two servers has one run", func(t *testing.T, s *site) {
		_, release := s.hold(t)
		servers := []*site{s, s.second(t)}
		const n = 50
		start, answers := make(chan struct{}), make(chan answer, n)
		for i := range n {
			req := servers[i%2].request(t, "POST", "/articles", "key", tea)
			go func() {
				<-start
				answers <- do(t, req)
			}()
		}
		close(start)
		for range n - 1 {
			(<-answers).conflicts(t, inFlight)
		}
		release()
		first := <-answers
		first.isRun(t, 1, "POST", "/articles", tea)
		for _, server := range servers {
			server.create(t, tea).replays(t, first)
		}
		s.ran(t, 1)
	})
	for _, expiry := range []struct {
		ttl          time.Duration
		method, path string
	}{
		{1 * day, "POST", "/articles"},
		{1 * day, "PUT", "/articles/1"},
		{7 * day, "PATCH", "/articles/1"},
	} {
		name := fmt.Sprintf("%s is forgotten after %g days", expiry.method, expiry.ttl.Hours()/24)
		onEach(t, name, func(t *testing.T, s *site) {
			first := s.send(t, expiry.method, expiry.path, "key", tea)
			s.age(t, expiry.ttl-5*time.Minute)
			s.send(t, expiry.method, expiry.path, "key", tea).replays(t, first)
			s.age(t, 5*time.Minute)
			second := s.send(t, expiry.method, expiry.path, "key", tea)
			second.isRun(t, 2, expiry.method, expiry.path, tea)
			s.send(t, expiry.method, expiry.path, "key", tea).replays(t, second)
			// What is forgotten is no conflict either.
			s.age(t, expiry.ttl)
			s.send(t, expiry.method, expiry.path, "key", "another body").isRun(t, 3, expiry.method, expiry.path, "another body")
			s.hasStates(t, 1)
		})
	}
	onEach(t, "a crash frees the key when the lease ends", func(t *testing.T, s *site) {
		s.handle = func(w http.ResponseWriter, r *http.Request, run int64) {
			if run == 1 {
				panic(http.ErrAbortHandler) // leaves what a process leaves that is killed: a row that nobody renews
			}
			created(w, r, run)
		}
		resp, err := client.Do(s.request(t, "POST", "/articles", "key", tea))
		if err == nil {
			resp.Body.Close()
			t.Fatalf("the first request is answered %s", resp.Status)
		}
		s.hasStates(t, 0)
		s.create(t, tea).conflicts(t, inFlight)
		s.ran(t, 1)

		s.age(t, 30*time.Second)
		s.create(t, "another body").conflicts(t, reused)
		second := s.create(t, tea)
		second.isRun(t, 2, "POST", "/articles", tea)
		s.hasStates(t, 1)
		s.create(t, tea).replays(t, second)
		s.ran(t, 2)
	})
}
