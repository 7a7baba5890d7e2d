package sqlstore_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func ExampleNewSQLite() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	db, err := sqlstore.OpenSQLite(filepath.Join(dir, "keys.db"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	store, err := sqlstore.NewSQLite(db)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}

	// What a guard does for a request and for its retry.
	first := &idempotency.Claim{ID: idempotency.ClaimID{1}, Hash: sha256.Sum256([]byte("key")), Lease: time.Minute, TTL: time.Hour}
	row, err := store.Claim(ctx, first)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("first claim won:", row.Won)
	answer := idempotency.Outcome{State: idempotency.Completed, Status: 201, Body: []byte("order 1")}
	if _, err := store.Settle(ctx, first, answer); err != nil {
		log.Fatal(err)
	}
	second := *first
	second.ID = idempotency.ClaimID{2}
	row, err = store.Claim(ctx, &second)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("second claim won: %t; recorded: %d %s\n", row.Won, row.Outcome.Status, row.Outcome.Body)
	// Output:
	// first claim won: true
	// second claim won: false; recorded: 201 order 1
}
