package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

const sqlHelp = `oapi-idempotent sql prints the DDL of the table that sqlstore keeps its keys in:
what Store.Migrate runs, for those who keep migrations of their own.

Usage:

  oapi-idempotent sql [flags]

  oapi-idempotent sql                                      # PostgreSQL, to standard output
  oapi-idempotent sql -dialect sqlite
  oapi-idempotent sql -table ops.keys                      # as for sqlstore.WithTable
  oapi-idempotent sql -format goose -dir db/migrations     # 00001_idempotency_keys.sql

With -dir the DDL becomes a migration in that directory, with the number after
the highest that is there. One for the same table is never overwritten.

Flags:
`

func printSQL(_ context.Context, args []string, stdout, _ io.Writer) error {
	set := flag.NewFlagSet("sql", flag.ContinueOnError)
	dialect := set.String("dialect", "postgres", "postgres or sqlite")
	table := set.String("table", "idempotency_keys", "`name` of the table, perhaps with its schema")
	format := set.String("format", "plain", "plain, or goose: with goose's annotations and a way back")
	dir := set.String("dir", "", "write a numbered migration into this `directory`")
	operands, done, err := parseFlags(set, sqlHelp, args, stdout)
	if done || err != nil {
		return err
	}
	if len(operands) > 0 {
		return usageError{fmt.Sprintf("sql takes flags only, not %q", operands)}
	}
	ddl, err := sqlstore.DDL(*dialect, *table)
	if err != nil {
		return usageError{strings.TrimPrefix(err.Error(), "sqlstore: ")}
	}
	switch *format {
	case "plain":
	case "goose":
		quoted := `"` + strings.ReplaceAll(*table, ".", `"."`) + `"`
		ddl = "-- +goose Up\n" + ddl + "\n-- +goose Down\nDROP TABLE " + quoted + ";\n"
	default:
		return usageError{fmt.Sprintf("-format is %q; write plain or goose", *format)}
	}
	if *dir == "" {
		_, err := io.WriteString(stdout, ddl)
		return err
	}
	name, err := migrationName(*dir, (*table)[strings.LastIndexByte(*table, '.')+1:])
	if err != nil {
		return err
	}
	if err := create(name, []byte(ddl)); err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, name)
	return err
}

var migration = regexp.MustCompile(`^([0-9]+)_(.*)\.(sql|go)$`)

// migrationName returns the name of the next migration in dir, unless there is
// one of the table.
func migrationName(dir, table string) (string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("the directory %s does not exist; create it, or name that of your migrations", dir)
	}
	if err != nil {
		return "", err
	}
	last := uint64(0)
	for _, entry := range entries {
		m := migration.FindStringSubmatch(entry.Name())
		if m == nil {
			continue
		}
		if m[2] == table {
			return "", fmt.Errorf("%s is there already; remove it, or write to another directory", filepath.Join(dir, entry.Name()))
		}
		if n, err := strconv.ParseUint(m[1], 10, 63); err == nil {
			last = max(last, n)
		}
	}
	return filepath.Join(dir, fmt.Sprintf("%05d_%s.sql", last+1, table)), nil
}
