package main

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// fingerprint replays requests with large bodies, which costs what their
// fingerprint costs, beside the hash function alone.
func fingerprint(b *bench, name string) (*contest, error) {
	const size = 256 << 10
	line := `{"account":"DE02120300000000202051","amount":250,"currency":"EUR","note":"für Röcke"},`
	array := "[" + strings.Repeat(line, size/len(line)) + "{}]"
	parts := "--b\r\nContent-Disposition: form-data; name=\"a\"; filename=\"a.txt\"\r\n\r\n" + array + "\r\n--b--\r\n"
	hashing := side{"SHA-256", func(d time.Duration) (sample, error) {
		body := []byte(array)
		s, err := b.processor(d, func(int) error {
			sha256.Sum256(body)
			return nil
		})
		return throughput(s, len(body)), err
	}}
	replaying := func(name, mediaType, body string) side {
		return side{name, func(d time.Duration) (sample, error) {
			g := newGuarded(memorystore.New(), idempotency.AtLeastOnce)
			bytes, key := []byte(body), uuid()
			post := func(int) error {
				resp, err := g.guard.Do(b.ctx, g.policy, &idempotency.Request{
					Method: http.MethodPost, Path: "/payments",
					Header: http.Header{"Idempotency-Key": {key}, "Content-Type": {mediaType}},
					Body:   func(int64) ([]byte, error) { return bytes, nil },
				}, pay)
				if err == nil && resp.Status != http.StatusCreated {
					err = fmt.Errorf("the answer is %d: %s", resp.Status, resp.Body)
				}
				return err
			}
			s, err := b.processor(d, post)
			return throughput(s, len(body)), err
		}}
	}
	return &contest{
		name: name,
		sides: []side{
			hashing,
			replaying("raw", "application/octet-stream", array),
			replaying("json", "application/json", array),
			replaying("multipart", `multipart/form-data; boundary=b`, parts),
		},
		figures: []figure{
			speed("raw", hashing.name, target{}),
			speed("json", hashing.name, target{}),
			speed("multipart", hashing.name, target{}),
		},
	}, nil
}

func throughput(s sample, size int) sample {
	s.per = map[string]float64{"MB/s": s.rate() * float64(size) / 1e6}
	return s
}
