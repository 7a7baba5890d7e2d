package observers_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/observers"
	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/std-http/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

type server struct{}

func (server) CreatePayment(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusCreated)
}

func guarded(store idempotency.Store, observe observers.Observer) http.Handler {
	alice := func(*http.Request) (string, error) { return "alice", nil }
	guard, err := idempotency.New(store, api.PrincipalFrom(alice), idempotency.WithObserver(observe))
	if err != nil {
		log.Fatal(err)
	}
	return api.Handler(server{}, guard)
}

// post pays an amount, under the key unless it is empty.
func post(handler http.Handler, key, amount string) {
	req := httptest.NewRequest("POST", "/payments", strings.NewReader(`{"amount":`+amount+`}`))
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	handler.ServeHTTP(httptest.NewRecorder(), req)
}

// A broken store is reached by no claim.
type broken struct{ idempotency.Store }

func (broken) Claim(context.Context, *idempotency.Claim) (idempotency.Row, error) {
	return idempotency.Row{}, errors.New("connection refused")
}

func ExampleSlog() {
	observe := observers.Slog(slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			switch a.Key {
			case slog.TimeKey, "store_time", "operation": // for an example that is short, and always the same
				return slog.Attr{}
			case "key_hash":
				return slog.String(a.Key, a.Value.String()[:8])
			}
			return a
		},
	})))
	handler := guarded(memorystore.New(), observe)
	post(handler, "", "250")
	post(handler, "tea-1", "250")
	post(handler, "tea-1", "250")
	post(handler, "tea-1", "999")
	post(guarded(broken{memorystore.New()}, observe), "tea-1", "250")
	// Output:
	// level=INFO msg="idempotency: refused" status=400 problem=missing-idempotency-key
	// level=INFO msg="idempotency: recorded" key_hash=f2cc4a29 attempt=1 status=201
	// level=INFO msg="idempotency: replayed" key_hash=f2cc4a29 attempt=1 status=201
	// level=INFO msg="idempotency: refused" key_hash=f2cc4a29 status=422 problem=idempotency-key-reused
	// level=ERROR msg="idempotency: store failed" key_hash=f2cc4a29 error="connection refused"
	// level=INFO msg="idempotency: refused" key_hash=f2cc4a29 status=503 problem=idempotency-store-unavailable error="connection refused"
}

func ExamplePrometheus() {
	registry := prometheus.NewRegistry()
	handler := guarded(memorystore.New(), observers.Prometheus(registry))
	post(handler, "", "250")
	post(handler, "tea-1", "250")
	post(handler, "tea-1", "250")
	post(handler, "tea-1", "999")

	scrape := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(scrape, httptest.NewRequest("GET", "/metrics", nil))
	for line := range strings.Lines(scrape.Body.String()) {
		if strings.HasPrefix(line, "idempotency_events_total") || strings.HasPrefix(line, "idempotency_store_seconds_count") {
			fmt.Print(line)
		}
	}
	// Output:
	// idempotency_events_total{kind="recorded",operation="POST /payments",problem=""} 1
	// idempotency_events_total{kind="refused",operation="POST /payments",problem="idempotency-key-reused"} 1
	// idempotency_events_total{kind="refused",operation="POST /payments",problem="missing-idempotency-key"} 1
	// idempotency_events_total{kind="replayed",operation="POST /payments",problem=""} 1
	// idempotency_store_seconds_count{operation="POST /payments"} 3
}

func ExampleOpenTelemetry() {
	spans := tracetest.NewInMemoryExporter()
	tracer := trace.NewTracerProvider(trace.WithSyncer(spans)).Tracer("payments")
	handler := guarded(memorystore.New(), observers.OpenTelemetry())
	traced := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, span := tracer.Start(r.Context(), r.Method+" "+r.URL.Path)
		defer span.End()
		handler.ServeHTTP(w, r.WithContext(ctx))
	})
	post(traced, "tea-1", "250")
	post(traced, "tea-1", "250")
	post(traced, "tea-1", "999")

	for _, span := range spans.GetSpans() {
		for _, event := range span.Events {
			fmt.Printf("%s: %s", span.Name, event.Name)
			for _, a := range event.Attributes {
				switch a.Key {
				case "idempotency.problem", "idempotency.attempt", "http.response.status_code":
					fmt.Printf(" %s=%s", a.Key, a.Value.String())
				}
			}
			fmt.Println()
		}
	}
	// Output:
	// POST /payments: idempotency recorded idempotency.attempt=1 http.response.status_code=201
	// POST /payments: idempotency replayed idempotency.attempt=1 http.response.status_code=201
	// POST /payments: idempotency refused http.response.status_code=422 idempotency.problem=idempotency-key-reused
}
