package idempotency_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

var (
	discard = log.New(io.Discard, "", 0)
	errDown = errors.New("the store is down")
)

// A flaky store fails where its hooks say so.
type flaky struct {
	idempotency.Store
	claim, renew, mark, settle, release atomic.Pointer[func() error]
}

func fails(err error) *func() error { f := func() error { return err }; return &f }

func hook(p *atomic.Pointer[func() error]) error {
	if f := p.Load(); f != nil {
		return (*f)()
	}
	return nil
}

func (s *flaky) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	if err := hook(&s.claim); err != nil {
		return idempotency.Row{}, err
	}
	return s.Store.Claim(ctx, c)
}

func (s *flaky) Renew(ctx context.Context, c *idempotency.Claim) error {
	if err := hook(&s.renew); err != nil {
		return err
	}
	return s.Store.Renew(ctx, c)
}

func (s *flaky) MarkEffect(ctx context.Context, c *idempotency.Claim) error {
	if err := hook(&s.mark); err != nil {
		return err
	}
	return s.Store.MarkEffect(ctx, c)
}

func (s *flaky) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	if err := hook(&s.settle); err != nil {
		return idempotency.Row{}, err
	}
	return s.Store.Settle(ctx, c, o)
}

func (s *flaky) Release(ctx context.Context, c *idempotency.Claim) error {
	if err := hook(&s.release); err != nil {
		return err
	}
	return s.Store.Release(ctx, c)
}

func TestStoreDownBeforeTheHandler(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.claim.Store(fails(errDown))
	f := serve(t, setup{store: s}, created)
	f.post("k", `{}`).refused(t, 503, "idempotency-store-unavailable")
	f.ran(0)
	s.claim.Store(nil)
	f.post("k", `{}`).is(t, 201, `{"id":1}`)
}

func TestStoreDownForAMomentWhenRecording(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	var calls atomic.Int64
	twice := func() error {
		if calls.Add(1) <= 2 {
			return errDown
		}
		return nil
	}
	s.settle.Store(&twice)
	f := serve(t, setup{store: s}, created)
	f.post("k", `{}`).is(t, 201, `{"id":1}`)
	f.post("k", `{}`).replayed(t, true)
	f.ran(1)
}

func TestStoreDownWhenRecording(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.settle.Store(fails(errDown))
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = 300 * time.Millisecond }}, created)
	start := time.Now()
	f.post("k", `{}`).refused(t, 503, "idempotency-outcome-unknown")
	if took := time.Since(start); took > 2*time.Second {
		t.Fatalf("gave up after %v, long after the lease", took)
	}
	s.settle.Store(nil)
	var a answer
	eventually(t, "the end of the lease", func() bool { a = f.post("k", `{}`); return a.StatusCode != 409 })
	a.is(t, 201, `{"id":1}`)
	f.ran(2)
}

func TestNoByteFlowsWhenItsRecordCannotBeMade(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.settle.Store(fails(errDown))
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = 200 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "secret")
		if err := http.NewResponseController(w).Flush(); !errors.Is(err, errDown) {
			t.Errorf("flush: %v", err)
		}
	})
	f.post("k", `{}`).refused(t, 503, "idempotency-outcome-unknown")
}

func TestFailedRenewalsCancelTheHandler(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.renew.Store(fails(errDown))
	lease := 300 * time.Millisecond
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = lease }}, func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		<-r.Context().Done()
		if took := time.Since(start); took > lease {
			t.Errorf("cancelled after %v, past the lease", took)
		}
		if !errors.Is(context.Cause(r.Context()), idempotency.ErrLeaseLost) {
			t.Errorf("cause is %v", context.Cause(r.Context()))
		}
		w.WriteHeader(500)
	})
	f.post("k", `{}`).is(t, 500, "")
	if f.saw(idempotency.EventRenewFailed) == 0 {
		t.Fatal("no event tells of the failed renewal")
	}
}

// A zombie is a run whose lease ended while it could not renew. It overwrites
// nothing and answers what its successor did.
func TestZombie(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.renew.Store(fails(errDown))
	successor := make(chan struct{})
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = 200 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		if idempotency.Attempt(r.Context()) == 1 {
			<-successor
			if err := idempotency.MarkEffect(r.Context()); !errors.Is(err, idempotency.ErrLeaseLost) {
				t.Errorf("MarkEffect of a zombie: %v", err)
			}
			_, _ = io.WriteString(w, "zombie")
			return
		}
		_, _ = io.WriteString(w, "successor")
	})
	zombie := make(chan answer)
	go func() { zombie <- f.post("k", `{}`) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	eventually(t, "the takeover", func() bool { return f.post("k", `{}`).body == "successor" })
	close(successor)
	a := <-zombie
	a.is(t, 200, "successor")
	a.replayed(t, true)
	f.post("k", `{}`).is(t, 200, "successor")
	f.ran(2)
}

func TestAZombieWhoseSuccessorIsGoneKnowsNothing(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.renew.Store(fails(errDown))
	successor := make(chan struct{})
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = 200 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		if idempotency.Attempt(r.Context()) == 1 {
			<-successor
			return
		}
		w.WriteHeader(500) // frees the key
	})
	zombie := make(chan answer)
	go func() { zombie <- f.post("k", `{}`) }()
	eventually(t, "the run", func() bool { return f.runs.Load() == 1 })
	eventually(t, "the takeover", func() bool { return f.post("k", `{}`).StatusCode == 500 })
	close(successor)
	(<-zombie).refused(t, 503, "idempotency-outcome-unknown")
	f.ran(2)
}

func TestMarkThatCannotBeMade(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.mark.Store(fails(errDown))
	f := serve(t, setup{store: s}, func(w http.ResponseWriter, r *http.Request) {
		if err := idempotency.MarkEffect(r.Context()); !errors.Is(err, errDown) {
			t.Errorf("MarkEffect: %v", err)
		}
		w.WriteHeader(503)
	})
	f.post("k", `{}`).is(t, 503, "")
	f.post("k", `{}`).is(t, 503, "")
	f.ran(2) // nothing was done, so the 503 freed the key
}

func TestFailedReleaseHoldsTheKeyOnlyForItsLease(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	s.release.Store(fails(errDown))
	f := serve(t, setup{store: s, policy: func(p *idempotency.Policy) { p.Lease = 200 * time.Millisecond }}, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(500)
	})
	f.post("k", `{}`).is(t, 500, "")
	f.post("k", `{}`).refused(t, 409, "idempotency-in-flight")
	eventually(t, "the end of the lease", func() bool { return f.post("k", `{}`).StatusCode == 500 })
}

func TestStoreCallsHaveADeadline(t *testing.T) {
	s := &flaky{Store: memorystore.New()}
	f := serve(t, setup{store: hanging{s}, options: []idempotency.Option{idempotency.WithStoreTimeout(50 * time.Millisecond)}}, created)
	start := time.Now()
	f.post("k", `{}`).refused(t, 503, "idempotency-store-unavailable")
	if took := time.Since(start); took > 3*time.Second {
		t.Fatalf("answered after %v", took)
	}
}

type hanging struct{ idempotency.Store }

func (hanging) Claim(ctx context.Context, _ *idempotency.Claim) (idempotency.Row, error) {
	<-ctx.Done()
	return idempotency.Row{}, ctx.Err()
}

func TestRowsThatCannotBeReadAreNotReplayable(t *testing.T) {
	for _, damage := range []func(*idempotency.Row){
		func(r *idempotency.Row) { r.Fingerprint[0] = 99 },
		func(r *idempotency.Row) { r.Outcome.Header = []byte{99} },
		func(r *idempotency.Row) { r.Outcome.Header = append(r.Outcome.Header, 200) },
	} {
		f := serve(t, setup{store: damaged{memorystore.New(), damage}}, created)
		f.post("k", `{}`).is(t, 201, `{"id":1}`)
		f.post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
		f.ran(1)
	}
}

type damaged struct {
	idempotency.Store
	damage func(*idempotency.Row)
}

func (s damaged) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := s.Store.Claim(ctx, c)
	if !row.Won {
		row.Fingerprint = append([]byte(nil), row.Fingerprint...)
		row.Outcome.Header = append([]byte(nil), row.Outcome.Header...)
		s.damage(&row)
	}
	return row, err
}
