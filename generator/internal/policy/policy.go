// Package policy turns the annotations of a document into policies. All
// validation and all inheritance of the extension lives here; what it returns
// has every value resolved, with the place where it came from.
package policy

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// Extension is the name of the extension unless a config says otherwise.
const Extension = "x-idempotent"

// A Config says how annotations are read. Its zero value has the defaults.
type Config struct {
	Extension   string // the extension's name; default [Extension]
	Unannotated string // "ignore" (default), or "reject": a POST or PATCH without a value is a finding
	HeaderParam string // what becomes of a declared key header parameter: "relax" (default), "keep" or "strip"
}

// An Operation is one operation with its resolved policy, if it has one.
type Operation struct {
	Method, Path string            // "POST", "/orders/{id}", or in words the webhook or callback
	Place        document.Place    // of its path item
	OperationID  string            // as in the document, "" if it has none
	Pos          document.Position // of the annotation, or of what made it apply; zero if nothing did
	AliasOf      string            // the path whose item this one is (`$ref: '#/paths/…'`), or ""
	Natural      bool              // idempotent by itself: not guarded, and safe to send again
	Secured      bool              // every alternative of its security names a scheme
	Streaming    bool              // a response declares a media type that streams
	HeaderParam  *HeaderParam      // the declared key header parameter of a guarded operation, or nil
	Server       Server
	Client       Client
	// Origins tells where each value came from, by the dotted name of its field
	// in the extension, such as "server.lease". Every field is in it. Nil: no
	// policy reaches the operation, or false keeps it off.
	Origins map[string]Origin
}

// Annotated reports whether the operation has a policy.
func (o *Operation) Annotated() bool { return o.Origins != nil }

// Server is what a generated server needs of a policy.
type Server struct {
	Header                          string
	OnMissing                       int // a status; 0: run
	OnMismatch                      int // a status; 0: replay
	KeyFormat                       string
	KeyMinLength, KeyMaxLength      int
	KeyPattern                      string // RE2, of the declared header parameter; or ""
	Scope                           string
	TTL, WaitFor, Lease, Timeout    time.Duration
	FingerprintBody                 string
	FingerprintQuery                bool
	FingerprintMediaType            bool
	FingerprintHeaders              []string
	FingerprintIgnore               []string // JSON pointers
	Record                          []string // "409", "4XX"
	ReplayNone                      bool
	ReplayStatus                    int // 200; 0: the original
	Marker                          string
	Guarantee                       string
	MaxRequestBody, MaxRecordedBody int64 // bytes
}

// Client is what a generated client needs of a policy.
type Client struct {
	Disabled    bool // no key, no retry
	NoRetry     bool
	MaxAttempts int // the first one included
	Base, Max   time.Duration
	MaxElapsed  time.Duration
}

// A HeaderParam is the header parameter that declares an operation's key.
type HeaderParam struct {
	Pos       document.Position // of the parameter, where a $ref leads
	Name      string            // as declared; header names differ in case only
	Ref       string            // the $ref that leads to it, or "" for an inline parameter
	PathLevel bool              // declared by the path item, not by the operation
	Required  bool
	Ignored   document.Findings // what of its schema the policy cannot take over, and why
}

// An Origin is the place that gave a field its value.
type Origin struct {
	Level string            // "built-in", "header parameter", "document root", "profile <name>", "path item" or "operation"
	Pos   document.Position // zero for "built-in"
	rank  int
}

// String returns the level and, unless it is built-in, the position.
func (o Origin) String() string {
	if o.rank == rankBuiltIn {
		return o.Level
	}
	return o.Level + " at " + o.Pos.String()
}

// Resolve returns all operations, annotated or not, sorted by path, then method.
// The error, of type
// [document.Findings], holds everything that is wrong with the document's
// annotations; there are no operations then.
func Resolve(doc *document.Document, cfg Config) ([]Operation, error) {
	cfg.Extension = cmp.Or(cfg.Extension, Extension)
	r := &resolver{doc: doc, cfg: cfg, read: make(map[*document.Node]bool), expanded: make(map[*document.Node]bool)}
	operations := r.document()
	if len(r.findings) > 0 {
		return nil, r.findings.Sorted()
	}
	slices.SortFunc(operations, func(a, b Operation) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return operations, nil
}
