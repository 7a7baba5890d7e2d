package idempotency

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A stored fingerprint is a version byte, the length of the secret's id, the id
// and the digest. Another version of this package, or another secret, shows in
// the first bytes, so that what cannot be compared is not taken for different.
const fingerprintVersion = 1

// fingerprint returns the digest as it is stored under a secret, or under none.
func fingerprint(digest [32]byte, secret *Secret) []byte {
	if secret == nil {
		return append([]byte{fingerprintVersion, 0}, digest[:]...)
	}
	mac := hmac.New(sha256.New, secret.Key)
	mac.Write(digest[:])
	return mac.Sum(append([]byte{fingerprintVersion, byte(len(secret.ID))}, secret.ID...))
}

// sameRequest compares a stored fingerprint with this request, under the secret
// that the stored one names. It is not known when that secret is gone, or when
// another version of this package wrote it.
func (e *execution) sameRequest(stored []byte) (same, known bool) {
	if len(stored) < 2 || stored[0] != fingerprintVersion || len(stored) < 2+int(stored[1]) {
		return false, false
	}
	id := string(stored[2 : 2+stored[1]])
	if id == "" {
		return bytes.Equal(stored, fingerprint(e.digest, nil)), true
	}
	for i := range e.guard.secrets {
		if secret := &e.guard.secrets[i]; secret.ID == id {
			return hmac.Equal(stored, fingerprint(e.digest, secret)), true
		}
	}
	return false, false
}

// digestRequest returns the digest of what is compared between two requests that
// carry the same key, or the refusal of a body that cannot be read.
func (op *operation) digestRequest(req *Request) (digest [32]byte, refused *refusal) {
	d := digester{sha256.New()}
	d.field(req.Method)
	d.field(req.Path)
	if op.Fingerprint.Query {
		d.field(canonicalQuery(req.RawQuery))
	}
	if op.Fingerprint.MediaType {
		d.field(canonicalMediaType(req.Header.Get("Content-Type")))
	}
	for _, name := range op.headers {
		values := req.Header[name]
		d.number(len(values))
		for _, v := range values {
			d.field(v)
		}
	}
	if op.readsBody {
		body, err := req.readBody(op.MaxRequestBody)
		if err != nil {
			return digest, unreadable(err)
		}
		d.body(op.Fingerprint.Body, req.Header.Get("Content-Type"), body, op.ignore)
	} else if req.limitBody != nil {
		req.limitBody(op.MaxRequestBody)
	}
	return [32]byte(d.Sum(nil)), nil
}

func unreadable(err error) *refusal {
	var tooLarge *http.MaxBytesError
	if errors.Is(err, ErrBodyTooLarge) || errors.As(err, &tooLarge) {
		return &refusal{name: wire.RequestTooLarge, status: http.StatusRequestEntityTooLarge, detail: "The request body is larger than this operation accepts."}
	}
	return &refusal{name: wire.RequestUnreadable, status: http.StatusBadRequest, detail: "The request body ended before it was complete.", err: err}
}

type digester struct{ hash.Hash }

func (d digester) field(s string)  { d.Write(appendField(nil, s)) }
func (d digester) number(n int)    { d.Write(binary.AppendUvarint(nil, uint64(n))) }
func (d digester) bytes(b []byte)  { d.Write(appendField(nil, b)) }
func (d digester) tag(kind string) { d.field(kind) }

// body adds the body as kind says. A body that is not of the kind it claims to
// be is added byte for byte.
func (d digester) body(kind BodyKind, contentType string, body []byte, ignore *pointerTree) {
	mediaType, params, err := mime.ParseMediaType(contentType)
	if kind == BodyAuto {
		kind = BodyRaw
		switch {
		case err != nil:
		case mediaType == "application/json", strings.HasSuffix(mediaType, "+json"):
			kind = BodyJSON
		case strings.HasPrefix(mediaType, "multipart/"):
			kind = BodyMultipart
		}
	}
	switch kind {
	case BodyJSON:
		if canonical, ok := canonicalJSON(body, ignore); ok {
			d.tag("json")
			d.bytes(canonical)
			return
		}
	case BodyMultipart:
		if parts, ok := canonicalParts(body, params["boundary"]); ok {
			d.tag("multipart")
			d.bytes(parts)
			return
		}
	}
	d.tag("raw")
	d.bytes(body)
}

// canonicalQuery sorts the pairs of a query by name, keeps the order of equal
// names, and compares escaped by what they stand for.
func canonicalQuery(raw string) string {
	if raw == "" {
		return ""
	}
	type pair struct{ name, value string }
	var pairs []pair
	var broken error
	unescape := func(s string) string {
		u, err := url.QueryUnescape(s)
		broken = errors.Join(broken, err)
		return u
	}
	for part := range strings.SplitSeq(raw, "&") {
		if part == "" {
			continue
		}
		name, value, _ := strings.Cut(part, "=")
		pairs = append(pairs, pair{unescape(name), unescape(value)})
	}
	slices.SortStableFunc(pairs, func(a, b pair) int { return strings.Compare(a.name, b.name) })
	if broken != nil { // handlers make of it what they like
		return "raw " + raw
	}
	b := []byte("pairs ")
	for _, p := range pairs {
		b = appendField(appendField(b, p.name), p.value)
	}
	return string(b)
}

// canonicalMediaType lowers what is case-insensitive and sorts the parameters.
// The boundary of a multipart body is not part of what it says.
func canonicalMediaType(contentType string) string {
	mediaType, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return contentType
	}
	delete(params, "boundary")
	if charset, ok := params["charset"]; ok {
		params["charset"] = strings.ToLower(charset)
	}
	return mime.FormatMediaType(mediaType, params)
}

// canonicalParts sorts the parts by name, keeping the order of equal names, as
// canonicalQuery does: fasthttp parses a form before anybody sees it, and does
// not keep the order of names.
func canonicalParts(body []byte, boundary string) ([]byte, bool) {
	if boundary == "" {
		return nil, false
	}
	type part struct {
		name  string
		bytes []byte
	}
	var parts []part
	r := multipart.NewReader(bytes.NewReader(body), boundary)
	for {
		p, err := r.NextRawPart()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, false
		}
		content := sha256.New()
		if _, err := io.Copy(content, p); err != nil {
			return nil, false
		}
		var b []byte
		for _, s := range []string{p.FormName(), p.FileName(), canonicalMediaType(p.Header.Get("Content-Type")), p.Header.Get("Content-Transfer-Encoding"), p.Header.Get("Content-Id")} {
			b = appendField(b, s)
		}
		parts = append(parts, part{p.FormName(), content.Sum(b)})
	}
	slices.SortStableFunc(parts, func(a, b part) int { return strings.Compare(a.name, b.name) })
	var b []byte
	for _, p := range parts {
		b = append(b, p.bytes...)
	}
	return b, true
}
