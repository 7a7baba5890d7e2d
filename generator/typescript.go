package generator

import (
	"context"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/typescript"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// TypeScript returns a module, without dependencies, that gives the calls of the
// document's annotated operations keys and retries in TypeScript as the generated
// client does in Go. Of cfg it reads what is said of the document: operations
// that the config's filters leave out are among them. Errors are as [Generate]'s,
// findings included.
func TypeScript(ctx context.Context, cfg Config) ([]byte, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	in, err := read(cfg)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := prepare(in.spec, cfg, annotated(in.operations)); err != nil {
		return nil, err
	}
	return typescript.New("v"+idempotency.Version, cfg.Idempotency.Extension, in.operations).Source()
}
