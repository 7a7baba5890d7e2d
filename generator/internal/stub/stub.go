// Package stub runs oapi-codegen. It is the only package that calls it, one
// call at a time, because oapi-codegen keeps its state in globals.
package stub

import (
	"cmp"
	"fmt"
	"io/fs"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// Output is what oapi-codegen made of a document.
type Output struct {
	// Head is what stands before the package clause, and Source what begins with
	// it.
	Head, Source string
	// Operations are those that survived the config's filters.
	Operations []Operation
	// Types are names that another config may declare in the same package.
	Types []string

	components     []component // as the document has them
	pruned         []component // those that are left out, because no operation uses them
	parameters     []parameter // of paths
	responseSuffix string
	models         bool // are generated
}

// An Operation is one operation as oapi-codegen named it.
type Operation struct {
	Method string
	Place  document.Place
	// Name is the name of its method on ServerInterface, or on the interface
	// that receives webhooks or callbacks.
	Name string
	// Alias is set when its path is only another name of a path that has the
	// server method: Name is then that one's.
	Alias bool
	// ClientName is Name, or of an alias the name of its client methods.
	ClientName string
	// ClientMethods are the names of its methods on the client, or on the
	// initiator of webhooks or callbacks.
	ClientMethods []string

	pos document.Position
}

var globals sync.Mutex

// Generate runs oapi-codegen on spec, which it changes. Its source is that of
// oapi-codegen but for the line that names the version. What it fails on is found
// in doc, which is the same document with positions.
func Generate(spec *openapi3.T, doc *document.Document, opts codegen.Configuration) (*Output, error) {
	globals.Lock()
	defer globals.Unlock()

	// An empty suffix would mean that of the call before.
	if opts.OutputOptions.ResponseTypeSuffix == "" {
		opts.OutputOptions.ResponseTypeSuffix = "Response"
	}
	given := namesOf(spec, doc)
	source, err := survive(func() (string, error) { return codegen.Generate(spec, opts) })
	given.inGo()
	definitions, definitionsErr := definitionsOf(spec)
	if clash := clashes(doc, definitions, emitsFunctions(opts.Generate)); clash != nil {
		return nil, clash // the cause, where err is one of its consequences
	}
	if err = cmp.Or(err, definitionsErr); err != nil {
		return nil, given.explain(spec, err)
	}
	left := components(spec, doc)
	head, source := withVersions(source)
	out := &Output{
		Head:           head,
		Source:         source,
		Types:          typeNames(left),
		components:     given.components,
		responseSuffix: opts.OutputOptions.ResponseTypeSuffix,
		models:         opts.Generate.Models,
	}
	for _, c := range given.components {
		if !slices.ContainsFunc(left, c.is) {
			out.pruned = append(out.pruned, c)
		}
	}
	for _, d := range definitions {
		op := Operation{
			Method:     d.Method,
			Place:      d.place,
			Name:       d.HandlerName(),
			Alias:      d.IsAlias,
			ClientName: d.OperationId,
			pos:        positionOf(doc, d.Method, d.place),
		}
		if prefix := Prefix(d.place.Kind); prefix != "" {
			op.Name = "Handle" + d.OperationId + prefix
			op.ClientName += prefix
		}
		if d.HasBody() {
			op.ClientMethods = append(op.ClientMethods, d.OperationId+"WithBody")
		} else {
			op.ClientMethods = append(op.ClientMethods, d.OperationId)
		}
		for _, body := range d.Bodies {
			if body.IsSupportedByClient() {
				op.ClientMethods = append(op.ClientMethods, d.OperationId+body.Suffix())
			}
		}
		out.Operations = append(out.Operations, op)
		for _, p := range d.PathParams {
			out.parameters = append(out.parameters, parameter{p.ParamName, p.GoVariableName(), d.Method + " " + d.place.String(), parameterPosition(doc, d.Method, d.place, p.ParamName)})
		}
	}
	return out, nil
}

// Prefix begins the names of what oapi-codegen emits for a kind of operation,
// such as WebhookInitiator; empty for those of paths.
func Prefix(kind string) string {
	switch kind {
	case document.Webhook:
		return "Webhook"
	case document.Callback:
		return "Callback"
	}
	return ""
}

// emitsFunctions reports whether more than types are generated.
func emitsFunctions(g codegen.GenerateOptions) bool {
	return g.Client || g.StdHTTPServer || g.ChiServer || g.GorillaServer || g.EchoServer || g.Echo5Server ||
		g.GinServer || g.FiberServer || g.FiberV3Server || g.IrisServer
}

// definitionsOf returns what oapi-codegen made of all operations.
func definitionsOf(spec *openapi3.T) ([]definition, error) {
	paths, err := operationDefinitions(spec)
	if err != nil {
		return nil, err
	}
	var all []definition
	for _, d := range paths {
		all = append(all, definition{d, document.Place{Kind: document.Path, Name: d.Path}})
	}
	webhooks, err := survive(func() ([]codegen.OperationDefinition, error) { return codegen.WebhookOperationDefinitions(spec) })
	if err != nil {
		return all, err
	}
	for _, d := range webhooks {
		all = append(all, definition{d, document.Place{Kind: document.Webhook, Name: d.WebhookName}})
	}
	callbacks, err := survive(func() ([]codegen.OperationDefinition, error) { return codegen.CallbackOperationDefinitions(spec) })
	if err != nil {
		return all, err
	}
	// They do not say which operation has them, but are in the order of places.
	for _, place := range places(spec) {
		if place.Kind != document.Callback {
			continue
		}
		for range pathItem(spec, place).Operations() {
			all = append(all, definition{callbacks[0], place})
			callbacks = callbacks[1:]
		}
	}
	return all, nil
}

func operationDefinitions(spec *openapi3.T) ([]codegen.OperationDefinition, error) {
	return survive(func() ([]codegen.OperationDefinition, error) { return codegen.OperationDefinitions(spec) })
}

// survive calls a function of oapi-codegen's, which may panic on a document
// that it did not expect.
func survive[T any](call func() (T, error)) (result T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return call()
}

// UserTemplates returns templates with those that name a file replaced by its
// text, which oapi-codegen would read past files. It fetches URLs itself.
func UserTemplates(files fs.FS, templates map[string]string) map[string]string {
	read := make(map[string]string, len(templates))
	for name, text := range templates {
		read[name] = text
		if strings.Contains(text, "\n") {
			continue
		}
		if data, err := fs.ReadFile(files, text); err == nil {
			// A line break tells oapi-codegen that this is text and no name.
			read[name] = strings.TrimSuffix(string(data), "\n") + "\n"
		}
	}
	return read
}

// typeNames lists the type names of components, whether or not this config
// generates them.
func typeNames(components []component) []string {
	var names []string
	for _, c := range components {
		names = append(names, codegen.SchemaNameToTypeName(c.name))
		for _, key := range []string{"x-go-name", "x-go-type-name"} {
			if renamed, ok := c.extensions[key].(string); ok {
				names = append(names, renamed)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

const (
	oapiCodegenModule = "github.com/oapi-codegen/oapi-codegen/v2"
	// oapiCodegenVersion is what go.mod requires: the version when the build
	// carries none.
	oapiCodegenVersion = "v2.8.2"
)

var versionLine = regexp.MustCompile(`(?m)^// Code generated by .* version .* DO NOT EDIT\.$`)

// withVersions cuts source before its package clause, and rewrites the line in
// which oapi-codegen names the main module of the running program, which says
// nothing when that program is built from a work tree, and too much about how it
// was built otherwise.
func withVersions(source string) (head, rest string) {
	at := strings.Index(source, "\npackage ") + len("\n")
	if at == 0 {
		return "", source
	}
	line := fmt.Sprintf("// Code generated by oapi-idempotent v%s with oapi-codegen %s. DO NOT EDIT.", idempotency.Version, OapiCodegenVersion())
	return versionLine.ReplaceAllLiteralString(source[:at], line), source[at:]
}

// OapiCodegenVersion returns the version of oapi-codegen that is linked in.
func OapiCodegenVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == oapiCodegenModule {
				return module.Version
			}
		}
	}
	return oapiCodegenVersion
}
