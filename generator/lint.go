package generator

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// Lint returns advice on the document that cfg names: what [Generate] accepts
// and does, but is likely not what was meant. It is sorted, and nil if there is
// none. Operations that the config's filters leave out are looked at too. Errors
// are as Generate's, findings included.
func Lint(ctx context.Context, cfg Config) (Findings, error) {
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
	l := linter{extension: cfg.Idempotency.Extension, root: in.doc.Root(), stdHTTP: cfg.Generate.StdHTTPServer}
	for _, op := range in.operations {
		l.operations = append(l.operations, newLinted(in.doc, op))
	}
	for _, rule := range rules {
		rule(&l)
	}
	return l.advice.Sorted(), nil
}

// rules are all that is advised, in no order that matters.
var rules = []func(*linter){
	(*linter).copiedKeys,
	(*linter).retriesWithoutKey,
	(*linter).contradictions,
	(*linter).generatedKeys,
	(*linter).otherHeader,
	(*linter).keyWithoutPolicy,
	(*linter).ignoredSchema,
	(*linter).unusedProfiles,
	(*linter).longWaits,
	(*linter).overlappingPaths,
}

// A linter collects advice on one document.
type linter struct {
	extension  string
	root       *document.Node
	operations []linted
	stdHTTP    bool // the server is net/http's
	advice     document.Findings
}

func (l *linter) advise(pos document.Position, format string, args ...any) {
	l.advice = append(l.advice, document.Finding{Pos: pos, Message: fmt.Sprintf(format, args...)})
}

// A linted operation is a resolved one with what its policy does not keep.
type linted struct {
	policy.Operation
	item, node *document.Node
	// headers are the header parameters that carry keys: the operation's, then
	// its path item's.
	headers []keyHeader
}

// A keyHeader is a header parameter that carries a key.
type keyHeader struct {
	name         string
	node, schema *document.Node
}

// keyHeaders are the names, in lower case, that public APIs give to the header
// field that carries a key.
var keyHeaders = []string{strings.ToLower(wire.HeaderKey), "x-idempotency-key", "x-idempotency", "paypal-request-id"}

// newLinted finds the nodes of op, which has been resolved, so that its
// references lead to it.
func newLinted(doc *document.Document, op policy.Operation) linted {
	method := strings.ToLower(op.Method)
	item, node := find(doc, op.Place, method)
	l := linted{Operation: op, item: item, node: node}
	for _, parameters := range []*document.Node{l.node.Field("parameters"), item.Field("parameters")} {
		if parameters == nil {
			continue
		}
		for _, parameter := range parameters.Items {
			node, _ := doc.Follow(parameter) // kin-openapi has followed it, too
			in, name := node.Field("in"), node.Field("name")
			if in == nil || in.Value != "header" || name == nil {
				continue
			}
			if strings.EqualFold(name.Value, op.Server.Header) || slices.Contains(keyHeaders, strings.ToLower(name.Value)) {
				schema, _ := doc.Follow(node.Field("schema"))
				l.headers = append(l.headers, keyHeader{name.Value, node, schema})
			}
		}
	}
	return l
}

// find returns the path item at a place, where its references lead, and its
// operation.
func find(doc *document.Document, at document.Place, method string) (item, operation *document.Node) {
	switch at.Kind {
	case document.Path:
		item = doc.Root().Field("paths").Get(at.Name)
	case document.Webhook:
		item = doc.Root().Field("webhooks").Get(at.Name)
	case document.Callback:
		_, parent := find(doc, document.Place{Kind: document.Path, Name: at.Path}, strings.ToLower(at.Method))
		callback, _ := doc.Follow(parent.Field("callbacks").Get(at.Name))
		item = callback.Get(at.URL)
	}
	for item.Field(method) == nil {
		item, _ = doc.Step(item)
	}
	return item, item.Field(method)
}

// idempotent reports whether HTTP calls the operation's method idempotent
// (RFC 9110, 9.2.2).
func (o *linted) idempotent() bool { return o.Method != "POST" && o.Method != "PATCH" }

// copiedKeys: users of an SDK copy an example and so share one key, and a
// default is one for all (Adyen/adyen-openapi#21).
func (l *linter) copiedKeys() {
	for _, op := range l.operations {
		for _, header := range op.headers {
			for _, in := range []*document.Node{header.node, header.schema} {
				for _, field := range []string{"example", "examples", "default"} {
					if m := in.Member(field); m != nil {
						l.advise(m.Pos, "clients send the %s of %s as it stands, and so share one key; remove it, and write in the description that every call needs a key of its own, such as a UUID",
							field, header.name)
					}
				}
			}
		}
	}
}

// retriesWithoutKey: a retry without a key does everything again
// (resend/resend-openapi#1). What an operation declares replaces what the root
// declares by the same name.
func (l *linter) retriesWithoutKey() {
	atRoot := retries(l.root)
	for _, op := range l.operations {
		if op.idempotent() || op.Annotated() || len(op.headers) > 0 {
			continue
		}
		declared := retries(op.node)
		for _, m := range atRoot {
			if op.node.Member(m.Name) == nil {
				declared = append(declared, m)
			}
		}
		for _, m := range declared {
			if !retriesOff(m.Value) {
				l.advise(op.node.Pos, "%s at %s has clients retry %s %s, which has no key, so that a retry does it again; write %s: true here, {natural: true} if that does no harm, or declare no retries",
					m.Name, m.Pos, op.Method, op.Path, l.extension)
			}
		}
	}
}

// retries lists the extensions by which generators of SDKs are told to retry:
// x-retries, x-speakeasy-retries, x-fern-retries and the like.
func retries(n *document.Node) []*document.Member {
	var found []*document.Member
	for i := range n.Members {
		if m := &n.Members[i]; strings.HasPrefix(m.Name, "x-") && strings.HasSuffix(m.Name, "-retries") {
			found = append(found, m)
		}
	}
	return found
}

// retriesOff reports whether a declaration says not to retry, in Fern's words,
// in Speakeasy's, or with a plain false.
func retriesOff(n *document.Node) bool {
	says := func(n *document.Node, value string) bool { return n != nil && n.Value == value }
	return says(n, "false") || says(n.Get("disabled"), "true") || says(n.Get("strategy"), "none")
}

// contradictions: callers read the declared parameter, and the server does what
// the policy says.
func (l *linter) contradictions() {
	for _, op := range l.operations {
		param := op.HeaderParam
		if param == nil {
			continue
		}
		onMissing := op.Origins["onMissing"].Pos
		switch {
		case onMissing.Line == 0: // built-in
		case param.Required && op.Server.OnMissing == 0:
			l.advise(onMissing, "onMissing: run lets requests without a key through, but %s is required: true at %s; write required: false there, or onMissing: %d here",
				param.Name, param.Pos, wire.DefaultOnMissing)
		case !param.Required && op.Server.OnMissing != 0:
			l.advise(onMissing, "onMissing: %d refuses requests without a key, but %s is not required at %s; write required: true there, or onMissing: run here",
				op.Server.OnMissing, param.Name, param.Pos)
		}
		for _, header := range op.headers {
			if header.node.Pos == param.Pos {
				l.schemaContradictions(op, header)
			}
		}
	}
}

func (l *linter) schemaContradictions(op linted, header keyHeader) {
	for _, v := range op.Values() {
		constraint, isKey := strings.CutPrefix(v.Field, "key.")
		declared, pos := header.schema.Field(constraint), op.Origins[v.Field].Pos
		switch {
		case !isKey || declared == nil || pos.Line == 0 || fmt.Sprint(v.Value) == declared.Value:
		case constraint == "format" && declared.Value != "uuid": // policies have no such format
		default:
			l.advise(pos, "%s: %v contradicts the schema of %s, which has %s: %s at %s; write the same in both, or leave it out here",
				v.Field, v.Value, header.name, constraint, declared.Value, declared.Pos)
		}
	}
}

// generatedKeys: unless they are told otherwise, clients send UUIDs in the form
// of RFC 9562, which has 36 characters.
func (l *linter) generatedKeys() {
	const length = 36
	for _, op := range l.operations {
		if !op.Annotated() || op.Natural || op.Client.Disabled {
			continue
		}
		refused := func(field string, is int, write string) {
			l.advise(op.Origins[field].Pos, "%s: %d refuses the UUIDs of %d characters that generated clients send; write %d or %s, or have every client generate other keys by idempotentclient.WithGenerator",
				field, is, length, length, write)
		}
		if op.Server.KeyMaxLength < length {
			refused("key.maxLength", op.Server.KeyMaxLength, "more")
		}
		if op.Server.KeyMinLength > length {
			refused("key.minLength", op.Server.KeyMinLength, "less")
		}
	}
}

// otherHeader: callers send the key that is declared, and the guard reads
// another.
func (l *linter) otherHeader() {
	for _, op := range l.operations {
		if op.Annotated() && !op.Natural && op.HeaderParam == nil && len(op.headers) > 0 {
			declared := op.headers[0]
			l.advise(op.Pos, "the key of %s %s is read from %s, but the operation declares %s at %s; write header: %s here, or rename the parameter",
				op.Method, op.Path, op.Server.Header, declared.name, declared.node.Pos, declared.name)
		}
	}
}

// keyWithoutPolicy: a parameter alone does nothing.
func (l *linter) keyWithoutPolicy() {
	for _, op := range l.operations {
		if op.idempotent() || op.Pos.Line != 0 || len(op.headers) == 0 {
			continue
		}
		header := op.headers[0]
		annotation := "true"
		if !strings.EqualFold(header.name, wire.HeaderKey) {
			annotation = fmt.Sprintf("{header: %s}", header.name)
		}
		l.advise(op.node.Pos, "%s %s declares %s at %s, but nothing holds its promise; write %s: %s here, or false if the handler does",
			op.Method, op.Path, header.name, header.node.Pos, l.extension, annotation)
	}
}

// ignoredSchema: what a parameter's schema demands and the guard does not check.
func (l *linter) ignoredSchema() {
	for _, op := range l.operations {
		if op.HeaderParam != nil {
			l.advice = append(l.advice, op.HeaderParam.Ignored...)
		}
	}
}

// unusedProfiles: a profile that nothing names does nothing.
func (l *linter) unusedProfiles() {
	profiles := l.root.Get(l.extension).Get("profiles")
	if profiles == nil {
		return
	}
	named := map[string]bool{}
	note := func(owner *document.Node) {
		if profile := owner.Get(l.extension).Get("profile"); profile != nil {
			named[profile.Value] = true
		}
	}
	note(l.root)
	for _, op := range l.operations {
		note(op.item)
		note(op.node)
	}
	for _, m := range profiles.Members {
		if !named[m.Name] {
			l.advise(m.Pos, "nothing names the profile %s; write profile: %s where it is meant, or remove it", m.Name, m.Name)
		}
	}
}

// longWaits: a run is cancelled when server.timeout is over, and whoever still
// waits for its answer waits for one that is unlikely to come.
func (l *linter) longWaits() {
	for _, op := range l.operations {
		if s := op.Server; op.Annotated() && !op.Natural && s.WaitFor > s.Timeout && s.Timeout > 0 {
			l.advise(op.Origins["waitFor"].Pos, "waitFor %v is longer than server.timeout %v, when the run that it waits for is cancelled; write a shorter waitFor, or a longer server.timeout", s.WaitFor, s.Timeout)
		}
	}
}

// overlappingPaths: net/http refuses two patterns of which neither is more
// specific, and the server panics when it starts. It is asked itself.
func (l *linter) overlappingPaths() {
	if !l.stdHTTP {
		return
	}
	mux := http.NewServeMux()
	var served []linted
	for _, op := range l.operations {
		if op.Place.Kind != document.Path {
			continue
		}
		if serves(mux, op) {
			served = append(served, op)
			continue
		}
		for _, other := range served {
			if pair := http.NewServeMux(); serves(pair, other) && !serves(pair, op) {
				l.advise(op.node.Pos, "net/http cannot tell %s %s from %s %s, of which neither is more specific, so that the server would panic when it starts; change one of the paths, or generate for another router",
					op.Method, op.Path, other.Method, other.Path)
				break
			}
		}
	}
}

var pathParameter = regexp.MustCompile(`\{[^{}]*\}`)

// serves registers an operation and reports whether mux takes it.
func serves(mux *http.ServeMux, op linted) (ok bool) {
	defer func() { ok = recover() == nil }()
	n := 0
	path := pathParameter.ReplaceAllStringFunc(op.Path, func(string) string {
		n++
		return fmt.Sprintf("{p%d}", n)
	})
	mux.Handle(op.Method+" "+path, http.NotFoundHandler())
	return true
}
