package main

import (
	"context"
	"flag"
	"io"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const lintHelp = `oapi-idempotent lint advises on what a document says of idempotency keys, as
file:line:column: message, with what to write instead. None of it stops generate,
which does what the document says:

  - an example or a default of a key, which clients copy and then share
  - retries (x-speakeasy-retries, x-fern-retries, x-retries, ...) of a POST or
    PATCH that has no key, so that a retry does it again
  - a policy that contradicts the declared key header parameter: its name, whether
    it is required, its format and lengths
  - a POST or PATCH that declares a key header parameter and has no policy
  - what of the parameter's schema is not checked, such as a pattern with lookahead
  - a profile that nothing names

A header parameter counts as a key's if the operation's policy names it, or if it
is called Idempotency-Key, X-Idempotency-Key, X-Idempotency or PayPal-Request-Id.

Usage:

  oapi-idempotent lint [generate's flags] <document>

  oapi-idempotent lint openapi.yaml
  oapi-idempotent lint -config api.yaml openapi.yaml

Of the config only what is said of the document matters: the idempotency block,
the overlay, allow-remote-refs-from. Nothing is written.

Exit codes: 0 and silence when there is no advice; 1 when there is, and for what
generate would refuse; 2 for a wrong command line.

Flags:
`

func lint(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("lint", flag.ContinueOnError)
	cfg, err := configure(ctx, set, lintHelp, args, stdout, stderr)
	if cfg == nil || err != nil {
		return err
	}
	advice, err := generator.Lint(ctx, *cfg)
	if err == nil && len(advice) > 0 {
		return advice
	}
	return err
}
