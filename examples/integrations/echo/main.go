// Command echo serves the API of ../openapi.yaml with echo v4:
//
//	go run ./echo
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/echo/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

//go:generate go tool oapi-idempotent -config oapi-idempotent.yaml ../openapi.yaml

var users = map[string]string{"alice": "tea", "bob": "coffee"}

type server struct{}

// CreatePayment runs once for each caller and key.
func (server) CreatePayment(c echo.Context) error {
	return c.JSON(http.StatusCreated, map[string]int64{"paid_at": time.Now().UnixNano()})
}

// caller names whose key it is.
func caller(c echo.Context) (string, error) {
	user, _ := c.Get("user").(string)
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
	e := echo.New()
	e.Use(middleware.BasicAuth(func(user, password string, c echo.Context) (bool, error) {
		c.Set("user", user)
		return password != "" && users[user] == password, nil
	}))
	api.RegisterHandlers(e, server{}, guard)
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, e))
}
