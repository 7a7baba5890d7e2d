package generator_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	keptheader "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/header-param-keep/want"
	strippedheader "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/header-param-strip/want"
	headerfields "github.com/oapi-idempotent/oapi-idempotent/testdata/golden/headers/want"
)

// TestHeadersOfTheField drives what is generated for the header fields by which
// public APIs take keys, as requests and by the generated client.
func TestHeadersOfTheField(t *testing.T) {
	const (
		refused  = http.StatusBadRequest
		made     = http.StatusCreated
		uuid     = "f3b9cd1e-7a0f-4b55-9d0c-1f6f6a4f9a01"
		nilUUID  = "00000000-0000-0000-0000-000000000000"
		standard = "Idempotency-Key"
	)
	// Whatever the operation, its handler makes something, and tells which key
	// the request brought.
	seen := make(chan http.Header, 1)
	answer := func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			seen <- r.Header
			w.WriteHeader(made)
		})
	}
	url := serve(t, headerfields.Handler(nil, newGuard(t, idempotency.WithInner(answer))))
	client, err := headerfields.NewClient(url)
	if err != nil {
		t.Fatal(err)
	}
	post := func(path, header string, keys ...string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			req.Header.Add(header, key)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode == made && resp.Header.Get("Idempotent-Replayed")+resp.Header.Get("X-Idempotent-Replay")+resp.Header.Get("Idempotency-Replayed") == "" {
			<-seen
		}
		return resp, string(body)
	}
	keys := func(lengths ...int) []string {
		var all []string
		for _, length := range lengths {
			all = append(all, strings.Repeat("k", length))
		}
		return all
	}
	for _, op := range []struct {
		path, method string // of the client
		header       string // default: standard
		missing      int    // default: refused
		marker       string // default: Idempotent-Replayed
		good, bad    []string
	}{
		{path: "/draft", method: "Draft", good: append(keys(1, 255), `"quoted"`, `"a,b"`, "%zz"), bad: append(keys(256), "a,b", `"half`, "é")},
		{path: "/draft-optional", method: "DraftOptional", missing: made, good: keys(255), bad: keys(256)},
		{path: "/lower-case", method: "LowerCase", good: keys(64), bad: keys(65)},
		{path: "/with-x", method: "WithX", header: "X-Idempotency-Key", good: keys(40), bad: keys(41)},
		{path: "/short", method: "Short", header: "X-Idempotency", missing: made, good: keys(128), bad: keys(129)},
		{path: "/paypal", method: "Paypal", header: "PayPal-Request-Id", good: keys(50), bad: keys(51)},
		{path: "/request-id", method: "RequestId", header: "X-Request-ID", good: keys(256), bad: keys(257)},
		{path: "/uuid", method: "Uuid", good: []string{uuid}, bad: []string{"order-1"}},
		{path: "/long", method: "Long", good: keys(16), bad: keys(15)},
		{path: "/listed", method: "Listed", good: []string{"one", "three"}},
		{path: "/lookahead", method: "Lookahead", good: []string{"abc", "000"}},
		{path: "/pattern", method: "Pattern", good: []string{"abc-1"}, bad: []string{"ABC"}},
		{path: "/nullable", method: "Nullable", missing: made, good: keys(64), bad: keys(65)},
		{path: "/referenced", method: "Referenced", good: []string{uuid}, bad: []string{"order-1"}},
		{path: "/path-level", method: "PathLevel", good: []string{uuid}, bad: []string{"order-1"}},
		{path: "/overridden", method: "Overridden", missing: made, good: append(keys(40), "order-1"), bad: keys(41)},
		{path: "/content", method: "Content", good: []string{uuid, `"order-1"`}},
		{path: "/number", method: "Number", good: []string{"17", "order-1"}},
		{path: "/echoed", method: "Echoed", marker: "X-Idempotent-Replay", good: keys(1)},
		{path: "/other-marker", method: "OtherMarker", marker: "Idempotency-Replayed", good: keys(1)},
		{path: "/another-header", method: "AnotherHeader", header: "Request-Key", good: keys(1)},
	} {
		t.Run(op.method, func(t *testing.T) {
			if op.header == "" {
				op.header = standard
			}
			if op.missing == 0 {
				op.missing = refused
			}
			if op.marker == "" {
				op.marker = "Idempotent-Replayed"
			}
			problem := func(what, name string, resp *http.Response, body string) {
				t.Helper()
				if resp.StatusCode != refused || resp.Header.Get("Content-Type") != "application/problem+json" || !strings.Contains(body, name) {
					t.Errorf("%s: got %d %s %s; want 400 and the problem %s", what, resp.StatusCode, resp.Header.Get("Content-Type"), body, name)
				}
			}
			resp, body := post(op.path, op.header)
			if op.missing == refused {
				problem("no key", "missing-idempotency-key", resp, body)
			} else if resp.StatusCode != op.missing {
				t.Errorf("no key: got %d %s, want %d", resp.StatusCode, body, op.missing)
			}
			for _, key := range append(op.bad, nilUUID) {
				resp, body := post(op.path, op.header, key)
				problem("the key "+key, "invalid-idempotency-key", resp, body)
			}
			resp, body = post(op.path, op.header, uuid, uuid)
			problem("two keys", "invalid-idempotency-key", resp, body)
			for _, key := range op.good {
				for _, marked := range []string{"", "true"} {
					resp, body := post(op.path, op.header, key)
					if resp.StatusCode != made || resp.Header.Get(op.marker) != marked {
						t.Errorf("the key %s: got %d, %s %q, %s; want %d and %q", key, resp.StatusCode, op.marker, resp.Header.Get(op.marker), body, made, marked)
					}
				}
			}

			method := reflect.ValueOf(client).MethodByName(op.method)
			args := []reflect.Value{reflect.ValueOf(t.Context())}
			if method.Type().NumIn() == 3 { // its params, all left out
				args = append(args, reflect.New(method.Type().In(1).Elem()))
			}
			results := method.Call(args)
			if err, _ := results[1].Interface().(error); err != nil {
				t.Fatal(err)
			}
			resp = results[0].Interface().(*http.Response)
			resp.Body.Close()
			if resp.StatusCode != made {
				t.Fatalf("the client's call was answered %d", resp.StatusCode)
			}
			sent := <-seen
			if values := sent.Values(op.header); len(values) != 1 || !regexp.MustCompile(`^[0-9a-f-]{36}$`).MatchString(values[0]) || values[0] == nilUUID {
				t.Errorf("the client sent %q in %s, want a UUID of its own", values, op.header)
			}
			if op.header != standard && sent.Get(standard) != "" {
				t.Errorf("the client sent %s besides %s", standard, op.header)
			}
		})
	}
}

// TestHeadersKeepSignatures compares the client's methods with oapi-codegen's:
// what becomes of a declared header changes none of them.
func TestHeadersKeepSignatures(t *testing.T) {
	const dir = "../testdata/golden/headers"
	options := codegen.Configuration{PackageName: "headerfields", Generate: codegen.GenerateOptions{StdHTTPServer: true, Client: true, Models: true}}
	want := signatures(t, stock(t, dir+"/spec.yaml", options))
	files, err := generator.Generate(t.Context(), generator.Config{Configuration: options, Spec: "spec.yaml", FS: os.DirFS(dir)})
	if err != nil {
		t.Fatal(err)
	}
	got := signatures(t, string(files[0].Content))
	for name, signature := range want {
		if got[name] != signature {
			t.Errorf("%s is %s, of oapi-codegen's %s", name, got[name], signature)
		}
	}
	if len(want) < 40 {
		t.Errorf("oapi-codegen's client has %d methods; they are not found", len(want))
	}
}

// signatures maps the methods of the generated clients to their types.
func signatures(t *testing.T, source string) map[string]string {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, decl := range file.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Recv == nil {
			continue
		}
		receiver := source[fn.Recv.Pos()-1 : fn.Recv.End()-1]
		if strings.Contains(receiver, "*Client") {
			found[receiver+" "+fn.Name.Name] = source[fn.Type.Params.Pos()-1 : fn.Type.End()-1]
		}
	}
	return found
}

// TestKeptHeader leaves a declared header to oapi-codegen's binder, which answers
// first; the guard has what passes it.
func TestKeptHeader(t *testing.T) {
	const key = "f3b9cd1e-7a0f-4b55-9d0c-1f6f6a4f9a01"
	url := serve(t, keptheader.Handler(nil, newGuard(t, idempotency.WithInner(noContent))))
	for _, path := range []string{"/referenced", "/shared", "/item/1"} {
		for _, bad := range []string{"", "no-uuid"} {
			a := send(t, "POST", url+path, bad, "")
			a.expect(t, path+" with key "+bad, http.StatusBadRequest, false)
			if a.header.Get("Content-Type") == "application/problem+json" {
				t.Errorf("%s with key %q: answered by the guard: %s", path, bad, a.body)
			}
		}
		send(t, "POST", url+path, key, "").expect(t, path, http.StatusNoContent, false)
		send(t, "POST", url+path, key, "").expect(t, path, http.StatusNoContent, true)
	}
	send(t, "POST", url+"/inline", strings.Repeat("k", 65), "").expect(t, "a long key", http.StatusBadRequest, false)
}

// TestStrippedHeader has a declared header known to the guard alone.
func TestStrippedHeader(t *testing.T) {
	const key = "f3b9cd1e-7a0f-4b55-9d0c-1f6f6a4f9a01"
	url := serve(t, strippedheader.Handler(nil, newGuard(t, idempotency.WithInner(noContent))))
	for _, path := range []string{"/referenced", "/shared", "/item/1"} {
		for _, bad := range []string{"", "no-uuid"} {
			a := send(t, "POST", url+path, bad, "")
			a.expect(t, path+" with key "+bad, http.StatusBadRequest, false)
			if a.header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("%s with key %q: answered by the binder: %s", path, bad, a.body)
			}
		}
		send(t, "POST", url+path, key, "").expect(t, path, http.StatusNoContent, false)
		send(t, "POST", url+path, key, "").expect(t, path, http.StatusNoContent, true)
	}
}

func noContent(http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) })
}
