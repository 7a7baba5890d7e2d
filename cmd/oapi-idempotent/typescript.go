package main

import (
	"context"
	"flag"
	"io"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const typescriptHelp = `oapi-idempotent typescript prints a TypeScript module that gives the calls of the
document's annotated operations idempotency keys and safe retries, as the
generated Go client does. It has no dependencies, and goes with openapi-fetch and
with plain fetch, in browsers and in Node 20 or newer.

Usage:

  oapi-idempotent typescript [-o file] [generate's flags] <document>

  oapi-idempotent typescript -o src/idempotency.ts openapi.yaml

  import { idempotency } from "./idempotency";
  const { fetch } = idempotency(baseUrl);
  const client = createClient<paths>({ baseUrl, fetch }); // openapi-fetch

Of the config only what is said of the document matters: the idempotency block,
the overlay, allow-remote-refs-from. The file is -o's, never the config's output.

Flags:
`

func typescript(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("typescript", flag.ContinueOnError)
	cfg, err := configure(ctx, set, typescriptHelp, args, stdout, stderr)
	if cfg == nil || err != nil {
		return err
	}
	module, err := generator.TypeScript(ctx, *cfg)
	if err != nil {
		return err
	}
	if output := set.Lookup("o").Value.String(); output != "" {
		return write(generator.File{Name: output, Content: module})
	}
	_, err = stdout.Write(module)
	return err
}
