package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The keys of the rows that the store's benchmarks use are numbers, so that
// pgbench can make them too: it has no random bytes. A key's hash is the number
// in decimal, filled up; nothing depends on how it looks.
const (
	firstKey    = 1_000_000_000_000_000_000 // the lowest of 19 digits
	filling     = "-idempotency-"           // up to 32 bytes
	firstClaim  = 1_000_000_000_000_000     // the lowest of 16 digits, the size of a ClaimID
	beyondClaim = 10 * firstClaim
)

// freshKey is a key that no other call returns, but for luck.
func freshKey() int64 { return firstKey + rand.Int64N(8*firstKey) }

func hashOf(key int64) (h [32]byte) {
	copy(h[:], strconv.AppendInt(nil, key, 10))
	copy(h[19:], filling)
	return h
}

func claimID() (id [16]byte) {
	copy(id[:], strconv.AppendInt(nil, firstClaim+rand.Int64N(beyondClaim-firstClaim), 10))
	return id
}

// A script is a transaction of pgbench's.
type script struct {
	// keys is the expression for the number of the key, as for \set.
	keys       string
	statements []string
	defines    []string // name=value
}

const (
	freshKeys = `random(1000000000000000000, 9000000000000000000)`
	sqlHash   = `(:key::bytea || :filling::bytea)`
)

// existingKeys are those of the first n rows.
func existingKeys(n int) string { return fmt.Sprintf("random(%d, %d)", firstKey, firstKey+n-1) }

var parameter = regexp.MustCompile(`\$[0-9]+`)

// add has the script send what a store sent: the same text with the same
// arguments, but for the key and the claim, which change.
func (s *script) add(statement sent, hash [32]byte, id [16]byte) error {
	n := len(s.statements)
	var failed error
	text := parameter.ReplaceAllStringFunc(statement.text, func(name string) string {
		i, err := strconv.Atoi(name[1:])
		if err != nil || i < 1 || i > len(statement.args) {
			failed = fmt.Errorf("the store sent no argument %s", name)
			return name
		}
		arg := string(statement.args[i-1])
		switch value, err := hex.DecodeString(strings.TrimPrefix(arg, `\x`)); {
		case err == nil && bytes.Equal(value, hash[:]):
			return sqlHash
		case err == nil && bytes.Equal(value, id[:]):
			return ":claim"
		}
		variable := fmt.Sprintf("a%d_%d", n, i)
		if define := variable + "=" + arg; !slices.Contains(s.defines, define) {
			s.defines = append(s.defines, define)
		}
		return ":" + variable
	})
	s.statements = append(s.statements, text)
	return failed
}

func (s *script) String() string {
	return fmt.Sprintf("\\set key %s\n\\set claim random(%d, %d)\n%s;\n", s.keys, firstClaim, beyondClaim-1, strings.Join(s.statements, ";\n"))
}

// pgbench returns the side of the name that has pgbench run the script.
func (b *bench) pgbench(name string, c *cluster, dsn string, clients int, s *script) (side, error) {
	binary, err := pgbenchBinary()
	if err != nil {
		return side{}, err
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return side{}, err
	}
	b.onClose(func() error { return os.RemoveAll(dir) })
	file := filepath.Join(dir, "script.sql")
	if err := os.WriteFile(file, []byte(s.String()), 0o600); err != nil {
		return side{}, err
	}
	host, port, err := net.SplitHostPort(c.server.Addr())
	if err != nil {
		return side{}, err
	}
	args := []string{"-M", "prepared", "-n", "-f", file, "-h", host, "-p", port, "-U", "postgres",
		"-c", strconv.Itoa(clients), "-j", strconv.Itoa(min(clients, runtime.NumCPU())), "-D", "filling=" + filling}
	for _, define := range s.defines {
		args = append(args, "-D", define)
	}
	round := func(d time.Duration) (sample, int64, error) {
		// pgbench counts whole seconds, or transactions.
		length := []string{"-T", strconv.Itoa(int(d.Round(time.Second).Seconds()))}
		if d < time.Second {
			length = []string{"-t", "20"}
		}
		cmd := exec.CommandContext(b.ctx, binary, slices.Concat(args, length, []string{databaseOf(dsn)})...)
		// The plans are to be those of the store.
		cmd.Env = append(os.Environ(), "LC_ALL=C", "PGOPTIONS=-c enable_seqscan=off -c plan_cache_mode=force_generic_plan")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return sample{}, 0, fmt.Errorf("pgbench: %w\n%s", err, out)
		}
		sample, err := parsePgbench(string(out))
		return sample, sample.ops, err
	}
	return side{name, c.counted(round)}, nil
}

func databaseOf(dsn string) string {
	_, name, _ := strings.Cut(dsn[strings.LastIndex(dsn, "/"):], "/")
	name, _, _ = strings.Cut(name, "?")
	return name
}

var (
	processed = regexp.MustCompile(`number of transactions actually processed: ([0-9]+)`)
	perSecond = regexp.MustCompile(`tps = ([0-9.]+) \(without initial connection time\)`)
	failures  = regexp.MustCompile(`number of failed transactions: ([0-9]+)`)
)

func parsePgbench(out string) (sample, error) {
	number := func(pattern *regexp.Regexp) float64 {
		m := pattern.FindStringSubmatch(out)
		if m == nil {
			return 0
		}
		n, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0
		}
		return n
	}
	ops, rate := number(processed), number(perSecond)
	if ops == 0 || rate == 0 || number(failures) > 0 {
		return sample{}, fmt.Errorf("pgbench did not do all that it should:\n%s", out)
	}
	return sample{ops: int64(ops), took: time.Duration(ops / rate * float64(time.Second))}, nil
}

func pgbenchBinary() (string, error) {
	if path, err := exec.LookPath("pgbench"); err == nil {
		return path, nil
	}
	packaged, err := filepath.Glob("/usr/lib/postgresql/*/bin/pgbench")
	if err != nil {
		return "", err
	}
	if len(packaged) == 0 {
		return "", errors.New("no pgbench found, which is the floor of what is measured; install it (Debian: apt-get install postgresql)")
	}
	return packaged[len(packaged)-1], nil
}
