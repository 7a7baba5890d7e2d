// Command std-http serves the API of ../openapi.yaml with net/http:
//
//	go run ./std-http
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/std-http/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

//go:generate go tool oapi-idempotent -config oapi-idempotent.yaml ../openapi.yaml

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
	// The keys are gone when the process ends; a sqlstore keeps them in a database.
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(caller))
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	api.HandlerFromMux(server{}, guard, mux)
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, mux))
}
