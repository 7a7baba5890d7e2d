package guardtest

import (
	"context"
	"net/http"
	"sync"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// held returns a handler that says when it begins and ends when it may.
func held() (handle Handler, begun <-chan struct{}, release func()) {
	started, ended := make(chan struct{}, 1), make(chan struct{})
	return func(ctx context.Context, call Call) Reply {
		started <- struct{}{}
		<-ended
		return created(ctx, call)
	}, started, sync.OnceFunc(func() { close(ended) })
}

func inFlight(t *testing.T, target Target) {
	handle, begun, release := held()
	f := serve(t, target, handle)
	t.Cleanup(release)
	first := f.start(request{path: things, key: "a", body: lamp})
	wait(f, "the first run", begun)
	again := f.send(request{path: things, key: "a", body: lamp})
	f.refuses("a duplicate", again, http.StatusConflict, wire.InFlight)
	if got := again.Header.Get("Retry-After"); got != "1" && got != "2" {
		f.Errorf("Retry-After is %q, want 1 or 2", got)
	}
	f.refuses("another request with the key", f.send(request{path: things, key: "a", body: vase}), http.StatusUnprocessableEntity, wire.KeyReused)
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.ranTimes(1)
}

func waiting(t *testing.T, target Target) {
	handle, begun, release := held()
	waits := make(chan struct{}, 1)
	f := serve(t, target, handle, func(s *Server) {
		s.Guard = over(t, &store{Store: memorystore.New(), claimed: func(row idempotency.Row) {
			if !row.Won {
				select {
				case waits <- struct{}{}:
				default:
				}
			}
		}})
	})
	t.Cleanup(release)
	pay := request{path: payments, key: "a", body: lamp, header: http.Header{"X-User": {"ann"}}}
	first := f.start(pay)
	wait(f, "the first run", begun)
	again := f.start(pay)
	wait(f, "the duplicate's claim", waits)
	release()
	f.ran("the first", wait(f, "the first answer", first), http.StatusCreated)
	f.replays("the one that waited", wait(f, "the second answer", again), http.StatusCreated)
	f.ranTimes(1)
}

func race(t *testing.T, target Target) {
	f := serve(t, target, created)
	var group sync.WaitGroup
	for range 100 {
		group.Go(func() {
			if a := f.send(request{path: things, key: "a", body: lamp}); a.StatusCode != http.StatusConflict && (a.StatusCode != http.StatusCreated || a.body != lamp) {
				f.Errorf("in the race: %d %s", a.StatusCode, a.body)
			}
		})
	}
	group.Wait()
	f.ranTimes(1)
}
