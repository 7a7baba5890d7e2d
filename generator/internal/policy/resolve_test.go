package policy_test

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"pgregory.net/rapid"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// resolve returns the annotated operations of files["spec.yaml"], which must be
// free of findings.
func resolve(t interface{ Fatal(...any) }, files map[string]string, cfg policy.Config) []policy.Operation {
	fsys := fstest.MapFS{}
	for name, text := range files {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	doc, err := document.Load(fsys, "spec.yaml")
	if err != nil {
		t.Fatal(err)
	}
	operations, err := policy.Resolve(doc, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(operations, func(o policy.Operation) bool { return !o.Annotated() })
}

func resolveOne(t interface{ Fatal(...any) }, text string) policy.Operation {
	operations := resolve(t, map[string]string{"spec.yaml": text}, policy.Config{})
	if len(operations) != 1 {
		t.Fatal(fmt.Sprintf("got %d operations, want 1", len(operations)))
	}
	return operations[0]
}

func TestTrueHasTheDefaults(t *testing.T) {
	got := resolveOne(t, `
paths:
  /orders/{id}:
    post:
      operationId: createOrder
      x-idempotent: true
`)
	for name, origin := range got.Origins {
		if origin != (policy.Origin{Level: "built-in"}) {
			t.Errorf("origin of %s is %v, want built-in", name, origin)
		}
	}
	got.Origins = nil
	want := policy.Operation{
		Method: "POST", Path: "/orders/{id}", OperationID: "createOrder", Place: document.Place{Kind: document.Path, Name: "/orders/{id}"},
		Pos: document.Position{File: "spec.yaml", Line: 6, Column: 7},
		Server: policy.Server{
			Header: wire.HeaderKey, OnMissing: wire.DefaultOnMissing, OnMismatch: wire.DefaultOnMismatch,
			KeyFormat: "any", KeyMinLength: wire.DefaultKeyMinLength, KeyMaxLength: wire.DefaultKeyMaxLength,
			Scope: "principal", TTL: wire.DefaultTTL, WaitFor: wire.DefaultWaitFor,
			Lease: wire.DefaultLease, Timeout: wire.DefaultTimeout,
			FingerprintBody: "auto", FingerprintQuery: true, FingerprintMediaType: true,
			Record: []string{wire.DefaultRecord}, Marker: wire.HeaderReplayed, Guarantee: "atLeastOnce",
			MaxRequestBody: wire.DefaultMaxRequestBody, MaxRecordedBody: wire.DefaultMaxRecordedBody,
		},
		Client: policy.Client{
			MaxAttempts: wire.DefaultRetryMaxAttempts, Base: wire.DefaultRetryBase,
			Max: wire.DefaultRetryMax, MaxElapsed: wire.DefaultRetryMaxElapsed,
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestEveryFieldTakesHoldAndKnowsItsOrigin(t *testing.T) {
	got := resolveOne(t, `
paths:
  /orders:
    post:
      x-idempotent:
        natural: false
        header: X-Request-Key
        onMissing: 422
        key: {format: uuid, minLength: 36, maxLength: 40}
        scope: global
        ttl: 1d2h3m4s5ms
        fingerprint: {body: json, query: false, mediaType: false, headers: [X-Tenant], ignore: [/a, /b~1c]}
        onMismatch: 409
        waitFor: 5s
        record: [4XX, 409, "503"]
        replay: {status: 200, marker: X-Replayed}
        client: {retry: {maxAttempts: 9, base: 1s, max: 2s, maxElapsed: 3s}}
        server: {guarantee: transaction, lease: 10s, timeout: 1h, maxRequestBody: 2KiB, maxRecordedBody: 3GiB}
        x-anything: goes
`)
	wantServer := policy.Server{
		Header: "X-Request-Key", OnMissing: 422, OnMismatch: 409, KeyFormat: "uuid", KeyMinLength: 36, KeyMaxLength: 40,
		Scope: "global", TTL: 26*time.Hour + 3*time.Minute + 4*time.Second + 5*time.Millisecond, WaitFor: 5 * time.Second,
		Lease: 10 * time.Second, Timeout: time.Hour, FingerprintBody: "json", FingerprintHeaders: []string{"X-Tenant"},
		FingerprintIgnore: []string{"/a", "/b~1c"}, Record: []string{"4XX", "409", "503"}, ReplayStatus: 200,
		Marker: "X-Replayed", Guarantee: "transaction", MaxRequestBody: 2 << 10, MaxRecordedBody: 3 << 30,
	}
	if !reflect.DeepEqual(got.Server, wantServer) {
		t.Errorf("server\ngot  %+v\nwant %+v", got.Server, wantServer)
	}
	wantClient := policy.Client{MaxAttempts: 9, Base: time.Second, Max: 2 * time.Second, MaxElapsed: 3 * time.Second}
	if got.Client != wantClient {
		t.Errorf("client\ngot  %+v\nwant %+v", got.Client, wantClient)
	}
	line := map[string]int{"natural": 6, "key.maxLength": 9, "fingerprint.ignore": 12, "client.retry.max": 17, "server.maxRecordedBody": 18}
	for name, origin := range got.Origins {
		switch {
		case name == "key.pattern": // no field of the extension
			if origin.Level != "built-in" {
				t.Errorf("origin of %s is %v, want built-in", name, origin)
			}
		case origin.Level != "operation":
			t.Errorf("origin of %s is %v, want the operation", name, origin)
		case line[name] != 0 && origin.Pos.Line != line[name]:
			t.Errorf("origin of %s is %v, want line %d", name, origin, line[name])
		}
	}
	if s := got.Origins["ttl"].String(); s != "operation at spec.yaml:11:9" {
		t.Errorf("origin of ttl reads %q", s)
	}
}

// TestTheStrongestLevelWins gives a value at any set of levels.
func TestTheStrongestLevelWins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		has := func(level string) bool { return rapid.Bool().Draw(t, level) }
		want, level := wire.DefaultKeyMaxLength, "built-in"
		give := func(from string, value int) string {
			if !has(from) {
				return ""
			}
			want, level = value, from
			return fmt.Sprintf("maxLength: %d", value)
		}
		param := give("header parameter", 101)
		root := give("document root", 102)
		profile := give("profile p", 103)
		item := give("path item", 104)
		operation := give("operation", 105)
		got := resolveOne(t, strings.NewReplacer(
			"PARAM", param, "ROOT", root, "PROFILE", profile, "ITEM", item, "OPERATION", operation,
		).Replace(`
x-idempotent:
  key: {ROOT}
  profiles:
    p: {key: {PROFILE}}
paths:
  /orders:
    x-idempotent: {key: {ITEM}, scope: global}
    post:
      parameters: [{in: header, name: idempotency-key, required: true, schema: {PARAM}}]
      x-idempotent: {profile: p, key: {OPERATION}}
`))
		if got.Server.KeyMaxLength != want || got.Origins["key.maxLength"].Level != level {
			t.Fatalf("key.maxLength is %d from %v, want %d from %s", got.Server.KeyMaxLength, got.Origins["key.maxLength"], want, level)
		}
		if got.Server.Scope != "global" {
			t.Fatalf("the path item's scope was lost beside its key")
		}
	})
}

func TestInheritance(t *testing.T) {
	tests := map[string]struct {
		spec string
		want string // the operations, each with what is asked of it
		cfg  policy.Config
		ask  func(policy.Operation) any
	}{
		"unannotated operations are not protected": {
			spec: "paths: {/a: {post: {}, get: {}}}",
		},
		"the root alone supplies defaults only": {
			spec: "x-idempotent: {ttl: 1h}\npaths: {/a: {post: {}}, /b: {post: {x-idempotent: true}}}",
			ask:  func(o policy.Operation) any { return o.Server.TTL },
			want: "POST /b 1h0m0s",
		},
		"applyTo annotates its methods": {
			spec: "x-idempotent: {applyTo: [post, delete]}\npaths: {/a: {post: {}, patch: {}, delete: {}, get: {}}}",
			ask:  func(o policy.Operation) any { return o.Pos },
			want: "DELETE /a spec.yaml:1:1, POST /a spec.yaml:1:1",
		},
		"false beats everything above it": {
			spec: "x-idempotent: {applyTo: [post, patch]}\npaths:\n  /a: {post: {x-idempotent: false}, patch: {}}\n  /b: {x-idempotent: false, post: {}, patch: {x-idempotent: true}}",
			want: "PATCH /a, PATCH /b",
		},
		"a path item reaches POST and PATCH only": {
			spec: "paths:\n  /a:\n    x-idempotent: {ttl: 1h}\n    get: {}\n    put: {x-idempotent: true}\n    delete: {}\n    post: {}\n    patch: {}",
			ask:  func(o policy.Operation) any { return fmt.Sprint(o.Server.TTL, " ", o.Pos.Line) },
			want: "PATCH /a 1h0m0s 3, POST /a 1h0m0s 3, PUT /a 24h0m0s 5",
		},
		"lists replace, objects merge": {
			spec: "x-idempotent: {record: [4XX, 503], fingerprint: {headers: [A], query: false}}\npaths: {/a: {post: {x-idempotent: {record: [], fingerprint: {headers: [B]}}}}}",
			ask: func(o policy.Operation) any {
				return fmt.Sprint(o.Server.Record, o.Server.FingerprintHeaders, o.Server.FingerprintQuery)
			},
			want: "POST /a [] [B] false",
		},
		"the deepest profile is the one": {
			spec: "x-idempotent: {profile: a, profiles: {a: {ttl: 1h}, b: {ttl: 2h}}}\npaths: {/a: {x-idempotent: {profile: b}, post: {}, patch: {x-idempotent: {profile: a}}}, /c: {post: {x-idempotent: true}}}",
			ask:  func(o policy.Operation) any { return o.Server.TTL },
			want: "PATCH /a 1h0m0s, POST /a 2h0m0s, POST /c 1h0m0s",
		},
		"an object below none replays": {
			spec: "x-idempotent: {replay: none}\npaths: {/a: {post: {x-idempotent: {replay: {status: 200}}}}, /b: {post: {x-idempotent: true}}}",
			ask:  func(o policy.Operation) any { return o.Server.ReplayNone },
			want: "POST /a false, POST /b true",
		},
		"client: false and client: {}": {
			spec: "x-idempotent: {client: false}\npaths: {/a: {post: {x-idempotent: {client: {}}}}, /b: {post: {x-idempotent: true}}}",
			ask:  func(o policy.Operation) any { return o.Client.Disabled },
			want: "POST /a false, POST /b true",
		},
		"no retry": {
			spec: "paths: {/a: {post: {x-idempotent: {client: {retry: false}}}}, /b: {post: {x-idempotent: {client: {retry: {maxAttempts: 1}}}}}, /c: {post: {x-idempotent: {client: {retry: {}}}}}}",
			ask:  func(o policy.Operation) any { return o.Client.NoRetry },
			want: "POST /a true, POST /b true, POST /c false",
		},
		"natural operations are told apart": {
			spec: "paths: {/a: {get: {x-idempotent: {natural: true}}, put: {x-idempotent: {natural: true, client: {retry: {maxAttempts: 2}}}}, trace: {x-idempotent: false}}, /b: {x-idempotent: {natural: true}, post: {}, patch: {x-idempotent: {natural: false}}}}",
			ask:  func(o policy.Operation) any { return o.Natural },
			want: "GET /a true, PUT /a true, PATCH /b false, POST /b true",
		},
		"defaults that a stronger level silences are not wrong": {
			spec: "x-idempotent: {waitFor: 5s, record: [4XX], fingerprint: {ignore: [/a]}, server: {lease: 1s}}\npaths: {/a: {post: {x-idempotent: {replay: none}}}, /b: {post: {x-idempotent: {server: {guarantee: atMostOnce}}}}, /c: {post: {x-idempotent: {fingerprint: {body: raw}}}}, /d: {post: {x-idempotent: {natural: true}}}, /e: {post: {x-idempotent: {onMismatch: replay}}}}",
			want: "POST /a, POST /b, POST /c, POST /d, POST /e",
		},
		"security": {
			spec: "security: [{a: []}]\npaths: {/root: {post: {x-idempotent: true}}, /none: {post: {security: [], x-idempotent: true}}, /own: {post: {security: [{a: []}, {b: [], c: []}], x-idempotent: true}}, /optional: {post: {security: [{a: []}, {}], x-idempotent: true}}}",
			ask:  func(o policy.Operation) any { return o.Secured },
			want: "POST /none false, POST /optional false, POST /own true, POST /root true",
		},
		"streaming": {
			spec: "paths: {/a: {post: {x-idempotent: {replay: none}, responses: {'200': {content: {text/event-stream: {}}}}}}, /b: {post: {x-idempotent: true, responses: {'200': {content: {application/json: {}}}}}}}",
			ask:  func(o policy.Operation) any { return o.Streaming },
			want: "POST /a true, POST /b false",
		},
		"another extension name": {
			spec: "paths: {/a: {post: {x-once: true}}, /b: {post: {x-idempotent: 1}}}",
			cfg:  policy.Config{Extension: "x-once"},
			want: "POST /a",
		},
		"every POST and PATCH has a value": {
			spec: "x-idempotent: {applyTo: [post]}\npaths: {/a: {post: {}, get: {}, put: {}, patch: {x-idempotent: false}}}",
			cfg:  policy.Config{Unannotated: "reject"},
			want: "POST /a",
		},
		"methods in any case, as kin-openapi reads them": {
			spec: "paths: {/a: {Post: {x-idempotent: true, OperationID: x}}}",
			ask:  func(o policy.Operation) any { return o.OperationID },
			want: "POST /a x",
		},
		"the article middleware": {
			spec: "paths: {/a: {post: {x-idempotent: {scope: global, onMissing: run, onMismatch: 409, ttl: 7d, fingerprint: {body: raw, query: false, mediaType: false}, record: [4XX, 5XX, 400, 401, 403, 408, 409, 413, 415, 422, 425, 429]}}}}",
			ask:  func(o policy.Operation) any { return o.Server.OnMissing },
			want: "POST /a 0",
		},
		"the how-to of NENE2": {
			spec: "paths: {/a: {post: {x-idempotent: {scope: global, onMissing: 422, onMismatch: replay, waitFor: 5s, record: [], replay: {status: 200}, ttl: 36500d}}}}",
			ask:  func(o policy.Operation) any { return o.Server.OnMismatch },
			want: "POST /a 0",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			operations := resolve(t, map[string]string{"spec.yaml": test.spec}, test.cfg)
			if got := describe(operations, test.ask); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func describe(operations []policy.Operation, ask func(policy.Operation) any) string {
	var texts []string
	for _, o := range operations {
		text := o.Method + " " + o.Path
		if ask != nil {
			text += fmt.Sprint(" ", ask(o))
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

func TestDeclaredHeaderParameter(t *testing.T) {
	const components = `
components:
  parameters:
    key: {in: header, name: IDEMPOTENCY-KEY, required: true, schema: {$ref: '#/components/schemas/key'}}
  schemas:
    key: {type: [string, "null"], format: uuid, minLength: 36, maxLength: 36, pattern: '^[0-9a-f-]+$'}
`
	tests := map[string]struct {
		item string
		want *policy.HeaderParam
		text string // onMissing, format, lengths, pattern
	}{
		"none": {
			item: "post: {x-idempotent: true, parameters: [{in: query, name: Idempotency-Key}, {in: header, name: X-Other}]}",
			text: "400 any 1 255 ",
		},
		"inline, optional": {
			item: "post: {x-idempotent: true, parameters: [{in: header, name: Idempotency-Key, schema: {type: string, maxLength: 64}}]}",
			want: &policy.HeaderParam{Name: "Idempotency-Key"},
			text: "0 any 1 64 ",
		},
		"inline, required": {
			item: "post: {x-idempotent: true, parameters: [{in: header, name: idempotency-key, required: true}]}",
			want: &policy.HeaderParam{Name: "idempotency-key", Required: true},
			text: "400 any 1 255 ",
		},
		"by reference": {
			item: "post: {x-idempotent: true, parameters: [{$ref: '#/components/parameters/key'}]}",
			want: &policy.HeaderParam{Name: "IDEMPOTENCY-KEY", Required: true, Ref: "#/components/parameters/key"},
			text: "400 uuid 36 36 ^[0-9a-f-]+$",
		},
		"at path level": {
			item: "parameters: [{$ref: '#/components/parameters/key'}], post: {x-idempotent: true}",
			want: &policy.HeaderParam{Name: "IDEMPOTENCY-KEY", Required: true, Ref: "#/components/parameters/key", PathLevel: true},
			text: "400 uuid 36 36 ^[0-9a-f-]+$",
		},
		"the operation's beats the path item's": {
			item: "parameters: [{$ref: '#/components/parameters/key'}], post: {x-idempotent: true, parameters: [{in: header, name: IDEMPOTENCY-KEY}]}",
			want: &policy.HeaderParam{Name: "IDEMPOTENCY-KEY"},
			text: "0 any 1 255 ",
		},
		"another header": {
			item: "post: {x-idempotent: {header: X-Request-Key}, parameters: [{in: header, name: Idempotency-Key}, {in: header, name: x-request-key, required: true}]}",
			want: &policy.HeaderParam{Name: "x-request-key", Required: true},
			text: "400 any 1 255 ",
		},
		"the policy beats the parameter": {
			item: "post: {x-idempotent: {onMissing: 422, key: {format: any}}, parameters: [{in: header, name: Idempotency-Key, schema: {format: uuid}}]}",
			want: &policy.HeaderParam{Name: "Idempotency-Key"},
			text: "422 any 1 255 ",
		},
		"a pattern beyond RE2": {
			item: `post: {x-idempotent: true, parameters: [{in: header, name: Idempotency-Key, required: true, schema: {pattern: '(?=a)b', maxLength: 9}}]}`,
			want: &policy.HeaderParam{Name: "Idempotency-Key", Required: true, Ignored: document.Findings{{
				Pos:     document.Position{File: "spec.yaml", Line: 2, Column: 118},
				Message: "the pattern of Idempotency-Key is not applied: error parsing regexp: invalid or unsupported Perl syntax: `(?=`; check it in a middleware if it matters",
			}}},
			text: "400 any 1 9 ",
		},
		"no string": {
			item: `post: {x-idempotent: true, parameters: [{in: header, name: Idempotency-Key, required: true, schema: {type: [integer, "null"], maxLength: 9, pattern: ^a}}]}`,
			want: &policy.HeaderParam{Name: "Idempotency-Key", Required: true, Ignored: document.Findings{{
				Pos:     document.Position{File: "spec.yaml", Line: 2, Column: 115},
				Message: "the schema of Idempotency-Key is not applied: a key is a string",
			}}},
			text: "400 any 1 255 ",
		},
		"a string or null": {
			item: `post: {x-idempotent: true, parameters: [{in: header, name: Idempotency-Key, required: true, schema: {type: [string, "null"], maxLength: 9}}]}`,
			want: &policy.HeaderParam{Name: "Idempotency-Key", Required: true},
			text: "400 any 1 9 ",
		},
		"natural operations have no key": {
			item: "post: {x-idempotent: {natural: true}, parameters: [{in: header, name: Idempotency-Key, required: true}]}",
			text: "400 any 1 255 ",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := resolveOne(t, "paths:\n  /a: {"+test.item+"}"+components)
			s := got.Server
			if text := fmt.Sprintf("%d %s %d %d %s", s.OnMissing, s.KeyFormat, s.KeyMinLength, s.KeyMaxLength, s.KeyPattern); text != test.text {
				t.Errorf("got  %s\nwant %s", text, test.text)
			}
			if got.HeaderParam != nil {
				if got.HeaderParam.Pos.Line == 0 {
					t.Error("the parameter has no position")
				}
				got.HeaderParam.Pos = document.Position{}
			}
			if !reflect.DeepEqual(got.HeaderParam, test.want) {
				t.Errorf("got  %+v\nwant %+v", got.HeaderParam, test.want)
			}
		})
	}
}

func TestPathItemsElsewhere(t *testing.T) {
	files := map[string]string{
		"spec.yaml": `
paths:
  /whole: {$ref: items/whole.json}
  /part: {$ref: 'items/parts.yaml#/pathItems/a~1b'}
  /chain: {$ref: '#/components/pathItems/chain'}
  /aliased: {post: {operationId: aliased, x-idempotent: true}}
  /alias: {$ref: '#/paths/~1aliased'}
  /encoded: {$ref: '#/paths/~1with%7Bid%7D'}
  /with{id}: {post: {x-idempotent: true}}
  /empty: {$ref: '', patch: {x-idempotent: true}}
  /url: {$ref: 'https://example.com/v1/items.yaml?x=1#/a'}
components:
  parameters: {root: {in: header, name: Idempotency-Key, required: true}}
  pathItems:
    chain: {$ref: 'items\parts.yaml#/pathItems/c'}
`,
		"items/whole.json":                     "\ufeff{\"post\": {\r\n\"x-idempotent\": {\"ttl\": \"1h\"},\r\n\"parameters\": [{\"$ref\": \"#/components/parameters/root\"}]}}",
		"items/parts.yaml":                     "pathItems:\r\n  a/b:\r\n    x-idempotent: true\r\n    post: {}\r\n  c: {$ref: '../more.yaml'}\r\n",
		"more.yaml":                            "patch: {x-idempotent: {natural: true}}",
		"https:/example.com/v1/items.yaml?x=1": "a: {$ref: ../b.yaml}",
		"https:/example.com/b.yaml":            "post: {x-idempotent: true}",
	}
	operations := resolve(t, files, policy.Config{})
	got := describe(operations, func(o policy.Operation) any {
		return fmt.Sprintf("%v %q %t", o.Pos, o.AliasOf, o.HeaderParam != nil)
	})
	want := strings.Join([]string{
		`POST /alias spec.yaml:6:43 "/aliased" false`,
		`POST /aliased spec.yaml:6:43 "" false`,
		`PATCH /chain more.yaml:1:9 "" false`,
		`PATCH /empty spec.yaml:10:30 "" false`,
		`POST /encoded spec.yaml:9:22 "/with{id}" false`,
		`POST /part items/parts.yaml:3:5 "" false`,
		`POST /url https:/example.com/b.yaml:1:8 "" false`,
		`POST /whole items/whole.json:2:1 "" true`,
		`POST /with{id} spec.yaml:9:22 "" false`,
	}, ", ")
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestDurationsAddUp(t *testing.T) {
	units := map[string]time.Duration{
		"ms": time.Millisecond, "s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour,
	}
	rapid.Check(t, func(t *rapid.T) {
		var text string
		var want time.Duration
		for range rapid.IntRange(1, 6).Draw(t, "parts") {
			unit := rapid.SampledFrom(slices.Sorted(maps.Keys(units))).Draw(t, "unit")
			count := rapid.IntRange(0, 10_000).Draw(t, "count")
			text += fmt.Sprint(count, unit)
			want += time.Duration(count) * units[unit]
		}
		got := resolveOne(t, "paths: {/a: {post: {x-idempotent: {waitFor: "+text+"}}}}")
		if got.Server.WaitFor != want {
			t.Fatalf("%s is %v, want %v", text, got.Server.WaitFor, want)
		}
	})
}
