package guardtest

import (
	"context"
	"database/sql"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"

	_ "modernc.org/sqlite"
)

func unannotated(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply { return Reply{Status: http.StatusOK, Body: "[]"} })
	for range 2 {
		f.ran("a GET", f.send(request{method: http.MethodGet, path: things, key: "a"}), http.StatusOK)
	}
	f.ranTimes(2)
}

func baseURL(t *testing.T, target Target) {
	f := serve(t, target, created, func(s *Server) { s.BaseURL = "/v1" })
	f.refuses("no key", f.send(request{path: "/v1" + things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: "/v1" + things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: "/v1" + things, key: "a", body: lamp}), http.StatusCreated)
}

func byHand(t *testing.T, target Target) {
	f := serve(t, target, created, func(s *Server) { s.ByHand = true })
	f.refuses("no key", f.send(request{path: things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func passthrough(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if idempotency.KeyFrom(ctx) != (idempotency.Key{}) {
			return Reply{Status: http.StatusTeapot}
		}
		reply := created(ctx, call)
		if strings.Contains(call.Body, "vase") {
			reply.Body, reply.Stream = "", []string{"one", "two"}
		}
		return reply
	}, func(s *Server) {
		s.Guard = func(idempotency.Option) *idempotency.Guard { return idempotency.Passthrough() }
	})
	for _, key := range []string{"", "a", "a"} {
		a := f.send(request{path: things, key: key, body: lamp, header: http.Header{"X-Trip": {"1"}}})
		f.ran("unguarded", a, http.StatusCreated)
		if a.body != lamp || a.Header.Get("Location") != "/things/1" || a.Header.Get("X-Outer") != "1" {
			f.Errorf("unguarded: %q %q", a.Header, a.body)
		}
	}
	if a := f.send(request{path: things, key: "a", body: vase}); a.StatusCode != http.StatusCreated || a.body != "onetwo" {
		f.Errorf("a stream, unguarded: %d %q", a.StatusCode, a.body)
	}
	f.ranTimes(4)
}

func group(t *testing.T, target Target) {
	f := serve(t, target, created, func(s *Server) { s.Group = "/v2" })
	f.refuses("no key", f.send(request{path: "/v2" + things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: "/v2" + things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: "/v2" + things, key: "a", body: lamp}), http.StatusCreated)
	f.ranTimes(1)
}

// alias has one operation at two paths: it is guarded at both, and they are two
// requests.
func alias(t *testing.T, target Target) {
	f := serve(t, target, created)
	f.refuses("no key", f.send(request{path: "/items", body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.ran("first sight", f.send(request{path: "/items", key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same again", f.send(request{path: "/items", key: "a", body: lamp}), http.StatusCreated)
	f.refuses("the key at the other path", f.send(request{path: things, key: "a", body: lamp}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

const (
	orders = "/orders"
	aUUID  = "0196c5c4-7b1e-4f60-8d1c-0a4e5f3b9c21"
)

// serveTwo serves both documents with one guard over one table of SQLite, and
// returns how many orders there are: each run of createOrder makes one.
func serveTwo(t *testing.T, target Target, handle Handler) (f *fixture, ordered func() int) {
	t.Helper()
	db, err := sql.Open("sqlite", sqlstore.SQLiteDSN(filepath.Join(t.TempDir(), "things.db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	store, err := sqlstore.NewSQLite(db)
	if err == nil {
		err = store.Migrate(t.Context())
	}
	if err == nil {
		_, err = db.ExecContext(t.Context(), "CREATE TABLE orders (n INTEGER)")
	}
	if err != nil {
		t.Fatal(err)
	}
	f = serve(t, target, func(ctx context.Context, call Call) Reply {
		if call.Operation == "createOrder" {
			run := idempotency.RunContext(ctx)
			tx, ok := sqlstore.Tx(run)
			if !ok {
				return Reply{Status: http.StatusTeapot, Body: "no transaction"}
			}
			if _, err := tx.ExecContext(run, "INSERT INTO orders VALUES (1)"); err != nil {
				return Reply{Status: http.StatusTeapot, Body: err.Error()}
			}
		}
		return handle(ctx, call)
	}, func(s *Server) { s.Second, s.Guard = true, over(t, store) })
	return f, func() (n int) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM orders").Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
}

func twoAPIs(t *testing.T, target Target) {
	f, _ := serveTwo(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		reply.Body = call.Operation
		return reply
	})
	for i, check := range []func(string, answer, int){f.ran, f.replays} {
		for path, operation := range map[string]string{things: "createThing", orders: "createOrder"} {
			a := f.send(request{path: path, key: aUUID, body: lamp})
			check(operation, a, http.StatusCreated)
			if a.body != operation {
				f.Errorf("request %d of %s is answered %q", i+1, operation, a.body)
			}
		}
	}
	f.ranTimes(2)
}

// replayAnyway has a policy under which bodies are not compared: a known key is
// answered whatever the request says now.
func replayAnyway(t *testing.T, target Target) {
	f, _ := serveTwo(t, target, func(_ context.Context, call Call) Reply {
		if !json.Valid([]byte(call.Body)) {
			return Reply{Status: http.StatusUnprocessableEntity, Body: "no JSON"}
		}
		return Reply{Status: http.StatusCreated, Body: call.Body}
	})
	quote := func(key, body string) answer { return f.send(request{path: "/quotes", key: key, body: body}) }
	f.refuses("no key", quote("", lamp), http.StatusUnprocessableEntity, wire.MissingKey)
	f.refuses("a large body", quote("b", strings.Repeat("x", 5<<10)), http.StatusRequestEntityTooLarge, wire.RequestTooLarge)
	f.ranTimes(0)
	f.ran("no JSON", quote("a", "{"), http.StatusUnprocessableEntity)
	f.ran("JSON with the same key", quote("a", lamp), http.StatusCreated)
	for _, body := range []string{lamp, vase, "{", "", strings.Repeat("x", 5<<10)} {
		again := quote("a", body)
		f.replays("the same key again", again, http.StatusOK)
		if again.body != lamp {
			f.Errorf("the replay for %.10q is %q", body, again.body)
		}
	}
	f.ranTimes(2)
}

// declaredKey has the document declare the key as a header parameter, which the
// guard judges and the handler gets.
func declaredKey(t *testing.T, target Target) {
	f, _ := serveTwo(t, target, func(ctx context.Context, call Call) Reply {
		reply := created(ctx, call)
		if call.Key == nil {
			return Reply{Status: http.StatusTeapot, Body: "no key was bound"}
		}
		reply.Body = *call.Key
		return reply
	})
	f.refuses("no key", f.send(request{path: orders, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.refuses("no UUID", f.send(request{path: orders, key: "a", body: lamp}), http.StatusBadRequest, wire.InvalidKey)
	if a := f.send(request{path: orders, body: lamp, header: http.Header{wire.HeaderKey: {aUUID, aUUID}}}); a.StatusCode != http.StatusBadRequest {
		f.Errorf("two keys: %d %s", a.StatusCode, a.body)
	}
	f.ranTimes(0)
	first := f.send(request{path: orders, key: aUUID, body: lamp})
	f.ran("first sight", first, http.StatusCreated)
	if first.body != aUUID {
		f.Errorf("the handler got the key %q", first.body)
	}
	f.replays("the same in upper case", f.send(request{path: orders, key: strings.ToUpper(aUUID), body: lamp}), http.StatusCreated)
	f.ranTimes(1)
}

// inTransaction has answers whose record commits with what the handler wrote.
func inTransaction(t *testing.T, target Target) {
	for what, c := range map[string]struct {
		reply    Reply
		status   int
		problem  string // of the guard, if the answer is one
		recorded bool
		ordered  int
	}{
		"an answer":           {Reply{Status: http.StatusCreated, Body: "made"}, http.StatusCreated, "", true, 1},
		"a refusal":           {Reply{Status: http.StatusNotFound, Body: "no"}, http.StatusNotFound, "", true, 0},
		"a server error":      {Reply{Status: http.StatusBadGateway, Body: "broken"}, http.StatusBadGateway, "", false, 0},
		"an answer too large": {Reply{Status: http.StatusCreated, Body: strings.Repeat("x", 5<<10)}, http.StatusInternalServerError, wire.ResponseTooLarge, false, 0},
	} {
		f, ordered := serveTwo(t, target, func(context.Context, Call) Reply { return c.reply })
		for i := range 2 {
			a := f.send(request{path: orders, key: aUUID, body: lamp})
			switch {
			case c.problem != "":
				f.refuses(what, a, c.status, c.problem)
			case c.recorded && i > 0:
				f.replays(what, a, c.status)
			default:
				f.ran(what, a, c.status)
			}
		}
		if got := ordered(); got != c.ordered {
			f.Errorf("%s: %d orders, want %d", what, got, c.ordered)
		}
		if c.recorded {
			f.ranTimes(1)
		} else {
			f.ranTimes(2)
		}
	}
}

// failingTransaction has handlers panic and try to pass by the guard. The key is
// free at once, and nothing is left of what they wrote.
func failingTransaction(t *testing.T, target Target) {
	failures := map[string]func() Reply{
		"a panic":  func() Reply { panic("out of lamps") },
		"a hijack": func() Reply { return Reply{Hijack: func(conn net.Conn) { _, _ = io.WriteString(conn, "mine") }} },
	}
	if target.FailedHijackIs200 {
		delete(failures, "a hijack")
	}
	if target.Fasthttp {
		failures["a stream"] = func() Reply { return Reply{Status: http.StatusOK, Stream: []string{"one", "two"}} }
	}
	for what, fail := range failures {
		failing := true
		f, ordered := serveTwo(t, target, func(ctx context.Context, call Call) Reply {
			if failing {
				return fail()
			}
			return created(ctx, call)
		})
		f.ran(what, f.send(request{path: orders, key: aUUID, body: lamp}), http.StatusInternalServerError)
		failing = false
		f.ran("after "+what, f.send(request{path: orders, key: aUUID, body: lamp}), http.StatusCreated)
		if got := ordered(); got != 1 {
			f.Errorf("after %s: %d orders, want 1", what, got)
		}
	}
}

// flushedTransaction has a handler flush before its transaction has committed: it
// is not sent, and so it is replayed.
func flushedTransaction(t *testing.T, target Target) {
	f, _ := serveTwo(t, target, func(context.Context, Call) Reply {
		return Reply{Status: http.StatusCreated, Stream: []string{"one ", "two"}}
	})
	first, again := f.send(request{path: orders, key: aUUID, body: lamp}), f.send(request{path: orders, key: aUUID, body: lamp})
	f.ran("first sight", first, http.StatusCreated)
	f.replays("the same again", again, http.StatusCreated)
	if first.body != "one two" || again.body != "one two" {
		f.Errorf("the answers are %q and %q", first.body, again.body)
	}
}
