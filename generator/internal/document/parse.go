package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Parse reads data, called name in positions, on its own: as JSON if it is JSON,
// else as YAML. The error is of type [Findings]. The order is kin-openapi's
// too, and it matters: YAML readers refuse the surrogate escapes that
// JSON uses for characters beyond the basic plane.
func Parse(name string, data []byte) (*Node, error) {
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	if json.Valid(data) {
		return newJSONReader(name, data).value(), nil
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, Findings{syntaxFinding(name, data, err)}
	}
	if len(doc.Content) == 0 {
		return nil, Findings{{Position{name, 1, 1}, "the file is empty; write the document"}}
	}
	c := yamlConverter{name: name, lines: lineCount(data), nodes: make(map[*yaml.Node]*Node)}
	root := c.convert(doc.Content[0])
	root.settle(0)
	if len(c.findings) > 0 {
		return nil, c.findings
	}
	return root, nil
}

// second returns the second document of a YAML file, and where it begins.
func second(name string, data []byte) (Position, string) {
	content, offset, n := false, 0, 0
	for line := range bytes.Lines(data) {
		n++
		text := bytes.TrimRight(line, " \t\r\n")
		switch begins := string(text) == "---" || bytes.HasPrefix(text, []byte("--- ")); {
		case begins && content:
			return Position{name, n, 1}, string(data[offset:])
		case len(text) > 0 && text[0] != '#' && text[0] != '%':
			content = content || !begins || len(text) > 3
		}
		offset += len(line)
	}
	return Position{}, ""
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// syntaxFinding describes data that is neither JSON nor YAML, by JSON's error if
// it looks like JSON.
func syntaxFinding(name string, data []byte, err error) Finding {
	if text := bytes.TrimSpace(data); len(text) > 0 && (text[0] == '{' || text[0] == '[') {
		var syntax *json.SyntaxError
		if errors.As(json.Unmarshal(data, new(any)), &syntax) {
			return Finding{positionAt(name, data, max(0, int(syntax.Offset)-1)), "not valid JSON: " + withCure(syntax.Error())}
		}
	}
	pos := Position{name, 1, 1}
	message := yamlLine.ReplaceAllString(err.Error(), "")
	if i := notText(data); i >= 0 && yamlReader.MatchString(message) {
		return Finding{positionAt(name, data, i), "not valid YAML: " + withCure(message)}
	}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil && m[1] != "" {
		line, _ := strconv.Atoi(m[1])
		if yamlParser.MatchString(message) {
			line++ // yaml.v3 counts the lines of these from 0, of its scanner's errors from 1
		}
		pos.Line = min(max(line, 1), lineCount(bytes.TrimSpace(data)))
		pos.Line, pos.Column = placeOf(message, data, pos.Line)
	}
	if alias := unknownAnchor.FindStringSubmatch(message); alias != nil {
		pos = firstAlias(pos, data, alias[1])
		message = fmt.Sprintf("*%[1]s stands before its anchor, or has none; write &%[1]s at the value that is meant, above this line", alias[1])
	}
	return Finding{pos, "not valid YAML: " + withCure(message)}
}

// placeOf returns where the fault is that the message describes: at the character
// it speaks of, in the line that yaml.v3 names or in the next, else where the
// line's text begins. yaml.v3 tells lines only, and of a text over several lines the
// first.
func placeOf(message string, data []byte, line int) (_, column int) {
	lines := bytes.Split(data, []byte("\n"))
	if line > len(lines) {
		return line, 1 // of a file that breaks lines otherwise
	}
	for _, c := range culprits {
		if !c.failure.MatchString(message) {
			continue
		}
		for i, text := range lines[line-1 : min(line+1, len(lines))] {
			if at := c.place.FindSubmatchIndex(text); at != nil {
				return line + i, 1 + utf8.RuneCount(text[:at[len(at)-1]-1])
			}
		}
	}
	text := lines[line-1]
	return line, 1 + utf8.RuneCount(text[:len(text)-len(bytes.TrimLeft(text, " "))])
}

// culprits are the characters that yaml.v3's messages speak of: the first of what
// place's group matches.
var culprits = []struct{ failure, place *regexp.Regexp }{
	{regexp.MustCompile(`cannot start any token|tab character`), regexp.MustCompile("(?:^|[ :,\\[{-])([@`%\t])")},
	{regexp.MustCompile(`mapping values are not allowed`), regexp.MustCompile(`^[^:{["']*: [^:{["']*?(:)(?:[ \r]|$)`)},
	{regexp.MustCompile(`mapping values are not allowed`), regexp.MustCompile(`(:)(?:[ \r]|$)`)},
	{regexp.MustCompile(`unknown escape character`), regexp.MustCompile(`^(?:[^\\]|\\[0abtnvfre "/\\N_LPxuU])*(\\)`)},
	{regexp.MustCompile(`alphabetic or numeric character`), regexp.MustCompile(`([*&])(?:[^\w-]|$)`)},
	{regexp.MustCompile(`unexpected end of stream`), regexp.MustCompile(`(["'])`)},
}

func positionAt(name string, data []byte, offset int) Position {
	at := cursor{pos: Position{name, 1, 1}, data: data}
	at.moveTo(offset)
	return at.pos
}

// notText returns the offset of the first byte of data that is not UTF-8, or is a
// control character that YAML does not have, or -1.
func notText(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 || r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			return i
		}
		i += size
	}
	return -1
}

// yamlReader matches the errors of what yaml.v3 reads bytes with.
var yamlReader = regexp.MustCompile(`^control characters|UTF-8|Unicode`)

// cures say what to write instead, by what the parsers of JSON and YAML say.
var cures = []struct {
	failure *regexp.Regexp
	cure    string
}{
	{yamlReader, "remove the character, or save the file as UTF-8 text"},
	{regexp.MustCompile(`cannot start any token`), "indent with spaces, not with tabs, and put text that begins with @, %, ` or a tab in quotes"},
	{regexp.MustCompile(`tab character`), "indent with spaces"},
	{regexp.MustCompile(`mapping values are not allowed`), "put text that has a colon and a space in quotes, and begin the names of one object in one column"},
	{regexp.MustCompile(`could not find expected ':'`), "write name: value, with a space behind the colon"},
	{regexp.MustCompile(`did not find expected (?:key|'-' indicator)`), "begin the names of one object, and the dashes of one list, in one column"},
	{regexp.MustCompile(`did not find expected (?:',' or|node content)`), "close every [ and {, and put a comma between what is in them"},
	{regexp.MustCompile(`unexpected end of stream`), "close every quote"},
	{regexp.MustCompile(`unknown escape character`), "write the backslash twice, or put the text in single quotes"},
	{regexp.MustCompile(`alphabetic or numeric character`), "put text that begins with * or & in quotes"},
	{regexp.MustCompile(`block sequence entries are not allowed`), "begin a list in a line of its own"},
	{regexp.MustCompile(`after object key$`), "write a colon"},
	{regexp.MustCompile(`after (?:object key:value pair|array element)`), "write a comma, or close what is open"},
	{regexp.MustCompile(`beginning of object key string`), "write a name in double quotes, and no comma behind the last member"},
	{regexp.MustCompile(`beginning of value`), "write a value, and text in double quotes"},
	{regexp.MustCompile(`unexpected end of JSON input`), "close every brace, bracket and quote"},
	{regexp.MustCompile(`in string`), `write a line break as \n, and a backslash twice`},
	{regexp.MustCompile(`max depth`), "nest less deeply"},
}

func withCure(failure string) string {
	for _, c := range cures {
		if c.failure.MatchString(failure) {
			return failure + "; " + c.cure
		}
	}
	return failure
}

// yamlParser matches the errors of yaml.v3's parser.
var yamlParser = regexp.MustCompile(`^did not find expected (?:<|node content|key|',' or|'-' indicator)`)

var unknownAnchor = regexp.MustCompile(`unknown anchor '(.*)' referenced$`)

// firstAlias finds the alias at which reading data fails: the first line up to
// which it fails in the same way.
func firstAlias(pos Position, data []byte, name string) Position {
	lines := bytes.SplitAfter(data, []byte("\n"))
	pos.Line = 1 + sort.Search(len(lines)-1, func(i int) bool {
		err := yaml.Unmarshal(bytes.Join(lines[:i+1], nil), new(yaml.Node))
		return err != nil && unknownAnchor.MatchString(err.Error())
	})
	before, _, _ := bytes.Cut(lines[pos.Line-1], []byte("*"+name))
	pos.Column = 1 + utf8.RuneCount(before)
	return pos
}

// lineCount counts lines as YAML does.
func lineCount(data []byte) int {
	count := func(lineBreak string) int { return bytes.Count(data, []byte(lineBreak)) }
	return 1 + count("\n") + count("\r") - count("\r\n") + count("\u0085") + count("\u2028") + count("\u2029")
}

type yamlConverter struct {
	name     string
	lines    int
	nodes    map[*yaml.Node]*Node // nil while a node is being converted
	findings Findings
}

func (c *yamlConverter) pos(y *yaml.Node) Position {
	// A value that is left out at the end of a file stands, for the parser, in
	// the line below.
	return Position{c.name, min(y.Line, c.lines), y.Column}
}

func (c *yamlConverter) reject(y *yaml.Node, format string, args ...any) {
	c.findings = append(c.findings, Finding{c.pos(y), fmt.Sprintf(format, args...)})
}

func (c *yamlConverter) convert(y *yaml.Node) *Node {
	if y.Kind == yaml.AliasNode {
		y = y.Alias
	}
	if n, ok := c.nodes[y]; ok {
		if n == nil {
			c.reject(y, "the anchor %q contains itself; repeat the value instead", y.Anchor)
			return &Node{Pos: c.pos(y)}
		}
		return n
	}
	c.nodes[y] = nil
	n := &Node{Pos: c.pos(y)}
	switch y.Kind {
	case yaml.MappingNode:
		n.Kind = Object
		c.members(n, y)
	case yaml.SequenceNode:
		n.Kind = List
		for _, item := range y.Content {
			converted := c.convert(item)
			converted.settle(0)
			n.Items = append(n.Items, converted)
		}
	default:
		var err error
		if n.Kind, n.Value, err = scalar(y); err != nil {
			c.reject(y, "not valid YAML: %s; write a value that its tag allows, or remove the tag", strings.TrimPrefix(err.Error(), "yaml: "))
		}
	}
	c.nodes[y] = n
	return n
}

func (c *yamlConverter) members(n *Node, y *yaml.Node) {
	seen := make(map[string]int, len(y.Content)/2) // name -> line
	var merges []*yaml.Node
	for i := 0; i+1 < len(y.Content); i += 2 {
		key, value := y.Content[i], y.Content[i+1]
		if key.ShortTag() == "!!merge" {
			merges = append(merges, value)
			continue
		}
		name, ok := c.memberName(key)
		if !ok {
			c.reject(key, "a name must be a string, a number or a boolean; write it in quotes")
			continue
		}
		if line, ok := seen[name]; ok {
			c.reject(key, "%q is already defined in line %d; remove one of them", name, line)
			continue
		}
		seen[name] = key.Line
		converted := c.convert(value)
		converted.settle(key.Line)
		n.Members = append(n.Members, Member{name, c.pos(key), converted})
	}
	merge := func(y *yaml.Node) {
		from := c.convert(y)
		if from.Kind != Object {
			c.reject(y, "a merge key takes an object, or a list of objects; write <<: *anchor")
			return
		}
		for _, m := range from.Members {
			if _, ok := seen[m.Name]; !ok {
				seen[m.Name] = m.Pos.Line
				n.Members = append(n.Members, m)
			}
		}
	}
	if merges != nil {
		n.home = -1
	}
	for _, y := range merges {
		if y.Kind != yaml.SequenceNode {
			merge(y)
			continue
		}
		for _, item := range y.Content {
			merge(item)
		}
	}
}

// memberName returns the name that a key stands for. Numbers are names in their
// plainest form: 0x10 is "16", as kin-openapi has it.
func (c *yamlConverter) memberName(key *yaml.Node) (string, bool) {
	switch n := c.convert(key); n.Kind {
	case String, Bool:
		return n.Value, true
	case Number:
		switch v := plainNumber(n.Value).(type) {
		case int:
			return strconv.Itoa(v), true
		case float64:
			return strconv.FormatFloat(v, 'g', -1, 64), true
		}
	}
	return "", false
}

// settle gives an object its home, the first time that it is somebody's value:
// an alias comes later.
func (n *Node) settle(line int) {
	if n.Kind != Object || n.home != 0 {
		return
	}
	if line == 0 && len(n.Members) > 0 {
		line = n.Members[0].Pos.Line
	}
	n.home = int32(line)
}

func scalar(y *yaml.Node) (Kind, string, error) {
	if y.Style&yaml.TaggedStyle != 0 {
		return taggedScalar(y)
	}
	switch y.ShortTag() {
	case "!!null":
		return Null, y.Value, nil
	case "!!bool":
		return Bool, strings.ToLower(y.Value), nil
	case "!!int", "!!float":
		return Number, y.Value, nil
	}
	return String, y.Value, nil
}

// taggedScalar reads a value of the type that its author names, as a document in
// JSON would write it.
func taggedScalar(y *yaml.Node) (Kind, string, error) {
	var v any
	if err := y.Decode(&v); err != nil {
		return Null, "", err
	}
	text, err := json.Marshal(v)
	switch v := v.(type) {
	case nil:
		return Null, "null", nil
	case bool:
		return Bool, string(text), nil
	case int, int64, uint64, float64:
		return Number, string(text), err
	case string:
		return String, v, nil
	}
	return String, strings.Trim(string(text), `"`), err // a time
}

// A cursor tracks the position of an offset that only grows.
type cursor struct {
	pos    Position
	data   []byte
	offset int
}

func (c *cursor) moveTo(offset int) {
	passed := c.data[c.offset:offset]
	c.offset = offset
	if n := bytes.Count(passed, []byte("\n")); n > 0 {
		c.pos.Line += n
		c.pos.Column = 1
		passed = passed[bytes.LastIndexByte(passed, '\n')+1:]
	}
	c.pos.Column += utf8.RuneCount(passed)
}

// A jsonReader builds nodes from valid JSON.
type jsonReader struct {
	decoder *json.Decoder
	at      cursor
}

func newJSONReader(name string, data []byte) *jsonReader {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	return &jsonReader{decoder, cursor{pos: Position{name, 1, 1}, data: data}}
}

// next moves to the next token and returns it with its position.
func (r *jsonReader) next() (json.Token, Position) {
	start := int(r.decoder.InputOffset())
	start += len(r.at.data[start:]) - len(bytes.TrimLeft(r.at.data[start:], " \t\r\n,:"))
	r.at.moveTo(start)
	token, err := r.decoder.Token()
	if err != nil {
		panic(fmt.Sprintf("document: valid JSON gave %v", err)) // json.Valid said otherwise
	}
	return token, r.at.pos
}

func (r *jsonReader) value() *Node {
	token, pos := r.next()
	n := &Node{Pos: pos}
	switch token := token.(type) {
	case nil:
		n.Kind = Null
	case bool:
		n.Kind, n.Value = Bool, strconv.FormatBool(token)
	case json.Number:
		n.Kind, n.Value = Number, token.String()
	case string:
		n.Kind, n.Value = String, token
	case json.Delim:
		if token == '[' {
			n.Kind = List
			for r.decoder.More() {
				n.Items = append(n.Items, r.value())
			}
		} else {
			n.Kind = Object
			for r.decoder.More() {
				name, pos := r.next()
				n.Members = append(n.Members, Member{name.(string), pos, r.value()})
			}
		}
		r.next() // the closing bracket
	}
	return n
}
