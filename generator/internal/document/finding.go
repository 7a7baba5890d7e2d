package document

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Position is a place in a file. Line and Column count from 1, columns in
// characters.
type Position struct {
	File         string
	Line, Column int
}

// String returns the form that editors and compilers understand.
func (p Position) String() string {
	place := fmt.Sprintf("%d:%d", p.Line, p.Column)
	if p.File == "" {
		return place
	}
	return p.File + ":" + place
}

// Compare orders positions by file, line and column.
func (p Position) Compare(q Position) int {
	return cmp.Or(strings.Compare(p.File, q.File), cmp.Compare(p.Line, q.Line), cmp.Compare(p.Column, q.Column))
}

// A Finding is one fault of a document. Its message says what is wrong and what
// to write instead.
type Finding struct {
	Pos     Position
	Message string
}

// String returns file:line:col: message, in one line.
func (f Finding) String() string { return f.Pos.String() + ": " + oneLine.Replace(f.Message) }

// oneLine escapes what a name out of the document may bring.
var oneLine = strings.NewReplacer("\n", `\n`, "\r", `\r`)

// Findings are all the faults that were found, as one error.
type Findings []Finding

// Error returns the findings, one per line, sorted by position and each once.
func (fs Findings) Error() string {
	var b strings.Builder
	for i, f := range fs.Sorted() {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(f.String())
	}
	return b.String()
}

// Sorted returns the findings by position, each once.
func (fs Findings) Sorted() Findings {
	sorted := slices.Clone(fs)
	slices.SortStableFunc(sorted, func(a, b Finding) int {
		return cmp.Or(a.Pos.Compare(b.Pos), strings.Compare(a.Message, b.Message))
	})
	return slices.Compact(sorted)
}
