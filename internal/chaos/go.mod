module github.com/oapi-idempotent/oapi-idempotent/internal/chaos

go 1.26.0

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/lib/pq v1.12.3
	github.com/oapi-idempotent/oapi-idempotent v0.0.0
)

require github.com/jmoiron/sqlx v1.4.0 // indirect

replace github.com/oapi-idempotent/oapi-idempotent => ../..
