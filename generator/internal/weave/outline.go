package weave

import (
	"go/token"
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
		to := from + len("\n") + len(body)
		if uncalled.MatchString(header) {
			from, to = at, to+len("\n}")
		}
		at = to
		for i := from; i < to; i++ {
			text[i] = ' '
		}
	}
}

// unwoven matches the first lines, each a whole signature, of the functions that
// make a client's request, read its response or tell what it was, and of those
// that bind a server's parameters.
var unwoven = regexp.MustCompile(`^func (?:` +
	`New\w+\(server string\b.*\) \(\*http\.Request, error\)|` +
	`Parse\w+\(rsp \*http\.Response\) \(.*, error\)|` +
	`\(r \w+\) (?:(?:Status|ContentType)\(\) string|StatusCode\(\) int)|` +
	`\(c \*\w+WithResponses\) \w+\(.*\) \(.*, error\)|` +
	`\(\w+ \*?ServerInterfaceWrapper\) \w+\(.*\)(?: error)?) \{$`)

// uncalled matches those that go altogether: methods that nothing in the file
// calls, with signatures that an interface has too or that never differ.
var uncalled = regexp.MustCompile(`^func \((?:r|c \*\w+WithResponses\b)`)

// parameter matches a parameter, or a receiver, up to its type.
var parameter = regexp.MustCompile(`[(,] ?(\w+) `)

// clash reports whether a function may declare one name twice, or one that means
// something else in its body: a package, or what Go declares itself.
func clash(header, body string, imported map[string]bool) bool {
	var parameters, variables []string
	for _, m := range parameter.FindAllStringSubmatch(header, -1) {
		parameters = append(parameters, m[1])
	}
	for line := range strings.SplitSeq(body, "\n") {
		declared := declaration(line)
		if declared == "" {
			continue
		}
		news := false
		for name := range strings.SplitSeq(declared, ", ") {
			if slices.Contains(parameters, name) {
				return true
			}
			if !slices.Contains(variables, name) {
				variables = append(variables, name)
				news = true
			}
		}
		if !news {
			return true
		}
	}
	return slices.ContainsFunc(append(parameters, variables...), func(name string) bool {
		return imported[name] || types.Universe.Lookup(name) != nil
	})
}

// declaration returns the names that a line declares for the whole function.
func declaration(line string) string {
	statement, outermost := strings.CutPrefix(line, "\t")
	first, rest, _ := strings.Cut(statement, " ")
	switch names, _, short := strings.Cut(statement, " := "); {
	case !outermost || strings.HasPrefix(first, "\t"):
		return ""
	case first == "var":
		name, _, _ := strings.Cut(rest, " ")
		return name
	case short && !token.IsKeyword(first):
		return names
	}
	return ""
}
