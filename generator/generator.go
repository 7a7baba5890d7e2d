// Package generator generates what oapi-codegen does, and puts the guard that
// an x-idempotent annotation asks for into it. For a document without
// annotations the result is oapi-codegen's, byte for byte but for the line that
// names the versions.
package generator

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/model"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/render"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/stub"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/weave"
)

// Import paths of the packages that generated code uses.
const (
	idempotencyPackage      = "github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	idempotentClientPackage = "github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// A File is one generated file.
type File struct {
	Name    string // cfg.Output
	Content []byte
}

// Findings are what is wrong with a document: one line each, as
// "file:line:column: what to write instead". [Generate] returns them as its
// error, to be found with [errors.As].
type Findings = document.Findings

// OapiCodegenVersion returns the version of oapi-codegen that this program
// generates with.
func OapiCodegenVersion() string { return stub.OapiCodegenVersion() }

// Generate generates the code that cfg asks for. It reads through cfg.FS and
// writes nothing. Equal input gives equal bytes.
//
// Calls may be concurrent; the part of them that runs oapi-codegen is not.
func Generate(ctx context.Context, cfg Config) ([]File, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	in, err := read(cfg)
	if err != nil {
		return nil, err
	}
	operations := annotated(in.operations)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := prepare(in.spec, cfg, operations); err != nil {
		return nil, err
	}
	options := cfg.Configuration
	options.OutputOptions.UserTemplates = stub.UserTemplates(cfg.FS, options.OutputOptions.UserTemplates)
	out, err := stub.Generate(in.spec, in.doc, options)
	if err != nil {
		if unresolved := in.doc.Unresolved(); unresolved != nil {
			return nil, unresolved // the cause, whatever oapi-codegen says
		}
		return nil, err
	}
	content, err := add(cfg, out, operations)
	if err != nil {
		return nil, err
	}
	return []File{{Name: cfg.Output, Content: content}}, nil
}

// An input is a document as oapi-codegen takes it, with positions, and what its
// annotations say.
type input struct {
	spec       *openapi3.T
	doc        *document.Document
	operations []policy.Operation
}

// read reads the document, for oapi-codegen and for its annotations.
func read(cfg Config) (*input, error) {
	loader := stub.NewLoader(cfg.FS, cfg.HTTP, cfg.Spec, cfg.AllowRemoteRefsFrom)
	rules := policy.Config{
		Extension:   cfg.Idempotency.Extension,
		Unannotated: cfg.Idempotency.Unannotated,
		HeaderParam: cfg.Idempotency.HeaderParam,
	}
	doc, err := loader.Document(cfg.Spec)
	if err != nil {
		return nil, err
	}
	if overlay := cfg.OutputOptions.Overlay; overlay.Path != "" {
		_, before := policy.Resolve(doc, rules)
		merged, lost, err := loader.Overlay(cfg.Spec, doc, overlay.Path, overlay.Strict == nil || *overlay.Strict)
		var findings document.Findings
		if errors.As(err, &findings) && merged != nil {
			// What those of its actions do that can be applied is looked at as well.
			var more document.Findings
			_, err = policy.Resolve(merged, rules)
			errors.As(err, &more)
			return nil, append(findings, more...)
		}
		if err != nil {
			return nil, err
		}
		errors.As(before, &findings)
		// What is wrong with the document alone, its overlay may mend; what
		// oapi-codegen drops before it applies the overlay, nobody would miss.
		if lost := slices.DeleteFunc(findings, func(f document.Finding) bool { return !lost(f.Pos) }); len(lost) > 0 {
			return nil, lost
		}
		doc = merged
	}
	operations, err := policy.Resolve(doc, rules)
	if err != nil {
		return nil, err
	}
	spec, err := loader.Load(cfg.Spec, doc)
	if err != nil {
		return nil, err
	}
	return &input{spec, doc, operations}, nil
}

func annotated(operations []policy.Operation) []policy.Operation {
	var annotated []policy.Operation
	for _, op := range operations {
		if op.Annotated() {
			annotated = append(annotated, op)
		}
	}
	return annotated
}

// prepare makes of the document what oapi-codegen is to see.
func prepare(spec *openapi3.T, cfg Config, operations []policy.Operation) error {
	if len(operations) == 0 {
		return nil
	}
	var findings document.Findings
	var declared []stub.Endpoint
	for _, op := range operations {
		endpoint := stub.Endpoint{Method: op.Method, Place: op.Place, Header: op.Server.Header}
		if !stub.Has(spec, endpoint) {
			findings = append(findings, document.Finding{
				Pos:     op.Pos,
				Message: fmt.Sprintf("%s %s is annotated, but oapi-codegen does not see such an operation and would not generate it; remove the annotation", op.Method, op.Path),
			})
			continue
		}
		if op.HeaderParam != nil {
			declared = append(declared, endpoint)
		}
	}
	if findings != nil {
		return findings
	}
	stub.NameAliased(spec)
	switch cfg.Idempotency.HeaderParam {
	case headerParamRelax:
		stub.RelaxHeader(spec, declared)
	case headerParamStrip:
		stub.StripHeader(spec, declared)
	}
	return nil
}

// A mapped operation is an annotated operation that survived the config's
// filters, with the names that oapi-codegen gave it.
type mapped struct {
	policy.Operation
	stub stub.Operation
}

// add puts the guard and the key into oapi-codegen's output.
func add(cfg Config, out *stub.Output, operations []policy.Operation) ([]byte, error) {
	guarded, called, err := mapOperations(out, operations)
	if err != nil {
		return nil, err
	}
	family := serverFamily(cfg.Generate)
	server := family != nil && len(guarded) > 0
	client := cfg.Generate.Client && len(called) > 0
	if !server && !client {
		return append([]byte(out.Head), out.Source...), nil
	}
	file, err := weave.Parse(out.Source, out.Types, cfg.OutputOptions.SkipFmt || len(cfg.OutputOptions.UserTemplates) > 0)
	if err != nil {
		return nil, err
	}
	var faults []stub.Fault
	for _, fault := range file.Faults() {
		faults = append(faults, stub.Fault(fault))
	}
	if err := out.Explain(faults); err != nil {
		return nil, err
	}
	section := ""
	if server {
		section, err = addServer(cfg, file, *family, guarded)
	}
	if client && err == nil {
		var text string
		text, err = addClient(cfg, file, called)
		section += text
	}
	if err != nil {
		return nil, err
	}
	return file.Source(out.Head, section, cfg.OutputOptions.SkipFmt)
}

// mapOperations finds what oapi-codegen made of each annotated operation:
// guarded ones for the server, called ones for the client. Those that the
// config's filters removed are in neither.
func mapOperations(out *stub.Output, operations []policy.Operation) (guarded, called []mapped, err error) {
	type endpoint struct {
		method string
		place  document.Place
	}
	generated := map[endpoint]stub.Operation{}
	handlers := map[string]bool{}
	for _, op := range out.Operations {
		generated[endpoint{op.Method, op.Place}] = op
		handlers[op.Name] = handlers[op.Name] || !op.Alias
	}
	for _, op := range operations {
		named, ok := generated[endpoint{op.Method, op.Place}]
		if !ok {
			continue
		}
		m := mapped{Operation: op, stub: named}
		if !handlers[named.Name] {
			return nil, nil, document.Findings{{
				Pos:     op.Pos,
				Message: fmt.Sprintf("%s %s is annotated, but oapi-codegen generates no server method for it, only an alias of %s; annotate an operation of its own", op.Method, op.Path, named.Name),
			}}
		}
		if !op.Natural && !named.Alias {
			guarded = append(guarded, m)
		}
		if !op.Client.Disabled {
			called = append(called, m)
		}
	}
	return guarded, called, nil
}

// serverFamily returns the family of the server that is generated, if any.
func serverFamily(generate codegen.GenerateOptions) *model.Family {
	switch {
	case generate.StdHTTPServer, generate.ChiServer, generate.GorillaServer:
		return &model.NetHTTP
	case generate.EchoServer:
		return &model.Echo
	case generate.Echo5Server:
		return &model.Echo5
	case generate.GinServer:
		return &model.Gin
	case generate.FiberServer:
		return &model.Fiber2
	case generate.FiberV3Server:
		return &model.Fiber3
	case generate.IrisServer:
		return &model.Iris
	}
	return nil
}

// kinds are those of operations, in the order in which they are added.
var kinds = []string{document.Path, document.Webhook, document.Callback}

// ofKind returns the operations of a kind.
func ofKind(operations []mapped, kind string) []mapped {
	return slices.DeleteFunc(slices.Clone(operations), func(op mapped) bool { return op.Place.Kind != kind })
}

func addServer(cfg Config, file *weave.File, family model.Family, operations []mapped) (string, error) {
	m := &model.Server{
		Family:      family.Name,
		Native:      family.Native,
		Fiber:       family.Fiber,
		Extension:   cfg.Idempotency.Extension,
		Time:        file.Import("time"),
		Idempotency: file.Import(idempotencyPackage),
	}
	m.PrincipalFrom = file.Declare("PrincipalFrom")
	if family.Glue {
		m.Context = file.Import("context")
		m.Glue = file.Declare("guardOperation")
	}
	if family.Name == model.Iris.Name {
		m.IrisContext = file.Import("github.com/kataras/iris/v12/context")
	}
	for _, kind := range kinds {
		of := ofKind(operations, kind)
		if len(of) == 0 {
			continue
		}
		name := "Server"
		if kind != document.Path {
			name = stub.Prefix(kind) + "Receiver"
		}
		server := &model.Guarded{Interface: name + "Interface", Type: file.Declare("Guarded" + name), Guard: file.Declare("Guard" + name)}
		server.Embedded, server.Alias = file.Embedded(server.Interface)
		m.Servers = append(m.Servers, server)
		for _, op := range of {
			params, err := file.Method(server.Interface, op.stub.Name)
			if err != nil {
				return "", document.Findings{{Pos: op.Pos, Message: err.Error()}}
			}
			m.Add(family, server, op.Operation, file.Declare("idempotencyPolicy"+op.stub.Name), op.stub.Name, params)
			if op.HeaderParam != nil && cfg.Idempotency.HeaderParam == headerParamRelax {
				file.PassKey(op.stub.Name, op.Server.Header)
			}
		}
		if err := file.Guard(server.Interface, m.Idempotency, server.Type, server.Guard); err != nil {
			return "", err
		}
	}
	return render.Server(m)
}

func addClient(cfg Config, file *weave.File, operations []mapped) (string, error) {
	m := &model.Client{
		Extension:        cfg.Idempotency.Extension,
		Time:             file.Import("time"),
		IdempotentClient: file.Import(idempotentClientPackage),
		Field:            "idempotency",
	}
	for _, kind := range kinds {
		of := ofKind(operations, kind)
		if len(of) == 0 {
			continue
		}
		prefix := stub.Prefix(kind)
		client := model.Caller{
			Type:            prefix + "Initiator",
			Option:          prefix + "InitiatorOption",
			WithIdempotency: file.Declare("With" + prefix + "Idempotency"),
		}
		if kind == document.Path {
			client.Type, client.Option = cfg.OutputOptions.ClientTypeName, "ClientOption"
			orDefault(&client.Type, "Client")
		}
		m.Clients = append(m.Clients, client)
		if err := file.ClientField(client.Type, m.Field, m.IdempotentClient+".Config"); err != nil {
			return "", err
		}
		for _, op := range of {
			variable := file.Declare("idempotencyCall" + op.stub.ClientName)
			m.Add(op.Operation, variable)
			for _, method := range op.stub.ClientMethods {
				if err := file.Key(client.Type, method, m.Field, variable); err != nil {
					return "", document.Findings{{Pos: op.Pos, Message: err.Error()}}
				}
			}
		}
	}
	return render.Client(m)
}
