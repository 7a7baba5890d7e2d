// Package weave puts the guard into oapi-codegen's registration functions and
// the key into its client methods. It reads the source as an AST and edits the
// text, so that what it does not touch stays as oapi-codegen wrote it.
package weave

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/tools/imports"
)

// A File is one generated Go file and the edits to be made to it.
type File struct {
	src   string
	fset  *token.FileSet
	ast   *ast.File
	edits []edit
	// named are the functions and methods that have a body, by their name; types
	// the declarations of types.
	named map[string][]*ast.FuncDecl
	types map[string]*ast.TypeSpec
	// literals are the function literals.
	literals []*ast.FuncLit
	// imports maps import paths to the names they go by; added are the import
	// specs that the source lacks.
	imports map[string]string
	added   []string
	// taken holds the names that new package-level declarations must not have.
	taken map[string]bool
	// local holds the names of parameters and variables, which would shadow a
	// new package-level name where it is used.
	local map[string]bool
	// hides is set when a variable that is no pointer has the name of an imported
	// package.
	hides bool
}

// An edit replaces a stretch of the source.
type edit struct {
	from, to int
	text     string
}

// Parse reads a generated file from its package clause on. Names that other files
// of the package may declare are passed in taken. Unless whole, which a file needs
// that is not formatted or that templates of the user's are in, bodies are passed
// over that the document does not spoil.
func Parse(source string, taken []string, whole bool) (*File, error) {
	f := &File{
		src:     source,
		fset:    token.NewFileSet(),
		named:   map[string][]*ast.FuncDecl{},
		types:   map[string]*ast.TypeSpec{},
		imports: map[string]string{},
		taken:   map[string]bool{},
		local:   map[string]bool{},
	}
	text := []byte(source)
	head, err := parser.ParseFile(token.NewFileSet(), "", text, parser.ImportsOnly)
	if err != nil {
		return nil, notGo(err)
	}
	imported := map[string]bool{}
	for _, spec := range head.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		name := packageName(path)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		if name != "_" && name != "." {
			f.imports[path] = name
			f.taken[name] = true
			imported[name] = true
		}
	}
	if !whole {
		passOver(text, source, imported)
	}
	f.ast, err = parser.ParseFile(f.fset, "", text, parser.SkipObjectResolution)
	if err != nil {
		return nil, notGo(err)
	}
	for _, name := range taken {
		f.taken[name] = true
	}
	for _, decl := range f.ast.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Recv == nil {
				f.taken[decl.Name.Name] = true
			}
			if decl.Body != nil {
				f.named[decl.Name.Name] = append(f.named[decl.Name.Name], decl)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					f.taken[spec.Name.Name] = true
					f.types[spec.Name.Name] = spec
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						f.taken[name.Name] = true
					}
				}
			}
		}
	}
	declare := func(names []*ast.Ident, kind ast.Expr) {
		_, pointer := kind.(*ast.StarExpr)
		for _, name := range names {
			f.local[name.Name] = true
			f.hides = f.hides || !pointer && imported[name.Name]
		}
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			f.literals = append(f.literals, n)
		case *ast.FuncType:
			for _, field := range n.Params.List {
				declare(field.Names, field.Type)
			}
		case *ast.ValueSpec:
			declare(n.Names, n.Type)
		}
		return true
	})
	return f, nil
}

func notGo(err error) error {
	return fmt.Errorf("what oapi-codegen generates for this document is not Go: %w", err)
}

// Declare returns a name for a new package-level declaration: name, or name
// with as many underscores behind it as make it free.
func (f *File) Declare(name string) string {
	for f.taken[name] || f.local[name] {
		name += "_"
	}
	f.taken[name] = true
	return name
}

// Import returns the name by which the file imports path, and adds the import
// if there is none.
func (f *File) Import(path string) string {
	if name, ok := f.imports[path]; ok {
		return name
	}
	base := packageName(path)
	name := base
	for f.taken[name] {
		name += "_"
	}
	f.taken[name] = true
	f.imports[path] = name
	spec := strconv.Quote(path)
	if name != base {
		spec = name + " " + spec
	}
	f.added = append(f.added, spec)
	return name
}

var versionSuffix = regexp.MustCompile(`[/.]v[0-9]+$`)

// packageName returns the name that a package has by convention.
func packageName(path string) string {
	path = versionSuffix.ReplaceAllString(path, "")
	return path[strings.LastIndexByte(path, '/')+1:]
}

// Source returns the edited file behind head, and with section at its end. Unless
// raw, what was added is formatted; the rest is as it was.
func (f *File) Source(head, section string, raw bool) ([]byte, error) {
	bodyAt := f.ast.Name.End()
	for _, decl := range f.ast.Decls {
		if gen, ok := decl.(*ast.GenDecl); ok && gen.Tok == token.IMPORT {
			bodyAt = gen.End()
		}
	}
	at, name := f.offset(bodyAt), f.offset(f.ast.Name.End())
	header := f.src[:name]
	for _, spec := range f.added {
		header += "\nimport " + spec
	}
	header += f.src[name:at]
	if !raw {
		grouped, err := imports.Process("", []byte(header), &imports.Options{Comments: true, TabIndent: true, TabWidth: 8, FormatOnly: true})
		if err != nil {
			return nil, fmt.Errorf("formatting the imports: %w", err)
		}
		formatted, err := format.Source([]byte(section))
		if err != nil {
			return nil, fmt.Errorf("formatting the generated code: %w", err)
		}
		header, section = strings.TrimRight(string(grouped), "\n"), "\n"+strings.Trim(string(formatted), "\n")+"\n"
	}
	size := len(head) + len(header) + len(f.src) + len(section)
	for _, e := range f.edits {
		size += len(e.text)
	}
	out := append(make([]byte, 0, size), head...)
	out = append(out, header...)
	slices.SortStableFunc(f.edits, func(a, b edit) int { return cmp.Compare(a.from, b.from) })
	for _, e := range f.edits {
		out = append(out, f.src[at:e.from]...)
		out = append(out, e.text...)
		at = e.to
	}
	out = append(out, f.src[at:]...)
	return append(out, section...), nil
}

func (f *File) insert(at token.Pos, text string) { f.replace(at, at, text) }

func (f *File) replace(from, to token.Pos, text string) {
	f.edits = append(f.edits, edit{f.offset(from), f.offset(to), text})
}

func (f *File) offset(pos token.Pos) int { return f.fset.File(pos).Offset(pos) }

func (f *File) text(n ast.Node) string {
	return f.src[f.offset(n.Pos()):f.offset(n.End())]
}

// line returns the line of the source that pos is in.
func (f *File) line(pos token.Pos) string {
	at := f.fset.Position(pos)
	start := at.Offset - (at.Column - 1)
	line, _, _ := strings.Cut(f.src[start:], "\n")
	return strings.TrimSpace(line)
}

// functions yields the file's functions and methods that have a body.
func (f *File) functions(yield func(*ast.FuncDecl) bool) {
	for _, decl := range f.ast.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Body != nil && !yield(fn) {
			return
		}
	}
}

func isIdent(n ast.Expr, name string) bool {
	ident, ok := n.(*ast.Ident)
	return ok && ident.Name == name
}
