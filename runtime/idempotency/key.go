package idempotency

import (
	"net/http"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// parseKey returns the key among the header fields, or the refusal. A key is
// sent raw or as a string of RFC 9651, section 3.3.3; both are the same key.
func (op *operation) parseKey(h http.Header) (string, *refusal) {
	values := h[op.header]
	if len(values) > 1 {
		return "", invalidKey("the header field occurs more than once")
	}
	if len(values) == 0 {
		return "", op.missingKey()
	}
	raw := strings.Trim(values[0], " \t")
	key, ok := raw, true
	if strings.HasPrefix(raw, `"`) {
		key, ok = unquote(raw)
	} else if strings.Contains(raw, ",") {
		return "", invalidKey("it holds a comma, as if two fields had been joined; put a key that has one in double quotes")
	}
	if !ok {
		return "", invalidKey("it begins with a double quote but is not a quoted string")
	}
	if strings.Trim(key, " \t") == "" {
		return "", op.missingKey()
	}
	for i := 0; i < len(key); i++ {
		if key[i] < 0x20 || key[i] > 0x7e {
			return "", invalidKey("it holds a byte that is not printable ASCII")
		}
	}
	switch {
	case len(key) < op.Key.MinLength:
		return "", invalidKey("it is too short")
	case len(key) > op.Key.MaxLength:
		return "", invalidKey("it is too long")
	case key == wire.NilUUID:
		return "", invalidKey("it is the nil UUID, which clients send that did not set a key")
	case op.Key.Format == FormatUUID && !isUUID(key):
		return "", invalidKey("it is not a UUID")
	case op.pattern != nil && !op.pattern.MatchString(key):
		return "", invalidKey("it does not match the pattern that the API declares")
	case op.Key.Format == FormatUUID:
		key = strings.ToLower(key)
	}
	return key, nil
}

func (op *operation) missingKey() *refusal {
	return &refusal{name: wire.MissingKey, status: int(op.OnMissing), detail: "This operation needs the header field " + op.Header + "."}
}

func invalidKey(why string) *refusal {
	return &refusal{name: wire.InvalidKey, status: http.StatusBadRequest, detail: "The idempotency key is not valid: " + why + "."}
}

// unquote parses a string of RFC 9651 that is the whole of s.
func unquote(s string) (string, bool) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), i == len(s)-1
		case '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", false
			}
			b.WriteByte(s[i])
		default:
			b.WriteByte(s[i])
		}
	}
	return "", false
}

func isUUID(s string) bool {
	if len(s) != len(wire.NilUUID) {
		return false
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case wire.NilUUID[i] == '-':
			if c != '-' {
				return false
			}
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f', c >= 'A' && c <= 'F':
		default:
			return false
		}
	}
	return true
}
