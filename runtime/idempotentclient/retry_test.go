package idempotentclient_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

func TestWhichAnswersAreRepeated(t *testing.T) {
	const urn = "urn:oapi-idempotent:"
	marked := []string{"Idempotent-Replayed", "true"}
	for _, test := range []struct {
		name   string
		answer http.HandlerFunc
		again  bool
	}{
		{"201", answer(201), false},
		{"303", answer(303, "Location", "/orders/1"), false},
		{"400", answer(400), false},
		{"408", answer(408), true},
		{"409", answer(409), false},
		{"422", answer(422), false},
		{"425", answer(425), true},
		{"429", answer(429), true},
		{"500", answer(500), true},
		{"501", answer(501), false},
		{"502", answer(502), true},
		{"503", answer(503), true},
		{"504", answer(504), true},

		{"in flight", problem(409, urn+"idempotency-in-flight"), true},
		{"in flight, URL", problem(409, "https://example.com/problems/idempotency-in-flight"), true},
		{"in flight, fragment", problem(409, "https://example.com/problems#idempotency-in-flight"), true},
		{"in flight, application/json", body(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "application/json; charset=utf-8"), true},
		{"in flight, as text", body(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "text/plain"), false},
		{"in flight, as text of known length", body(409, `{"type":"idempotency-in-flight"}`, "Content-Type", "text/plain", "Content-Length", "32"), false},
		{"in flight, but 422", problem(422, urn+"idempotency-in-flight"), false},
		{"not quite in flight", problem(409, urn+"not-idempotency-in-flight"), false},
		{"in flight in the middle", problem(409, "https://example.com/idempotency-in-flight/no"), false},
		{"in flight, replayed", problem(409, urn+"idempotency-in-flight", marked...), false},
		{"key reused", problem(422, urn+"idempotency-key-reused"), false},
		{"key reused, as 409", problem(409, urn+"idempotency-key-reused"), false},
		{"not replayable", problem(409, urn+"idempotency-not-replayable"), false},
		{"store unavailable", problem(503, urn+"idempotency-store-unavailable"), true},
		{"outcome unknown", problem(503, urn+"idempotency-outcome-unknown"), false},
		{"outcome unknown, 409", problem(409, urn+"idempotency-outcome-unknown"), false},
		{"a problem of the application", problem(409, "https://example.com/sold-out"), false},
		{"replayed 500", answer(500, marked...), false},
		{"replayed 503", answer(503, marked...), false},
		{"marked as no replay", answer(503, "Idempotent-Replayed", "false"), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := &memory{answers: []http.HandlerFunc{test.answer, answer(201)}}
			c := api{Client: server}
			if _, err := c.CreateOrder(t.Context(), "", strings.NewReader("order")); err != nil {
				t.Fatal(err)
			}
			want := 1
			if test.again {
				want = 2
			}
			server.oneKey(t, want, "order")
		})
	}
}

func TestTheLastAnswerIsReturned(t *testing.T) {
	server := &memory{answers: []http.HandlerFunc{problem(503, "urn:oapi-idempotent:idempotency-store-unavailable")}}
	c := api{Client: server}
	resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	server.oneKey(t, 4, "order")
	if text := drain(t, resp); resp.StatusCode != 503 || !strings.Contains(text, "What to do.") {
		t.Fatalf("got %d %q", resp.StatusCode, text)
	}
}

func TestConflictsWithoutProblemsAreInFlightByOption(t *testing.T) {
	conflicts := idempotentclient.NewConfig(idempotentclient.WithConflictsInFlight())
	for _, test := range []struct {
		name   string
		answer http.HandlerFunc
		again  bool
	}{
		{"bare", answer(409), true},
		{"JSON without a type", body(409, `{"error":"busy"}`, "Content-Type", "application/json"), true},
		{"about:blank", problem(409, "about:blank"), true},
		{"another problem", problem(409, "https://example.com/sold-out"), false},
		{"replayed", answer(409, "Idempotent-Replayed", "true"), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := &memory{answers: []http.HandlerFunc{test.answer, answer(201)}}
			c := api{Client: server, idempotency: conflicts}
			resp, err := c.CreateOrder(idempotentclient.WithoutRetry(t.Context()), "", nil)
			if err != nil {
				t.Fatal(err)
			}
			var refused *idempotentclient.Problem
			if got := errors.As(idempotentclient.Check(resp), &refused) && refused.Code == idempotentclient.InFlight; got != test.again {
				t.Errorf("Check says %v", idempotentclient.Check(resp))
			}
			server.seen = nil
			if _, err := c.CreateOrder(t.Context(), "", nil); err != nil {
				t.Fatal(err)
			}
			if got := len(server.seen) == 2; got != test.again {
				t.Fatalf("the server saw %d requests", len(server.seen))
			}
		})
	}
}

func TestACallOutlivesALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inFlight := problem(409, "urn:oapi-idempotent:idempotency-in-flight", "Retry-After", "2")
		server := &memory{answers: slices.Concat(slices.Repeat([]http.HandlerFunc{inFlight}, 15), []http.HandlerFunc{answer(201)})}
		c := api{Client: server, idempotency: idempotentclient.NewConfig(
			idempotentclient.WithRetry(idempotentclient.Retry{Max: 2 * time.Second, MaxElapsed: time.Minute}))}
		resp, err := c.CreateOrder(t.Context(), "", strings.NewReader("order"))
		if err != nil || resp.StatusCode != 201 {
			t.Fatalf("got %v, %v", resp, err)
		}
		server.oneKey(t, 16, "order")
	})
}

func TestInFlightEndsWithMaxElapsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &memory{answers: []http.HandlerFunc{problem(409, "urn:oapi-idempotent:idempotency-in-flight", "Retry-After", "2")}}
		c := api{Client: server, idempotency: idempotentclient.NewConfig(
			idempotentclient.WithRetry(idempotentclient.Retry{Max: 2 * time.Second, MaxElapsed: 10 * time.Second}))}
		begun := time.Now()
		resp, err := c.CreateOrder(t.Context(), "mine", nil)
		if err != nil {
			t.Fatal(err)
		}
		var refused *idempotentclient.Problem
		if !errors.As(idempotentclient.Check(resp), &refused) || refused.Code != idempotentclient.InFlight || refused.Key != "mine" {
			t.Fatalf("Check is %v", idempotentclient.Check(resp))
		}
		if took := time.Since(begun); took != 10*time.Second || len(server.seen) != 6 {
			t.Fatalf("gave up after %v and %d requests", took, len(server.seen))
		}
	})
}

// The last attempt is the one that finds the lease over.
func TestTheLastWaitEndsWithMaxElapsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 50 {
			server := &memory{answers: []http.HandlerFunc{problem(409, "urn:x:idempotency-in-flight")}}
			op := idempotentclient.Operation{Retry: idempotentclient.Retry{Base: 700 * time.Millisecond, Max: 800 * time.Millisecond, MaxElapsed: 1200 * time.Millisecond}}
			if _, err := (&api{Client: server}).call(t.Context(), &op, "/", "", nil); err != nil {
				t.Fatal(err)
			}
			if span := server.at[len(server.at)-1].Sub(server.at[0]); span != 1200*time.Millisecond {
				t.Fatalf("the last attempt began %v after the first", span)
			}
		}
	})
}

func TestWaits(t *testing.T) {
	standard := idempotentclient.Operation{ID: "op"} // all defaults: 500ms, 8s, 4 attempts, 60s
	for _, test := range []struct {
		name     string
		fields   []string
		min, max []time.Duration // of each wait
	}{
		{"full jitter", nil, []time.Duration{0, 0, 0}, []time.Duration{500e6, 1e9, 2e9}},
		{"seconds", []string{"Retry-After", "3"}, []time.Duration{3e9, 3e9, 3e9}, []time.Duration{3e9, 3e9, 3e9}},
		{"date", []string{"Retry-After", "Sat, 01 Jan 2000 00:00:05 GMT"}, []time.Duration{5e9, 0, 0}, []time.Duration{5e9, 1e9, 2e9}},
		{"date by the server's clock", []string{
			"Date", "Sun, 30 Nov 2036 10:00:00 GMT", "Retry-After", "Sun, 30 Nov 2036 10:00:04 GMT",
		}, []time.Duration{4e9, 4e9, 4e9}, []time.Duration{4e9, 4e9, 4e9}},
		{"absurd seconds", []string{"Retry-After", "31536000"}, []time.Duration{8e9, 8e9, 8e9}, []time.Duration{8e9, 8e9, 8e9}},
		{"more seconds than there are", []string{"Retry-After", "99999999999999999999999"}, []time.Duration{8e9, 8e9, 8e9}, []time.Duration{8e9, 8e9, 8e9}},
		{"absurd date", []string{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"}, []time.Duration{8e9, 8e9, 8e9}, []time.Duration{8e9, 8e9, 8e9}},
		{"zero", []string{"Retry-After", "0"}, []time.Duration{0, 0, 0}, []time.Duration{500e6, 1e9, 2e9}},
		{"negative", []string{"Retry-After", "-5"}, []time.Duration{0, 0, 0}, []time.Duration{500e6, 1e9, 2e9}},
		{"no number", []string{"Retry-After", "soon"}, []time.Duration{0, 0, 0}, []time.Duration{500e6, 1e9, 2e9}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 20 {
				synctest.Test(t, func(t *testing.T) {
					server := &memory{answers: []http.HandlerFunc{answer(503, test.fields...)}}
					c := api{Client: server}
					if _, err := c.call(t.Context(), &standard, "/", "", nil); err != nil {
						t.Fatal(err)
					}
					if len(server.at) != 4 {
						t.Fatalf("%d attempts, want 4", len(server.at))
					}
					for i := range test.min {
						if wait := server.at[i+1].Sub(server.at[i]); wait < test.min[i] || wait > test.max[i] {
							t.Errorf("wait %d was %v, want %v to %v", i+1, wait, test.min[i], test.max[i])
						}
					}
				})
			}
		})
	}
}

func TestWaitsDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := map[time.Duration]bool{}
		for range 50 {
			server := &memory{answers: []http.HandlerFunc{answer(503), answer(201)}}
			c := api{Client: server}
			if _, err := c.call(t.Context(), &idempotentclient.Operation{}, "/", "", nil); err != nil {
				t.Fatal(err)
			}
			waits[server.at[1].Sub(server.at[0]).Round(10*time.Millisecond)] = true
		}
		if len(waits) < 10 {
			t.Fatalf("50 first waits within half a second fall on %d hundredths", len(waits))
		}
	})
}

func TestExtremeLimitsDoNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &memory{answers: []http.HandlerFunc{answer(503)}}
		const forever = time.Duration(1<<63 - 1)
		c := api{Client: server, idempotency: idempotentclient.NewConfig(idempotentclient.WithRetry(
			idempotentclient.Retry{MaxAttempts: 100, Base: 1, Max: forever, MaxElapsed: time.Hour}))}
		if _, err := c.CreateOrder(t.Context(), "", nil); err != nil {
			t.Fatal(err)
		}
		if n := len(server.at); n < 40 || server.at[n-1].Sub(server.at[0]) > time.Hour {
			t.Fatalf("%d attempts in %v", n, server.at[n-1].Sub(server.at[0]))
		}
	})
}

func TestNoAttemptOnceTheContextIsDone(t *testing.T) {
	t.Run("cancelled while waiting", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			server := &memory{answers: []http.HandlerFunc{answer(503, "Retry-After", "5")}}
			time.AfterFunc(time.Second, cancel)
			begun := time.Now()
			c := api{Client: server}
			_, err := c.call(ctx, &idempotentclient.Operation{}, "/", "mine", nil)
			var lost *idempotentclient.Error
			if !errors.Is(err, context.Canceled) || !errors.As(err, &lost) || lost.Key != "mine" || lost.Attempts != 1 {
				t.Fatalf("got %#v", err)
			}
			if len(server.seen) != 1 || time.Since(begun) != time.Second {
				t.Fatalf("%d requests in %v", len(server.seen), time.Since(begun))
			}
		})
	})
	t.Run("deadline before the next attempt", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			server := &memory{answers: []http.HandlerFunc{answer(503, "Retry-After", "5")}}
			begun := time.Now()
			c := api{Client: server}
			resp, err := c.call(ctx, &idempotentclient.Operation{}, "/", "", nil)
			if err != nil || resp.StatusCode != 503 || len(server.seen) != 1 || time.Since(begun) != 0 {
				t.Fatalf("got %v, %v after %d requests and %v; want the answer at once", resp, err, len(server.seen), time.Since(begun))
			}
		})
	})
	t.Run("in flight past the deadline", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			server := &memory{answers: []http.HandlerFunc{
				problem(409, "urn:x:idempotency-in-flight"),
				func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			}}
			c := api{Client: doerFunc(func(r *http.Request) (*http.Response, error) {
				resp, err := server.Do(r)
				if r.Context().Err() != nil {
					return nil, r.Context().Err()
				}
				return resp, err
			})}
			_, err := c.call(ctx, &idempotentclient.Operation{}, "/", "mine", nil)
			var refused *idempotentclient.Problem
			if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &refused) || refused.Code != idempotentclient.InFlight || refused.Key != "mine" {
				t.Fatalf("got %v", err)
			}
			server.oneKey(t, 2, "")
		})
	})
	t.Run("another answer than in flight before the deadline", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			server := &memory{answers: []http.HandlerFunc{problem(409, "urn:x:idempotency-in-flight"), answer(503)}}
			c := api{Client: doerFunc(func(r *http.Request) (*http.Response, error) {
				if len(server.seen) == 2 {
					<-r.Context().Done()
				}
				return server.Do(r)
			})}
			_, err := c.call(ctx, &idempotentclient.Operation{}, "/", "mine", nil)
			var refused *idempotentclient.Problem
			if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &refused) {
				t.Fatalf("got %v", err)
			}
		})
	})
	t.Run("before the first attempt", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		server := &memory{answers: []http.HandlerFunc{answer(201)}}
		c := api{Client: server}
		_, err := c.CreateOrder(ctx, "", nil, func(context.Context, *http.Request) error { cancel(); return nil })
		if !errors.Is(err, context.Canceled) || !errors.Is(err, idempotentclient.ErrNotSent) {
			t.Fatalf("got %v", err)
		}
		if len(server.seen) != 0 {
			t.Fatalf("%d requests", len(server.seen))
		}
	})
	t.Run("cancelled during the attempt", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		server := &memory{answers: []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) { cancel(); w.WriteHeader(503) }}}
		c := api{Client: server}
		resp, err := c.CreateOrder(ctx, "", nil)
		if err != nil || resp.StatusCode != 503 {
			t.Fatalf("got %v, %v", resp, err)
		}
		server.oneKey(t, 1, "")
	})
}

func TestAClientThatReturnsNothing(t *testing.T) {
	c := api{Client: doerFunc(func(*http.Request) (*http.Response, error) { return nil, nil })}
	if _, err := c.CreateOrder(t.Context(), "", nil); err == nil {
		t.Fatal("there is neither an answer nor an error")
	}
}

func TestOneAttempt(t *testing.T) {
	once := createOrder
	once.NoRetry = true
	single := createOrder
	single.Retry.MaxAttempts = 1
	for name, call := range map[string]func(*memory) (*http.Response, error){
		"NoRetry": func(m *memory) (*http.Response, error) {
			c := api{Client: m, idempotency: idempotentclient.NewConfig(idempotentclient.NoRetry())}
			return c.CreateOrder(t.Context(), "", strings.NewReader("order"))
		},
		"WithoutRetry": func(m *memory) (*http.Response, error) {
			c := api{Client: m}
			return c.CreateOrder(idempotentclient.WithoutRetry(t.Context()), "", strings.NewReader("order"))
		},
		"WithRetry": func(m *memory) (*http.Response, error) {
			c := api{Client: m, idempotency: idempotentclient.NewConfig(idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 1}))}
			return c.CreateOrder(t.Context(), "", strings.NewReader("order"))
		},
		"the operation's NoRetry, whatever the option": func(m *memory) (*http.Response, error) {
			c := api{Client: m, idempotency: idempotentclient.NewConfig(idempotentclient.WithRetry(idempotentclient.Retry{MaxAttempts: 3}))}
			return c.call(t.Context(), &once, "/orders", "", strings.NewReader("order"))
		},
		"the operation's maxAttempts": func(m *memory) (*http.Response, error) {
			return (&api{Client: m}).call(t.Context(), &single, "/orders", "", strings.NewReader("order"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, a := range []http.HandlerFunc{answer(503), problem(409, "idempotency-in-flight")} {
				server := &memory{answers: []http.HandlerFunc{a}}
				if _, err := call(server); err != nil {
					t.Fatal(err)
				}
				server.oneKey(t, 1, "order")
			}
		})
	}
}

// unrewindable hides from http.NewRequest how to rewind a reader.
type unrewindable struct{ io.Reader }

// replaceBody leaves GetBody the old body's, as careless editors do.
func replaceBody(text string) editor {
	return func(_ context.Context, r *http.Request) error {
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
		return nil
	}
}

func TestBodies(t *testing.T) {
	large := strings.Repeat("x", 100)
	for _, test := range []struct {
		name     string
		body     io.Reader
		editors  []editor
		attempts int
		want     string
	}{
		{"none", nil, nil, 4, ""},
		{"rewindable", strings.NewReader("order"), nil, 4, "order"},
		{"rewindable over the limit", strings.NewReader(large), nil, 4, large},
		{"buffered", unrewindable{strings.NewReader("order")}, nil, 4, "order"},
		{"buffered, at the limit", unrewindable{strings.NewReader(large[:64])}, nil, 4, large[:64]},
		{"over the limit", unrewindable{strings.NewReader(large)}, nil, 1, large},
		{"replaced by an editor", strings.NewReader("order"), []editor{replaceBody("sealed")}, 4, "sealed"},
		{"replaced by an editor, over the limit", strings.NewReader("order"), []editor{replaceBody(large)}, 1, large},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := &memory{answers: []http.HandlerFunc{answer(503)}}
			c := api{Client: server, idempotency: idempotentclient.NewConfig(idempotentclient.WithBodyLimit(64))}
			resp, err := c.CreateOrder(t.Context(), "", test.body, test.editors...)
			if err != nil || resp.StatusCode != 503 {
				t.Fatalf("got %v, %v", resp, err)
			}
			server.oneKey(t, test.attempts, test.want)
		})
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestABodyThatCannotBeReadIsNotSent(t *testing.T) {
	lost := errors.New("disk gone")
	server := &memory{answers: []http.HandlerFunc{answer(201)}}
	c := api{Client: server}
	_, err := c.CreateOrder(t.Context(), "", io.MultiReader(strings.NewReader("half"), failing{lost}))
	if !errors.Is(err, lost) || !errors.Is(err, idempotentclient.ErrNotSent) || len(server.seen) != 0 {
		t.Fatalf("got %v and %d requests", err, len(server.seen))
	}
}

func TestABodyThatNeverComesEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		server := &memory{answers: []http.HandlerFunc{answer(201)}}
		c := api{Client: server}
		if _, err := c.CreateOrder(ctx, "", r); !errors.Is(err, idempotentclient.ErrNotSent) || len(server.seen) != 0 {
			t.Fatalf("got %v and %d requests", err, len(server.seen))
		}
	})
}

func TestABodyThatCannotBeOpenedAgain(t *testing.T) {
	lost := errors.New("file gone")
	for opens, want := range []int{0, 1, 2} { // requests, when that many opens succeed
		server := &memory{answers: []http.HandlerFunc{answer(503)}}
		req, err := http.NewRequest(http.MethodPost, "http://example.com/", strings.NewReader("order"))
		if err != nil {
			t.Fatal(err)
		}
		left, open := opens, req.GetBody
		req.GetBody = func() (io.ReadCloser, error) {
			if left--; left < 0 {
				return nil, lost
			}
			return open()
		}
		var config idempotentclient.Config
		_, err = config.Start(&createOrder, req).Do(server)
		if !errors.Is(err, lost) || errors.Is(err, idempotentclient.ErrNotSent) != (opens == 0) || len(server.seen) != want {
			t.Errorf("after %d opens: %v and %d requests", opens, err, len(server.seen))
		}
	}
}

type closing struct {
	io.Reader
	closed int
}

func (c *closing) Close() error { c.closed++; return nil }

func TestTheRequestBodyIsClosed(t *testing.T) {
	for name, ctx := range map[string]context.Context{
		"sent":     t.Context(),
		"not sent": idempotentclient.WithKey(t.Context(), ""),
	} {
		t.Run(name, func(t *testing.T) {
			b := &closing{Reader: strings.NewReader("order")}
			c := api{Client: &memory{answers: []http.HandlerFunc{answer(201)}}}
			c.CreateOrder(ctx, "", b)
			if b.closed == 0 {
				t.Fatal("the body is still open")
			}
		})
	}
}

func TestTheContextForgetsTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b := &closing{Reader: strings.NewReader("order")}
		c := api{Client: &memory{answers: []http.HandlerFunc{answer(201)}}}
		if _, err := c.CreateOrder(ctx, "", b); err != nil {
			t.Fatal(err)
		}
		cancel()
		synctest.Wait()
		if b.closed != 1 {
			t.Fatalf("the body was closed %d times", b.closed)
		}
	})
}

func TestAnObserverHearsEachAttempt(t *testing.T) {
	var heard []idempotentclient.Attempt
	broken := errors.New("broken")
	answers := []func() (*http.Response, error){
		func() (*http.Response, error) { return nil, broken },
		func() (*http.Response, error) { return &http.Response{StatusCode: 503}, nil },
		func() (*http.Response, error) { return &http.Response{StatusCode: 201}, nil },
	}
	c := api{
		Client: doerFunc(func(*http.Request) (*http.Response, error) { return answers[len(heard)]() }),
		idempotency: idempotentclient.NewConfig(idempotentclient.WithObserver(
			func(_ context.Context, a idempotentclient.Attempt) { heard = append(heard, a) })),
	}
	if _, err := c.CreateOrder(t.Context(), "mine", nil); err != nil {
		t.Fatal(err)
	}
	for i := range heard {
		heard[i].Wait = 0
	}
	if want := []idempotentclient.Attempt{
		{Operation: "createOrder", Key: "mine", Number: 1, Err: broken, Again: true},
		{Operation: "createOrder", Key: "mine", Number: 2, Status: 503, Again: true},
		{Operation: "createOrder", Key: "mine", Number: 3, Status: 201},
	}; !slices.Equal(heard, want) {
		t.Fatalf("heard %+v", heard)
	}
}

type doerFunc func(*http.Request) (*http.Response, error)

func (f doerFunc) Do(r *http.Request) (*http.Response, error) { return f(r) }
