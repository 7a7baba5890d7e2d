package sqlstore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

var _ idempotency.Inspector = (*PostgresInspector)(nil)

// A PostgresInspector is an [idempotency.Inspector] of a table that a [Store]
// keeps in PostgreSQL. Each call is one statement, and reads the whole table
// unless a key hash is given. Like the store it leaves nothing in a session and
// returns when its context ends.
type PostgresInspector struct {
	db    *sqlx.DB
	table table
}

// NewPostgresInspector returns an inspector of the table that a store of the
// same options uses. It does not connect.
func NewPostgresInspector(db *sql.DB, opts ...Option) (*PostgresInspector, error) {
	o, err := newOptions(opts)
	if err != nil {
		return nil, err
	}
	return &PostgresInspector{sqlx.NewDb(db, "postgres"), o.table}, nil
}

// The inspector's statements, in the notation of the store's.
const (
	entriesSQL = `SELECT key_hash, claim_id, state, at_most_once, attempt, lease_until, coalesce(status, 0) AS status, created_at,
decode(operation, 'escape') AS operation, decode(key, 'escape') AS key,
CASE WHEN isfinite(expires_at) THEN expires_at END AS expires_at,
(extract(epoch FROM now() - created_at) * 1000000)::bigint AS age,
CASE WHEN expires_at <= now() THEN 'expired'
WHEN state = 0 AND lease_until > now() THEN 'in-flight'
WHEN state = 0 THEN 'stuck'
WHEN state = 1 THEN 'completed'
WHEN state = 2 THEN 'not-replayable'
ELSE 'unknown' END AS condition`

	listSQL = `SELECT * FROM (` + entriesSQL + ` FROM {table}) AS entries
WHERE (? OR condition = {text} OR (? AND condition = 'stuck' AND at_most_once))
AND (? OR operation = ?) AND (? OR age >= ?) ORDER BY created_at, key_hash`

	findSQL = entriesSQL + `, headers, body FROM {table} WHERE key_hash BETWEEN ? AND ? ORDER BY key_hash LIMIT 2`

	tallySQL = `SELECT operation, condition, count(*) AS keys, max(age) AS oldest FROM (` + entriesSQL + ` FROM {table}) AS entries
GROUP BY operation, condition ORDER BY operation, condition`

	overruleSQL = `UPDATE {table} SET state = ?, status = ?, headers = ?, body = ?, expires_at = now() + ?::bigint * interval '1 microsecond'` + seenSQL

	forgetSQL = `DELETE FROM {table}` + seenSQL

	seenSQL = ` WHERE key_hash = ? AND claim_id = ? AND state = ? AND (? OR state <> 0 OR lease_until <= now())`
)

func (i *PostgresInspector) text(statementText string, args ...any) string {
	words := strings.NewReplacer("{table}", i.table.String(), "{text}", "encode(?, 'escape')")
	return (&statement{text: words.Replace(statementText)}).literal(args)
}

// List implements [idempotency.Inspector].
func (i *PostgresInspector) List(ctx context.Context, f idempotency.Filter) ([]idempotency.Entry, error) {
	text := i.text(listSQL,
		f.Condition == "", []byte(f.Condition), f.Condition == idempotency.ConditionUnknown,
		f.Operation == "", []byte(f.Operation), f.OlderThan <= 0, micros(f.OlderThan))
	if f.Limit > 0 {
		text += fmt.Sprintf(" LIMIT %d", f.Limit)
	}
	return i.entries(ctx, "list", text)
}

// Find implements [idempotency.Inspector].
func (i *PostgresInspector) Find(ctx context.Context, hash string) ([]idempotency.Entry, error) {
	const digits = 64
	pad := func(with string) ([]byte, error) {
		return hex.DecodeString(hash + strings.Repeat(with, max(digits-len(hash), 0)))
	}
	first, err := pad("0")
	if err != nil || hash == "" || len(hash) > digits {
		return nil, fmt.Errorf("sqlstore: %q is no beginning of a key hash; write up to 64 hexadecimal digits", hash)
	}
	last, _ := pad("f") // what differs from the first is a digit, too
	return i.entries(ctx, "find", i.text(findSQL, first, last))
}

func (i *PostgresInspector) entries(ctx context.Context, what, text string) ([]idempotency.Entry, error) {
	return within(ctx, what, func() ([]idempotency.Entry, error) {
		var records []entryRecord
		if err := i.db.SelectContext(ctx, &records, text); err != nil {
			return nil, err
		}
		entries := make([]idempotency.Entry, len(records))
		for n := range records {
			if err := records[n].read(&entries[n]); err != nil {
				return nil, err
			}
		}
		return entries, nil
	}, nil)
}

// Settle implements [idempotency.Inspector].
func (i *PostgresInspector) Settle(ctx context.Context, seen *idempotency.Entry, o idempotency.Outcome, ttl time.Duration, force bool) (bool, error) {
	return i.write(ctx, "settle", i.text(overruleSQL,
		int64(o.State), int64(o.Status), o.Header, o.Body, micros(ttl),
		seen.Hash[:], seen.ID[:], int64(seen.State), force))
}

// Forget implements [idempotency.Inspector].
func (i *PostgresInspector) Forget(ctx context.Context, seen *idempotency.Entry, force bool) (bool, error) {
	return i.write(ctx, "forget", i.text(forgetSQL, seen.Hash[:], seen.ID[:], int64(seen.State), force))
}

func (i *PostgresInspector) write(ctx context.Context, what, text string) (bool, error) {
	return within(ctx, what, func() (bool, error) {
		result, err := i.db.ExecContext(ctx, text)
		if err != nil {
			if (postgres{}).conflict(err) {
				err = nil // another wrote the row at the same time
			}
			return false, err
		}
		n, err := result.RowsAffected()
		return n > 0, err
	}, nil)
}

// Tally implements [idempotency.Inspector].
func (i *PostgresInspector) Tally(ctx context.Context) ([]idempotency.Tally, error) {
	return within(ctx, "tally", func() ([]idempotency.Tally, error) {
		var records []struct {
			Operation []byte `db:"operation"`
			Condition string `db:"condition"`
			Keys      int64  `db:"keys"`
			Oldest    int64  `db:"oldest"` // microseconds
		}
		if err := i.db.SelectContext(ctx, &records, i.text(tallySQL)); err != nil {
			return nil, err
		}
		tallies := make([]idempotency.Tally, len(records))
		for n, r := range records {
			tallies[n] = idempotency.Tally{
				Operation: string(r.Operation), Condition: idempotency.Condition(r.Condition),
				Keys: r.Keys, Oldest: time.Duration(r.Oldest) * time.Microsecond,
			}
		}
		return tallies, nil
	}, nil)
}

// An entryRecord is an entry as the statements return it.
type entryRecord struct {
	KeyHash    []byte       `db:"key_hash"`
	ClaimID    []byte       `db:"claim_id"`
	Operation  []byte       `db:"operation"`
	Key        []byte       `db:"key"`
	State      int16        `db:"state"`
	Condition  string       `db:"condition"`
	AtMostOnce bool         `db:"at_most_once"`
	Attempt    int          `db:"attempt"`
	Age        int64        `db:"age"` // microseconds
	CreatedAt  time.Time    `db:"created_at"`
	LeaseUntil time.Time    `db:"lease_until"`
	ExpiresAt  sql.NullTime `db:"expires_at"`
	Status     int          `db:"status"`
	Headers    []byte       `db:"headers"`
	Body       []byte       `db:"body"`
}

func (r *entryRecord) read(e *idempotency.Entry) error {
	*e = idempotency.Entry{
		Operation:  string(r.Operation),
		Key:        string(r.Key),
		State:      idempotency.State(r.State),
		Condition:  idempotency.Condition(r.Condition),
		AtMostOnce: r.AtMostOnce,
		Attempt:    r.Attempt,
		Age:        time.Duration(r.Age) * time.Microsecond,
		Claimed:    r.CreatedAt,
		LeaseUntil: r.LeaseUntil,
		Expires:    r.ExpiresAt.Time,
		Outcome: idempotency.Outcome{
			State: idempotency.State(r.State), Status: r.Status, Header: r.Headers, Body: r.Body,
		},
	}
	if len(r.KeyHash) != len(e.Hash) || len(r.ClaimID) != len(e.ID) {
		return errForeignRow
	}
	copy(e.Hash[:], r.KeyHash)
	copy(e.ID[:], r.ClaimID)
	return nil
}
