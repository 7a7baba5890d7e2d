package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/gofiber/fiber/v3"
	fiberidempotency "github.com/gofiber/fiber/v3/middleware/idempotency"
	fiberpostgres "github.com/gofiber/storage/postgres/v3"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

const connections = 64

// A serving is a server of one round: it listens where it is told and returns
// how to end it.
type serving func(net.Listener) (end func() error, err error)

// payOverHTTP is the handler of all that is net/http, guarded or not.
func payOverHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Location", "/payments/pay_01J8ZC3Q7V")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, answerBody) // the client checks what it gets
}

// serveHTTP serves h by net/http.
func serveHTTP(h http.Handler) serving {
	return func(l net.Listener) (func() error, error) {
		server := &http.Server{Handler: h}
		go func() { _ = server.Serve(l) }() // until it is closed
		return server.Close, nil
	}
}

// serveGuarded serves by net/http behind a guard.
func serveGuarded(store idempotency.Store) serving {
	g := newGuarded(store, idempotency.AtLeastOnce)
	return serveHTTP(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.guard.Handle(g.policy, w, r, payOverHTTP) }))
}

// serveFiber serves by fiber behind its idempotency middleware; its own storage
// is in memory.
func serveFiber(storage fiber.Storage) serving {
	return func(l net.Listener) (func() error, error) {
		app := fiber.New()
		app.Use(fiberidempotency.New(fiberidempotency.Config{KeyHeader: "Idempotency-Key", Storage: storage}))
		app.Post("/payments", func(c fiber.Ctx) error {
			c.Set("Content-Type", "application/json")
			c.Set("Location", "/payments/pay_01J8ZC3Q7V")
			return c.Status(http.StatusCreated).SendString(answerBody)
		})
		go func() { _ = app.Listener(l, fiber.ListenConfig{DisableStartupMessage: true}) }() // until it is shut down
		return func() error { return app.ShutdownWithTimeout(time.Second) }, nil
	}
}

// A client speaks as much of HTTP/1.1 as costs next to nothing, so that what is
// measured is the server.
type client struct {
	conn    net.Conn
	r       *bufio.Reader
	request []byte
	key     []byte // within request
}

const uuidLength = 36

func dial(address string) (*client, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	head := "POST /payments HTTP/1.1\r\nHost: " + address + "\r\nContent-Type: application/json\r\nIdempotency-Key: "
	c := &client{conn: conn, r: bufio.NewReader(conn)}
	c.request = fmt.Appendf(nil, "%s%*s\r\nContent-Length: %d\r\n\r\n%s", head, uuidLength, "", len(requestBody), requestBody)
	c.key = c.request[len(head) : len(head)+uuidLength]
	copy(c.key, uuid())
	return c, nil
}

// newKey puts another key in place, at next to no cost.
func (c *client) newKey() {
	n := rand.Uint64()
	for i := range 12 { // the UUID's last digits
		c.key[uuidLength-1-i] = "0123456789abcdef"[n>>(4*i)&15]
	}
}

var replayed = []byte("Idempotent-Replayed: true")

// post sends a request with the key that is in place, and reads its answer,
// which must be 201.
func (c *client) post(wantReplay bool) error {
	if _, err := c.conn.Write(c.request); err != nil {
		return err
	}
	length, isReplay := -1, false
	for first := true; ; first = false {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch value, found := bytes.CutPrefix(line, []byte("Content-Length: ")); {
		case first && !bytes.HasPrefix(line, []byte("HTTP/1.1 201 ")):
			return fmt.Errorf("the answer is %q, not 201", line)
		case found:
			if length, err = strconv.Atoi(string(value)); err != nil {
				return err
			}
		case bytes.Equal(line, replayed):
			isReplay = true
		}
		if len(line) == 0 {
			break
		}
	}
	if length != len(answerBody) || isReplay != wantReplay {
		return fmt.Errorf("the answer has %d bytes and says of itself that it is a replay: %v", length, isReplay)
	}
	_, err := c.r.Discard(length)
	return err
}

// load has all connections make requests for the time given. The keys are those
// given, or new ones.
func (b *bench) load(d time.Duration, serve serving, keys []string) (_ sample, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return sample{}, err
	}
	end, err := serve(listener)
	if err != nil {
		return sample{}, errors.Join(err, listener.Close())
	}
	defer func() { err = errors.Join(err, end()) }()
	clients := make([]*client, connections)
	for i := range clients {
		if clients[i], err = dial(listener.Addr().String()); err != nil {
			return sample{}, err
		}
		defer clients[i].conn.Close()
	}
	post := func(i int) error {
		c := clients[i]
		if keys == nil {
			c.newKey()
		} else {
			copy(c.key, keys[rand.N(len(keys))])
		}
		return c.post(keys != nil)
	}
	if _, err := b.drive(connections, d/20, post); err != nil {
		return sample{}, err
	}
	var before, after runtime.MemStats
	runtime.GC() // the garbage of the last round
	runtime.ReadMemStats(&before)
	s, err := b.drive(connections, d, post)
	runtime.ReadMemStats(&after)
	if err != nil {
		return s, err
	}
	s.per = map[string]float64{"allocs/op": allocations(&before, &after, s.ops)}
	return s, nil
}

// allocations returns how many one operation makes, rounded down, as Go's own
// benchmarks do: what grows now and then is not one operation's.
func allocations(before, after *runtime.MemStats, ops int64) float64 {
	return float64((after.Mallocs - before.Mallocs) / uint64(ops))
}

func overHTTP(b *bench, name string) (*contest, error) {
	_, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	if err := b.table(dsn, defaultTable, b.fewRows); err != nil {
		return nil, err
	}
	fresh := func(name string, serve serving) side {
		return side{name, func(d time.Duration) (sample, error) { return b.load(d, serve, nil) }}
	}
	ours := func(name string, w way) side {
		return side{name, func(d time.Duration) (_ sample, err error) {
			store, closeStore, err := w.open(b.ctx, dsn, connections)
			if err != nil {
				return sample{}, err
			}
			defer func() { err = errors.Join(err, closeStore()) }()
			return b.load(d, serveGuarded(store), nil)
		}}
	}
	// Without this pgx opens four connections, or as many as there are processors.
	storage := fiberpostgres.New(fiberpostgres.Config{ConnectionURI: dsn + "&pool_max_conns=" + strconv.Itoa(connections)})
	b.onClose(storage.Close)
	contest := &contest{name: name, sides: []side{
		fresh("bare", serveHTTP(http.HandlerFunc(payOverHTTP))),
		ours(grouped.name, grouped),
		ours(newPostgres.name, newPostgres),
		fresh("fiber-Postgres", serveFiber(storage)),
		{"memory", func(d time.Duration) (sample, error) { return b.load(d, serveGuarded(memorystore.New()), nil) }},
		fresh("fiber-memory", serveFiber(nil)),
	}}
	contest.figures = []figure{
		speed(grouped.name, "fiber-Postgres", atLeast(1.5)),
		speed(newPostgres.name, "fiber-Postgres", target{}),
		speed(grouped.name, "bare", target{}),
		speed("memory", "fiber-memory", target{}),
	}
	return contest, nil
}

func inMemory(b *bench, name string) (*contest, error) {
	store, keys := memorystore.New(), make([]string, 1000)
	g := newGuarded(store, idempotency.AtLeastOnce)
	for i := range keys {
		keys[i] = uuid()
		if err := g.do(b.ctx, keys[i], requestBody, http.StatusCreated, pay); err != nil {
			return nil, err
		}
	}
	return &contest{
		name: name,
		sides: []side{
			{"bare", func(d time.Duration) (sample, error) {
				return b.load(d, serveHTTP(http.HandlerFunc(payOverHTTP)), nil)
			}},
			{"fresh", func(d time.Duration) (sample, error) { return b.load(d, serveGuarded(memorystore.New()), nil) }},
			{"replay", func(d time.Duration) (sample, error) { return b.load(d, serveGuarded(store), keys) }},
		},
		figures: []figure{
			speed("replay", "bare", atLeast(0.9)),
			speed("fresh", "bare", target{}),
			more("replay", "bare", "allocs/op", atMost(4)),
			more("fresh", "bare", "allocs/op", atMost(6)),
		},
	}, nil
}
