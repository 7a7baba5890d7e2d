package weave

import (
	"go/types"
	"regexp"
	"slices"
	"strings"
)

// passOver overwrites with blanks, in the text of a formatted source, the bodies
// that need no reading, which are most of it.
//
// Those are bodies of oapi-codegen's own templates in which a document spoils only
// what it also spoils outside of them: the types they name stand in the signature
// too, or in the struct that they fill. What is left are path parameters, which
// become variables. A body is read if one of its variables may clash.
func passOver(text []byte, source string, imported map[string]bool) {
	for at := 0; ; {
		begin := strings.Index(source[at:], "\nfunc ")
		if begin < 0 {
			return
		}
		at += begin + len("\n")
		header, rest, _ := strings.Cut(source[at:], "\n")
		if !unwoven.MatchString(header) {
			continue
		}
		body, _, found := strings.Cut(rest, "\n}\n")
		if !found || clash(header, body, imported) {
			continue
		}
		from := at + len(header)
		at = from + len("\n") + len(body)
		for i := range text[from:at] {
			text[from+i] = ' '
		}
	}
}

// unwoven matches the first lines, each a whole signature, of the functions that
// make a client's request or read its response, and of those that bind a
// server's parameters.
var unwoven = regexp.MustCompile(`^func (?:` +
	`New\w+\(server string\b.*\) \(\*http\.Request, error\)|` +
	`Parse\w+\(rsp \*http\.Response\) \(.*, error\)|` +
	`\(c \*\w+WithResponses\) \w+\(.*\) \(.*, error\)|` +
	`\(\w+ \*?ServerInterfaceWrapper\) \w+\(.*\)(?: error)?) \{$`)

var (
	parameter = regexp.MustCompile(`[(,] ?(\w+) `)
	// declaration matches a statement of a function's outermost block.
	declaration = regexp.MustCompile(`(?m)^\t(?:var (\w+) |(\w+(?:, \w+)*) :=)`)
)

// clash reports whether a function may declare one name twice, or one that means
// something else in its body: a package, or what Go declares itself.
func clash(header, body string, imported map[string]bool) bool {
	var parameters, variables []string
	for _, m := range parameter.FindAllStringSubmatch(header, -1) {
		parameters = append(parameters, m[1])
	}
	for _, m := range declaration.FindAllStringSubmatch(body, -1) {
		var added []string
		for name := range strings.SplitSeq(m[1]+m[2], ", ") {
			if slices.Contains(parameters, name) {
				return true
			}
			if !slices.Contains(variables, name) {
				added = append(added, name)
			}
		}
		if added == nil {
			return true
		}
		variables = append(variables, added...)
	}
	return slices.ContainsFunc(append(parameters, variables...), func(name string) bool {
		return imported[name] || types.Universe.Lookup(name) != nil
	})
}
