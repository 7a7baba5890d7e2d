package idempotentclient

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// ErrNotSent is in the chain of the error of a call that failed before its first
// attempt: nothing was sent, and a key that was made for it is as good as new. Of
// a key that the caller gave, to resume a call, it says nothing about earlier
// calls. An attempt that failed may have been sent, whatever its error says.
var ErrNotSent = errors.New("idempotentclient: the request was not sent")

func notSent(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrNotSent, fmt.Errorf(format, args...))
}

type contextKey struct{}

// A givenKey is a key in a context, and the first target it was used for.
type givenKey struct {
	key    string
	target atomic.Pointer[string]
}

// WithKey returns a context whose call carries key. Use it to resume, perhaps in
// another process, a call whose answer was lost.
//
// A key stands for one logical call, so the context serves one: calling the same
// method and URL again with it is that call resumed, which the server answers
// with the first outcome, or refuses if the body differs. A call of any other
// method or URL with it fails with [ErrNotSent]. Give each call a context of its
// own. Operations without a key ignore it.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, contextKey{}, &givenKey{key: key})
}

// bind reports whether the key may be used for target.
func (k *givenKey) bind(target string) bool {
	return k.target.CompareAndSwap(nil, &target) || *k.target.Load() == target
}

// absent reports whether a value of the header field, quoted or not, stands for
// no key.
func absent(key string) bool {
	key = strings.Trim(key, " \t\"")
	return key == "" || key == wire.NilUUID
}

// checkKey says why a server would never accept key.
func checkKey(key string) error {
	if absent(key) {
		return notSent("the idempotency key is blank or the nil UUID; give another, or none to have one made")
	}
	if strings.TrimSpace(key) != key {
		return notSent("the idempotency key %q begins or ends with a space, which does not arrive; remove it", key)
	}
	for _, b := range []byte(key) {
		if b < ' ' || b > '~' {
			return notSent("the idempotency key has the byte %#x; use printable ASCII only", b)
		}
	}
	return nil
}

// fieldValues returns the values of a header field, however its name is spelt
// in the map.
func fieldValues(h http.Header, name string) []string {
	var values []string
	for k, v := range h {
		if strings.EqualFold(k, name) {
			values = append(values, v...)
		}
	}
	return values
}

// setField makes value the only value of a header field, however its name was
// spelt in the map.
func setField(h http.Header, name, value string) {
	removeField(h, name)
	h.Set(name, value)
}

func removeField(h http.Header, name string) {
	maps.DeleteFunc(h, func(k string, _ []string) bool { return strings.EqualFold(k, name) })
}

// UUIDv4 returns a random UUID (RFC 9562), the default key.
func UUIDv4(context.Context) (string, error) {
	var u [16]byte
	rand.Read(u[:])
	return formatUUID(u, 4), nil
}

// UUIDv7 returns a UUID that begins with the time in milliseconds (RFC 9562).
// Servers that keep keys in an ordered index write less for such keys. For
// [WithGenerator].
func UUIDv7(context.Context) (string, error) {
	var u [16]byte
	rand.Read(u[6:])
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(time.Now().UnixMilli()))
	copy(u[:6], ms[2:])
	return formatUUID(u, 7), nil
}

func formatUUID(u [16]byte, version byte) string {
	u[6] = u[6]&0x0f | version<<4
	u[8] = u[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
