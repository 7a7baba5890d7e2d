package sqlstore_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/storetest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// openDirect returns a store with a pool of its own.
func openDirect(t *testing.T, dsn string, opts ...sqlstore.Option) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.OpenPostgres(dsn, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

func TestOpenPostgres(t *testing.T) {
	for name, opts := range map[string][]sqlstore.Option{
		"grouped":        nil,
		"alone":          {sqlstore.WithoutGrouping()},
		"one connection": {sqlstore.WithMaxConns(1)},
	} {
		t.Run(name, func(t *testing.T) {
			dsn := pgtest.DSN(t)
			var n atomic.Int64
			storetest.Run(t, func(t *testing.T) idempotency.Store {
				return migrated(t, openDirect(t, dsn, append(opts, sqlstore.WithTable(fmt.Sprintf("keys_%d", n.Add(1))))...))
			})
		})
	}
}
