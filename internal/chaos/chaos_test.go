//go:build unix

// Package chaos records what concurrent clients ask and are answered while
// leases lapse, stores fail, connections break and PostgreSQL crashes, and has
// porcupine look for an order of one after the other in which the guard's
// promise explains it all. What was done in transactions is counted besides.
//
// It also holds the store to its promises over pgx. It is a module of its own so
// that nobody inherits porcupine or pgx.
package chaos

import (
	"cmp"
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
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	_ "github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

var duration = flag.Duration("chaos.duration", 3*time.Second, "how long the clients of TestHistories keep asking")

const (
	lease        = 150 * time.Millisecond
	storeTimeout = 500 * time.Millisecond
	clients      = 48
	poolSize     = 12
	// So many keys are asked for at a time, each for six leases: with each birth
	// a new one takes the place of the oldest.
	keys  = 24
	birth = 6 * lease / keys
)

const (
	headerNumber = "Test-Number" // of the request
	headerPlan   = "Test-Plan"   // what its handler does; neither is compared
)

// guaranteeOf returns the guarantee of the operation that a key is of.
func guaranteeOf(key int) idempotency.Guarantee {
	return [...]idempotency.Guarantee{idempotency.AtMostOnce, idempotency.Transaction, idempotency.AtLeastOnce, idempotency.Transaction, idempotency.AtLeastOnce}[key%5]
}

func isAtMostOnce(key int) bool { return guaranteeOf(key) == idempotency.AtMostOnce }

func isInTx(key int) bool { return guaranteeOf(key) == idempotency.Transaction }

// A txStore is a store for all guarantees.
type txStore interface {
	idempotency.Store
	idempotency.Transactor
}

// An asker sends requests and keeps the history.
type asker struct {
	t       *testing.T
	began   time.Time
	numbers atomic.Int64
	faults  atomic.Bool
	servers []*httptest.Server
	pools   []io.Closer
	look    *sql.DB // past the proxies
	client  *http.Client

	mu      sync.Mutex
	history history
}

// now is the time since the asker began, in nanoseconds.
func (a *asker) now() int64 { return time.Since(a.began).Nanoseconds() }

func (a *asker) note(f func(*history)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(&a.history)
}

// newAsker starts three servers, each with a pool of its own that leads through
// a proxy of its own to one database. One keeps keys in another pool besides,
// where claims share statements, and prepares what its transactions send; the last
// one's driver is pgx.
func newAsker(t *testing.T, dsn string, sabotage func(txStore) txStore) *asker {
	t.Helper()
	look, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := look.Exec("CREATE TABLE effects (key int, run int)"); err != nil {
		t.Fatal(err)
	}
	a := &asker{
		t:     t,
		look:  look,
		pools: []io.Closer{look},
		history: history{
			runs: map[int][]run{}, held: map[int][]holding{}, effects: map[int][]int{},
			bound: map[int]binding{}, marks: map[int]bool{}, seen: map[string]int{},
		},
		// On a connection that breaks when it is used again net/http would send
		// a request with a key once more, unasked.
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	for i := range 3 {
		proxy := newProxy(t, dsn, &a.faults)
		var db *sql.DB
		if i == 2 {
			db = openPgx(t, proxy.dsn, pgx.QueryExecModeCacheStatement)
		} else if db, err = sql.Open("postgres", proxy.dsn); err != nil {
			t.Fatal(err)
		}
		db.SetMaxOpenConns(poolSize)
		db.SetMaxIdleConns(poolSize)
		var pg *sqlstore.Store
		if i == 1 {
			pg, err = sqlstore.OpenPostgres(proxy.dsn, sqlstore.WithTransactions(db), sqlstore.WithPreparedStatements())
		} else {
			pg, err = sqlstore.NewPostgres(db)
		}
		if err != nil {
			t.Fatal(err)
		}
		a.pools = append(a.pools, pg, db)
		if err := pg.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		var store txStore = &failing{pg, a, i}
		if sabotage != nil {
			store = sabotage(store)
		}
		guard, err := idempotency.New(store,
			idempotency.WithStoreTimeout(storeTimeout),
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
		go proxy.cutNowAndThen()
	}
	return a
}

func (a *asker) routes(guard *idempotency.Guard) http.Handler {
	mux := http.NewServeMux()
	for _, guarantee := range []idempotency.Guarantee{idempotency.AtLeastOnce, idempotency.AtMostOnce, idempotency.Transaction} {
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
	plan := r.Header.Get(headerPlan)
	ran := run{number, idempotency.Attempt(r.Context()), plan}
	a.note(func(h *history) {
		h.runs[key] = append(h.runs[key], ran)
		if isAtMostOnce(key) {
			h.bind(key, ran)
		}
	})
	if tx, ok := sqlstore.Tx(r.Context()); ok {
		if _, err := tx.ExecContext(r.Context(), fmt.Sprintf("INSERT INTO effects VALUES (%d, %d)", key, number)); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	status := http.StatusCreated
	switch plan {
	case "refuse":
		status = http.StatusNotFound
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
	server := number / 2 % len(a.servers)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, a.servers[server].URL+"/"+string(guaranteeOf(key)), strings.NewReader(strconv.Itoa(number%2)))
	if err != nil {
		a.t.Error(err)
		return wrong
	}
	r.Header.Set(wire.HeaderKey, strconv.Itoa(key))
	r.Header.Set(headerNumber, strconv.Itoa(number))
	r.Header.Set(headerPlan, plan)

	call := a.now()
	out := a.send(r, key)
	end := a.now()
	if out.kind == noAnswer || out.kind == unsettled {
		end = math.MaxInt64 // what it did may come to light at any time
	}
	a.note(func(h *history) {
		h.seen[string(out.kind)]++
		h.ops = append(h.ops, porcupine.Operation{ClientId: server, Input: input{key, number}, Call: call, Output: out, Return: end})
	})
	return out.kind
}

func (a *asker) send(r *http.Request, key int) output {
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
		out := output{freed, run, resp.StatusCode}
		switch {
		case resp.Header.Get(wire.HeaderReplayed) != "":
			out.kind = replayed
		case resp.StatusCode < 500 || isAtMostOnce(key):
			out.kind = own
		}
		return out
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
	if isInTx(key) && resp.StatusCode == http.StatusInternalServerError {
		return output{kind: freed} // its handler's statement failed
	}
	return output{kind: wrong}
}

// record has clients ask for a while, in which crash is called again and again,
// and, on a busy machine, until what is wanted has been seen; then lets
// everything heal and asks once more for each key.
func (a *asker) record(d time.Duration, crash func(), wanted ...string) *history {
	plans := []string{"", "refuse", "mark", "slow", "slow", "slow", "slow", "fail", "fail", "panic"}
	a.began = time.Now()
	a.faults.Store(true)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for time.Since(a.began) < d || time.Since(a.began) < d+2*time.Minute && !a.saw(wanted) {
				key := int(time.Since(a.began)/birth) + rand.N(keys)
				patience := 10 * time.Second
				if rand.N(20) == 0 {
					patience = rand.N(20 * time.Millisecond) // hangs up
				}
				plan := plans[rand.N(len(plans))]
				if plan == "mark" && isInTx(key) || plan == "refuse" && !isInTx(key) {
					plan = "" // these are not for them
				}
				a.ask(key, plan, rand.N(10) == 0, patience)
			}
		})
	}
	for span := min(d/3, 2*time.Second); time.Since(a.began) < d-span; {
		time.Sleep(span + rand.N(span))
		crash()
	}
	wg.Wait()
	a.faults.Store(false)

	last := int(time.Since(a.began)/birth) + keys
	var next atomic.Int64
	for range clients {
		wg.Go(func() {
			for key := int(next.Add(1)) - 1; key < last; key = int(next.Add(1)) - 1 {
				a.settle(key)
			}
		})
	}
	wg.Wait()
	for _, server := range a.servers {
		server.Close() // waits for handlers whose clients have left
	}
	a.count()
	for _, pool := range a.pools { // there may be many askers in one test
		pool.Close()
	}
	return &a.history
}

// saw reports whether all that is wanted has been seen.
func (a *asker) saw(wanted []string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !slices.ContainsFunc(wanted, func(what string) bool { return a.history.seen[what] == 0 })
}

// settle asks until a key is answered for good.
func (a *asker) settle(key int) {
	for began := time.Now(); ; time.Sleep(lease / 2) {
		switch got := a.ask(key, "", false, 10*time.Second); got {
		case inFlight, unavailable, unsettled, noAnswer:
			if time.Since(began) > 30*time.Second {
				a.t.Errorf("key %d is still answered: %s", key, got)
				return
			}
		default:
			return
		}
	}
}

// count reads which runs left what they did in transactions.
func (a *asker) count() {
	rows, err := a.look.Query("SELECT key, run FROM effects")
	if err != nil {
		a.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var key, run int
		if err := rows.Scan(&key, &run); err != nil {
			a.t.Fatal(err)
		}
		a.history.effects[key] = append(a.history.effects[key], run)
	}
	if err := rows.Err(); err != nil {
		a.t.Fatal(err)
	}
}

// failing is a store some calls of which fail, and do their work or do not, and
// which lets the lease of three claims in four lapse.
type failing struct {
	txStore
	asker  *asker
	server int
}

var errFault = errors.New("chaos: the store fails")

// fault calls f and returns its error, unless it is f's turn to fail: before it
// did its work or after.
func (s *failing) fault(percent int, f func() error) error {
	turn := rand.N(100)
	if !s.asker.faults.Load() || turn >= percent {
		return f()
	}
	if turn%2 == 0 {
		_ = f() // nobody hears of it
	}
	return errFault
}

func (s *failing) Claim(ctx context.Context, c *idempotency.Claim) (row idempotency.Row, err error) {
	err = s.fault(4, func() (err error) { row, err = s.txStore.Claim(ctx, c); return err })
	return row, err
}

func (s *failing) Takeover(ctx context.Context, c *idempotency.Claim, seen idempotency.ClaimID) (row idempotency.Row, err error) {
	err = s.fault(10, func() (err error) { row, err = s.txStore.Takeover(ctx, c, seen); return err })
	return row, err
}

func (s *failing) Renew(ctx context.Context, c *idempotency.Claim) error {
	if s.asker.faults.Load() && c.ID[0]%4 != 0 {
		return errFault
	}
	return s.fault(10, func() error { return s.txStore.Renew(ctx, c) })
}

func (s *failing) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	return s.fault(20, func() error { return s.txStore.MarkEffect(ctx, c) })
}

func (s *failing) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (row idempotency.Row, err error) {
	err = s.fault(20, func() (err error) { row, err = s.txStore.Settle(ctx, c, o); return err })
	return row, err
}

func (s *failing) Release(ctx context.Context, c *idempotency.Claim) error {
	return s.fault(20, func() error { return s.txStore.Release(ctx, c) })
}

// InTx also notes for how long a run has its key in its own process.
func (s *failing) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (row idempotency.Row, err error) {
	turn := rand.N(100)
	if turn < 2 && s.asker.faults.Load() {
		return row, errFault
	}
	ran := false
	from := s.asker.now()
	row, err = s.txStore.InTx(ctx, c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		ran = true
		return run(ctx)
	})
	if ran {
		key, _ := strconv.Atoi(c.Key)
		s.asker.note(func(h *history) { h.held[key] = append(h.held[key], holding{s.server, from, s.asker.now()}) })
	}
	if ran && err == nil && turn < 4 && s.asker.faults.Load() {
		return idempotency.Row{}, fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, errFault)
	}
	return row, err
}

func TestHistories(t *testing.T) {
	cluster := pgtest.Start(t)
	crashes := 0
	var wanted []string
	for _, kind := range []kind{own, replayed, freed, inFlight, mismatch, unavailable, noAnswer, unknown} {
		wanted = append(wanted, string(kind))
	}
	for _, event := range []idempotency.EventKind{idempotency.EventTakenOver, idempotency.EventLeaseLost, idempotency.EventStoreFailed} {
		wanted = append(wanted, string(event))
	}
	h := newAsker(t, cluster.DSN(t), nil).record(*duration, func() {
		cluster.Crash(t)
		cluster.Restart(t)
		crashes++
	}, wanted...)
	t.Logf("%d requests for %d keys, %d crashes, %d keys with an effect in a transaction: %v", len(h.ops), len(h.runs), crashes, len(h.effects), h.seen)
	if err := h.check(); err != nil {
		t.Fatal(err)
	}
	for _, what := range wanted {
		if h.seen[what] == 0 {
			t.Errorf("never seen: %s", what)
		}
	}
	if crashes == 0 || len(h.effects) == 0 {
		t.Errorf("%d crashes, %d keys with an effect", crashes, len(h.effects))
	}
}

// A losesRecords says that an answer is recorded which is not.
type losesRecords struct{ txStore }

func (s losesRecords) Settle(_ context.Context, c *idempotency.Claim, _ idempotency.Outcome) (idempotency.Row, error) {
	return idempotency.Row{Won: true, ID: c.ID}, nil
}

// A hailsZombies says that an answer is recorded where another's is.
type hailsZombies struct{ txStore }

func (s hailsZombies) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	row, err := s.txStore.Settle(ctx, c, o)
	row.Won = true
	return row, err
}

// A blursRequests takes all requests of a key for the same.
type blursRequests struct{ txStore }

func (s blursRequests) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := s.txStore.Claim(ctx, c)
	row.Fingerprint = c.Fingerprint
	return row, err
}

// A forgetsGuarantee claims as if everything could run again.
type forgetsGuarantee struct{ txStore }

func (s forgetsGuarantee) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	c.AtMostOnce = false
	return s.txStore.Claim(ctx, c)
}

// A forgetsMarks says that an effect is marked which is not.
type forgetsMarks struct{ txStore }

func (forgetsMarks) MarkEffect(context.Context, *idempotency.Claim) error { return nil }

// An asksElsewhere looks every request up under a key of its own.
type asksElsewhere struct{ txStore }

func (s asksElsewhere) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	copy(c.Hash[:], c.ID[:])
	return s.txStore.InTx(ctx, c, run)
}

// A commitsFailures leaves what a run did that frees its key.
type commitsFailures struct{ txStore }

func (s commitsFailures) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	var freed error
	row, err := s.txStore.InTx(ctx, c, func(ctx context.Context) (o idempotency.Outcome, keep bool, err error) {
		if o, keep, freed = run(ctx); freed != nil {
			tx, _ := sqlstore.Tx(ctx)
			_, _ = tx.ExecContext(ctx, "COMMIT")
		}
		return o, keep, freed
	})
	return row, cmp.Or(freed, err)
}

// A keepsRefused leaves what a run did whose recorded answer is a refusal.
type keepsRefused struct{ txStore }

func (s keepsRefused) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	return s.txStore.InTx(ctx, c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		o, _, err := run(ctx)
		return o, true, err
	})
}

// A mixesAnswersUp replays what it was asked to record last.
type mixesAnswersUp struct {
	txStore
	last *atomic.Pointer[idempotency.Outcome]
}

func (s mixesAnswersUp) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	row, err := s.txStore.InTx(ctx, c, func(ctx context.Context) (idempotency.Outcome, bool, error) {
		o, keep, err := run(ctx)
		if err == nil {
			s.last.Store(&o)
		}
		return o, keep, err
	})
	if last := s.last.Load(); row.State == idempotency.Completed && !row.Won && last != nil {
		row.Outcome = *last
	}
	return row, err
}

// A deniesLost takes a commit of which nothing was heard for one that failed.
type deniesLost struct{ txStore }

func (s deniesLost) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	row, err := s.txStore.InTx(ctx, c, run)
	if errors.Is(err, idempotency.ErrOutcomeUnknown) {
		err = errFault
	}
	return row, err
}

// A believesLost takes it for one that succeeded.
type believesLost struct{ txStore }

func (s believesLost) InTx(ctx context.Context, c *idempotency.Claim, run func(context.Context) (idempotency.Outcome, bool, error)) (idempotency.Row, error) {
	var outcome idempotency.Outcome
	row, err := s.txStore.InTx(ctx, c, func(ctx context.Context) (_ idempotency.Outcome, keep bool, err error) {
		outcome, keep, err = run(ctx)
		return outcome, keep, err
	})
	if outcome.State == idempotency.Completed && err != nil {
		return idempotency.Row{Won: true, ID: c.ID, State: outcome.State, Outcome: outcome}, nil
	}
	return row, err
}

// What porcupine and the count of runs have found right is worth something only
// if they find fault with what is wrong.
func TestHistoriesOfSabotage(t *testing.T) {
	for name, test := range map[string]struct {
		sabotage func(txStore) txStore
		finding  error
	}{
		"loses records":         {func(s txStore) txStore { return losesRecords{s} }, errNoOrder},
		"hails zombies":         {func(s txStore) txStore { return hailsZombies{s} }, errNoOrder},
		"blurs requests":        {func(s txStore) txStore { return blursRequests{s} }, errNoOrder},
		"forgets a guarantee":   {func(s txStore) txStore { return forgetsGuarantee{s} }, errRanAgain},
		"forgets marks":         {func(s txStore) txStore { return forgetsMarks{s} }, errRanAgain},
		"asks elsewhere":        {func(s txStore) txStore { return asksElsewhere{s} }, errTwice},
		"commits failures":      {func(s txStore) txStore { return commitsFailures{s} }, errKept},
		"keeps what it refused": {func(s txStore) txStore { return keepsRefused{s} }, errKept},
		"mixes answers up":      {func(s txStore) txStore { return mixesAnswersUp{s, new(atomic.Pointer[idempotency.Outcome])} }, errNoOrder},
		"denies what is lost":   {func(s txStore) txStore { return deniesLost{s} }, errDenied},
		"believes what is lost": {func(s txStore) txStore { return believesLost{s} }, errNoOrder},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			for began := time.Now(); !errors.Is(err, test.finding); {
				if time.Since(began) > 3*time.Minute {
					t.Fatalf("found last: %v", err)
				}
				err = newAsker(t, pgtest.DSN(t), test.sabotage).record(time.Second, func() {}).check()
			}
			t.Log(err)
		})
	}
}
