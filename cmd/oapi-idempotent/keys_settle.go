package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"os"
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

const settleHelp = `oapi-idempotent keys settle says how a run ended, after somebody has looked: at the
payment provider, in the orders' table, in the logs.

It happened. Requests with the key get this answer from now on:

  oapi-idempotent keys settle 3f9a01 -as completed -status 201 \
    -header 'Content-Type: application/json' -body-file answer.json

It never happened. The next request with the key runs:

  oapi-idempotent keys settle 3f9a01 -as never-happened

The key is shown first, and it is settled only if it is still in the claim and the
state that were shown. -claim names the claim that an earlier show has printed, so
that a script cannot settle another run than the one that was looked at. What is in
flight or has its answer recorded is not touched without -force: a run in flight
that was declared never to have happened goes on, and the next request runs beside
it. Servers with WithReplayCache replay an answer that was recorded for up to a
minute more.

The database does not know the operation's ttl: give it as -ttl.

Flags:
`

// A settlement is what a command line says of a run.
type settlement struct {
	claim  string
	as     string
	answer idempotency.Response
	ttl    time.Duration
	force  bool
}

const (
	asCompleted     = "completed"
	asNeverHappened = "never-happened"
)

func settleKey(ctx context.Context, args []string, stdout io.Writer) error {
	set := flag.NewFlagSet("keys settle", flag.ContinueOnError)
	var table keyTable
	table.declare(set)
	var s settlement
	var header []string
	set.StringVar(&s.as, "as", "", "how it ended: completed or never-happened")
	set.StringVar(&s.claim, "claim", "", "settle only this `claim`, as show prints it")
	set.IntVar(&s.answer.Status, "status", 0, "`status` of the answer")
	set.Func("header", "a header field of the answer, as `'Name: value'`; may be repeated", func(line string) error {
		header = append(header, line)
		return nil
	})
	bodyFile := set.String("body-file", "", "`file` with the body of the answer, byte for byte")
	set.DurationVar(&s.ttl, "ttl", wire.DefaultTTL, "how long the answer is replayed from now")
	set.BoolVar(&s.force, "force", false, "also what is in flight, or has its answer recorded")
	yes := set.Bool("yes", false, "do not ask")
	operands, done, err := parseFlags(set, settleHelp, args, stdout)
	if done || err != nil {
		return err
	}
	hash, err := hashOperand(operands)
	if err != nil {
		return err
	}
	if err := s.check(set); err != nil {
		return err
	}
	if s.answer.Header, err = parseHeader(header); err != nil {
		return err
	}
	if *bodyFile != "" {
		if s.answer.Body, err = os.ReadFile(*bodyFile); err != nil {
			return err
		}
	}
	var outcome idempotency.Outcome
	if s.as == asCompleted {
		if outcome, err = idempotency.EncodeOutcome(&s.answer); err != nil {
			return usageError{strings.TrimPrefix(err.Error(), "idempotency: ")}
		}
	}
	if err := mayAsk(*yes); err != nil {
		return err
	}

	db, inspector, err := table.open()
	if err != nil {
		return err
	}
	defer db.Close()
	seen, err := table.find(ctx, inspector, hash)
	if err != nil {
		return err
	}
	if err := printEntry(stdout, seen); err != nil {
		return err
	}
	if err := s.allowed(seen); err != nil {
		return err
	}
	if err := confirm(ctx, *yes, s.question()); err != nil {
		return err
	}
	var settled bool
	if s.as == asCompleted {
		settled, err = inspector.Settle(ctx, seen, outcome, s.ttl, s.force)
	} else {
		settled, err = inspector.Forget(ctx, seen, s.force)
	}
	switch {
	case err != nil:
		return table.explained(err)
	case !settled:
		return fmt.Errorf("the key %s has changed since it was shown; nothing was settled, so look at it again", hash)
	}
	_, err = fmt.Fprintf(stdout, "\nSettled as %s.\n", s.as)
	return err
}

// check returns what is wrong with the command line.
func (s *settlement) check(set *flag.FlagSet) error {
	switch s.as {
	case asCompleted:
		if s.answer.Status == 0 {
			return usageError{"-as completed needs the -status of the answer"}
		}
		if s.ttl <= 0 {
			return usageError{fmt.Sprintf("-ttl is %v; write how long the answer is replayed, such as 24h", s.ttl)}
		}
	case asNeverHappened:
		var err error
		set.Visit(func(f *flag.Flag) {
			switch f.Name {
			case "status", "header", "body-file", "ttl":
				err = usageError{fmt.Sprintf("-%s means nothing with -as never-happened; remove it", f.Name)}
			}
		})
		return err
	default:
		return usageError{fmt.Sprintf("-as is %q; write completed or never-happened", s.as)}
	}
	return nil
}

// allowed returns why the entry may not be settled.
func (s *settlement) allowed(e *idempotency.Entry) error {
	switch {
	case s.claim != "" && s.claim != e.ID.String():
		return fmt.Errorf("the key is held by the claim %s, not by %s; look at it again", e.ID, s.claim)
	case e.Condition == idempotency.ConditionExpired:
		return errors.New("the key has expired and counts as absent; there is nothing to settle")
	case s.force:
		return nil
	case e.Condition == idempotency.ConditionInFlight:
		return fmt.Errorf("its run is in flight, and holds the key until %s at least; wait, or give -force if you know that it is dead", timeText(e.LeaseUntil))
	case e.Condition == idempotency.ConditionCompleted:
		return errors.New("its answer is recorded; give -force to overrule it")
	}
	return nil
}

func (s *settlement) question() string {
	if s.as == asNeverHappened {
		return "Did it never happen, and may the next request with the key run?"
	}
	return fmt.Sprintf("Did it happen, and should requests get %d with %d header fields and %d bytes?",
		s.answer.Status, len(s.answer.Header), len(s.answer.Body))
}

// parseHeader parses lines as HTTP writes them.
func parseHeader(lines []string) (http.Header, error) {
	text := strings.Join(append(lines, "", ""), "\r\n")
	header, err := textproto.NewReader(bufio.NewReader(strings.NewReader(text))).ReadMIMEHeader()
	if err != nil {
		return nil, usageError{fmt.Sprintf("-header: %v; write 'Name: value'", err)}
	}
	return http.Header(header), nil
}
