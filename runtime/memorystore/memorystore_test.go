package memorystore_test

import (
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func TestStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) idempotency.Store { return memorystore.New() })
}
