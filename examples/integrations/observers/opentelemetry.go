package observers

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// OpenTelemetry adds every event to the span that an outer middleware has
// started in the request's context (with fiber v2, in its user context). Where
// no span is recorded it does nothing.
func OpenTelemetry() Observer {
	return func(ctx context.Context, e idempotency.Event) {
		span := trace.SpanFromContext(ctx)
		if !span.IsRecording() {
			return
		}
		attrs := []attribute.KeyValue{
			attribute.String("idempotency.operation", e.Operation),
			attribute.Float64("idempotency.store_seconds", e.StoreTime.Seconds()),
		}
		if e.KeyHash != "" {
			attrs = append(attrs, attribute.String("idempotency.key_hash", e.KeyHash))
		}
		if e.Attempt > 0 {
			attrs = append(attrs, attribute.Int("idempotency.attempt", e.Attempt))
		}
		if e.Status > 0 {
			attrs = append(attrs, attribute.Int("http.response.status_code", e.Status))
		}
		if e.Problem != "" {
			attrs = append(attrs, attribute.String("idempotency.problem", e.Problem))
		}
		if e.Err != nil {
			attrs = append(attrs, attribute.String("exception.message", e.Err.Error()))
		}
		span.AddEvent("idempotency "+string(e.Kind), trace.WithAttributes(attrs...))
	}
}
