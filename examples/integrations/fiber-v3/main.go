// Command fiber-v3 serves the API of ../openapi.yaml with fiber v3:
//
//	go run ./fiber-v3
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"time"

	"github.com/gofiber/fiber/v3"
	"github.com/gofiber/fiber/v3/middleware/basicauth"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/fiber-v3/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

//go:generate go tool oapi-idempotent -config oapi-idempotent.yaml ../openapi.yaml

var users = map[string]string{"alice": "tea", "bob": "coffee"}

type server struct{}

// CreatePayment runs once for each caller and key.
func (server) CreatePayment(c fiber.Ctx) error {
	return c.Status(fiber.StatusCreated).JSON(fiber.Map{"paid_at": time.Now().UnixNano()})
}

// caller names whose key it is.
func caller(c fiber.Ctx) (string, error) {
	return basicauth.UsernameFromContext(c), nil
}

func main() {
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	flag.Parse()
	// The keys are gone when the process ends; a sqlstore keeps them in a database.
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(caller))
	if err != nil {
		log.Fatal(err)
	}
	app := fiber.New()
	app.Use(basicauth.New(basicauth.Config{Authorizer: func(user, password string, _ fiber.Ctx) bool {
		return password != "" && users[user] == password
	}}))
	api.RegisterHandlers(app, server{}, guard)
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(app.Listener(listener, fiber.ListenConfig{DisableStartupMessage: true}))
}
