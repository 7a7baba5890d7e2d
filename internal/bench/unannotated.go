package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/bench/api/stock"
	"github.com/oapi-idempotent/oapi-idempotent/internal/bench/api/woven"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A lister implements both packages' servers, whose parameters differ in name
// alone.
type lister[Params any] struct{}

func (lister[Params]) CreatePayment(w http.ResponseWriter, r *http.Request) { payOverHTTP(w, r) }

func (lister[Params]) ListPayments(w http.ResponseWriter, _ *http.Request, _ Params) {
	w.WriteHeader(http.StatusOK)
}

// A discard is an http.ResponseWriter that costs nothing.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(status int)      { d.status = status }

// unannotated calls an operation that is not annotated, without a network,
// beside which nothing would show.
func unannotated(b *bench, name string) (*contest, error) {
	calling := func(name string, h http.Handler) side {
		return side{name, func(d time.Duration) (sample, error) {
			r := httptest.NewRequest(http.MethodGet, "/payments?limit=10", nil)
			w := &discard{header: http.Header{}}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			const batch = 1000 // for which reading the clock does not count
			s, err := b.processor(d, func(int) error {
				for range batch {
					w.status = 0
					h.ServeHTTP(w, r)
					if w.status != http.StatusOK {
						return errors.New("the operation was not called")
					}
				}
				return nil
			})
			runtime.ReadMemStats(&after)
			if err != nil {
				return s, err
			}
			s.ops *= batch
			s.per = map[string]float64{"allocs/op": allocations(&before, &after, s.ops)}
			return s, nil
		}}
	}
	guard, err := idempotency.New(memorystore.New())
	if err != nil {
		return nil, err
	}
	return &contest{
		name: name,
		sides: []side{
			calling("stock", stock.Handler(lister[stock.ListPaymentsParams]{})),
			calling("woven", woven.Handler(lister[woven.ListPaymentsParams]{}, guard)),
		},
		figures: []figure{
			speed("woven", "stock", atLeast(0.98)),
			more("woven", "stock", "allocs/op", exactly(0)),
		},
	}, nil
}
