// Package model is what a template may see: names and Go expressions, resolved
// and in order.
package model

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/weave"
)

// A Family is a kind of router whose handlers look alike.
type Family struct {
	Name   string // of its template
	Native string // the type that its principal functions take
	// Own are the names that its template uses in a method, besides those of
	// the handler's own first parameters, which Handler lists.
	Own     []string
	Handler []string
	Glue    bool // its methods call a function that is emitted once
	Fiber   Fiber
}

// Fiber names what fiber's versions name differently: the methods of its context
// that get and set the user's context, and get fasthttp's.
type Fiber struct{ Context, SetContext, RequestCtx string }

// The families.
var (
	NetHTTP = Family{Name: "nethttp", Native: "*http.Request", Own: []string{"s", "http"}, Handler: []string{"w", "r"}}
	Echo    = Family{Name: "echo", Native: "echo.Context", Own: []string{"s"}, Handler: []string{"ctx"}, Glue: true}
	Echo5   = Family{Name: "echo5", Native: "*echo.Context", Own: []string{"s"}, Handler: []string{"ctx"}, Glue: true}
	Gin     = Family{Name: "gin", Native: "*gin.Context", Own: []string{"s"}, Handler: []string{"c"}, Glue: true}
	Fiber2  = Family{Name: "fiber", Native: "*fiber.Ctx", Own: []string{"s"}, Handler: []string{"c"}, Glue: true,
		Fiber: Fiber{Context: "UserContext", SetContext: "SetUserContext", RequestCtx: "Context"}}
	Fiber3 = Family{Name: "fiber", Native: "fiber.Ctx", Own: []string{"s"}, Handler: []string{"c"}, Glue: true,
		Fiber: Fiber{Context: "Context", SetContext: "SetContext", RequestCtx: "RequestCtx"}}
	Iris = Family{Name: "iris", Native: "iris.Context", Own: []string{"s", "iris"}, Handler: []string{"ctx"}, Glue: true}
)

// Server is the section of a server.
type Server struct {
	Family, Native, Extension string
	Fiber                     Fiber

	// Names of imports.
	Idempotency, Time, Context, IrisContext string
	// Names of declarations.
	PrincipalFrom, Glue string

	Servers  []*Guarded
	Policies []Policy
	Methods  []Method
}

// Guarded is an interface of handlers with the guard in front of it.
type Guarded struct {
	// Names of oapi-codegen's interface, of the guarded type and of what makes one.
	Interface, Type, Guard string
	// Embedded is the name by which the guarded type embeds the interface; Alias
	// is the same if it is one to be declared, else empty.
	Embedded, Alias string
	Policies        []string // their variables
}

// A Policy is one row of the policy table. All but Var and Summary are Go
// expressions.
type Policy struct {
	Var, Summary string

	Operation, OperationID, Secured                                                                string
	Header, OnMissing, OnMismatch                                                                  string
	KeyFormat, KeyMinLength, KeyMaxLength, KeyPattern                                              string
	Scope, TTL, WaitFor                                                                            string
	FingerprintBody, FingerprintQuery, FingerprintMediaType, FingerprintHeaders, FingerprintIgnore string
	Record                                                                                         string
	ReplayNone, ReplayStatus, Marker                                                               string
	Guarantee, Lease, Timeout                                                                      string
	MaxRequestBody, MaxRecordedBody                                                                string
}

// A Method is one guarded handler.
type Method struct {
	Name, Operation, Policy, GuardedServer, Embedded, Glue string
	Params, Args                                           string
}

// Add adds a guarded operation: policy variable, handler name and parameters as
// in the interface of g, which is one of s.Servers.
func (s *Server) Add(family Family, g *Guarded, op policy.Operation, variable, name string, params []weave.Param) {
	s.Policies = append(s.Policies, s.policy(op, variable))
	g.Policies = append(g.Policies, variable)

	inUse := map[string]bool{s.Idempotency: true, s.Glue: true, variable: true}
	for _, name := range family.Own {
		inUse[name] = true
	}
	declared := make([]string, len(params))
	args := make([]string, len(params))
	for i, p := range params {
		if i < len(family.Handler) {
			p.Name = family.Handler[i]
		}
		for inUse[p.Name] {
			p.Name += "_"
		}
		inUse[p.Name] = true
		declared[i], args[i] = p.Name+" "+p.Type, p.Name
	}
	s.Methods = append(s.Methods, Method{
		Name: name, Operation: operation(op), Policy: variable, GuardedServer: g.Type, Embedded: g.Embedded, Glue: s.Glue,
		Params: strings.Join(declared, ", "), Args: strings.Join(args, ", "),
	})
}

func (s *Server) policy(op policy.Operation, variable string) Policy {
	constant := func(name string) string { return s.Idempotency + "." + name }
	p := op.Server
	return Policy{
		Var:                  variable,
		Summary:              summary(p),
		Operation:            strconv.Quote(operation(op)),
		OperationID:          strconv.Quote(op.OperationID),
		Secured:              strconv.FormatBool(op.Secured),
		Header:               strconv.Quote(p.Header),
		OnMissing:            statusOr(p.OnMissing, constant("RunUnguarded")),
		OnMismatch:           statusOr(p.OnMismatch, constant("ReplayAnyway")),
		KeyFormat:            constant(keyFormats[p.KeyFormat]),
		KeyMinLength:         strconv.Itoa(p.KeyMinLength),
		KeyMaxLength:         strconv.Itoa(p.KeyMaxLength),
		KeyPattern:           strconv.Quote(p.KeyPattern),
		Scope:                constant(scopes[p.Scope]),
		TTL:                  duration(s.Time, p.TTL),
		WaitFor:              duration(s.Time, p.WaitFor),
		FingerprintBody:      constant(bodyKinds[p.FingerprintBody]),
		FingerprintQuery:     strconv.FormatBool(p.FingerprintQuery),
		FingerprintMediaType: strconv.FormatBool(p.FingerprintMediaType),
		FingerprintHeaders:   list("string", p.FingerprintHeaders),
		FingerprintIgnore:    list("string", p.FingerprintIgnore),
		Record:               list(constant("StatusPattern"), p.Record),
		ReplayNone:           strconv.FormatBool(p.ReplayNone),
		ReplayStatus:         strconv.Itoa(p.ReplayStatus),
		Marker:               strconv.Quote(p.Marker),
		Guarantee:            constant(guarantees[p.Guarantee]),
		Lease:                duration(s.Time, p.Lease),
		Timeout:              duration(s.Time, p.Timeout),
		MaxRequestBody:       size(p.MaxRequestBody),
		MaxRecordedBody:      size(p.MaxRecordedBody),
	}
}

// The extension's words and the runtime's constants.
var (
	keyFormats = map[string]string{"any": "FormatAny", "uuid": "FormatUUID"}
	scopes     = map[string]string{"principal": "ScopePrincipal", "operation": "ScopeOperation", "global": "ScopeGlobal"}
	bodyKinds  = map[string]string{"auto": "BodyAuto", "json": "BodyJSON", "raw": "BodyRaw", "multipart": "BodyMultipart", "none": "BodyNone"}
	guarantees = map[string]string{"atLeastOnce": "AtLeastOnce", "atMostOnce": "AtMostOnce", "transaction": "Transaction"}
)

// summary says in a line what a policy answers.
func summary(p policy.Server) string {
	missing := "a missing key runs unguarded"
	if p.OnMissing != 0 {
		missing = fmt.Sprintf("a missing key is %d", p.OnMissing)
	}
	mismatch := "a reused one replays"
	if p.OnMismatch != 0 {
		mismatch = fmt.Sprintf("a reused one %d", p.OnMismatch)
	}
	waiting := ""
	if p.WaitFor > 0 {
		waiting = " after waiting"
	}
	return fmt.Sprintf("%s, %s, one in flight 409%s.", missing, mismatch, waiting)
}

// Client is the section of a client.
type Client struct {
	Extension                     string
	IdempotentClient, Time, Field string
	Clients                       []Caller
	Calls                         []Call
}

// A Caller is a type whose methods call, with the type of its options and the
// name of the one that says how.
type Caller struct{ Type, Option, WithIdempotency string }

// A Call is how one operation is called. All but Var are Go expressions.
type Call struct {
	Var, ID, Header, Marker, Natural, NoRetry string
	MaxAttempts, Base, Max, MaxElapsed        string
}

// Add adds an operation.
func (c *Client) Add(op policy.Operation, variable string) {
	id := op.OperationID
	if id == "" {
		id = operation(op)
	}
	c.Calls = append(c.Calls, Call{
		Var:         variable,
		ID:          strconv.Quote(id),
		Header:      strconv.Quote(op.Server.Header),
		Marker:      strconv.Quote(op.Server.Marker),
		Natural:     strconv.FormatBool(op.Natural),
		NoRetry:     strconv.FormatBool(op.Client.NoRetry),
		MaxAttempts: strconv.Itoa(op.Client.MaxAttempts),
		Base:        duration(c.Time, op.Client.Base),
		Max:         duration(c.Time, op.Client.Max),
		MaxElapsed:  duration(c.Time, op.Client.MaxElapsed),
	})
}

func operation(op policy.Operation) string { return op.Method + " " + op.Path }

func statusOr(status int, zero string) string {
	if status == 0 {
		return zero
	}
	return strconv.Itoa(status)
}

func list(of string, values []string) string {
	if len(values) == 0 {
		return "nil"
	}
	quoted := make([]string, len(values))
	for i, value := range values {
		quoted[i] = strconv.Quote(value)
	}
	return "[]" + of + "{" + strings.Join(quoted, ", ") + "}"
}

// duration prints d in the largest unit that divides it. The file imports the
// package time as pkg.
func duration(pkg string, d time.Duration) string {
	units := []struct {
		of   time.Duration
		name string
	}{{time.Hour, "Hour"}, {time.Minute, "Minute"}, {time.Second, "Second"}, {time.Millisecond, "Millisecond"}}
	for _, unit := range units {
		if d != 0 && d%unit.of == 0 {
			return fmt.Sprintf("%d * %s.%s", d/unit.of, pkg, unit.name)
		}
	}
	return strconv.FormatInt(int64(d), 10)
}

// size prints a number of bytes as a shifted one where that is shorter.
func size(bytes int64) string {
	for _, shift := range []int{20, 10} {
		if bytes > 0 && bytes%(1<<shift) == 0 {
			return fmt.Sprintf("%d << %d", bytes>>shift, shift)
		}
	}
	return strconv.FormatInt(bytes, 10)
}
