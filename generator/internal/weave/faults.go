package weave

import (
	"errors"
	"go/ast"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strings"
)

// A Fault is something that keeps a file from compiling.
type Fault struct {
	// Message is the compiler's, such as "undefined: Order".
	Message string
	// In is the package-level declaration that it is in: its name, or that of
	// the receiver where it is a method.
	In string
}

// Faults lists what keeps the file from compiling, as far as that shows without
// the packages that it imports: nothing is said of what comes from them. What is
// undefined may be declared in another file of the package.
func (f *File) Faults() []Fault {
	var faults []Fault
	add := func(pos token.Pos, message string) {
		fault := Fault{message, f.declaration(pos)}
		if !slices.Contains(faults, fault) {
			faults = append(faults, fault)
		}
	}
	var info types.Info
	if f.hides { // which is seldom: what every name stands for takes memory to tell
		info = types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	}
	check := types.Config{Importer: unknown{}, Error: func(err error) {
		e := err.(types.Error)
		message, _, _ := strings.Cut(e.Msg, " at ") // a line of what is not written
		if e.Soft {
			message = "" // of what is not used: what uses it may have been passed over
			if strings.HasPrefix(e.Msg, "no new variables") {
				message = f.assigned(e.Pos)
			}
		}
		if message != "" && !doubtful.MatchString(message) {
			add(e.Pos, message)
		}
	}}
	pkg, _ := check.Check(f.ast.Name.Name, f.fset, []*ast.File{f.ast}, &info) // its error is the first of those
	for _, body := range f.notText(pkg) {
		add(body.Pos(), "a text body is converted to "+body.Name+", which is no string")
	}
	if f.hides {
		for _, x := range f.hiding(&info) {
			add(x.Pos(), x.Name+" hides the package "+x.Name)
		}
	}
	return faults
}

// notText lists the types to which strict handlers convert the text of a body and
// cannot. The checker does not tell: that text comes from a package.
func (f *File) notText(pkg *types.Package) []*ast.Ident {
	text := types.NewSlice(types.Typ[types.Byte])
	var bodies []*ast.Ident
	for fn := range f.functions {
		if !isReceiver(fn, "strictHandler") {
			continue
		}
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 || !isIdent(call.Args[0], "data") {
				return true
			}
			name, ok := call.Fun.(*ast.Ident)
			if !ok {
				return true
			}
			body, ok := pkg.Scope().Lookup(name.Name).(*types.TypeName)
			if ok && body.Type().Underlying() != types.Typ[types.Invalid] && !types.ConvertibleTo(text, body.Type()) {
				bodies = append(bodies, name)
			}
			return true
		})
	}
	return bodies
}

// assigned tells what is declared twice by the := at pos; empty if there is none,
// as the other soft errors are no faults of the document's.
func (f *File) assigned(pos token.Pos) (message string) {
	ast.Inspect(f.ast, func(n ast.Node) bool {
		if n, ok := n.(*ast.AssignStmt); ok && n.TokPos == pos {
			message = f.text(n.Lhs[0]) + " redeclared in this block"
		}
		return message == ""
	})
	return message
}

// hiding lists where a variable of the document's, which is no pointer, stands in
// place of the package whose name it has.
func (f *File) hiding(info *types.Info) []*ast.Ident {
	imported := map[string]bool{}
	for _, name := range f.imports {
		imported[name] = true
	}
	plain := map[types.Object]bool{}
	declare := func(names []*ast.Ident, kind ast.Expr) {
		if _, pointer := kind.(*ast.StarExpr); pointer || kind == nil {
			return
		}
		for _, name := range names {
			plain[info.Defs[name]] = imported[name.Name]
		}
	}
	var hiding []*ast.Ident
	ast.Inspect(f.ast, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncType:
			for _, field := range n.Params.List {
				declare(field.Names, field.Type)
			}
		case *ast.ValueSpec:
			declare(n.Names, n.Type)
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && plain[info.Uses[x]] {
				hiding = append(hiding, x)
			}
		}
		return true
	})
	return hiding
}

// doubtful are messages that follow from others, or that an import may have
// caused.
var doubtful = regexp.MustCompile(`^could not import|^\t|no field or method|missing method|missing return|does not implement`)

// declaration names the package-level declaration that pos is in.
func (f *File) declaration(pos token.Pos) string {
	for _, decl := range f.ast.Decls {
		if pos < decl.Pos() || pos >= decl.End() {
			continue
		}
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Recv == nil {
				return decl.Name.Name
			}
			receiver := decl.Recv.List[0].Type
			if pointer, ok := receiver.(*ast.StarExpr); ok {
				receiver = pointer.X
			}
			return f.text(receiver)
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if spec, ok := spec.(*ast.TypeSpec); ok && pos >= spec.Pos() && pos < spec.End() {
					return spec.Name.Name
				}
			}
		}
	}
	return ""
}

// unknown imports every package as one that nothing is known of.
type unknown struct{}

func (unknown) Import(path string) (*types.Package, error) {
	return types.NewPackage(path, packageName(path)), errors.New("not read")
}
