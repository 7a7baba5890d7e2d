//go:build unix && !race

package generator_test

import (
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// BenchmarkDocuments generates the largest documents, every POST and PATCH
// annotated, and beside each run lets oapi-codegen generate the same documents.
// time/stock and memory/stock are the ratios of the cheapest run of each, which
// other load on the machine disturbs least: of the processor's time, and of what
// was allocated. The bound is 1.25.
func BenchmarkDocuments(b *testing.B) {
	for _, d := range realDocuments {
		switch d.name {
		case "coinbase-cdp.yaml", "twilio-messaging-v1.yaml", "dcsa-booking-v2.yaml", "resend.yaml":
		default:
			continue
		}
		b.Run(d.name, func(b *testing.B) {
			cfg := documentConfig(b, annotate(b, os.DirFS(specs), d.name), d.name, "std-http", outputOptions(d.options))
			options := cfg.UpdateDefaults()
			var ours, stock cost
			for b.Loop() {
				ours.measure(func() error {
					_, err := generator.Generate(b.Context(), cfg)
					return err
				}, b)
				stock.measure(func() error {
					doc, err := util.LoadSwaggerWithOverlay(filepath.Join(specs, d.name), util.LoadSwaggerWithOverlayOpts{})
					if err != nil {
						return err
					}
					_, err = codegen.Generate(doc, options)
					return err
				}, b)
			}
			b.ReportMetric(float64(ours.time)/float64(stock.time), "time/stock")
			b.ReportMetric(float64(ours.bytes)/float64(stock.bytes), "memory/stock")
		})
	}
}

// A cost is what the cheapest call took.
type cost struct {
	time  time.Duration
	bytes uint64 // allocated
}

func (c *cost) measure(call func() error, b *testing.B) {
	var before, after runtime.MemStats
	runtime.GC() // so that neither pays for the other's garbage
	runtime.ReadMemStats(&before)
	start := processorTime(b)
	if err := call(); err != nil {
		b.Fatal(err)
	}
	took := processorTime(b) - start
	runtime.ReadMemStats(&after)
	allocated := after.TotalAlloc - before.TotalAlloc
	if c.time == 0 || took < c.time {
		c.time = took
	}
	if c.bytes == 0 || allocated < c.bytes {
		c.bytes = allocated
	}
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
