// Command iris serves the API of ../openapi.yaml with iris:
//
//	go run ./iris
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/kataras/iris/v12"
	"github.com/kataras/iris/v12/middleware/basicauth"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/iris/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

//go:generate go tool oapi-idempotent -config oapi-idempotent.yaml ../openapi.yaml

var users = map[string]string{"alice": "tea", "bob": "coffee"}

type server struct{}

// CreatePayment runs once for each caller and key.
func (server) CreatePayment(c iris.Context) {
	c.StatusCode(iris.StatusCreated)
	_ = c.JSON(iris.Map{"paid_at": time.Now().UnixNano()}) // it renders its errors
}

// caller names whose key it is.
func caller(c iris.Context) (string, error) {
	return c.User().GetUsername()
}

func main() {
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	flag.Parse()
	// The keys are gone when the process ends; a sqlstore keeps them in a database.
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(caller))
	if err != nil {
		log.Fatal(err)
	}
	app := iris.New()
	app.Use(basicauth.Default(users))
	api.RegisterHandlers(app, server{}, guard)
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, app))
}
