package weave

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"slices"
	"strings"
)

// Names in oapi-codegen's templates.
const (
	serverInterface = "ServerInterface"
	serverWrapper   = "ServerInterfaceWrapper"
	wrapperField    = "Handler"
)

// noRegistration says that the file has nothing to put the guard of an interface
// into.
func noRegistration(handlers string) error {
	if handlers != serverInterface {
		return fmt.Errorf("no function that takes a %s was found in oapi-codegen's output, so nothing would be guarded; if user-templates replace its receiver templates, they must keep %s and functions that take one", handlers, handlers)
	}
	return errors.New("no function that registers a ServerInterface was found in oapi-codegen's output, so nothing would be guarded; if user-templates replace its server templates, they must keep ServerInterface, ServerInterfaceWrapper.Handler and functions that take a ServerInterface")
}

// A Param is one parameter of a function.
type Param struct{ Name, Type string }

// Method returns the parameters of a method of an interface of handlers.
func (f *File) Method(handlers, name string) ([]Param, error) {
	spec := f.types[handlers]
	if spec == nil {
		return nil, noRegistration(handlers)
	}
	methods, ok := spec.Type.(*ast.InterfaceType)
	if !ok {
		return nil, noRegistration(handlers)
	}
	for _, method := range methods.Methods.List {
		signature, ok := method.Type.(*ast.FuncType)
		if !ok || !slices.ContainsFunc(method.Names, func(n *ast.Ident) bool { return n.Name == name }) {
			continue
		}
		var params []Param
		for _, field := range signature.Params.List {
			for _, param := range field.Names {
				params = append(params, Param{Name: param.Name, Type: f.text(field.Type)})
			}
		}
		return params, nil
	}
	return nil, fmt.Errorf("%s has no method %s, so the operation cannot be guarded", handlers, name)
}

// Embedded returns the name by which a struct can embed an interface of
// handlers. Where a method of that name is in the way it is that of an alias, to
// be declared.
func (f *File) Embedded(handlers string) (name, alias string) {
	if _, err := f.Method(handlers, handlers); err != nil {
		return handlers, ""
	}
	alias = f.Declare(strings.ToLower(handlers[:1]) + handlers[1:])
	return alias, alias
}

// Guard makes every function that takes handlers, an interface, take a guard
// behind it, and reach them only through what guardServer makes of the two: by
// the wrapper that a ServerInterface has, else from the start. Handlers that
// would be reached past the guard are an error that quotes the line.
func (f *File) Guard(handlers, idempotency, guardedServer, guardServer string) error {
	takes := func(literal *ast.FuncLit) bool { return paramOf(literal.Type, handlers) >= 0 }
	if i := slices.IndexFunc(f.literals, takes); i >= 0 {
		return fmt.Errorf("`%s` takes a %s in a function literal, where nobody can pass a guard; declare the function by name", f.line(f.literals[i].Pos()), handlers)
	}
	taking := map[string]int{} // function -> index of its first parameter of that type
	for fn := range f.functions {
		if i := paramOf(fn.Type, handlers); i >= 0 && fn.Recv == nil {
			taking[fn.Name.Name] = i
		}
	}
	wrapped := handlers == serverInterface
	filled := 0
	for fn := range f.functions {
		index := paramOf(fn.Type, handlers)
		guard, server := "", ""
		if index >= 0 {
			guard = freeIn(fn, "guard")
			param := fn.Type.Params.List[fieldOf(fn, index)]
			server = param.Names[len(param.Names)-1].Name
			f.insert(param.End(), fmt.Sprintf(", %s *%s.Guard", guard, idempotency))
			if !wrapped {
				f.insert(fn.Body.Lbrace+1, fmt.Sprintf("\n\t%s = %s(%s, %s)", server, guardServer, server, guard))
				filled++
			}
		}
		var failed error
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				callee, ok := n.Fun.(*ast.Ident)
				if !ok {
					break
				}
				at, ok := taking[callee.Name]
				if !ok {
					break
				}
				if guard == "" || at >= len(n.Args) {
					failed = fmt.Errorf("%s calls %s without a %s of its own, so it has no guard to pass on; let it take a %s", fn.Name.Name, callee.Name, handlers, handlers)
					break
				}
				f.insert(n.Args[at].End(), ", "+guard)
			case *ast.SelectorExpr:
				if wrapped && server != "" && isIdent(n.X, server) {
					failed = fmt.Errorf("%s uses a handler of its ServerInterface past the guard, in `%s`; go through a %s", fn.Name.Name, f.line(n.Pos()), serverWrapper)
				}
			case *ast.CompositeLit:
				if !wrapped || !isIdent(n.Type, serverWrapper) {
					break
				}
				for _, element := range n.Elts {
					field, ok := element.(*ast.KeyValueExpr)
					if !ok || !isIdent(field.Key, wrapperField) {
						continue
					}
					if guard == "" {
						failed = fmt.Errorf("%s makes a %s but takes no ServerInterface, so it has no guard", fn.Name.Name, serverWrapper)
						continue
					}
					f.insert(field.Value.Pos(), guardServer+"(")
					f.insert(field.Value.End(), ", "+guard+")")
					filled++
				}
			}
			return true
		})
		if failed != nil {
			return failed
		}
	}
	if len(taking) == 0 || filled == 0 || wrapped && !f.retype(guardedServer) {
		return noRegistration(handlers)
	}
	return nil
}

// PassKey has the parameter binder before a handler pass a key on that is sent
// more than once. It would answer itself otherwise, in plain text; the guard does
// it as for every other key that is none.
func (f *File) PassKey(handler, header string) {
	// The header has been made a plain string: no brace is closed in between.
	several := regexp.MustCompile(`(?i:CanonicalHeaderKey\("` + regexp.QuoteMeta(header) + `"\))[^}]*?if (n != 1) \{`)
	pass := func(fn *ast.FuncDecl) bool {
		body := f.text(fn.Body)
		if !strings.Contains(body, "."+handler+"(") {
			return false
		}
		found := several.FindAllStringSubmatchIndex(body, -1)
		for _, at := range found {
			f.replace(fn.Body.Pos()+token.Pos(at[2]), fn.Body.Pos()+token.Pos(at[3]), "n == 0")
		}
		return found != nil
	}
	// A binder for a ServerInterface has the handler's name.
	if !slices.ContainsFunc(f.named[handler], pass) {
		for fn := range f.functions {
			pass(fn)
		}
	}
}

// retype gives the wrapper's field the type of the guarded server, so that a
// wrapper made by hand cannot hold an unguarded one.
func (f *File) retype(guardedServer string) bool {
	spec := f.types[serverWrapper]
	if spec == nil {
		return false
	}
	wrapper, ok := spec.Type.(*ast.StructType)
	if !ok {
		return false
	}
	for _, field := range wrapper.Fields.List {
		if isIdent(field.Type, serverInterface) && len(field.Names) == 1 && field.Names[0].Name == wrapperField {
			f.replace(field.Type.Pos(), field.Type.End(), guardedServer)
			return true
		}
	}
	return false
}

// paramOf returns the index of a function's first parameter of a type, or -1.
func paramOf(fn *ast.FuncType, name string) int {
	index := 0
	for _, field := range fn.Params.List {
		if isIdent(field.Type, name) {
			return index + len(field.Names) - 1
		}
		index += len(field.Names)
	}
	return -1
}

// fieldOf returns the index of the field that declares a parameter.
func fieldOf(fn *ast.FuncDecl, param int) int {
	for i, field := range fn.Type.Params.List {
		if param -= len(field.Names); param < 0 {
			return i
		}
	}
	return -1
}

// freeIn returns name, or name with as many underscores behind it as make it
// one that fn does not use.
func freeIn(fn *ast.FuncDecl, name string) string {
	used := map[string]bool{}
	ast.Inspect(fn, func(n ast.Node) bool {
		if ident, ok := n.(*ast.Ident); ok {
			used[ident.Name] = true
		}
		return true
	})
	for used[name] {
		name += "_"
	}
	return name
}
