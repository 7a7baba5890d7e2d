// Package typescript makes the TypeScript client of a document's annotated
// operations.
package typescript

import (
	"bytes"
	"cmp"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
	"github.com/oapi-idempotent/oapi-idempotent/templates"
)

// A Module is what the template sees. Values are TypeScript expressions but for
// those that stand in comments: Version and Extension.
type Module struct {
	Version, Extension       string
	Operations               []Operation
	Codes                    []string
	InFlight, OutcomeUnknown string
	BodyLimit                string
}

// An Operation is one entry of the table. It is the first entry that a request
// of it matches.
type Operation struct {
	Method, Path string
	Policy       *Policy // nil: none
}

// A Policy is how an operation is called.
type Policy struct {
	ID, Header, Marker, Natural string
	Retry                       *Retry // nil: not at all
}

// Retry are limits of the attempts; durations in milliseconds.
type Retry struct{ MaxAttempts, Base, Max, MaxElapsed string }

// bodyLimit is how many bytes of a body are held in memory, as in Go's client.
const bodyLimit = 1 << 20

// New returns the module of operations. Those of webhooks and callbacks are none:
// their URLs are not the document's.
func New(version, extension string, operations []policy.Operation) *Module {
	m := &Module{
		Version: version, Extension: extension,
		InFlight: quote(wire.InFlight), OutcomeUnknown: quote(wire.OutcomeUnknown),
		BodyLimit: strconv.Itoa(bodyLimit),
	}
	for _, code := range []string{
		wire.MissingKey, wire.InvalidKey, wire.KeyReused, wire.InFlight, wire.NotReplayable, wire.StoreUnavailable, wire.OutcomeUnknown,
	} {
		m.Codes = append(m.Codes, quote(code))
	}
	operations = slices.DeleteFunc(slices.Clone(operations), func(op policy.Operation) bool { return op.Place.Kind != document.Path })
	slices.SortStableFunc(operations, func(a, b policy.Operation) int {
		return slices.CompareFunc(segments(a.Path), segments(b.Path), segment.compare)
	})
	for i, op := range operations {
		shadows := func(later policy.Operation) bool {
			return called(later) && op.Method == later.Method && slices.EqualFunc(segments(op.Path), segments(later.Path), segment.overlaps)
		}
		entry := Operation{Method: quote(op.Method), Path: quote(op.Path)}
		if called(op) {
			entry.Policy = newPolicy(op)
		} else if !slices.ContainsFunc(operations[i+1:], shadows) {
			continue
		}
		m.Operations = append(m.Operations, entry)
	}
	return m
}

func called(op policy.Operation) bool { return op.Annotated() && !op.Client.Disabled }

// A segment is what stands between two slashes of a path.
type segment struct {
	literal    int // characters that are no parameter's
	parameters int
	head, tail string // before the first parameter, and behind the last; the whole if there is none
}

var parameter = regexp.MustCompile(`\{[^}]*\}`)

func segments(path string) (all []segment) {
	// A parameter's name may have a slash.
	for text := range strings.SplitSeq(parameter.ReplaceAllString(path, "{}"), "/") {
		parts := strings.Split(text, "{}")
		n := len(parts) - 1
		all = append(all, segment{literal: len(text) - n*len("{}"), parameters: n, head: parts[0], tail: parts[n]})
	}
	return all
}

// compare puts what says more about a path first: a segment without parameters,
// then the one with more literal characters.
func (s segment) compare(other segment) int {
	if s.parameters == 0 || other.parameters == 0 {
		return cmp.Compare(min(s.parameters, 1), min(other.parameters, 1))
	}
	return cmp.Compare(other.literal, s.literal)
}

// overlaps reports whether one text may be both. That it says so of some that
// cannot does no harm: their requests match the right one alone.
func (s segment) overlaps(other segment) bool {
	if s.parameters == 0 && other.parameters == 0 {
		return s == other
	}
	return (strings.HasPrefix(s.head, other.head) || strings.HasPrefix(other.head, s.head)) &&
		(strings.HasSuffix(s.tail, other.tail) || strings.HasSuffix(other.tail, s.tail))
}

func newPolicy(op policy.Operation) *Policy {
	p := &Policy{
		ID:      quote(cmp.Or(op.OperationID, op.Method+" "+op.Path)),
		Header:  quote(op.Server.Header),
		Marker:  quote(op.Server.Marker),
		Natural: strconv.FormatBool(op.Natural),
	}
	if !op.Client.NoRetry {
		p.Retry = &Retry{
			MaxAttempts: strconv.Itoa(op.Client.MaxAttempts),
			Base:        milliseconds(op.Client.Base),
			Max:         milliseconds(op.Client.Max),
			MaxElapsed:  milliseconds(op.Client.MaxElapsed),
		}
	}
	return p
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// quote returns a string literal: JSON is TypeScript.
func quote(text string) string {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(text); err != nil {
		panic(err) // of a string there is none
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// Source returns the module's text.
func (m *Module) Source() ([]byte, error) {
	t, err := template.New("typescript").Option("missingkey=error").ParseFS(templates.Files, "typescript.tmpl")
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.ExecuteTemplate(&out, "typescript", m); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
