package generator_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A section is what was added at the end of one golden file.
type section struct {
	file  string
	fset  *token.FileSet
	decls []ast.Decl
}

// sections finds the added declarations of every golden file that has any:
// those from the first mention of the extension in our own words on.
func sections(t *testing.T) []section {
	t.Helper()
	var all []section
	for _, g := range goldens(t) {
		file := filepath.Join(g.dir, g.config.Output)
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		start := bytes.Index(source, []byte("\n// What follows"))
		if start < 0 {
			continue
		}
		s := section{file: file, fset: token.NewFileSet()}
		parsed, err := parser.ParseFile(s.fset, file, source, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range parsed.Decls {
			if s.fset.Position(decl.Pos()).Offset > start {
				s.decls = append(s.decls, decl)
			}
		}
		all = append(all, s)
	}
	if len(all) < 10 {
		t.Fatalf("only %d golden files have a section", len(all))
	}
	return all
}

// TestSectionDecidesNothing walks the added code: it branches on errors and on
// whether there is an answer to write, and on nothing else.
func TestSectionDecidesNothing(t *testing.T) {
	allowed := map[string]bool{"err": true, "failed": true, "answer": true, "nil": true, "next": true}
	for _, s := range sections(t) {
		for _, decl := range s.decls {
			ast.Inspect(decl, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.IfStmt:
					names := []ast.Node{n.Cond}
					if n.Init != nil {
						names = append(names, n.Init)
					}
					for _, name := range names {
						ast.Inspect(name, func(n ast.Node) bool {
							switch n := n.(type) {
							case *ast.Ident:
								if !allowed[n.Name] {
									t.Errorf("%s: branches on %s", s.fset.Position(n.Pos()), n.Name)
								}
							case *ast.BasicLit, *ast.SelectorExpr:
								t.Errorf("%s: branches on a value", s.fset.Position(n.Pos()))
							}
							return true
						})
					}
				case *ast.ForStmt, *ast.RangeStmt, *ast.SwitchStmt, *ast.TypeSwitchStmt, *ast.SelectStmt, *ast.BranchStmt:
					t.Errorf("%s: %T in the added code", s.fset.Position(n.Pos()), n)
				}
				return true
			})
		}
	}
}

// TestSectionIsShort counts the added lines of each annotated operation, the
// policy table aside.
func TestSectionIsShort(t *testing.T) {
	const budget = 12
	lines := func(fset *token.FileSet, n ast.Node, doc *ast.CommentGroup) int {
		start := n.Pos()
		if doc != nil {
			start = doc.Pos()
		}
		return fset.Position(n.End()).Line - fset.Position(start).Line + 1
	}
	for _, s := range sections(t) {
		methods, calls, registered := 0, 0, 0
		longest := 0
		for _, decl := range s.decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				if decl.Recv != nil {
					methods++
					longest = max(longest, lines(s.fset, decl, decl.Doc)+1) // and a blank line
				}
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					value, ok := spec.(*ast.ValueSpec)
					if !ok {
						continue
					}
					switch {
					case strings.HasPrefix(value.Names[0].Name, "idempotencyCall"):
						calls = max(calls, lines(s.fset, value, nil))
					case strings.HasPrefix(value.Names[0].Name, "idempotencyPolicy"):
						registered = 1 // its line in the registration
					}
				}
			}
		}
		if methods+calls == 0 {
			t.Errorf("%s: no operation was found in the section", s.file)
		}
		if got := longest + calls + registered; got > budget {
			t.Errorf("%s: %d lines for an operation, want at most %d", s.file, got, budget)
		}
	}
}
