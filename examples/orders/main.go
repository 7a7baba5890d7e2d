// Command orders is a server of two guarded operations, as oapi-idempotent
// generates them from api/openapi.yaml.
//
//	go run ./examples/orders            serve, on an SQLite file unless DATABASE_URL names a PostgreSQL
//	go run ./examples/orders -demo      play the whole story against a server of its own
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("orders: ")
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	file := flag.String("sqlite", "orders.db", "`file` of the SQLite database, unless DATABASE_URL names a PostgreSQL")
	delay := flag.Duration("delay", 0, "how long a payment takes")
	demo := flag.Bool("demo", false, "play the whole story against a server of its own, and exit")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	var err error
	if *demo {
		err = play(ctx, os.Stdout)
	} else {
		err = serve(ctx, *addr, os.Getenv("DATABASE_URL"), *file, *delay)
	}
	if err != nil {
		stop()
		log.Fatal(err)
	}
}

// serve serves until ctx ends, and then finishes the requests in flight.
func serve(ctx context.Context, addr, postgres, sqlite string, delay time.Duration) error {
	db, store, err := open(ctx, postgres, sqlite)
	if err != nil {
		return err
	}
	defer db.Close()
	handler, err := newHandler(db, store, delay)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	fmt.Printf(`listening on http://%[1]s

Send the second line again, and again with another amount:

  curl -i http://%[1]s/payments -d '{"amount":250,"currency":"EUR"}' -H 'Content-Type: application/json'
  curl -i http://%[1]s/payments -d '{"amount":250,"currency":"EUR"}' -H 'Content-Type: application/json' -H 'Idempotency-Key: tea-1'
  curl -i http://%[1]s/orders -d '{"item":"tea","quantity":1,"price":2.5}' -H 'Content-Type: application/json' -H 'Idempotency-Key: order-1'
`, listener.Addr())

	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		stopped <- server.Shutdown(grace)
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}
