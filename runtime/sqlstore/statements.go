package sqlstore

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jmoiron/sqlx"
)

// The statements, one home for all dialects. A ? is an argument; words in
// braces are a dialect's. What has no column list of its own returns {row}, which
// [readRow] reads by place.
const (
	readSQL = `SELECT {row} FROM {table} WHERE key_hash = ?`

	insertSQL = `INSERT INTO {table} (key_hash, claim_id, owner, fingerprint, at_most_once, lease_until, expires_at, operation, key)
VALUES (?, ?, ?, ?, ?, {after}, CASE WHEN ? THEN {never} ELSE {after} END, {text}, {text})
ON CONFLICT (key_hash) DO NOTHING`

	// A row of which nothing is left, or whose claimant died, becomes another's.
	takeoverSQL = `UPDATE {table} SET claim_id = ?, owner = ?, fingerprint = ?, state = 0, at_most_once = ?,
attempt = CASE WHEN expires_at <= {now} THEN 1 ELSE attempt + 1 END,
lease_until = {after}, expires_at = CASE WHEN ? THEN {never} ELSE {after} END, created_at = {now},
operation = {text}, key = {text}, status = NULL, headers = NULL, body = NULL
WHERE key_hash = ? AND claim_id = ?
AND (expires_at <= {now} OR (state = 0 AND NOT at_most_once AND lease_until <= {now})) RETURNING {row}`

	renewSQL = `UPDATE {table} SET lease_until = {after}, expires_at = CASE WHEN at_most_once THEN {never} ELSE {after} END` + held

	markSQL = `UPDATE {table} SET at_most_once = true, expires_at = {never}` + held

	settleSQL = `UPDATE {table} SET state = ?, status = ?, headers = ?, body = ?,
expires_at = CASE WHEN ? THEN {never} ELSE {after} END` + held

	// The versions of a claim and a settlement for many, whose arguments are
	// arrays, of PostgreSQL only. They also return the key.
	claimManySQL = `WITH c AS (SELECT * FROM unnest(?::bytea[], ?::bytea[], ?::bytea[], ?::bytea[], ?::boolean[], ?::bigint[], ?::boolean[], ?::bigint[], ?::bytea[], ?::bytea[])
AS c(key_hash, claim_id, owner, fingerprint, at_most_once, lease, never, life, operation, key)),
ins AS (INSERT INTO {table} (key_hash, claim_id, owner, fingerprint, at_most_once, lease_until, expires_at, operation, key)
SELECT key_hash, claim_id, owner, fingerprint, at_most_once, {now} + lease * interval '1 microsecond',
CASE WHEN never THEN {never} ELSE {now} + life * interval '1 microsecond' END, encode(operation, 'escape'), encode(key, 'escape') FROM c
ON CONFLICT (key_hash) DO NOTHING RETURNING key_hash, {row})
SELECT * FROM ins UNION ALL SELECT key_hash, {row} FROM {table} WHERE key_hash = ANY(?::bytea[])`

	settleManySQL = `UPDATE {table} AS k SET state = m.state, status = m.status, headers = m.headers, body = m.body,
expires_at = CASE WHEN m.never THEN {never} ELSE {now} + m.life * interval '1 microsecond' END
FROM unnest(?::smallint[], ?::smallint[], ?::bytea[], ?::bytea[], ?::boolean[], ?::bigint[], ?::bytea[], ?::bytea[])
AS m(state, status, headers, body, never, life, key_hash, claim_id)
WHERE k.key_hash = m.key_hash AND k.claim_id = m.claim_id AND k.state = 0 RETURNING k.key_hash`

	// What a transaction did is a row where it saw none, ...
	recordSQL = `INSERT INTO {table} AS k (key_hash, claim_id, owner, fingerprint, state, attempt, lease_until, expires_at, operation, key, status, headers, body)
VALUES (?, ?, ?, ?, ?, ?, {clock}, CASE WHEN ? THEN {never} ELSE {clock_after} END, {text}, {text}, ?, ?, ?)
ON CONFLICT (key_hash) DO `

	recordNewSQL = recordSQL + `NOTHING`

	// ... or replaces the one it saw: that which it took over itself, or one that
	// is still expired. A run that was taken for dead may have settled it since.
	recordOverSQL = recordSQL + `UPDATE SET claim_id = excluded.claim_id, owner = excluded.owner, fingerprint = excluded.fingerprint, state = excluded.state,
at_most_once = false, attempt = excluded.attempt, lease_until = excluded.lease_until, expires_at = excluded.expires_at, created_at = excluded.created_at,
operation = excluded.operation, key = excluded.key, status = excluded.status, headers = excluded.headers, body = excluded.body
WHERE k.claim_id = ? AND (k.expires_at <= {now} OR k.claim_id = excluded.claim_id AND k.state = 0)`

	releaseSQL = `DELETE FROM {table}` + held

	// An abandoned claim is given back unless an earlier attempt ran before
	// it: its successor is to know of that one.
	disownSQL = releaseSQL + ` AND attempt = 1`

	held = ` WHERE key_hash = ? AND claim_id = ? AND state = 0`

	// The advisory lock that stands for a key in this table, which may have one
	// name with its schema and another without; of PostgreSQL only.
	lockSQL  = `SELECT pg_try_advisory_xact_lock(` + keyLock + `)`
	awaitSQL = `SELECT pg_advisory_xact_lock(` + keyLock + `)`
	keyLock  = `('{table}'::regclass::oid::bigint << 32) # ?::bigint`

	// Times are in seconds, and judged in Go: what the planner need not work out
	// is half the cost of a statement that is not prepared.
	rowColumns = `claim_id, owner, fingerprint, state, at_most_once, attempt,
{seconds lease_until} AS lease_until, {seconds expires_at} AS expires_at, {seconds now} AS read_at, status, headers, body`
)

// statements are the statements of one table.
type statements struct {
	read, insert, takeover, renew, mark, settle, release, disown, recordNew, recordOver *statement
	// insertOrRead is insert and read in one trip, for dialects that can; its
	// arguments are theirs. Zero rows: another inserted while it ran.
	insertOrRead *statement
	// claimMany and settleMany are insertOrRead and settle for many at once.
	claimMany, settleMany *statement
	// lock takes a key's lock, or says that another has it; await waits for it.
	lock, await *statement
}

// settleHash is the place of the key's hash among the arguments of settle.
const settleHash = 6

// newStatements fills in the words of a dialect.
func newStatements(words ...string) statements {
	// {row} holds further words, and so is replaced first.
	expand := func(text string) *statement {
		text = strings.ReplaceAll(text, "{row}", rowColumns)
		return newStatement(strings.NewReplacer(words...).Replace(text))
	}
	return statements{
		read: expand(readSQL), insert: expand(insertSQL), takeover: expand(takeoverSQL),
		renew: expand(renewSQL), mark: expand(markSQL), settle: expand(settleSQL),
		release: expand(releaseSQL), disown: expand(disownSQL), recordNew: expand(recordNewSQL), recordOver: expand(recordOverSQL),
		claimMany: expand(claimManySQL), settleMany: expand(settleManySQL),
		lock: expand(lockSQL), await: expand(awaitSQL),
		insertOrRead: expand("WITH ins AS (" + insertSQL + " RETURNING {row}) SELECT * FROM ins UNION ALL " + readSQL + " LIMIT 1"),
	}
}

// prepareTx is SQL that prepares what a transaction sends.
func (s *statements) prepareTx() string {
	var prepare []string
	for _, st := range []*statement{s.lock, s.read, s.recordNew, s.recordOver} {
		prepare = append(prepare, st.prepare)
	}
	return strings.Join(prepare, "; ")
}

// A statement is SQL with a ? for each argument.
type statement struct {
	text     string
	prepared atomic.Pointer[sqlx.Stmt] // nil until first used, or never
	// prepare and execute are the same in two steps, as SQL. The name that a
	// session has it under is its text's own: nobody else's statement is run.
	prepare, execute string
}

func newStatement(text string) *statement {
	sum := sha256.Sum256([]byte(text))
	name := fmt.Sprintf("oapi_idempotent_%x", sum[:8])
	args := strings.TrimSuffix(strings.Repeat("?,", strings.Count(text, "?")), ",")
	return &statement{
		text:    text,
		prepare: "PREPARE " + name + " AS " + sqlx.Rebind(sqlx.DOLLAR, text),
		execute: "EXECUTE " + name + "(" + args + ")",
	}
}

// literal returns the statement with its arguments written into it: bytes as
// hexadecimal, the others as PostgreSQL's literals, so that nothing a client
// sent can be read as SQL.
func (s *statement) literal(args []any) string { return fillIn(s.text, args) }

// fillIn puts literals in the places of the arguments.
func fillIn(template string, args []any) string {
	size := len(template)
	for _, arg := range args {
		size += len("-9223372036854775808")
		if b, ok := arg.([]byte); ok {
			size += hex.EncodedLen(len(b))
		}
	}
	text := make([]byte, 0, size)
	rest := template
	for _, arg := range args {
		var before string
		before, rest, _ = strings.Cut(rest, "?")
		text = append(text, before...)
		switch arg := arg.(type) {
		case []byte:
			// As an escape string it does not depend on standard_conforming_strings.
			text = append(text, `E'\\x`...)
			text = hex.AppendEncode(text, arg)
			text = append(text, '\'')
		case int64:
			// In parentheses, as a minus after an operator would belong to it.
			text = append(text, '(')
			text = strconv.AppendInt(text, arg, 10)
			text = append(text, ')')
		case bool:
			text = strconv.AppendBool(text, arg)
		default:
			panic(fmt.Sprintf("sqlstore: no literal for an argument of type %T", arg))
		}
	}
	return string(append(text, rest...))
}
