package observers

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// Prometheus registers two metrics and feeds them: idempotency_events_total, by
// kind, operation and problem, and idempotency_store_seconds, by operation: for
// how long a request waited for the store, all its calls together. It panics
// when reg has metrics of these names already.
func Prometheus(reg prometheus.Registerer) Observer {
	events := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "idempotency_events_total",
		Help: "What the idempotency guard did.",
	}, []string{"kind", "operation", "problem"})
	storeTime := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "idempotency_store_seconds",
		Help:    "How long a request waited for the idempotency store.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14), // up to 4 s; a call ends at 5 s by default
	}, []string{"operation"})
	reg.MustRegister(events, storeTime)
	return func(_ context.Context, e idempotency.Event) {
		events.WithLabelValues(string(e.Kind), e.Operation, e.Problem).Inc()
		// Without a key the store was not asked.
		if e.KeyHash != "" && answers(e.Kind) {
			storeTime.WithLabelValues(e.Operation).Observe(e.StoreTime.Seconds())
		}
	}
}

// answers says whether an event of the kind is the one that tells how its
// request was answered. StoreTime adds up from event to event of a request, so
// that to count each would count the same time again.
func answers(kind idempotency.EventKind) bool {
	switch kind {
	case idempotency.EventRecorded, idempotency.EventReleased, idempotency.EventReplayed, idempotency.EventRefused, idempotency.EventNotReplayable:
		return true
	}
	return false
}
