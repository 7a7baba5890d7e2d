package idempotency

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Every server that uses generated code inherits what this package imports.
func TestStandardLibraryOnly(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	want := "github.com/oapi-idempotent/oapi-idempotent/internal/wire github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	if got := strings.Join(strings.Fields(string(out)), " "); got != want {
		t.Fatalf("it depends on %s, want %s", got, want)
	}
}

// value draws any JSON value.
func value(depth int) *rapid.Generator[any] {
	leaf := rapid.OneOf(
		rapid.Just[any](nil),
		rapid.Map(rapid.Bool(), func(b bool) any { return b }),
		rapid.Map(rapid.Int64(), func(n int64) any { return json.Number(fmt.Sprint(n)) }),
		rapid.Map(rapid.String(), func(s string) any { return s }),
	)
	if depth == 0 {
		return leaf
	}
	return rapid.OneOf(
		leaf,
		rapid.Map(rapid.SliceOfN(value(depth-1), 0, 4), func(s []any) any { return s }),
		rapid.Map(rapid.MapOfN(rapid.String(), value(depth-1), 0, 4), func(m map[string]any) any { return m }),
	)
}

// write writes v as JSON with members in a random order, random white space and
// random escapes.
func write(b *strings.Builder, v any, r *rand.Rand) {
	space := func() { b.WriteString([]string{"", " ", "\n", "\t \r"}[r.IntN(4)]) }
	text := func(s string) {
		if r.IntN(2) == 0 {
			j, _ := json.Marshal(s)
			b.Write(j)
			return
		}
		b.WriteByte('"')
		for _, c := range s {
			if c > 0xffff {
				b.WriteRune(c)
			} else {
				fmt.Fprintf(b, `\u%04X`, c)
			}
		}
		b.WriteByte('"')
	}
	space()
	switch v := v.(type) {
	case map[string]any:
		b.WriteByte('{')
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		for i, name := range names {
			if i > 0 {
				b.WriteByte(',')
			}
			space()
			text(name)
			space()
			b.WriteByte(':')
			write(b, v[name], r)
		}
		b.WriteByte('}')
	case []any:
		b.WriteByte('[')
		for i, e := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			write(b, e, r)
		}
		space()
		b.WriteByte(']')
	case string:
		text(v)
	default:
		j, _ := json.Marshal(v)
		b.Write(j)
	}
	space()
}

// hashed is a hash that keeps what it is given.
type hashed struct {
	hash.Hash
	given []byte
}

func (h *hashed) Write(b []byte) (int, error) {
	h.given = append(h.given, b...)
	return len(b), nil
}

// canonicalJSON returns what a digester hashes for a JSON text.
func canonicalJSON(src []byte, ignore *pointerTree) ([]byte, bool) {
	var h hashed
	d := newDigester(&h)
	ok := d.canonicalJSON(src, ignore)
	d.flush()
	if !ok {
		return nil, false
	}
	kind, rest, _ := cutField(h.given)
	size, n := binary.Uvarint(rest)
	if kind != "json" || size != uint64(len(rest)-n) {
		panic(fmt.Sprintf("%q of %q announces %d bytes", kind, h.given, size))
	}
	return rest[n:], true
}

func TestCanonicalJSONIsEqualExactlyForEqualValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := value(3).Draw(t, "a"), value(3).Draw(t, "b")
		seed := rapid.Uint64().Draw(t, "seed")
		canonical := func(v any, seed uint64) string {
			var s strings.Builder
			write(&s, v, rand.New(rand.NewPCG(seed, seed)))
			c, ok := canonicalJSON([]byte(s.String()), nil)
			if !ok {
				t.Fatalf("not JSON: %s", s.String())
			}
			return string(c)
		}
		if x, y := canonical(a, seed), canonical(a, seed+1); x != y {
			t.Fatalf("one value, two forms:\n%s\n%s", x, y)
		}
		same := reflect.DeepEqual(a, b)
		if x, y := canonical(a, seed), canonical(b, seed); (x == y) != same {
			t.Fatalf("equal values: %v, equal forms: %v\n%s", same, x == y, x)
		}
	})
}

func TestCanonicalJSONTellsApart(t *testing.T) {
	seen := map[string]string{}
	for _, s := range []string{
		`1`, `1.0`, `1e0`, `"1"`, `90071992547409930`, `90071992547409931`, `true`, `null`, `"null"`, `[]`, `{}`, `[[]]`, `[null]`, `[1,2]`, `[2,1]`, `[12]`,
		`{"a":1}`, `{"a":[1]}`, `{"a":"1"}`, `{"a":1,"a":2}`, `{"a":2,"a":1}`, `{"":1}`, `"\ud800"`, `"\ufffd"`, `"\ud800\ud800"`, `"\\ud800"`, `"\udc00\ud800"`, `"\ud83d\ude00"`,
		`"\u0000"`, `"a\"b"`, `"a\\\"b"`, `{"a\":1,\"b":1}`, `{"a":1,"b":1}`, `"\u0022"`, `"\u005c"`,
	} {
		c, ok := canonicalJSON([]byte(s), nil)
		if s == `"\u0022"` || s == `"\u005c"` {
			plain, _ := canonicalJSON([]byte(map[string]string{`"\u0022"`: `"\""`, `"\u005c"`: `"\\"`}[s]), nil)
			if string(c) != string(plain) {
				t.Errorf("%s is %s, want %s", s, c, plain)
			}
		}
		if !ok {
			t.Fatalf("%s is JSON", s)
		}
		if other, taken := seen[string(c)]; taken {
			t.Errorf("%s and %s have one form: %s", s, other, c)
		}
		seen[string(c)] = s
	}
}

func FuzzCanonicalJSON(f *testing.F) {
	for _, s := range []string{`{"a":[1,{"b":"\ud83d\ude00"}]}`, `"\ud800x"`, `[`, "\xff", `{"a":1,"a":2}`, ` [ ] `} {
		f.Add([]byte(s))
	}
	ignore, err := newPointerTree([]string{"/a/0", "/b"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		c, ok := canonicalJSON(src, ignore)
		if ok != json.Valid(src) {
			t.Fatalf("valid: %v, canonical: %v", json.Valid(src), ok)
		}
		again, _ := canonicalJSON(append([]byte(" "), src...), ignore)
		if string(again) != string(c) {
			t.Fatal("white space changes the form")
		}
	})
}

func FuzzKey(f *testing.F) {
	for _, s := range []string{"abc", `"abc"`, `"a\"b"`, "a,b", `"`, `"\`, "\x00", " x "} {
		f.Add(s)
	}
	p := DefaultPolicy("POST /")
	op, err := newOperation(&p, nil, "", nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		key, refused := op.parseKey(http.Header{"Idempotency-Key": {s}})
		if refused != nil {
			return
		}
		if len(key) < 1 || len(key) > 255 {
			t.Fatalf("a key of %d bytes passed", len(key))
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		again, refused := op.parseKey(http.Header{"Idempotency-Key": {quoted}})
		if refused != nil || again != key {
			t.Fatalf("%q and its quoted form %s are two keys", key, quoted)
		}
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(encodeHeader(http.Header{"Link": {"a", "b"}, "X-Removed": {}}, ""))
	f.Add([]byte{1, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHeader(b)
		if err != nil {
			return
		}
		again, err := decodeHeader(encodeHeader(h, ""))
		if err != nil {
			t.Fatal(err)
		}
		for name, values := range h {
			if recordable(http.CanonicalHeaderKey(name)) && !(len(values) == 0 && len(again[name]) == 0) && !reflect.DeepEqual(values, again[name]) {
				t.Fatalf("%q: %q became %q", name, values, again[name])
			}
		}
	})
}

// What is written down once must be read the same by every later version.
func TestStoredFormsDoNotChange(t *testing.T) {
	p := DefaultPolicy("POST /orders")
	op, err := newOperation(&p, nil, "ns", nil)
	if err != nil {
		t.Fatal(err)
	}
	hash, owner := op.identify("ann", "k")
	req := &Request{
		Method: "POST", Path: "/orders", RawQuery: "b=1&a=2", Header: http.Header{"Content-Type": {"application/json"}},
		Body: func(int64) ([]byte, error) { return []byte(`{"b":1,"a":"é"}`), nil },
	}
	var digest [32]byte
	if refused := op.digestRequest(&digest, req); refused != nil {
		t.Fatal(refused)
	}
	got := fmt.Sprintf("%x\n%x\n%x\n%x", hash, owner, fingerprint(digest, nil), encodeHeader(http.Header{"Etag": {"1"}, "Link": {"a", "b"}}, ""))
	want := strings.TrimSpace(storedForms)
	if got != want {
		t.Fatalf("stored forms are\n%s\nwant\n%s", got, want)
	}
}

const storedForms = `
17130d72e4576582065e84ef9c2a545365f15c0473bdc55da5312417507dcee3
08bac0babfe7bda1654a52c020d20fca7f4d45ee815f203052e333d2f0fa0fc2
010033c57fc197756f0ad5500519a1713870fc5582e8f6f312920b077fe991eff426
010445746167010131044c696e6b0201610162
`
