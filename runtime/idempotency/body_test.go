package idempotency_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// A reader that is not one of a type known to net/http has no known length.
type reader struct{ io.Reader }

// jsonOf returns an array of objects whose members are in no order, of about size
// bytes.
func jsonOf(size int) []byte {
	b := append(make([]byte, 0, size+200), '[')
	for n := 0; len(b) < size; n++ {
		if n > 0 {
			b = append(b, ',', '\n')
		}
		b = fmt.Appendf(b, `{"quantity":%d,"item":"tea \"%d\"","price":{"currency":"EUR","amount":%d.50},"tags":["a","b",null]}`, n%7, n, n)
	}
	return append(b, ']')
}

// discarded is a writer that keeps nothing of a body.
type discarded struct {
	header http.Header
	status int
	size   int
}

func (d *discarded) Header() http.Header         { return d.header }
func (d *discarded) WriteHeader(status int)      { d.status = status }
func (d *discarded) Write(b []byte) (int, error) { d.size += len(b); return len(b), nil }

func multipartOf(content []byte) []byte {
	b := bytes.NewBuffer(make([]byte, 0, len(content)+1000))
	w := multipart.NewWriter(b)
	_ = w.SetBoundary("b")
	_ = w.WriteField("name", "tea")
	part, _ := w.CreateFormFile("file", "tea.jpg")
	_, _ = part.Write(content)
	_ = w.Close()
	return b.Bytes()
}

// BenchmarkFingerprint shows how fast requests are compared by their bodies, beside
// what it cannot be faster than: a hash of the same bytes, and another pass over
// JSON.
func BenchmarkFingerprint(b *testing.B) {
	document := jsonOf(1 << 20)
	raw := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for _, bench := range []struct {
		name, contentType string
		body              []byte
	}{
		{"json", "application/json", document},
		{"raw", "application/octet-stream", raw},
		{"multipart", "multipart/form-data; boundary=b", multipartOf(raw)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			p := idempotency.DefaultPolicy("POST /orders")
			p.MaxRequestBody = 2 << 20
			guard, err := idempotency.New(memorystore.New())
			if err != nil {
				b.Fatal(err)
			}
			idempotency.Register[*http.Request](guard, &p)
			w := &discarded{header: http.Header{}}
			body := bytes.NewReader(nil)
			r, err := http.NewRequest("POST", "/orders", reader{body})
			if err != nil {
				b.Fatal(err)
			}
			r.ContentLength = int64(len(bench.body))
			r.Header = http.Header{"Idempotency-Key": {"k"}, "Content-Type": {bench.contentType}}
			source := r.Body
			b.SetBytes(int64(len(bench.body)))
			b.ReportAllocs()
			for b.Loop() {
				body.Reset(bench.body)
				r.Body = source
				guard.Handle(&p, w, r, func(w http.ResponseWriter, _ *http.Request) {})
			}
		})
	}
	b.Run("floor/sha256", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			sha256.Sum256(raw)
		}
	})
	b.Run("floor/json.Compact", func(b *testing.B) {
		var out bytes.Buffer
		b.SetBytes(int64(len(document)))
		for b.Loop() {
			out.Reset()
			if err := json.Compact(&out, document); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("floor/json.Valid", func(b *testing.B) {
		b.SetBytes(int64(len(document)))
		for b.Loop() {
			if !json.Valid(document) {
				b.Fatal("not JSON")
			}
		}
	})
}
