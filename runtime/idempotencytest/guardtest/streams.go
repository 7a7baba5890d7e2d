package guardtest

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func tooLarge(t *testing.T, target Target) {
	large := strings.Repeat("0123456789abcdef", 300) // over 4 KiB
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"text/plain"}}, Body: large}
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	first := f.send(form)
	f.ran("first sight", first, http.StatusCreated)
	if first.body != large {
		f.Errorf("%d of %d bytes came", len(first.body), len(large))
	}
	f.refuses("the same again", f.send(form), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

func streams(t *testing.T, target Target) {
	between := make(chan struct{})
	ended := sync.OnceFunc(func() { close(between) })
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{
			Status:  http.StatusOK,
			Header:  http.Header{"Content-Type": {"text/event-stream"}},
			Stream:  []string{"data: one\n\n", "data: two\n\n"},
			Between: func() { <-between },
		}
	})
	t.Cleanup(ended)
	resp, err := f.open(request{path: things, key: "a", body: lamp})
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	begin := make([]byte, len("data: one\n\n"))
	if _, err := io.ReadFull(resp.Body, begin); err != nil || string(begin) != "data: one\n\n" {
		f.Fatalf("the first part came as %q: %v", begin, err)
	}
	f.refuses("a duplicate while it streams", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	ended()
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "data: two\n\n" || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		f.Errorf("the rest came as %d %q %q: %v", resp.StatusCode, resp.Header, rest, err)
	}
	f.refuses("a duplicate afterwards", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

// compressedStream has a compressor around what streams, which some leave alone.
func compressedStream(t *testing.T, target Target) {
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Status: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Stream: []string{`{"item":`, `"lamp"}`}}
	}, func(s *Server) { s.Compress = true })
	r := request{path: things, key: "a", body: lamp, header: http.Header{"Accept-Encoding": {"gzip"}}}
	first := f.send(r)
	f.ran("a stream", first, http.StatusOK)
	got := first.body
	if first.Header["Content-Encoding"] != nil {
		got = f.unzip(first)
	}
	if got != lamp {
		f.Errorf("the stream is %q", got)
	}
	r.header = nil // a compressor may compress refusals too
	f.refuses("the same again", f.send(r), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)
}

// hijacks has a handler take the connection.
func hijacks(t *testing.T, target Target) {
	between := make(chan struct{})
	ended := sync.OnceFunc(func() { close(between) })
	f := serve(t, target, func(_ context.Context, call Call) Reply {
		return Reply{Hijack: func(conn net.Conn) {
			_, _ = io.WriteString(conn, "my ")
			<-between
			_, _ = io.WriteString(conn, "own bytes")
		}}
	})
	t.Cleanup(ended)
	w := f.dial()
	w.post(things, "Idempotency-Key: a")
	begin := make([]byte, len("my "))
	if _, err := io.ReadFull(w.read, begin); err != nil || string(begin) != "my " {
		f.Fatalf("first came %q: %v", begin, err)
	}
	f.refuses("a duplicate meanwhile", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	ended()
	if rest, err := io.ReadAll(w.read); err != nil || string(rest) != "own bytes" {
		f.Errorf("then came %q: %v", rest, err)
	}
	f.refuses("a duplicate afterwards", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
	f.ranTimes(1)

	w = f.dial() // without a key, where none is needed
	w.write("POST "+files+" HTTP/1.1", "Host: things", "Content-Type: application/x-www-form-urlencoded", "Content-Length: 9", "", "item=lamp")
	if all, err := io.ReadAll(w.read); err != nil || string(all) != "my own bytes" {
		f.Errorf("unguarded came %q: %v", all, err)
	}
}

// hijackUnrecorded has the store fail before the connection is taken: no byte
// passes.
func hijackUnrecorded(t *testing.T, target Target) {
	s := &store{Store: memorystore.New()}
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{Hijack: func(conn net.Conn) { _, _ = io.WriteString(conn, "my own bytes") }}
	}, func(server *Server) { server.Guard = over(t, s) })
	s.settling.Store(true)
	f.refuses("not recorded", f.send(request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}), http.StatusServiceUnavailable, wire.OutcomeUnknown)
}

// flushes are the ways in which an http.ResponseWriter is flushed.
func flushes(t *testing.T, target Target) {
	for what, flush := range map[string]func(http.ResponseWriter) error{
		"http.Flusher": func(w http.ResponseWriter) error {
			w.(http.Flusher).Flush()
			return nil
		},
		"http.ResponseController": func(w http.ResponseWriter) error { return http.NewResponseController(w).Flush() },
	} {
		for _, written := range []bool{false, true} {
			between := make(chan struct{})
			ended := sync.OnceFunc(func() { close(between) })
			failed := make(chan error, 1)
			f := serve(t, target, func(context.Context, Call) Reply {
				return Reply{Header: http.Header{"X-Early": {"1"}}, Write: func(w http.ResponseWriter) {
					if written {
						w.WriteHeader(http.StatusCreated)
						_, _ = io.WriteString(w, "one ")
					}
					failed <- flush(w)
					<-between
					w.Header().Set("X-Late", "1")
					_, _ = io.WriteString(w, "two")
				}}
			})
			t.Cleanup(ended)
			resp, err := f.open(request{path: things, key: "a", body: lamp})
			if err != nil {
				f.Fatal(err)
			}
			defer resp.Body.Close()
			status, body := http.StatusOK, "two"
			if written {
				status, body = http.StatusCreated, "one two"
			}
			if err := wait(f, "the flush", failed); err != nil || resp.StatusCode != status || resp.Header.Get("X-Early") != "1" {
				f.Errorf("%s after a write, %v: %v; the header came as %d %q, want %d", what, written, err, resp.StatusCode, resp.Header, status)
			}
			f.refuses("a duplicate meanwhile", f.send(request{path: things, key: "a", body: lamp}), http.StatusConflict, wire.NotReplayable)
			ended()
			if all, err := io.ReadAll(resp.Body); err != nil || string(all) != body {
				f.Errorf("%s: the body came as %q: %v", what, all, err)
			}
			f.ranTimes(1)
		}
	}
}

// unguardedStreams has an operation stream that runs without a key.
func unguardedStreams(t *testing.T, target Target) {
	between := make(chan struct{}, 2)
	f := serve(t, target, func(context.Context, Call) Reply {
		return Reply{
			Status:  http.StatusOK,
			Header:  http.Header{"Content-Type": {"text/event-stream"}},
			Stream:  []string{"data: one\n\n", "data: two\n\n"},
			Between: func() { <-between },
		}
	})
	t.Cleanup(func() { close(between) })
	for i := range 2 {
		resp, err := f.open(request{path: files, contentType: "application/x-www-form-urlencoded", body: "item=lamp"})
		if err != nil {
			f.Fatal(err)
		}
		defer resp.Body.Close()
		begin := make([]byte, len("data: one\n\n"))
		if _, err := io.ReadFull(resp.Body, begin); err != nil {
			f.Fatalf("stream %d: the first part came as %q: %v", i, begin, err)
		}
		between <- struct{}{}
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "data: two\n\n" {
			f.Errorf("stream %d: the rest came as %q: %v", i, rest, err)
		}
	}
	f.ranTimes(2)
}
