// Command gin serves the API of ../openapi.yaml with gin:
//
//	go run ./gin
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/oapi-idempotent/oapi-idempotent/examples/integrations/gin/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

//go:generate go tool oapi-idempotent -config oapi-idempotent.yaml ../openapi.yaml

var users = map[string]string{"alice": "tea", "bob": "coffee"}

type server struct{}

// CreatePayment runs once for each caller and key.
func (server) CreatePayment(c *gin.Context) {
	c.JSON(http.StatusCreated, gin.H{"paid_at": time.Now().UnixNano()})
}

// caller names whose key it is.
func caller(c *gin.Context) (string, error) {
	return c.GetString(gin.AuthUserKey), nil
}

func main() {
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	flag.Parse()
	// The keys are gone when the process ends; a sqlstore keeps them in a database.
	guard, err := idempotency.New(memorystore.New(), api.PrincipalFrom(caller))
	if err != nil {
		log.Fatal(err)
	}
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.Use(gin.Recovery(), gin.BasicAuth(users))
	api.RegisterHandlers(engine, server{}, guard)
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, engine))
}
