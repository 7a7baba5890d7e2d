// Command observed serves the API of ../openapi.yaml with net/http, and shows
// what its guard does: logged and as spans on standard error, counted at
// /metrics, and refusing in an error envelope of its own.
//
//	go run ./observed
package main

import (
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/envelope"
	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/observers"
	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/std-http/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

var users = map[string]string{"alice": "tea", "bob": "coffee"}

type server struct{}

// CreatePayment runs once for each caller and key.
func (server) CreatePayment(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, `{"paid_at":%d}`, time.Now().UnixNano())
}

// caller names whose key it is.
func caller(r *http.Request) (string, error) {
	user, password, _ := r.BasicAuth()
	if password == "" || users[user] != password {
		return "", idempotency.ErrUnauthenticated // where no middleware has refused before
	}
	return user, nil
}

func main() {
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	flag.Parse()
	exporter, err := stdouttrace.New(stdouttrace.WithWriter(os.Stderr))
	if err != nil {
		log.Fatal(err)
	}
	tracer := trace.NewTracerProvider(trace.WithSyncer(exporter)).Tracer("payments")
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(caller),
		idempotency.WithProblem(envelope.Problem),
		idempotency.WithObserver(observers.All(
			observers.Slog(slog.Default()),
			observers.Prometheus(prometheus.DefaultRegisterer),
			observers.OpenTelemetry(),
		)))
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.Handler())
	api.HandlerFromMux(server{}, guard, mux)
	traced := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, span := tracer.Start(r.Context(), r.Method+" "+r.URL.Path)
		defer span.End()
		mux.ServeHTTP(w, r.WithContext(ctx))
	})

	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, traced))
}
