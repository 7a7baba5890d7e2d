// Command oapi-idempotent is a drop-in for oapi-codegen that guards the
// operations an OpenAPI document annotates with x-idempotent. It takes the same
// flags and config files; see the package generator for what it adds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1 // findings, or something could not be read or written
	exitUsage   = 2 // the command line is wrong
)

// A verb is one thing that the command does.
type verb struct {
	name string
	run  func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

// verbs lists them; the first is the default.
var verbs = []verb{
	{"generate", generate},
	{"check", check},
	{"explain", explain},
	{"lint", lint},
	{"typescript", typescript},
	{"sql", printSQL},
	{"keys", keys},
}

// A usageError is a mistake in the command line.
type usageError struct{ message string }

func (e usageError) Error() string { return e.message }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	verb, args, err := selectVerb(args)
	if err == nil {
		err = verb.run(ctx, args, stdout, stderr)
	}
	var usage usageError
	var findings generator.Findings
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &findings):
		fmt.Fprintln(stderr, findings) // each line begins with its file
		return exitFailure
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "oapi-idempotent: %s\nRun '%s -h' for help.\n", usage.message, strings.TrimSpace("oapi-idempotent "+verb.name))
		return exitUsage
	default:
		fmt.Fprintf(stderr, "oapi-idempotent: %v\n", err)
		return exitFailure
	}
}

// parseFlags parses flags and operands in any order. It prints the help, and is
// done, if that is what args ask for.
func parseFlags(set *flag.FlagSet, help string, args []string, stdout io.Writer) (operands []string, done bool, err error) {
	set.SetOutput(io.Discard)
	for {
		switch err := set.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			fmt.Fprint(stdout, help)
			set.SetOutput(stdout)
			set.PrintDefaults()
			return nil, true, nil
		case err != nil:
			return nil, false, usageError{err.Error()}
		case set.NArg() == 0:
			return operands, false, nil
		}
		operands = append(operands, set.Arg(0))
		args = set.Args()[1:]
	}
}

var word = regexp.MustCompile(`^[a-z]+$`)

// selectVerb takes the verb off args. Without one, args are those of the
// default verb, as oapi-codegen has none.
func selectVerb(args []string) (verb, []string, error) {
	if len(args) == 0 || !word.MatchString(args[0]) {
		return verbs[0], args, nil
	}
	if i := slices.IndexFunc(verbs, func(v verb) bool { return v.name == args[0] }); i >= 0 {
		return verbs[i], args[1:], nil
	}
	if _, err := os.Stat(args[0]); err == nil {
		return verbs[0], args, nil
	}
	names := make([]string, len(verbs))
	for i, v := range verbs {
		names[i] = v.name
	}
	return verb{}, nil, usageError{fmt.Sprintf("%q is neither a verb nor a file; the verbs are: %s", args[0], strings.Join(names, ", "))}
}
