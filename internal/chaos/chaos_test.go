//go:build unix

// Package chaos records what concurrent clients ask and are answered while
// leases lapse, stores fail and connections break, and has porcupine look for an
// order of one after the other in which the guard's promise explains it all.
//
// It also holds the store to its promises over pgx. It is a module of its own so
// that nobody inherits porcupine or pgx.
package chaos

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	_ "github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

var duration = flag.Duration("chaos.duration", 3*time.Second, "how long the clients of TestHistories keep asking")

const (
	lease    = 150 * time.Millisecond
	clients  = 48
	poolSize = 12
	// So many keys are asked for at a time, each for six leases: with each birth
	// a new one takes the place of the oldest.
	keys  = 24
	birth = 6 * lease / keys
)

const (
	headerNumber = "Test-Number" // of the request
	headerPlan   = "Test-Plan"   // what its handler does; neither is compared
)

// Every fourth key is of an operation that runs at most once.
func isAtMostOnce(key int) bool { return key%4 == 0 }

// An asker sends requests and keeps the history.
type asker struct {
	t       *testing.T
	began   time.Time
	numbers atomic.Int64
	faults  atomic.Bool
	servers []*httptest.Server
	pools   []*sql.DB
	client  *http.Client

	mu      sync.Mutex
	history history
}

func (a *asker) note(f func(*history)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(&a.history)
}

// newAsker starts two servers, each with a pool of its own that leads through a
// proxy of its own to one database.
func newAsker(t *testing.T, sabotage func(idempotency.Store) idempotency.Store) *asker {
	t.Helper()
	a := &asker{
		t:       t,
		history: history{runs: map[int][]run{}, bound: map[int]binding{}, marks: map[int]bool{}, seen: map[string]int{}},
		// On a connection that breaks when it is used again net/http would send
		// a request with a key once more, unasked.
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	dsn := pgtest.DSN(t)
	for range 2 {
		proxy := newProxy(t, dsn)
		db, err := sql.Open("postgres", proxy.dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		a.pools = append(a.pools, db)
		db.SetMaxOpenConns(poolSize)
		db.SetMaxIdleConns(poolSize)
		pg, err := sqlstore.NewPostgres(db)
		if err != nil {
			t.Fatal(err)
		}
		if err := pg.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		var store idempotency.Store = &failing{pg, &a.faults}
		if sabotage != nil {
			store = sabotage(store)
		}
		guard, err := idempotency.New(store,
			idempotency.WithStoreTimeout(500*time.Millisecond),
			idempotency.WithObserver(func(_ context.Context, e idempotency.Event) {
				a.note(func(h *history) { h.seen[string(e.Kind)]++ })
			}))
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(a.routes(guard))
		server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handlers that panic
		server.Start()
		t.Cleanup(server.Close)
		a.servers = append(a.servers, server)
		go proxy.cutNowAndThen(&a.faults)
	}
	return a
}

func (a *asker) routes(guard *idempotency.Guard) http.Handler {
	mux := http.NewServeMux()
	for _, guarantee := range []idempotency.Guarantee{idempotency.AtLeastOnce, idempotency.AtMostOnce} {
		p := idempotency.DefaultPolicy("POST /" + string(guarantee))
		p.Guarantee, p.Lease = guarantee, lease
		idempotency.Register[*http.Request](guard, &p)
		mux.HandleFunc(p.Operation, func(w http.ResponseWriter, r *http.Request) {
			guard.Handle(&p, w, r, a.handle)
		})
	}
	return mux
}

// handle does not watch its context: a guard has to do with handlers that do
// not.
func (a *asker) handle(w http.ResponseWriter, r *http.Request) {
	key, _ := strconv.Atoi(idempotency.KeyFrom(r.Context()).String())
	number, _ := strconv.Atoi(r.Header.Get(headerNumber))
	ran := run{number, idempotency.Attempt(r.Context())}
	a.note(func(h *history) {
		h.runs[key] = append(h.runs[key], ran)
		if isAtMostOnce(key) {
			h.bind(key, ran)
		}
	})
	status := http.StatusCreated
	switch r.Header.Get(headerPlan) {
	case "mark":
		a.note(func(h *history) { h.marks[key] = true })
		if err := idempotency.MarkEffect(r.Context()); err != nil {
			status = http.StatusInternalServerError
			break
		}
		a.note(func(h *history) { h.bind(key, ran) })
		time.Sleep(rand.N(2 * lease))
	case "slow":
		time.Sleep(lease/2 + rand.N(2*lease))
	case "fail":
		status = http.StatusInternalServerError
	case "panic":
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(status)
	fmt.Fprint(w, number)
}

// ask sends one request and writes down what came of it.
func (a *asker) ask(key int, plan string, another bool, patience time.Duration) kind {
	number := int(a.numbers.Add(1)) * 2
	if another {
		number++
	}
	path := string(idempotency.AtLeastOnce)
	if isAtMostOnce(key) {
		path = string(idempotency.AtMostOnce)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, a.servers[number/2%len(a.servers)].URL+"/"+path, strings.NewReader(strconv.Itoa(number%2)))
	if err != nil {
		a.t.Error(err)
		return wrong
	}
	r.Header.Set(wire.HeaderKey, strconv.Itoa(key))
	r.Header.Set(headerNumber, strconv.Itoa(number))
	r.Header.Set(headerPlan, plan)

	call := time.Since(a.began).Nanoseconds()
	out := a.send(r, isAtMostOnce(key))
	end := time.Since(a.began).Nanoseconds()
	if out.kind == noAnswer || out.kind == unsettled {
		end = math.MaxInt64 // what it did may come to light at any time
	}
	a.note(func(h *history) {
		h.seen[string(out.kind)]++
		h.ops = append(h.ops, porcupine.Operation{Input: input{key, number}, Call: call, Output: out, Return: end})
	})
	return out.kind
}

func (a *asker) send(r *http.Request, atMostOnce bool) output {
	resp, err := a.client.Do(r)
	if err != nil {
		return output{kind: noAnswer}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return output{kind: noAnswer}
	}
	if run, err := strconv.Atoi(string(body)); err == nil { // a handler's answer
		switch {
		case resp.Header.Get(wire.HeaderReplayed) != "":
			return output{replayed, run}
		case resp.StatusCode == http.StatusCreated || atMostOnce:
			return output{own, run}
		}
		return output{freed, run}
	}
	var problem struct{ Type string }
	_ = json.Unmarshal(body, &problem) // what is no problem has no type
	switch answer := fmt.Sprint(resp.StatusCode, " ", strings.TrimPrefix(problem.Type, wire.ProblemBase)); answer {
	case "409 " + wire.InFlight:
		return output{kind: inFlight}
	case "422 " + wire.KeyReused:
		return output{kind: mismatch}
	case "409 " + wire.OutcomeUnknown:
		return output{kind: unknown}
	case "503 " + wire.OutcomeUnknown:
		return output{kind: unsettled}
	case "503 " + wire.StoreUnavailable:
		return output{kind: unavailable}
	}
	return output{kind: wrong}
}

// record has clients ask for a while, then lets everything heal and asks once
// more for each key.
func (a *asker) record(d time.Duration) *history {
	plans := []string{"", "mark", "slow", "slow", "slow", "slow", "fail", "fail", "panic"}
	a.began = time.Now()
	a.faults.Store(true)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for time.Since(a.began) < d {
				key := int(time.Since(a.began)/birth) + rand.N(keys)
				patience := 10 * time.Second
				if rand.N(20) == 0 {
					patience = rand.N(20 * time.Millisecond) // hangs up
				}
				a.ask(key, plans[rand.N(len(plans))], rand.N(10) == 0, patience)
			}
		})
	}
	wg.Wait()
	a.faults.Store(false)

	last := int(time.Since(a.began)/birth) + keys
	var next atomic.Int64
	healed := time.Now()
	for range clients {
		wg.Go(func() {
			for key := int(next.Add(1)) - 1; key < last; key = int(next.Add(1)) - 1 {
				for again := true; again; {
					switch a.ask(key, "", false, 10*time.Second) {
					case inFlight, unavailable, unsettled, noAnswer:
						time.Sleep(lease / 2)
					default:
						again = false
					}
					if again && time.Since(healed) > 30*time.Second {
						a.t.Errorf("key %d is still not answered for good", key)
						again = false
					}
				}
			}
		})
	}
	wg.Wait()
	for _, server := range a.servers {
		server.Close() // waits for handlers whose clients have left
	}
	for _, pool := range a.pools {
		pool.Close()
	}
	return &a.history
}

// failing is a store some calls of which fail, and do their work or do not, and
// which lets the lease of three claims in four lapse.
type failing struct {
	idempotency.Store
	on *atomic.Bool
}

var errFault = errors.New("chaos: the store fails")

// fault calls f and returns its error, unless it is f's turn to fail: before it
// did its work or after.
func (s *failing) fault(percent int, f func() error) error {
	turn := rand.N(100)
	if !s.on.Load() || turn >= percent {
		return f()
	}
	if turn%2 == 0 {
		_ = f() // nobody hears of it
	}
	return errFault
}

func (s *failing) Claim(ctx context.Context, c *idempotency.Claim) (row idempotency.Row, err error) {
	err = s.fault(4, func() (err error) { row, err = s.Store.Claim(ctx, c); return err })
	return row, err
}

func (s *failing) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (row idempotency.Row, err error) {
	err = s.fault(10, func() (err error) { row, err = s.Store.Takeover(ctx, c, seen); return err })
	return row, err
}

func (s *failing) Renew(ctx context.Context, c *idempotency.Claim) error {
	if s.on.Load() && c.ID[0]%4 != 0 {
		return errFault
	}
	return s.fault(10, func() error { return s.Store.Renew(ctx, c) })
}

func (s *failing) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	return s.fault(20, func() error { return s.Store.MarkEffect(ctx, c) })
}

func (s *failing) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (row idempotency.Row, err error) {
	err = s.fault(20, func() (err error) { row, err = s.Store.Settle(ctx, c, o); return err })
	return row, err
}

func (s *failing) Release(ctx context.Context, c *idempotency.Claim) error {
	return s.fault(20, func() error { return s.Store.Release(ctx, c) })
}

func TestHistories(t *testing.T) {
	h := newAsker(t, nil).record(*duration)
	t.Logf("%d requests for %d keys: %v", len(h.ops), len(h.runs), h.seen)
	if err := h.check(); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []kind{own, replayed, freed, inFlight, mismatch, unavailable, noAnswer, unknown} {
		if h.seen[string(kind)] == 0 {
			t.Errorf("nothing was answered: %s", kind)
		}
	}
	for _, event := range []idempotency.EventKind{idempotency.EventTakenOver, idempotency.EventLeaseLost, idempotency.EventStoreFailed} {
		if h.seen[string(event)] == 0 {
			t.Errorf("there was no event: %s", event)
		}
	}
}

// A losesRecords says that an answer is recorded which is not.
type losesRecords struct{ idempotency.Store }

func (s losesRecords) Settle(_ context.Context, c *idempotency.Claim, _ idempotency.Outcome) (idempotency.Row, error) {
	return idempotency.Row{Won: true, ID: c.ID}, nil
}

// A hailsZombies says that an answer is recorded where another's is.
type hailsZombies struct{ idempotency.Store }

func (s hailsZombies) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	row, err := s.Store.Settle(ctx, c, o)
	row.Won = true
	return row, err
}

// A blursRequests takes all requests of a key for the same.
type blursRequests struct{ idempotency.Store }

func (s blursRequests) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := s.Store.Claim(ctx, c)
	row.Fingerprint = c.Fingerprint
	return row, err
}

// A forgetsGuarantee claims as if everything could run again.
type forgetsGuarantee struct{ idempotency.Store }

func (s forgetsGuarantee) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	c.AtMostOnce = false
	return s.Store.Claim(ctx, c)
}

// A forgetsMarks says that an effect is marked which is not.
type forgetsMarks struct{ idempotency.Store }

func (forgetsMarks) MarkEffect(context.Context, *idempotency.Claim) error { return nil }

// What porcupine and the count of runs have found right is worth something only
// if they find fault with what is wrong.
func TestHistoriesOfSabotage(t *testing.T) {
	for name, test := range map[string]struct {
		sabotage func(idempotency.Store) idempotency.Store
		finding  error
	}{
		"loses records":       {func(s idempotency.Store) idempotency.Store { return losesRecords{s} }, errNoOrder},
		"hails zombies":       {func(s idempotency.Store) idempotency.Store { return hailsZombies{s} }, errNoOrder},
		"blurs requests":      {func(s idempotency.Store) idempotency.Store { return blursRequests{s} }, errNoOrder},
		"forgets a guarantee": {func(s idempotency.Store) idempotency.Store { return forgetsGuarantee{s} }, errRanAgain},
		"forgets marks":       {func(s idempotency.Store) idempotency.Store { return forgetsMarks{s} }, errRanAgain},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			for began := time.Now(); err == nil && time.Since(began) < time.Minute; {
				err = newAsker(t, test.sabotage).record(time.Second).check()
			}
			if !errors.Is(err, test.finding) {
				t.Fatalf("found: %v", err)
			}
			t.Log(err)
		})
	}
}
