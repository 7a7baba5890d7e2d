package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const explainHelp = `oapi-idempotent explain prints what holds for each operation of a document, and
where the document says so: built-in, declared header parameter, document root,
profile, path item or operation. Built-in values are left out unless -all is given.
Webhooks and callbacks are among the operations, and inherit as the others do.
Notes tell what a declared header parameter says that no guard can hold.

Usage:

  oapi-idempotent explain [flags] [generate's flags] <document>

  oapi-idempotent explain openapi.yaml
  oapi-idempotent explain -all -config api.yaml openapi.yaml
  oapi-idempotent explain -json openapi.yaml | jq '.[] | select(.treatment == "unannotated")'

Of the config only what is said of the document matters: the idempotency block,
the overlay, allow-remote-refs-from. Operations that it leaves out are explained
too. The JSON is complete and only gains fields.

Flags:
`

func explain(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("explain", flag.ContinueOnError)
	all := set.Bool("all", false, "print built-in values too")
	asJSON := set.Bool("json", false, "print JSON, with all values")
	cfg, err := configure(ctx, set, explainHelp, args, stdout, stderr)
	if cfg == nil || err != nil {
		return err
	}
	explanations, err := generator.Explain(ctx, *cfg)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(stdout, explanations)
	}
	for _, e := range explanations {
		if err := printExplanation(stdout, e, *all); err != nil {
			return err
		}
	}
	return nil
}

func printExplanation(w io.Writer, e generator.Explanation, all bool) error {
	name := e.Method + " " + e.Path
	if e.OperationID != "" {
		name += " (" + e.OperationID + ")"
	}
	treatment := e.Treatment
	if e.Treatment != generator.Unannotated {
		treatment += ", says " + place(e.Annotation)
	}
	if e.Treatment == generator.Guarded && e.Secured {
		treatment += "; secured"
	}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(out, "%s: %s\n", name, treatment)
	builtIn := 0
	for _, v := range e.Values {
		from := v.Level
		if v.Origin != (generator.Position{}) {
			from += " at " + place(v.Origin)
		} else if builtIn++; !all {
			continue
		}
		fmt.Fprintf(out, "  %s\t%s\t%s\n", v.Field, valueText(v.Value), from)
	}
	if builtIn > 0 && !all {
		fmt.Fprintf(out, "  (%d built-in)\n", builtIn)
	}
	for _, note := range e.Notes {
		fmt.Fprintf(out, "  note: %s: %s\n", place(note.Position), note.Text)
	}
	return out.Flush()
}

func place(p generator.Position) string { return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column) }

func valueText(value any) string {
	if list, ok := value.([]string); ok {
		return "[" + strings.Join(list, ", ") + "]"
	}
	return fmt.Sprint(value)
}

func printJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
