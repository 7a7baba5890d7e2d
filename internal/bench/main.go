// Command bench measures this module beside a floor and beside its peers: they
// take turns, round by round, so that whatever else the machine does falls on
// all of them, and what is printed are ratios.
//
//	go run . [-run regexp] [-time 2s] [-rounds 5] [-disk 1ms] [-rows10m] [-update file]
//
// It starts a PostgreSQL of its own, which waits for the disk at every commit,
// and needs PostgreSQL's server binaries and pgbench. On its standard output
// are a line for each side of each round, which benchstat reads, and after them
// two Markdown tables: medians of the ratios with their targets, and of the
// figures. What it is doing is on its standard error. A target that is missed
// is not an error; what cannot be measured is.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

func main() {
	b := bench{
		out:       os.Stdout,
		progress:  os.Stderr,
		documents: largest,
		fewRows:   10_000,
	}
	run := flag.String("run", ".", "measure only the contests whose name matches the `regexp`")
	flag.DurationVar(&b.time, "time", 2*time.Second, "how long each side runs in each round")
	flag.IntVar(&b.rounds, "rounds", 5, "how many rounds there are")
	flag.DurationVar(&b.disk, "disk", 0, "have PostgreSQL wait so much longer for the disk, to see what a slower one would change: at most 100ms")
	flag.StringVar(&b.update, "update", "", "write the figures to the `file`, between the marks for this disk, as well")
	rows10m := flag.Bool("rows10m", false, "compare tables of 10 thousand and of 10 million rows, too; it says what disk it needs")
	flag.Parse()
	var err error
	if b.run, err = regexp.Compile(*run); err != nil || flag.NArg() > 0 || b.rounds < 1 || b.time <= 0 || b.disk < 0 || b.disk > 100*time.Millisecond {
		fmt.Fprintln(os.Stderr, "bench: -run takes a regular expression, -time and -rounds are positive, -disk is at most 100ms, and there are no arguments")
		flag.Usage()
		os.Exit(2)
	}
	if *rows10m {
		b.manyRows = 10_000_000
	}
	// An interrupt ends the round that is under way, and the server with it.
	var stop context.CancelFunc
	b.ctx, stop = signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.measure(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
