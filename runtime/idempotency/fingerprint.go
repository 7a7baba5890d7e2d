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
	"sync"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A stored fingerprint is a version byte, the length of the secret's id, the id
// and the digest. Another version of this package, or another secret, shows in
// the first bytes, so that what cannot be compared is not taken for different.
const fingerprintVersion = 1

// fingerprint returns the digest as it is stored under a secret, or under none.
func fingerprint(digest [32]byte, secret *Secret) []byte {
	if secret != nil {
		return secretFingerprint(digest, secret)
	}
	return append(append(make([]byte, 0, 2+32), fingerprintVersion, 0), digest[:]...)
}

func secretFingerprint(digest [32]byte, secret *Secret) []byte {
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
	var secret *Secret
	if id := stored[2 : 2+int(stored[1])]; len(id) > 0 {
		i := slices.IndexFunc(e.guard.secrets, func(s Secret) bool { return s.ID == string(id) })
		if i < 0 {
			return false, false
		}
		secret = &e.guard.secrets[i]
	}
	return hmac.Equal(stored, fingerprint(e.digest, secret)), true
}

// digestRequest sets digest to that of what is compared between two requests
// that carry the same key, or returns the refusal of a body that cannot be read.
func (op *operation) digestRequest(digest *[32]byte, req *Request) *refusal {
	d := digesters.Get().(*digester)
	defer d.free()
	d.text(req.Method)
	d.text(req.Path)
	if op.Fingerprint.Query {
		d.text(canonicalQuery(req.RawQuery))
	}
	if op.Fingerprint.MediaType {
		d.text(canonicalMediaType(first(req.Header, "Content-Type")))
	}
	for _, name := range op.headers {
		values := req.Header[name]
		d.number(len(values))
		for _, v := range values {
			d.text(v)
		}
	}
	if op.readsBody {
		body, err := req.readBody(op.MaxRequestBody)
		if err != nil {
			return unreadable(err)
		}
		d.body(op.Fingerprint.Body, first(req.Header, "Content-Type"), body, op.ignore)
	} else {
		req.limitBody(op.MaxRequestBody)
	}
	d.sum(digest)
	return nil
}

func unreadable(err error) *refusal {
	var tooLarge *http.MaxBytesError
	if errors.Is(err, ErrBodyTooLarge) || errors.As(err, &tooLarge) {
		return &refusal{name: wire.RequestTooLarge, status: http.StatusRequestEntityTooLarge, detail: "The request body is larger than this operation accepts."}
	}
	return &refusal{name: wire.RequestUnreadable, status: http.StatusBadRequest, detail: "The request body ended before it was complete.", err: err}
}

// A digester hashes fields, each behind its length. It collects small ones.
type digester struct {
	hash.Hash
	pending []byte
	json    jsonSpace
}

var digesters = sync.Pool{New: func() any { return newDigester(sha256.New()) }}

func newDigester(h hash.Hash) *digester {
	return &digester{Hash: h, pending: make([]byte, 0, 2048)}
}

// free makes the digester another request's.
func (d *digester) free() {
	d.Reset()
	d.pending = d.pending[:0]
	d.json.shrink()
	digesters.Put(d)
}

func (d *digester) sum(digest *[32]byte) {
	d.flush()
	d.Sum(digest[:0])
}

func (d *digester) flush() {
	d.Write(d.pending)
	d.pending = d.pending[:0]
}

// add hashes b, which it does not keep.
func (d *digester) add(b []byte) {
	if len(b) > cap(d.pending)-len(d.pending) {
		d.flush()
		if len(b) > cap(d.pending) {
			d.Write(b)
			return
		}
	}
	d.pending = append(d.pending, b...)
}

func (d *digester) addByte(b byte) {
	if len(d.pending) == cap(d.pending) {
		d.flush()
	}
	d.pending = append(d.pending, b)
}

func (d *digester) number(n int) {
	if cap(d.pending)-len(d.pending) < binary.MaxVarintLen64 {
		d.flush()
	}
	d.pending = binary.AppendUvarint(d.pending, uint64(n))
}

func (d *digester) text(s string) {
	d.number(len(s))
	for len(s) > 0 {
		if len(d.pending) == cap(d.pending) {
			d.flush()
		}
		n := min(len(s), cap(d.pending)-len(d.pending))
		d.pending = append(d.pending, s[:n]...)
		s = s[n:]
	}
}

func (d *digester) bytes(b []byte) {
	d.number(len(b))
	d.add(b)
}

// body adds the body as kind says. A body that is not of the kind it claims to
// be is added byte for byte.
func (d *digester) body(kind BodyKind, contentType string, body []byte, ignore *pointerTree) {
	mediaType, params, err := parseMediaType(contentType)
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
		if d.canonicalJSON(body, ignore) {
			return
		}
	case BodyMultipart:
		if parts, ok := canonicalParts(body, params["boundary"]); ok {
			d.text("multipart")
			d.bytes(parts)
			return
		}
	}
	d.text("raw")
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
	mediaType, params, err := parseMediaType(contentType)
	if err != nil || len(params) == 0 && mediaType == contentType {
		return contentType
	}
	delete(params, "boundary")
	if charset, ok := params["charset"]; ok {
		params["charset"] = strings.ToLower(charset)
	}
	return mime.FormatMediaType(mediaType, params)
}

// parseMediaType is [mime.ParseMediaType], and is quick with what most requests
// say: a type in lower case without parameters.
func parseMediaType(contentType string) (mediaType string, params map[string]string, err error) {
	slashes := 0
	for i := 0; i < len(contentType); i++ {
		switch b := contentType[i]; {
		case b >= 'a' && b <= 'z', b >= '0' && b <= '9', b == '+', b == '-', b == '.':
		case b == '/' && i > 0 && i < len(contentType)-1 && slashes == 0:
			slashes++
		default:
			return mime.ParseMediaType(contentType)
		}
	}
	if slashes == 0 {
		return mime.ParseMediaType(contentType)
	}
	return contentType, nil, nil
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
