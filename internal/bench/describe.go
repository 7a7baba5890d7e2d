package main

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
)

// describe says on what is measured, in lines that benchstat reads.
func (b *bench) describe() error {
	c, err := b.postgres()
	if err != nil {
		return err
	}
	sync, err := c.syncTime()
	if err != nil {
		return err
	}
	var version string
	if err := c.admin.QueryRow("SHOW server_version").Scan(&version); err != nil {
		return err
	}
	version, _, _ = strings.Cut(version, " ")
	fmt.Fprintf(b.out, "goos: %s\ngoarch: %s\npkg: github.com/oapi-idempotent/oapi-idempotent/internal/bench\ncpu: %d × %s\n",
		runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), processorModel())
	fmt.Fprintf(b.out, "go: %s\npostgres: %s, fsync on, synchronous_commit on\nfsync: %.0f µs\nload: %s\nrounds: %d of %s\n",
		runtime.Version(), version, float64(sync.Nanoseconds())/1e3, load(), b.rounds, b.time)
	return nil
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
