package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A bench is one run of the command.
type bench struct {
	ctx           context.Context
	out, progress io.Writer
	run           *regexp.Regexp // which contests
	time          time.Duration  // how long a side runs in each round
	rounds        int
	disk          time.Duration // that each wait for it takes longer
	fewRows       int           // of the tables that are measured
	manyRows      int           // of the one that they are compared with; 0: none is
	documents     []document    // to be generated
	update        string        // the document to write the tables to; empty: none

	cluster *cluster // nil until postgres is called
	closers []func() error
}

// A contest is a comparison. Its sides take turns.
type contest struct {
	// name is that of a Go benchmark, without "Benchmark": words, then
	// key=value between slashes.
	name    string
	sides   []side
	figures []figure
}

// A side is one of the ways to do the work.
type side struct {
	name string
	// round works for about the time given.
	round func(time.Duration) (sample, error)
}

// A sample is what one side did in one round.
type sample struct {
	ops  int64
	took time.Duration
	// per are further measures of one operation, by their unit.
	per map[string]float64
}

func (s sample) rate() float64 { return float64(s.ops) / s.took.Seconds() }

// A round is one sample of each side, by its name.
type round map[string]sample

// A figure is what is printed of a contest: the median of the rounds' values.
type figure struct {
	what   string
	value  func(round) float64
	target target
}

// A target bounds a figure. The zero target bounds nothing.
type target struct {
	relation string // "≥", "≤" or "="
	bound    float64
}

func atLeast(bound float64) target { return target{"≥", bound} }
func atMost(bound float64) target  { return target{"≤", bound} }
func exactly(bound float64) target { return target{"=", bound} }

// result compares what is printed of a value, so that 0.798 meets 0.80.
func (t target) result(value float64) string {
	const precision = 100
	value = math.Round(value*precision) / precision
	var met bool
	switch t.relation {
	case "≥":
		met = value >= t.bound
	case "≤":
		met = value <= t.bound
	case "=":
		met = value == t.bound
	default:
		return ""
	}
	if met {
		return "pass"
	}
	return "**miss**"
}

func (t target) String() string {
	if t.relation == "" {
		return ""
	}
	return fmt.Sprintf("%s %.4g", t.relation, t.bound)
}

// speed is how much faster one side is than another.
func speed(us, base string, want target) figure {
	return figure{us + " × " + base, func(r round) float64 { return r[us].rate() / r[base].rate() }, want}
}

// cost is what one side needs for each that another needs.
func cost(us, base, unit string, want target) figure {
	return figure{us + " × " + base + ", " + unit, func(r round) float64 { return r[us].per[unit] / r[base].per[unit] }, want}
}

// measure is a measure of one side, as it is.
func measure(us, unit string, want target) figure {
	return figure{us + ", " + unit, func(r round) float64 { return r[us].per[unit] }, want}
}

// more is what one side needs more than another.
func more(us, base, unit string, want target) figure {
	return figure{us + " − " + base + ", " + unit, func(r round) float64 { return r[us].per[unit] - r[base].per[unit] }, want}
}

// A planned is a contest that has not been prepared. What prepares it registers
// with onClose what is to be undone after it.
type planned struct {
	name  string
	build func(*bench, string) (*contest, error)
}

// contests are all comparisons in the order in which they run.
func (b *bench) contests() []planned {
	all := []planned{
		{"Fresh/clients=1", fresh(1)},
		{"Fresh/clients=8", fresh(8)},
		{"Fresh/clients=64", fresh(64)},
		{"Replay/clients=8", replay},
		{"InFlight/clients=8", inFlight},
		{"Mismatch/clients=8", mismatch},
		{"Transaction/clients=8", transaction},
		{"HTTP/connections=64", overHTTP},
		{"Memory/connections=64", inMemory},
		{"Unannotated", unannotated},
		{"SQLite/clients=8", sqlite},
		{"Trips", trips},
		{"Fingerprint/bytes=262144", fingerprint},
	}
	for _, d := range b.documents {
		all = append(all, planned{"Generator/document=" + d.name, generators(d)})
	}
	if b.manyRows > 0 {
		all = append(all, planned{"Rows/clients=8", rows})
	}
	return all
}

func (b *bench) measure() (err error) {
	defer func() { err = errors.Join(err, b.close(0)) }()
	machine, err := b.describe()
	if err != nil {
		return err
	}
	fmt.Fprint(b.out, machine)
	var ratios, figures strings.Builder
	found := false
	for _, c := range b.contests() {
		if !b.run.MatchString(c.name) {
			continue
		}
		found = true
		kept := len(b.closers)
		contest, err := c.build(b, c.name)
		if err == nil {
			var rounds []round
			if rounds, err = b.play(contest); err == nil {
				contest.tabulate(rounds, &ratios, &figures)
			}
		}
		if err := errors.Join(err, b.close(kept)); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	if !found {
		return fmt.Errorf("no contest's name matches %q", b.run)
	}
	tables := fmt.Sprintf("\n| what | median | least to most | target | |\n|---|---|---|---|---|\n%s"+
		"\n| what | side | operations/s | of one operation |\n|---|---|---|---|\n%s", &ratios, &figures)
	fmt.Fprint(b.out, tables)
	if b.update == "" {
		return nil
	}
	return b.writeTo(b.update, machine, tables)
}

// play runs all rounds, after a short one that is not counted.
func (b *bench) play(c *contest) ([]round, error) {
	var rounds []round
	for n := range b.rounds + 1 {
		r := round{}
		for _, s := range c.sides {
			d := b.time
			if n == 0 {
				d /= 8
			}
			sample, err := s.round(d)
			if err == nil {
				err = b.ctx.Err()
			}
			if err == nil && (sample.ops == 0 || sample.took <= 0) {
				err = errors.New("nothing was done")
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			r[s.name] = sample
			fmt.Fprintf(b.progress, "%s: round %d of %d: %s: %.0f/s\n", c.name, n, b.rounds, s.name, sample.rate())
			if n > 0 {
				fmt.Fprintf(b.out, "Benchmark%s/side=%s-%d\t%d\t%.0f ns/op", c.name, s.name, runtime.GOMAXPROCS(0), sample.ops, 1e9/sample.rate())
				for _, unit := range slices.Sorted(maps.Keys(sample.per)) {
					fmt.Fprintf(b.out, "\t%.6g %s", sample.per[unit], unit)
				}
				fmt.Fprintln(b.out)
			}
		}
		if n > 0 {
			rounds = append(rounds, r)
		}
	}
	return rounds, nil
}

// tabulate writes the contest's rows of both tables.
func (c *contest) tabulate(rounds []round, ratios, figures *strings.Builder) {
	for _, f := range c.figures {
		values := over(rounds, f.value)
		fmt.Fprintf(ratios, "| %s: %s | %.2f | %.2f to %.2f | %s | %s |\n",
			c.name, f.what, median(values), slices.Min(values), slices.Max(values), f.target, f.target.result(median(values)))
	}
	for _, s := range c.sides {
		var per []string
		for _, unit := range slices.Sorted(maps.Keys(rounds[0][s.name].per)) {
			per = append(per, fmt.Sprintf("%.4g %s", median(over(rounds, func(r round) float64 { return r[s.name].per[unit] })), unit))
		}
		fmt.Fprintf(figures, "| %s | %s | %.4g | %s |\n",
			c.name, s.name, median(over(rounds, func(r round) float64 { return r[s.name].rate() })), strings.Join(per, ", "))
	}
}

func over(rounds []round, value func(round) float64) []float64 {
	values := make([]float64, 0, len(rounds))
	for _, r := range rounds {
		values = append(values, value(r))
	}
	return values
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// onClose has f called, in reverse order, when the contest is over that
// registers it.
func (b *bench) onClose(f func() error) { b.closers = append(b.closers, f) }

func (b *bench) close(kept int) (err error) {
	for len(b.closers) > kept {
		last := len(b.closers) - 1
		err = errors.Join(err, b.closers[last]())
		b.closers = b.closers[:last]
	}
	return err
}

// processor is drive with one client whose time is the processor's, which other
// load hardly changes.
func (b *bench) processor(d time.Duration, op func(client int) error) (sample, error) {
	before, err := processorTime()
	if err != nil {
		return sample{}, err
	}
	s, err := b.drive(1, d, op)
	if err != nil {
		return s, err
	}
	after, err := processorTime()
	s.took = after - before
	return s, err
}

// drive has clients call op, each one after the other and once at least, until
// the time is over or one fails.
func (b *bench) drive(clients int, d time.Duration, op func(client int) error) (sample, error) {
	var (
		wg     sync.WaitGroup
		ops    atomic.Int64
		failed = make(chan error, clients)
		start  = time.Now()
	)
	for client := range clients {
		wg.Go(func() {
			for {
				if err := op(client); err != nil {
					failed <- err
					return
				}
				ops.Add(1)
				if time.Since(start) >= d || b.ctx.Err() != nil || len(failed) > 0 {
					return
				}
			}
		})
	}
	wg.Wait()
	s := sample{ops: ops.Load(), took: time.Since(start)}
	select {
	case err := <-failed:
		return s, err
	default:
		return s, nil
	}
}
