package generator

import (
	"context"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
)

// An Explanation tells what holds for one operation of a document, and why. Its
// JSON form only gains fields.
type Explanation struct {
	Method      string   `json:"method"`                // "POST"
	Path        string   `json:"path"`                  // "/orders/{id}", "webhook paid" or "callback paid of POST /orders at {$request.body#/url}"
	OperationID string   `json:"operationId,omitempty"` // as in the document
	Treatment   string   `json:"treatment"`             // one of the constants below
	Annotation  Position `json:"annotation,omitzero"`   // of what says so; zero when Unannotated
	// Secured says that every alternative of the operation's security names a
	// scheme, so that it needs a principal.
	Secured bool `json:"secured"`
	// Values are the policy's values in force, in the order of the extension's
	// documentation. There are none of an operation that is not annotated.
	Values []Value `json:"values,omitempty"`
	// Notes are what the document says of the key and the policy cannot take
	// over.
	Notes []Note `json:"notes,omitempty"`
}

// What becomes of an operation.
const (
	Guarded     = "guarded"     // wrapped by the guard; clients send a key
	Natural     = "natural"     // idempotent by itself: not wrapped, and clients may retry
	Off         = "off"         // its annotation is false
	Unannotated = "unannotated" // nothing reaches it
)

// A Value is one field of a policy with the place that it came from.
type Value struct {
	Field string `json:"field"` // dotted, such as "server.lease"
	// Value is as the document writes it: a bool, an int, a string or a
	// []string.
	Value any `json:"value"`
	// Level is "built-in", "header parameter", "document root", "profile
	// <name>", "path item" or "operation".
	Level  string   `json:"level"`
	Origin Position `json:"origin,omitzero"` // zero when built-in
}

// A Note is something in a document that has no effect, and why.
type Note struct {
	Position Position `json:"position"`
	Text     string   `json:"text"`
}

// A Position is a place in a document. Line and Column count from 1.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"` // in characters
}

// Explain returns what holds for each operation of the document that cfg names,
// webhooks and callbacks included, sorted by path, then method. Operations that the config's filters leave out
// are among them. Errors are as [Generate]'s, findings included.
func Explain(ctx context.Context, cfg Config) ([]Explanation, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	in, err := read(cfg)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := prepare(in.spec, cfg, annotated(in.operations)); err != nil {
		return nil, err
	}
	explanations := make([]Explanation, len(in.operations))
	for i, op := range in.operations {
		explanations[i] = explain(op)
	}
	return explanations, nil
}

func explain(op policy.Operation) Explanation {
	e := Explanation{
		Method: op.Method, Path: op.Path, OperationID: op.OperationID,
		Annotation: Position(op.Pos), Secured: op.Secured,
	}
	switch {
	case op.Pos.Line == 0:
		e.Treatment = Unannotated
	case !op.Annotated():
		e.Treatment = Off
	case op.Natural:
		e.Treatment = Natural
	default:
		e.Treatment = Guarded
	}
	if !op.Annotated() {
		return e
	}
	for _, v := range op.Values() {
		origin := op.Origins[v.Field]
		e.Values = append(e.Values, Value{v.Field, v.Value, origin.Level, Position(origin.Pos)})
	}
	if op.HeaderParam != nil {
		for _, ignored := range op.HeaderParam.Ignored {
			e.Notes = append(e.Notes, Note{Position(ignored.Pos), ignored.Message})
		}
	}
	return e
}
