package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/diff"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

const checkHelp = `oapi-idempotent check tells whether the generated file is what generate would
write now. It writes nothing.

Usage:

  oapi-idempotent check [generate's flags] <document>

  oapi-idempotent check -config api.yaml openapi.yaml

Exit codes: 0 and silence when the file is up to date; 1 with the first lines
that differ when it is not, when it is missing, and for findings; 2 for a wrong
command line.

Flags:
`

// maxDiffLines is how much of a difference is printed.
const maxDiffLines = 40

func check(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("check", flag.ContinueOnError)
	cfg, err := configure(ctx, set, checkHelp, args, stdout, stderr)
	if cfg == nil || err != nil {
		return err
	}
	if cfg.Output == "" {
		return usageError{"there is no file to check; name it with -o, or as output in the config file"}
	}
	files, err := generator.Generate(ctx, *cfg)
	if err != nil {
		return err
	}
	for _, file := range files {
		have, err := os.ReadFile(filepath.FromSlash(file.Name))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s does not exist; generate it", file.Name)
		}
		if err != nil {
			return err
		}
		if bytes.Equal(have, file.Content) {
			continue
		}
		if err := printDiff(stdout, file.Name, have, file.Content); err != nil {
			return err
		}
		return fmt.Errorf("%s is out of date; generate it again", file.Name)
	}
	return nil
}

// printDiff prints the beginning of a unified diff.
func printDiff(w io.Writer, name string, have, want []byte) error {
	lines := bytes.SplitAfter(diff.Diff(name, have, name+" (generated now)", want), []byte("\n"))
	lines = lines[1 : len(lines)-1] // without the line that repeats the names, and what follows the last line
	more := len(lines) - maxDiffLines
	if more > 0 {
		lines = lines[:maxDiffLines]
	}
	if _, err := w.Write(bytes.Join(lines, nil)); err != nil {
		return err
	}
	if more > 0 {
		_, err := fmt.Fprintf(w, "(%d more lines)\n", more)
		return err
	}
	return nil
}
