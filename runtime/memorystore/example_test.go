package memorystore_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func Example() {
	store := memorystore.New()
	ctx := context.Background()

	// What a guard does for a request whose handler fails, and for its retry.
	first := &idempotency.Claim{ID: idempotency.ClaimID{1}, Hash: sha256.Sum256([]byte("key")), Lease: time.Minute, TTL: time.Hour}
	if _, err := store.Claim(ctx, first); err != nil {
		log.Fatal(err)
	}
	if err := store.Release(ctx, first); err != nil {
		log.Fatal(err)
	}
	second := *first
	second.ID = idempotency.ClaimID{2}
	row, err := store.Claim(ctx, &second)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the retry runs:", row.Won)
	// Output:
	// the retry runs: true
}
