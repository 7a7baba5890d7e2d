package main

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
)

// describe says on what is measured, in lines that benchstat reads.
func (b *bench) describe() (string, error) {
	c, err := b.postgres()
	if err != nil {
		return "", err
	}
	sync, err := c.syncTime()
	if err != nil {
		return "", err
	}
	var version string
	if err := c.admin.QueryRow("SHOW server_version").Scan(&version); err != nil {
		return "", err
	}
	version, _, _ = strings.Cut(version, " ")
	var slower string
	if b.disk > 0 {
		slower = fmt.Sprintf(" + %s (commit_delay)", b.disk)
	}
	return fmt.Sprintf("goos: %s\ngoarch: %s\npkg: github.com/oapi-idempotent/oapi-idempotent/internal/bench\ncpu: %d × %s\n"+
		"go: %s\npostgres: %s, fsync on, synchronous_commit on\nfsync: %.0f µs%s\nload: %s\nrounds: %d of %s\n",
		runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), processorModel(), runtime.Version(), version, float64(sync.Nanoseconds())/1e3, slower, load(), b.rounds, b.time), nil
}

var modelName = regexp.MustCompile(`(?m)^model name\s*: (.*)$`)

// processorModel returns the model's name where the system says it.
func processorModel() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if m := modelName.FindSubmatch(info); err == nil && m != nil {
		return string(m[1])
	}
	return "unknown"
}

// load returns how many processes wanted to run in the last minute, where the
// system says it: what is measured on a busy machine is worth less.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	last, _, _ := strings.Cut(string(text), " ")
	return last
}

// The figures of a document are between a mark that names the disk and its end.
const (
	figuresBegin       = "<!-- figures -->\n"
	figuresBeginSlower = "<!-- figures, -disk %s -->\n"
	figuresEnd         = "<!-- end of figures -->"
)

// writeTo puts what was measured into a document.
func (b *bench) writeTo(path, machine, tables string) error {
	figuresBegin := figuresBegin
	if b.disk > 0 {
		figuresBegin = fmt.Sprintf(figuresBeginSlower, b.disk)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begins := strings.Cut(string(text), figuresBegin)
	_, after, ends := strings.Cut(rest, figuresEnd)
	if !begins || !ends {
		return fmt.Errorf("%s has no lines %q and %q to write the figures between", path, strings.TrimSpace(figuresBegin), figuresEnd)
	}
	return os.WriteFile(path, []byte(before+figuresBegin+"```\n"+machine+"```\n"+tables+figuresEnd+after), 0o644)
}
