package main

import (
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing/fstest"
	"time"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"
	"github.com/ogen-go/ogen"
	"github.com/ogen-go/ogen/gen"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// specs is where the documents are, seen from this module.
const specs = "../../testdata/specs"

const generatorConfig = `
package: api
output: api.gen.go
generate: {std-http-server: true, strict-server: true, client: true, models: true, embedded-spec: true}
output-options: {skip-prune: true}
`

// A document is one of testdata/specs, in YAML, or one that is made, in JSON.
type document struct {
	name string
	// ogen says that ogen can generate it, which fails for others in its
	// templates.
	ogen bool
	// resources are those of a document that is made; 0: it is not.
	resources int
}

// The largest documents.
var largest = []document{
	{name: "coinbase-cdp.yaml", ogen: true},
	{name: "twilio-messaging-v1.yaml"},
	{name: "dcsa-booking-v2.yaml", ogen: true},
	{name: "synthetic.json", resources: 200},
}

// write writes the document into dir, and returns its path and its text with
// every POST and PATCH annotated.
func (d document) write(dir string) (path string, annotated []byte, err error) {
	path = filepath.Join(dir, d.name)
	if d.resources > 0 {
		text, err := synthetic(d.resources)
		if err != nil {
			return "", nil, err
		}
		annotated = append([]byte(`{"x-idempotent": {"applyTo": ["post", "patch"]},`), text[len("{"):]...)
		return path, annotated, os.WriteFile(path, text, 0o600)
	}
	text, err := os.ReadFile(filepath.Join(specs, d.name))
	if err != nil {
		return "", nil, err
	}
	annotated = append(text[:len(text):len(text)], "\nx-idempotent: {applyTo: [post, patch]}\n"...)
	return path, annotated, os.WriteFile(path, text, 0o600)
}

// generators generates a document with every POST and PATCH annotated; beside it
// oapi-codegen generates the same, and ogen what it makes of it. Time is the
// processor's, and memory what was allocated.
func generators(d document) func(*bench, string) (*contest, error) {
	return func(b *bench, name string) (*contest, error) {
		dir, err := os.MkdirTemp("", "bench-generators-")
		if err != nil {
			return nil, err
		}
		b.onClose(func() error { return os.RemoveAll(dir) })
		path, annotated, err := d.write(dir)
		if err != nil {
			return nil, err
		}
		cfg, err := generator.ParseConfig([]byte(generatorConfig))
		if err != nil {
			return nil, err
		}
		cfg.FS, cfg.Spec = fstest.MapFS{d.name: {Data: annotated}}, d.name
		contest := &contest{
			name: name,
			sides: []side{
				working("oapi-idempotent", func() error {
					_, err := generator.Generate(b.ctx, cfg)
					return err
				}),
				working("oapi-codegen", func() error {
					doc, err := util.LoadSwaggerWithOverlay(path, util.LoadSwaggerWithOverlayOpts{})
					if err != nil {
						return err
					}
					_, err = codegen.Generate(doc, cfg.UpdateDefaults())
					return err
				}),
			},
			figures: []figure{
				cost("oapi-idempotent", "oapi-codegen", "ns-CPU/op", atMost(1.25)),
				cost("oapi-idempotent", "oapi-codegen", "B/op", atMost(1.25)),
			},
		}
		if d.ogen {
			contest.sides = append(contest.sides, working("ogen", func() error { return runOgen(annotated) }))
			contest.figures = append(contest.figures,
				cost("oapi-idempotent", "ogen", "ns-CPU/op", target{}),
				cost("oapi-idempotent", "ogen", "B/op", target{}))
		}
		return contest, nil
	}
}

// working makes the side that does its work once, however long it takes.
func working(name string, work func() error) side {
	return side{name, func(time.Duration) (sample, error) {
		var before, after runtime.MemStats
		runtime.GC() // so that none pays for another's garbage
		runtime.ReadMemStats(&before)
		processor, err := processorTime()
		if err != nil {
			return sample{}, err
		}
		start := time.Now()
		if err := work(); err != nil {
			return sample{}, err
		}
		s := sample{ops: 1, took: time.Since(start)}
		processorNow, err := processorTime()
		runtime.ReadMemStats(&after)
		s.per = map[string]float64{
			"ns-CPU/op": float64(processorNow - processor),
			"B/op":      float64(after.TotalAlloc - before.TotalAlloc),
		}
		return s, err
	}}
}

func processorTime() (time.Duration, error) {
	var usage syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), err
}

// runOgen generates the client and the server, leaving out what ogen does not
// know.
func runOgen(text []byte) error {
	spec, err := ogen.Parse(text)
	if err != nil {
		return err
	}
	g, err := gen.NewGenerator(spec, gen.Options{
		Parser:    gen.ParseOptions{InferSchemaType: true, AuthenticationSchemes: []string{"basic", "bearer", "none"}},
		Generator: gen.GenerateOptions{IgnoreNotImplemented: []string{"all"}},
	})
	if err != nil {
		return err
	}
	return g.WriteSource(unwritten{}, "api")
}

// unwritten is where generated files go that nobody needs.
type unwritten struct{}

func (unwritten) WriteFile(string, []byte) error { return nil }
