package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lib/pq"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

const keysHelp = `oapi-idempotent keys shows the idempotency keys in a PostgreSQL database, and
settles those that no request settles any more.

Usage:

  oapi-idempotent keys <what> [flags]      (-h after <what> tells its flags)

  list      which keys there are
  show      all about one key
  settle    say how a run ended
  sweep     delete what has expired
  stats     how many keys there are

  export DATABASE_URL=postgres://shop@db.internal/shop
  oapi-idempotent keys list -state unknown
  oapi-idempotent keys show 3f9a01
  oapi-idempotent keys settle 3f9a01 -as never-happened

A key is in one of these states:

  in-flight       a run holds it
  stuck           its run died, or lost the database; the next request runs again,
                  unless the operation is at-most-once
  unknown         nobody knows how its run ended; requests get 409 until it is settled
  completed       its answer is replayed
  not-replayable  it completed, but the answer was not recorded; requests get 409
  expired         counts as absent, until it is swept

The database is the primary that the servers use, named by -dsn or DATABASE_URL.
What changes something shows it and asks first, unless -yes is given. Exit codes:
1 for failures, with nothing changed; 2 for a wrong command line, and where there
is no terminal to ask on.
`

func keys(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	what := ""
	if len(args) > 0 {
		what = args[0]
	}
	switch what {
	case "list":
		return listKeys(ctx, args[1:], stdout, stderr)
	case "show":
		return showKey(ctx, args[1:], stdout)
	case "settle":
		return settleKey(ctx, args[1:], stdout)
	case "sweep":
		return sweepKeys(ctx, args[1:], stdout)
	case "stats":
		return countKeys(ctx, args[1:], stdout)
	case "-h", "-help", "--help":
		_, err := io.WriteString(stdout, keysHelp)
		return err
	}
	return usageError{fmt.Sprintf("keys takes list, show, settle, sweep or stats and then flags, not %q", what)}
}

// A keyTable is a table of keys in a database, as flags name it.
type keyTable struct{ dsn, table string }

func (k *keyTable) declare(set *flag.FlagSet) {
	set.StringVar(&k.dsn, "dsn", "", "the database, as a `URL` or key=value pairs (default: DATABASE_URL)")
	set.StringVar(&k.table, "table", "idempotency_keys", "`name` of the table, perhaps with its schema")
}

// open returns the database and an inspector of the table. It does not connect.
func (k *keyTable) open() (*sql.DB, idempotency.Inspector, error) {
	if k.dsn == "" {
		k.dsn = os.Getenv("DATABASE_URL")
	}
	if k.dsn == "" {
		return nil, nil, usageError{"name the database with -dsn or DATABASE_URL"}
	}
	connector, err := pq.NewConnector(k.dsn)
	if err != nil {
		// The driver's text may hold the password.
		return nil, nil, usageError{"the DSN cannot be read; write postgres://user@host/database, or key=value pairs"}
	}
	db := sql.OpenDB(connector)
	inspector, err := sqlstore.NewPostgresInspector(db, sqlstore.WithTable(k.table))
	if err != nil {
		db.Close()
		return nil, nil, usageError{strings.TrimPrefix(err.Error(), "sqlstore: ")}
	}
	return db, inspector, nil
}

// explained adds to an error of the database what to do about it.
func (k *keyTable) explained(err error) error {
	var state interface{ SQLState() string }
	if errors.As(err, &state) && state.SQLState() == "42P01" {
		return fmt.Errorf("%w; name the table with -table", err)
	}
	return err
}

// find returns the entry whose hash begins with the digits.
func (k *keyTable) find(ctx context.Context, inspector idempotency.Inspector, digits string) (*idempotency.Entry, error) {
	found, err := inspector.Find(ctx, digits)
	switch {
	case err != nil:
		return nil, k.explained(err)
	case len(found) == 0:
		return nil, fmt.Errorf("there is no key %s in %s", digits, k.table)
	case len(found) > 1:
		return nil, fmt.Errorf("%s is the beginning of several hashes, such as %x and %x; write more of it", digits, found[0].Hash, found[1].Hash)
	}
	return &found[0], nil
}

var hashForm = regexp.MustCompile(`^[0-9a-fA-F]{1,64}$`)

// hashOperand returns the one operand, the beginning of a key hash.
func hashOperand(operands []string) (string, error) {
	if len(operands) != 1 || !hashForm.MatchString(operands[0]) {
		return "", usageError{fmt.Sprintf("name one key by the beginning of its hash, in hexadecimal digits, as list prints it, not %q", operands)}
	}
	return strings.ToLower(operands[0]), nil
}

func noOperands(operands []string) error {
	if len(operands) > 0 {
		return usageError{fmt.Sprintf("flags only, not %q", operands)}
	}
	return nil
}

const listHelp = `oapi-idempotent keys list prints the keys, the oldest claim first.

  oapi-idempotent keys list -state stuck
  oapi-idempotent keys list -operation 'POST /payments' -older-than 1h
  oapi-idempotent keys list -state unknown -json | jq -r '.[].hash'

-state unknown lists the stuck keys of at-most-once operations too: requests get
the same 409 for both.

Flags:
`

var states = []idempotency.Condition{
	idempotency.ConditionInFlight, idempotency.ConditionStuck, idempotency.ConditionUnknown,
	idempotency.ConditionCompleted, idempotency.ConditionNotReplayable, idempotency.ConditionExpired,
}

func listKeys(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("keys list", flag.ContinueOnError)
	var table keyTable
	table.declare(set)
	state := set.String("state", "", "only this `state`: in-flight, stuck, unknown, completed, not-replayable or expired")
	operation := set.String("operation", "", "only this `operation`, such as 'POST /orders/{id}'")
	olderThan := set.Duration("older-than", 0, "only what was claimed longer ago, such as 90s or 36h")
	limit := set.Int("limit", 100, "at most so many")
	asJSON := set.Bool("json", false, "print JSON")
	operands, done, err := parseFlags(set, listHelp, args, stdout)
	if done || err != nil {
		return err
	}
	if err := noOperands(operands); err != nil {
		return err
	}
	if *state != "" && !slices.Contains(states, idempotency.Condition(*state)) {
		return usageError{fmt.Sprintf("-state is %q; write one of %q", *state, states)}
	}
	if *limit < 1 {
		return usageError{fmt.Sprintf("-limit is %d; write at least 1", *limit)}
	}
	db, inspector, err := table.open()
	if err != nil {
		return err
	}
	defer db.Close()
	entries, err := inspector.List(ctx, idempotency.Filter{
		Condition: idempotency.Condition(*state), Operation: *operation, OlderThan: *olderThan, Limit: *limit + 1,
	})
	if err != nil {
		return table.explained(err)
	}
	if len(entries) > *limit {
		entries = entries[:*limit]
		fmt.Fprintf(stderr, "There are more; these are the oldest %d (-limit).\n", *limit)
	}
	if *asJSON {
		list := make([]entryJSON, len(entries))
		for i := range entries {
			list[i] = toJSON(&entries[i])
		}
		return printJSON(stdout, list)
	}
	out := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "HASH\tSTATE\tAGE\tATTEMPT\tSTATUS\tOPERATION\tKEY")
	for _, e := range entries {
		status := "-"
		if e.Outcome.Status != 0 {
			status = fmt.Sprint(e.Outcome.Status)
		}
		fmt.Fprintf(out, "%.6x\t%s\t%s\t%d\t%s\t%s\t%s\n",
			e.Hash, e.Condition, ageText(e.Age), e.Attempt, status, printable(e.Operation), printable(e.Key))
	}
	return out.Flush()
}

const showHelp = `oapi-idempotent keys show prints all about one key, named by the beginning of its
hash, with the recorded answer.

  oapi-idempotent keys show 3f9a01
  oapi-idempotent keys show 3f9a01 -json | jq -r .body

Flags:
`

func showKey(ctx context.Context, args []string, stdout io.Writer) error {
	set := flag.NewFlagSet("keys show", flag.ContinueOnError)
	var table keyTable
	table.declare(set)
	asJSON := set.Bool("json", false, "print JSON")
	operands, done, err := parseFlags(set, showHelp, args, stdout)
	if done || err != nil {
		return err
	}
	hash, err := hashOperand(operands)
	if err != nil {
		return err
	}
	db, inspector, err := table.open()
	if err != nil {
		return err
	}
	defer db.Close()
	entry, err := table.find(ctx, inspector, hash)
	if err != nil {
		return err
	}
	if *asJSON {
		return printJSON(stdout, toJSON(entry))
	}
	return printEntry(stdout, entry)
}

// meaning tells what a request with the key gets.
func meaning(e *idempotency.Entry) string {
	switch e.Condition {
	case idempotency.ConditionInFlight:
		return "a run holds it; other requests get 409 " + wire.InFlight
	case idempotency.ConditionStuck:
		if !e.AtMostOnce {
			return "its run died or lost the database; the next request runs again"
		}
		fallthrough
	case idempotency.ConditionUnknown:
		return "nobody knows how its run ended; requests get 409 " + wire.OutcomeUnknown + " until it is settled"
	case idempotency.ConditionCompleted:
		return "requests get the recorded answer"
	case idempotency.ConditionNotReplayable:
		return "the answer was not recorded; requests get 409 " + wire.NotReplayable
	}
	return "it counts as absent"
}

func printEntry(w io.Writer, e *idempotency.Entry) error {
	expires := "never"
	if !e.Expires.IsZero() {
		expires = timeText(e.Expires)
	}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"hash", fmt.Sprintf("%x", e.Hash)},
		{"claim", e.ID.String()},
		{"operation", printable(e.Operation)},
		{"key", printable(e.Key)},
		{"state", fmt.Sprintf("%s: %s", e.Condition, meaning(e))},
		{"at most once", fmt.Sprint(e.AtMostOnce)},
		{"attempt", fmt.Sprint(e.Attempt)},
		{"claimed", fmt.Sprintf("%s, %s ago", timeText(e.Claimed), ageText(e.Age))},
		{"lease until", timeText(e.LeaseUntil)},
		{"expires", expires},
	} {
		fmt.Fprintf(out, "%s\t%s\n", line[0], line[1])
	}
	if e.Outcome.Status != 0 {
		fmt.Fprintf(out, "status\t%d\n", e.Outcome.Status)
	}
	if e.State == idempotency.Completed {
		printAnswer(out, e.Outcome)
	}
	return out.Flush()
}

func printAnswer(w io.Writer, o idempotency.Outcome) {
	resp, err := idempotency.DecodeOutcome(o)
	if err != nil {
		fmt.Fprintf(w, "answer\t%s\n", strings.TrimPrefix(err.Error(), "idempotency: "))
		return
	}
	var fields []string
	for name, values := range resp.Header {
		for _, value := range values {
			fields = append(fields, name+": "+value)
		}
	}
	slices.Sort(fields)
	for _, field := range fields {
		fmt.Fprintf(w, "header\t%s\n", printable(field))
	}
	body := string(resp.Body)
	if !utf8.ValidString(body) || strings.ContainsFunc(body, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
		fmt.Fprintf(w, "body\t%d bytes that are not text; -json prints them\n", len(body))
	} else if body != "" {
		fmt.Fprintf(w, "body\t%d bytes:\n\n%s\n", len(body), strings.TrimSuffix(body, "\n"))
	}
}

// entryJSON is an entry as -json prints it.
type entryJSON struct {
	Hash       string                `json:"hash"`
	Claim      string                `json:"claim"`
	Operation  string                `json:"operation"`
	Key        string                `json:"key"`
	State      idempotency.Condition `json:"state"`
	AtMostOnce bool                  `json:"atMostOnce"`
	Attempt    int                   `json:"attempt"`
	AgeSeconds float64               `json:"ageSeconds"`
	ClaimedAt  time.Time             `json:"claimedAt"`
	LeaseUntil time.Time             `json:"leaseUntil"`
	ExpiresAt  *time.Time            `json:"expiresAt"` // null: never
	Status     int                   `json:"status,omitempty"`

	// Of the answer, where it is known.
	Header     map[string][]string `json:"header,omitempty"`
	Body       *string             `json:"body,omitempty"`       // text
	BodyBase64 []byte              `json:"bodyBase64,omitempty"` // anything else
	Unreadable string              `json:"unreadable,omitempty"` // why there is no answer
}

func toJSON(e *idempotency.Entry) entryJSON {
	j := entryJSON{
		Hash: fmt.Sprintf("%x", e.Hash), Claim: e.ID.String(), Operation: e.Operation, Key: e.Key,
		State: e.Condition, AtMostOnce: e.AtMostOnce, Attempt: e.Attempt, AgeSeconds: e.Age.Seconds(),
		ClaimedAt: e.Claimed.UTC(), LeaseUntil: e.LeaseUntil.UTC(), Status: e.Outcome.Status,
	}
	if !e.Expires.IsZero() {
		expires := e.Expires.UTC()
		j.ExpiresAt = &expires
	}
	if e.State != idempotency.Completed || e.Outcome.Header == nil {
		return j // not recorded, or not asked for
	}
	resp, err := idempotency.DecodeOutcome(e.Outcome)
	switch {
	case err != nil:
		j.Unreadable = strings.TrimPrefix(err.Error(), "idempotency: ")
		return j
	case utf8.Valid(resp.Body):
		body := string(resp.Body)
		j.Body = &body
	default:
		j.BodyBase64 = resp.Body
	}
	j.Header = resp.Header
	return j
}

const sweepHelp = `oapi-idempotent keys sweep deletes the keys that have expired, in small steps that
hold nobody up. Servers that run a sweeper do so by themselves.

  oapi-idempotent keys sweep -yes

Flags:
`

// sweepBatch is how many rows are deleted at most before the next look.
const sweepBatch = 100_000

func sweepKeys(ctx context.Context, args []string, stdout io.Writer) error {
	set := flag.NewFlagSet("keys sweep", flag.ContinueOnError)
	var table keyTable
	table.declare(set)
	asJSON := set.Bool("json", false, "print JSON")
	yes := set.Bool("yes", false, "do not ask")
	operands, done, err := parseFlags(set, sweepHelp, args, stdout)
	if done || err != nil {
		return err
	}
	if err := noOperands(operands); err != nil {
		return err
	}
	if err := mayAsk(*yes); err != nil {
		return err
	}
	db, _, err := table.open()
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := sqlstore.NewPostgres(db, sqlstore.WithTable(table.table))
	if err != nil {
		return err
	}
	if err := confirm(ctx, *yes, fmt.Sprintf("Delete all expired keys of %s?", table.table)); err != nil {
		return err
	}
	deleted := 0
	for {
		n, err := store.Sweep(ctx, sweepBatch)
		deleted += n
		if err != nil {
			return fmt.Errorf("%w; %d keys had been deleted", table.explained(err), deleted)
		}
		if n < sweepBatch {
			break
		}
	}
	if *asJSON {
		return printJSON(stdout, map[string]int{"deleted": deleted})
	}
	_, err = fmt.Fprintf(stdout, "Expired keys deleted: %d\n", deleted)
	return err
}

const statsHelp = `oapi-idempotent keys stats counts the keys by operation and state.

  oapi-idempotent keys stats
  oapi-idempotent keys stats -json | jq 'map(select(.state == "unknown")) | map(.keys) | add'

Flags:
`

func countKeys(ctx context.Context, args []string, stdout io.Writer) error {
	set := flag.NewFlagSet("keys stats", flag.ContinueOnError)
	var table keyTable
	table.declare(set)
	asJSON := set.Bool("json", false, "print JSON")
	operands, done, err := parseFlags(set, statsHelp, args, stdout)
	if done || err != nil {
		return err
	}
	if err := noOperands(operands); err != nil {
		return err
	}
	db, inspector, err := table.open()
	if err != nil {
		return err
	}
	defer db.Close()
	tallies, err := inspector.Tally(ctx)
	if err != nil {
		return table.explained(err)
	}
	if *asJSON {
		type tallyJSON struct {
			Operation        string                `json:"operation"`
			State            idempotency.Condition `json:"state"`
			Keys             int64                 `json:"keys"`
			OldestAgeSeconds float64               `json:"oldestAgeSeconds"`
		}
		list := make([]tallyJSON, len(tallies))
		for i, t := range tallies {
			list[i] = tallyJSON{t.Operation, t.Condition, t.Keys, t.Oldest.Seconds()}
		}
		return printJSON(stdout, list)
	}
	out := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "OPERATION\tSTATE\tKEYS\tOLDEST")
	for _, t := range tallies {
		fmt.Fprintf(out, "%s\t%s\t%d\t%s\n", printable(t.Operation), t.Condition, t.Keys, ageText(t.Oldest))
	}
	return out.Flush()
}

// printable keeps what others wrote from moving a terminal's cursor.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Sprintf("%q", s)
	}
	return s
}

func ageText(d time.Duration) string { return d.Truncate(time.Second).String() }

func timeText(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

var errNoTerminal = usageError{"there is no terminal to ask on; give -yes to change things without a question"}

// mayAsk returns an error if what changes things could not ask before it does.
func mayAsk(yes bool) error {
	info, err := os.Stdin.Stat()
	if !yes && (err != nil || info.Mode()&os.ModeCharDevice == 0) {
		return errNoTerminal
	}
	return nil
}

// confirm asks a question on the terminal, and returns nil if the answer is yes
// or need not be asked for.
func confirm(ctx context.Context, yes bool, question string) error {
	if yes {
		return nil
	}
	fmt.Fprintf(os.Stderr, "%s [y/N] ", question)
	type line struct {
		text string
		err  error
	}
	answer := make(chan line, 1)
	go func() {
		text, err := bufio.NewReader(os.Stdin).ReadString('\n')
		answer <- line{text, err}
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case l := <-answer:
		if l.err != nil { // /dev/null, say
			return errNoTerminal
		}
		if a := strings.ToLower(strings.TrimSpace(l.text)); a != "y" && a != "yes" {
			return errors.New("the answer was not yes; nothing was changed")
		}
		return nil
	}
}
