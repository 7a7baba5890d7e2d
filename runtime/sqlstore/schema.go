package sqlstore

import (
	"embed"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

//go:embed schema
var schema embed.FS

// defaultTable is the table's name, in schema and unless [WithTable] says else.
const defaultTable = "idempotency_keys"

// columns are the columns that the statements use.
var columns = []string{
	"key_hash", "claim_id", "owner", "fingerprint", "state", "at_most_once", "attempt", "lease_until", "expires_at",
	"created_at", "operation", "key", "status", "headers", "body",
}

// DDL returns the statements that create the table: what [Store.Migrate] runs.
// The dialect is "postgres" or "sqlite"; the table is as for [WithTable], or
// empty for the default.
func DDL(dialect, tableName string) (string, error) {
	if tableName == "" {
		tableName = defaultTable
	}
	t, err := parseTable(tableName)
	if err != nil {
		return "", err
	}
	if dialect == "sqlite" {
		if err := t.checkSQLite(); err != nil {
			return "", err
		}
	}
	files, err := schema.ReadDir("schema/" + dialect)
	if err != nil {
		return "", fmt.Errorf("sqlstore: there is no dialect %q; write \"postgres\" or \"sqlite\"", dialect)
	}
	var ddl strings.Builder
	for _, file := range files { // sorted, and so in the order of their numbers
		text, err := schema.ReadFile("schema/" + dialect + "/" + file.Name())
		if err != nil {
			return "", err
		}
		ddl.Write(text)
	}
	return strings.NewReplacer(
		defaultTable+"_expires_at", quote(t.name+"_expires_at"),
		defaultTable, t.String(),
	).Replace(ddl.String()), nil
}

// A table is a table's name. The schema may be empty.
type table struct{ schema, name string }

// 63 bytes are what PostgreSQL keeps of an identifier.
var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

func parseTable(name string) (table, error) {
	t := table{name: name}
	if schema, rest, qualified := strings.Cut(name, "."); qualified {
		t = table{schema, rest}
		if !identifier.MatchString(schema) {
			return table{}, badTable(name)
		}
	}
	if !identifier.MatchString(t.name) {
		return table{}, badTable(name)
	}
	return t, nil
}

func badTable(name string) error {
	return fmt.Errorf("sqlstore: %q is no name of a table; write letters, digits and underscores, at most 63, as in \"keys\" or \"schema.keys\"", name)
}

// String returns the name as SQL.
func (t table) String() string {
	if t.schema == "" {
		return quote(t.name)
	}
	return quote(t.schema) + "." + quote(t.name)
}

// unquoted returns the name as [WithTable] takes it.
func (t table) unquoted() string {
	if t.schema == "" {
		return t.name
	}
	return t.schema + "." + t.name
}

func quote(name string) string { return `"` + name + `"` }

// checkColumns says what columns the table lacks.
func (t table) checkColumns(have []string) error {
	missing := slices.DeleteFunc(slices.Clone(columns), func(c string) bool { return slices.Contains(have, c) })
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the table %s lacks the column %s: it is not this package's, or an older version's; "+
		"alter it after DDL, or choose another with WithTable", t, strings.Join(missing, ", "))
}
