package guardtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

func badKeys(t *testing.T, target Target) {
	f := serve(t, target, created)
	f.refuses("no key", f.send(request{path: things, body: lamp}), http.StatusBadRequest, wire.MissingKey)
	f.refuses("a blank key", f.send(request{path: things, body: lamp, header: http.Header{wire.HeaderKey: {" "}}}), http.StatusBadRequest, wire.MissingKey)
	for what, values := range map[string][]string{
		"two fields":    {"a", "b"},
		"one key twice": {"a", "a"},
		"a comma":       {"a, b"},
		"not ASCII":     {"sch\u00fcssel"},
		"too long":      {strings.Repeat("k", 256)},
		"the nil UUID":  {"00000000-0000-0000-0000-000000000000"},
	} {
		f.refuses(what, f.send(request{path: things, body: lamp, header: http.Header{wire.HeaderKey: values}}), http.StatusBadRequest, wire.InvalidKey)
	}
	f.ranTimes(0)
	f.ran("a bare key", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.replays("the same key, quoted", f.send(request{path: things, key: `"a"`, body: lamp}), http.StatusCreated)
}

func optionalKey(t *testing.T, target Target) {
	f := serve(t, target, created)
	form := request{path: files, contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	for range 2 {
		f.ran("no key", f.send(form), http.StatusCreated)
	}
	f.ranTimes(2)
}

func mismatch(t *testing.T, target Target) {
	f := serve(t, target, created)
	f.ran("first sight", f.send(request{path: things + "?a=1&b=2", key: "a", body: `{"item":"lamp","n":1}`}), http.StatusCreated)
	f.replays("the same in another order", f.send(request{path: things + "?b=2&a=1", key: "a", body: `{ "n":1, "item":"lamp" }`}), http.StatusCreated)
	f.refuses("another body", f.send(request{path: things + "?a=1&b=2", key: "a", body: vase}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.refuses("another query", f.send(request{path: things + "?a=1&b=3", key: "a", body: `{"item":"lamp","n":1}`}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.refuses("another media type", f.send(request{path: things + "?a=1&b=2", key: "a", body: `{"item":"lamp","n":1}`, contentType: "application/vnd.t+json"}), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

func bodyLimit(t *testing.T, target Target) {
	f := serve(t, target, created)
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded"}
	for _, chunked := range []bool{false, true} {
		form.chunked, form.body = chunked, "item="+strings.Repeat("x", 4<<10)
		f.refuses(fmt.Sprintf("4 KiB and more, chunked: %v", chunked), f.send(form), http.StatusRequestEntityTooLarge, wire.RequestTooLarge)
	}
	f.ranTimes(0)
	form.body = "item=lamp"
	f.ran("a small body with the key", f.send(form), http.StatusCreated)
}

func chunked(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	f.ran("chunked", f.send(request{path: things, key: "a", body: lamp, chunked: true}), http.StatusCreated)
	f.replays("with a length", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
	f.refuses("another, chunked", f.send(request{path: things, key: "a", body: vase, chunked: true}), http.StatusUnprocessableEntity, wire.KeyReused)
	if body, _ := seen.Load().(string); !strings.Contains(body, "lamp") {
		f.Errorf("the handler read %q", body)
	}
}

func multipartForm(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	form := func(boundary, content string) request {
		var body bytes.Buffer
		w := multipart.NewWriter(&body)
		err := w.SetBoundary(boundary)
		for _, field := range []string{"item", "colour", "size", "shape", "price", "weight"} {
			err = errors.Join(err, w.WriteField(field, "the "+field))
		}
		for _, name := range []string{"front.txt", "back.txt"} {
			part, failed := w.CreateFormFile("picture", name)
			err = errors.Join(err, failed)
			if failed == nil {
				_, failed = io.WriteString(part, name+content)
				err = errors.Join(err, failed)
			}
		}
		if err = errors.Join(err, w.Close()); err != nil {
			f.Fatal(err)
		}
		return request{path: files, key: "a", contentType: w.FormDataContentType(), body: body.String()}
	}
	f.ran("first sight", f.send(form("one", "lamp")), http.StatusCreated)
	if body, _ := seen.Load().(string); !strings.Contains(body, "front.txtlamp") || !strings.Contains(body, "the colour") {
		f.Errorf("the handler read %q", body)
	}
	for i := range 5 {
		f.replays("the same with another boundary", f.send(form(fmt.Sprintf("b%d", i), "lamp")), http.StatusCreated)
	}
	f.refuses("another file", f.send(form("one", "vase")), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

func urlencodedForm(t *testing.T, target Target) {
	var seen atomic.Value
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		seen.Store(call.Body)
		return created(ctx, call)
	})
	form := request{path: files, key: "a", contentType: "application/x-www-form-urlencoded", body: "item=lamp"}
	f.ran("first sight", f.send(form), http.StatusCreated)
	if body, _ := seen.Load().(string); !strings.Contains(body, "lamp") {
		f.Errorf("the handler read %q", body)
	}
	f.replays("the same again", f.send(form), http.StatusCreated)
	form.body = "item=vase"
	f.refuses("another form", f.send(form), http.StatusUnprocessableEntity, wire.KeyReused)
}

func undecodable(t *testing.T, target Target) {
	f := serve(t, target, func(ctx context.Context, call Call) Reply {
		if !json.Valid([]byte(call.Body)) { // behind a strict handler it did not come so far
			return Reply{Status: http.StatusBadRequest, Body: "no JSON"}
		}
		return created(ctx, call)
	})
	for range 2 {
		f.ran("no JSON", f.send(request{path: things, key: "a", body: `{"item":`}), http.StatusBadRequest)
	}
	f.ran("JSON with the same key", f.send(request{path: things, key: "a", body: lamp}), http.StatusCreated)
}

func principals(t *testing.T, target Target) {
	f := serve(t, target, created)
	pay := func(user string) answer {
		r := request{path: payments, key: "a", body: lamp}
		if user != "" {
			r.header = http.Header{"X-User": {user}}
		}
		return f.send(r)
	}
	f.refuses("nobody", pay(""), http.StatusUnauthorized, wire.Unauthenticated)
	f.refuses("who cannot be known", pay("unknowable"), http.StatusInternalServerError, wire.PrincipalFailed)
	f.refuses("who may not", pay("banned"), http.StatusForbidden, wire.Forbidden)
	f.ranTimes(0)
	f.ran("ann", pay("ann"), http.StatusCreated)
	f.ran("bob, with ann's key", pay("bob"), http.StatusCreated)
	f.replays("ann again", pay("ann"), http.StatusCreated)
	f.ranTimes(2)
}

// keyForms has keys in the forms that clients write them.
func keyForms(t *testing.T, target Target) {
	f := serve(t, target, created)
	w := f.dial()
	longest := strings.Repeat("k", 255)
	for _, c := range []struct {
		what         string
		first, again string // header lines with the same key
	}{
		{"a name in another case", "idempotency-KEY: a", "IDEMPOTENCY-key:a"},
		{"a comma between quotes", `Idempotency-Key: "b,1"`, `Idempotency-Key:   "b,1"  `},
		{"255 bytes", "Idempotency-Key: " + longest, `Idempotency-Key: "` + longest + `"`},
		{"spaces within", "Idempotency-Key: c d", `Idempotency-Key: "c d"`},
		{"SQL", "Idempotency-Key: '; DROP TABLE idempotency_keys; --", `Idempotency-Key: "'; DROP TABLE idempotency_keys; --"`},
	} {
		w.post(things, c.first)
		f.ran(c.what, w.answer(http.MethodPost), http.StatusCreated)
		w.post(things, c.again)
		f.replays(c.what+" again", w.answer(http.MethodPost), http.StatusCreated)
	}
	ran := f.runs.Load()
	for what, lines := range map[string][]string{
		"256 bytes":                {"Idempotency-Key: " + longest + "k"},
		"a comma":                  {"Idempotency-Key: a,b"},
		"UTF-8":                    {"Idempotency-Key: schl\u00fcssel"},
		"a byte that is not UTF-8": {"Idempotency-Key: a\xff"},
		"two cases of the name":    {"Idempotency-Key: a", "idempotency-key: a"},
		"an open quote":            {`Idempotency-Key: "a`},
	} {
		w.post(things, lines...)
		f.refuses(what, w.answer(http.MethodPost), http.StatusBadRequest, wire.InvalidKey)
	}
	f.ranTimes(ran)
}

// wireForms has requests that are not as net/http's client writes them.
func wireForms(t *testing.T, target Target) {
	f := serve(t, target, created)

	// A refusal leaves the connection as good as it was, whether its body was
	// read or not.
	w := f.dial()
	w.post(things)
	f.refuses("no key", w.answer(http.MethodPost), http.StatusBadRequest, wire.MissingKey)
	w.post(things, "Idempotency-Key: a")
	f.ran("on the same connection", w.answer(http.MethodPost), http.StatusCreated)
	w.write("POST "+things+" HTTP/1.1", "Host: things", "Idempotency-Key: a", "Content-Type: application/json", "Transfer-Encoding: chunked", "",
		"4", `{"it`, fmt.Sprintf("%x", len(lamp)-4), lamp[4:], "0", "", "")
	f.replays("chunked", w.answer(http.MethodPost), http.StatusCreated)
	w.post(f.URL+things, "Idempotency-Key: a")
	f.replays("with the whole URL", w.answer(http.MethodPost), http.StatusCreated)

	w = f.dial()
	large := strings.Repeat("x", 5<<10)
	w.write("POST "+files+" HTTP/1.1", "Host: things", "Idempotency-Key: a", "Content-Type: application/x-www-form-urlencoded", fmt.Sprintf("Content-Length: %d", len(large)), "", large)
	f.refuses("a large body", w.answer(http.MethodPost), http.StatusRequestEntityTooLarge, wire.RequestTooLarge)
	w.post(payments, "Idempotency-Key: a")
	f.refuses("nobody", w.answer(http.MethodPost), http.StatusUnauthorized, wire.Unauthenticated)
	w.post(things, "Idempotency-Key: a")
	f.replays("behind these", w.answer(http.MethodPost), http.StatusCreated)

	w = f.dial()
	w.write("POST "+things+" HTTP/1.1", "Host: things", "Idempotency-Key: b", "Content-Type: application/json", "Expect: 100-continue", fmt.Sprintf("Content-Length: %d", len(lamp)), "", "")
	if a := w.answer(http.MethodPost); a.StatusCode != http.StatusContinue {
		f.Errorf("to Expect came %d %s", a.StatusCode, a.body)
	}
	w.write(lamp)
	f.ran("what was expected", w.answer(http.MethodPost), http.StatusCreated)

	for i, check := range []func(string, answer, int){f.ran, f.replays} {
		w = f.dial()
		w.write("POST "+things+" HTTP/1.0", "Idempotency-Key: c", "Content-Type: application/json", fmt.Sprintf("Content-Length: %d", len(lamp)), "", lamp)
		a := w.answer(http.MethodPost)
		check(fmt.Sprintf("HTTP/1.0, request %d", i+1), a, http.StatusCreated)
		if a.body != lamp {
			f.Errorf("over HTTP/1.0 came %q", a.body)
		}
	}
	f.ranTimes(3)
}

// noRequestBody has requests without a body, which are the same however that is
// said.
func noRequestBody(t *testing.T, target Target) {
	f := serve(t, target, created)
	w := f.dial()
	for i, framing := range [][]string{{"Content-Length: 0", "", ""}, {"Transfer-Encoding: chunked", "", "0", "", ""}, {"Content-Length: 0", "", ""}} {
		w.write(append([]string{"POST " + files + " HTTP/1.1", "Host: things", "Idempotency-Key: a"}, framing...)...)
		if a := w.answer(http.MethodPost); i == 0 {
			f.ran("no body", a, http.StatusCreated)
		} else {
			f.replays(framing[0], a, http.StatusCreated)
		}
	}
	f.refuses("a body", f.send(aForm), http.StatusUnprocessableEntity, wire.KeyReused)
	f.ranTimes(1)
}

// cutShort has a client send half of a body and hang up.
func cutShort(t *testing.T, target Target) {
	f := serve(t, target, created)
	w := f.dial()
	w.write("POST "+things+" HTTP/1.1", "Host: things", "Idempotency-Key: a", "Content-Type: application/json", fmt.Sprintf("Content-Length: %d", len(lamp)), "", lamp[:5])
	w.Close()
	f.ran("the whole body", f.until("a free key", request{path: things, key: "a", body: lamp}, func(a answer) bool { return a.StatusCode != http.StatusConflict }), http.StatusCreated)
	f.ranTimes(1)
}

// paths compares the path as it was sent.
func paths(t *testing.T, target Target) {
	f := serve(t, target, created)
	pay := func(account string) answer {
		return f.send(request{path: "/accounts/" + account + "/payments", key: "a", body: lamp, header: http.Header{"X-User": {"ann"}}})
	}
	f.ran("an account", pay("a%20b"), http.StatusCreated)
	f.replays("the same account", pay("a%20b"), http.StatusCreated)
	for _, account := range []string{"%61%20b", "other"} {
		f.refuses("the account "+account, pay(account), http.StatusUnprocessableEntity, wire.KeyReused)
	}
	f.ranTimes(1)

	// Some routers take a trailing slash for nothing and some redirect. None
	// runs what is guarded without a key.
	if a := f.send(request{path: things + "/", body: lamp}); a.StatusCode < 300 {
		f.Errorf("a trailing slash without a key: %d %s", a.StatusCode, a.body)
	}
	f.ranTimes(1)
}

// large has bodies and answers of a mebibyte, which are the most by default.
func large(t *testing.T, target Target) {
	const most = 1 << 20
	body := func(size int) string { return `{"item":"` + strings.Repeat("x", size-len(`{"item":""}`)) + `"}` }
	f := serve(t, target, func(_ context.Context, call Call) Reply {
		return Reply{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: body(most)}
	})
	full := request{path: things, key: "a", body: body(most)}
	first, again := f.send(full), f.send(full)
	f.ran("a mebibyte", first, http.StatusCreated)
	f.replays("the same again", again, http.StatusCreated)
	if first.body != body(most) || again.body != first.body {
		f.Errorf("%d and %d bytes came, want %d", len(first.body), len(again.body), most)
	}
	full.body = full.body[:most-3] + `y"}`
	f.refuses("another byte at its end", f.send(full), http.StatusUnprocessableEntity, wire.KeyReused)
	f.refuses("a byte more", f.send(request{path: things, key: "b", body: body(most + 1)}), http.StatusRequestEntityTooLarge, wire.RequestTooLarge)
	f.ranTimes(1)
}

// notMixedUp has many requests at once, whose buffers routers use again.
func notMixedUp(t *testing.T, target Target) {
	f := serve(t, target, func(_ context.Context, call Call) Reply {
		return Reply{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}, "X-Body": {call.Body}}, Body: call.Body}
	})
	const clients = 50
	first := make([]answer, clients)
	each := func(do func(i int, r request)) {
		var group sync.WaitGroup
		for i := range clients {
			group.Go(func() {
				do(i, request{path: things, key: fmt.Sprint("key-", i), body: fmt.Sprintf(`{"item":"lamp %d"}`, i)})
			})
		}
		group.Wait()
	}
	each(func(i int, r request) {
		first[i] = f.send(r)
		f.ran(r.key, first[i], http.StatusCreated)
		if want := fmt.Sprintf("lamp %d\"", i); !strings.Contains(first[i].body, want) {
			f.Errorf("%s: the handler read %s, want %s", r.key, first[i].body, r.body)
		}
	})
	each(func(i int, r request) {
		again := f.send(r)
		f.replays(r.key, again, http.StatusCreated)
		if again.body != first[i].body || again.Header.Get("X-Body") != first[i].Header.Get("X-Body") {
			f.Errorf("%s: the replay is %q %q, want %q", r.key, again.Header, again.body, first[i].body)
		}
	})
	f.ranTimes(clients)
}
