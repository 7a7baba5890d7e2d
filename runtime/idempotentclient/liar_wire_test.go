package idempotentclient_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// onLiars runs a test against a liar of each profile, and fails if it leaves
// anything behind.
func onLiars(t *testing.T, test func(*testing.T, *liar, *http.Client)) {
	for _, p := range profiles {
		t.Run(p.name, func(t *testing.T) {
			leavesNothing(t, func(t *testing.T, open *atomic.Int64) {
				client := netClient(t)
				transport := client.Transport.(*http.Transport)
				transport.ExpectContinueTimeout = time.Millisecond
				client.Transport = counting{transport, open}
				test(t, newLiar(t, p, false), client)
			})
		})
	}
}

// order makes a call with a body of its own and returns the status.
func (l *liar) order(t *testing.T, url string, client idempotentclient.Doer, body io.Reader, editors ...editor) int {
	t.Helper()
	c := api{Server: url, Client: client, idempotency: idempotentclient.NewConfig(l.options...)}
	resp, err := c.CreateOrder(t.Context(), "", body, editors...)
	if err != nil {
		t.Fatal(err)
	}
	drain(t, resp)
	return resp.StatusCode
}

// sameKey fails unless there were n requests with one key, whatever their bodies.
func (l *log) sameKey(t *testing.T, n int) {
	t.Helper()
	seen := l.requests()
	for _, r := range seen {
		if len(r.keys) != 1 || r.keys[0] == "" || r.keys[0] != seen[0].keys[0] {
			t.Fatalf("the keys are %v", seen)
		}
	}
	if len(seen) != n {
		t.Fatalf("the server saw %d requests, want %d", len(seen), n)
	}
}

// readHead reads a request without its body.
func readHead(r *bufio.Reader, seen *log) {
	if req, err := http.ReadRequest(r); err == nil {
		req.Body = nil
		seen.add(req)
	}
}

// An answer that comes while the body is still on its way is an answer, and the
// next attempt has the body from its start.
func TestALiarAnswersBeforeItHasTheBody(t *testing.T) {
	body := bytes.Repeat([]byte("order "), 1<<20)
	for _, test := range []struct {
		name             string
		answer           string
		status, requests int
		runs             int32
	}{
		{name: "200", answer: http11(200, "early", "Connection", "close"), status: 200, requests: 1},
		{name: "413", answer: http11(413, "", "Connection", "close"), status: 413, requests: 1},
		{name: "503", answer: http11(503, "", "Connection", "close"), status: 201, requests: 2, runs: 1},
		{name: "nothing", status: 201, requests: 2, runs: 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			onLiars(t, func(t *testing.T, l *liar, client *http.Client) {
				url, seen := wire(t, func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
					readHead(r, seen)
					_, _ = io.WriteString(conn, test.answer)
					if test.answer != "" { // a reset would take the answer back
						_, _ = io.Copy(io.Discard, r)
					}
					conn.Close()
				}, l.truth)
				if status := l.order(t, url, client, bytes.NewReader(body)); status != test.status {
					t.Errorf("got %d, want %d", status, test.status)
				}
				seen.sameKey(t, test.requests)
				if last := seen.requests()[test.requests-1]; test.runs > 0 && last.body != string(body) {
					t.Errorf("the last body has %d bytes, want %d", len(last.body), len(body))
				}
				if got := l.runs.Load(); got != test.runs {
					t.Errorf("%d effects, want %d", got, test.runs)
				}
			})
		})
	}
}

// TestALiarNeverSaysContinue asks with Expect: 100-continue.
func TestALiarNeverSaysContinue(t *testing.T) {
	expect := func(_ context.Context, r *http.Request) error { r.Header.Set("Expect", "100-continue"); return nil }
	for _, test := range []struct {
		name             string
		lie              func(*liar) step
		status, requests int
		runs             int32
	}{
		{"and reads the body", func(l *liar) step { return l.truth }, 201, 1, 1},
		{"and says 417", func(*liar) step {
			return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
				readHead(r, seen)
				_, _ = io.WriteString(conn, http11(417, "", "Connection", "close"))
				_, _ = io.Copy(io.Discard, r)
				conn.Close()
			}
		}, 417, 1, 0},
		{"and hangs up", func(*liar) step {
			return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
				readHead(r, seen)
				conn.Close()
			}
		}, 201, 2, 1},
		{"but does, and hangs up", func(*liar) step {
			return func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
				readHead(r, seen)
				_, _ = io.WriteString(conn, "HTTP/1.1 100 Continue\r\n\r\n")
				conn.Close()
			}
		}, 201, 2, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			onLiars(t, func(t *testing.T, l *liar, client *http.Client) {
				url, seen := wire(t, test.lie(l), l.truth)
				if status := l.order(t, url, client, strings.NewReader("order"), expect); status != test.status {
					t.Errorf("got %d, want %d", status, test.status)
				}
				seen.sameKey(t, test.requests)
				if got := l.runs.Load(); got != test.runs {
					t.Errorf("%d effects, want %d", got, test.runs)
				}
			})
		})
	}
}

// An attempt that is given up because the rest of its answer does not come, as by
// the Timeout of an http.Client, is repeated.
func TestALiarKeepsTheRestToItself(t *testing.T) {
	for _, head := range []string{"201 Created", "503 Busy"} {
		t.Run(head, func(t *testing.T) {
			onLiars(t, func(t *testing.T, l *liar, client *http.Client) {
				told := make(chan struct{})
				l.acts = true
				url, seen := wire(t, func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
					l.receive(r, seen)
					_, _ = io.WriteString(conn, "HTTP/1.1 "+head+"\r\n"+jsonFields+"Content-Length: 100\r\n\r\n{")
					close(told)
					_, _ = r.Peek(1) // until the client hangs up
					conn.Close()
				}, l.truth)
				attempts := 0
				impatient := doerFunc(func(r *http.Request) (*http.Response, error) {
					if attempts++; attempts == 1 {
						ctx, giveUp := context.WithCancel(r.Context())
						go func() {
							<-told
							giveUp()
						}()
						r = r.WithContext(ctx)
					}
					return client.Do(r)
				})
				if status := l.order(t, url, impatient, strings.NewReader("order")); status != l.replayed {
					t.Errorf("got %d, want a replayed %d", status, l.replayed)
				}
				seen.oneKey(t, 2, "order")
				if got := l.runs.Load(); got != 1 {
					t.Errorf("%d effects", got)
				}
			})
		})
	}
}

// TestALiarRedirects sends a call through redirects of every kind: the key goes
// with it, and a repetition begins where the call did.
func TestALiarRedirects(t *testing.T) {
	for _, status := range []int{301, 302, 303, 307, 308} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			onLiars(t, func(t *testing.T, l *liar, client *http.Client) {
				var posts, gets log
				mux := http.NewServeMux()
				// The other host acts on a POST, and has what a GET asks for, but
				// not the first time.
				mux.HandleFunc("POST /there", func(w http.ResponseWriter, r *http.Request) {
					posts.add(r.Clone(r.Context()))
					r.Body = io.NopCloser(strings.NewReader("order"))
					resp := l.act(r)
					if len(posts.requests()) == 1 {
						panic(http.ErrAbortHandler)
					}
					w.WriteHeader(resp.StatusCode)
				})
				mux.HandleFunc("GET /there", func(w http.ResponseWriter, r *http.Request) {
					if gets.add(r) == 1 {
						w.WriteHeader(http.StatusServiceUnavailable)
					}
				})
				there := httptest.NewUnstartedServer(mux)
				there.Config.ErrorLog = quiet
				there.Start()
				defer there.Close()
				url, seen := wire(t, func(conn *net.TCPConn, r *bufio.Reader, seen *log) {
					l.acts = status < 307
					l.receive(r, seen)
					_, _ = io.WriteString(conn, http11(status, "", "Location", there.URL+"/there"))
				})
				want := http.StatusOK
				if status >= 307 {
					want = l.replayed
				}
				if got := l.order(t, url, client, strings.NewReader("order")); got != want {
					t.Errorf("got %d, want %d", got, want)
				}
				key := seen.oneKey(t, 2, "order")
				if got := l.runs.Load(); got != 1 {
					t.Errorf("%d effects", got)
				}
				if followed := slices.Concat(posts.requests(), gets.requests()); len(followed) != 2 {
					t.Errorf("followed %d times, want 2", len(followed))
				}
				if status >= 307 && posts.oneKey(t, 2, "order") != key {
					t.Error("another key was sent to the other host")
				}
			})
		})
	}
}

// Frames of HTTP/2 (RFC 9113).
const (
	frameHeaders, frameReset, frameSettings, frameGoAway = 1, 3, 4, 7
	flagAck                                              = 1
	refusedStream                                        = 7
)

func writeFrame(w io.Writer, kind, flags byte, stream uint32, payload ...byte) {
	head := []byte{0, byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	_, _ = w.Write(append(binary.BigEndian.AppendUint32(head, stream), payload...))
}

// refuse speaks HTTP/2 on a connection until it has refused a request, before
// anything was done with it.
func refuse(conn net.Conn, how func(stream uint32)) {
	defer conn.Close()
	r := bufio.NewReader(conn)
	preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	if _, err := io.ReadFull(r, preface); err != nil {
		return
	}
	writeFrame(conn, frameSettings, 0, 0)
	for refused := false; ; {
		var head [9]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		if _, err := io.CopyN(io.Discard, r, int64(head[0])<<16|int64(head[1])<<8|int64(head[2])); err != nil {
			return
		}
		switch {
		case head[3] == frameSettings && head[4]&flagAck == 0:
			writeFrame(conn, frameSettings, flagAck, 0)
		case head[3] == frameHeaders && !refused:
			refused = true
			how(binary.BigEndian.Uint32(head[5:]))
		}
	}
}

// firstRefused is a listener whose first connection is refused.
type firstRefused struct {
	net.Listener
	refused atomic.Bool
	refuse  func(net.Conn)
}

func (l *firstRefused) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil && !l.refused.Swap(true) {
		go l.refuse(conn)
		return l.Listener.Accept()
	}
	return conn, err
}

// TestALiarRefusesStreams is of what HTTP/2 says without an answer.
func TestALiarRefusesStreams(t *testing.T) {
	noStreams := make([]byte, 8) // up to which something was done, and no error
	for name, how := range map[string]func(net.Conn, uint32){
		"GOAWAY": func(conn net.Conn, _ uint32) { writeFrame(conn, frameGoAway, 0, 0, noStreams...) },
		"REFUSED_STREAM and GOAWAY": func(conn net.Conn, stream uint32) {
			writeFrame(conn, frameGoAway, 0, 0, noStreams...)
			writeFrame(conn, frameReset, 0, stream, 0, 0, 0, refusedStream)
		},
		"GOAWAY with an error": func(conn net.Conn, _ uint32) {
			writeFrame(conn, frameGoAway, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2)
		},
		"RST_STREAM of another error": func(conn net.Conn, stream uint32) {
			writeFrame(conn, frameReset, 0, stream, 0, 0, 0, 2)
			conn.Close()
		},
		"a frame that is none": func(conn net.Conn, _ uint32) {
			_, _ = io.WriteString(conn, "HTTP/1.1 201 Created\r\n\r\n")
		},
		"an answer without a status": func(conn net.Conn, stream uint32) {
			writeFrame(conn, frameHeaders, 5, stream) // the last frame of stream and of header
			conn.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			onLiars(t, func(t *testing.T, l *liar, client *http.Client) {
				var seen log
				server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					seen.add(r)
					r.Body = io.NopCloser(strings.NewReader("order"))
					w.WriteHeader(l.act(r).StatusCode)
				}))
				h2 := new(http.Protocols)
				h2.SetUnencryptedHTTP2(true)
				server.Config.Protocols, server.Config.ErrorLog = h2, quiet
				server.Listener = &firstRefused{Listener: server.Listener, refuse: func(conn net.Conn) {
					refuse(conn, func(stream uint32) { how(conn, stream) })
				}}
				server.Start()
				defer server.Close()
				client.Transport.(counting).RoundTripper.(*http.Transport).Protocols = h2
				if status := l.order(t, server.URL, client, strings.NewReader("order")); status != 201 {
					t.Errorf("got %d", status)
				}
				seen.oneKey(t, 1, "order")
				if got := l.runs.Load(); got != 1 {
					t.Errorf("%d effects", got)
				}
			})
		})
	}
}
