package policy

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// A parser reads the value of the field name from n, or rejects it.
type parser[T any] func(r *resolver, name string, n *document.Node) (T, bool)

func boolean(r *resolver, name string, n *document.Node) (bool, bool) {
	if n.Kind != document.Bool {
		r.mustBe(name, n, "true or false")
		return false, false
	}
	return n.Value == "true", true
}

var wholeNumber = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)

func positive(r *resolver, name string, n *document.Node) (int, bool) {
	if n.Kind == document.Number && wholeNumber.MatchString(n.Value) {
		if v, err := strconv.ParseInt(n.Value, 10, 32); err == nil && v > 0 {
			return int(v), true
		}
	}
	r.mustBe(name, n, "a whole number of at least 1, in decimal digits")
	return 0, false
}

// An option is one of the values that a field may have.
type option[T any] struct {
	kind  document.Kind
	text  string
	value T
}

func word[T any](text string, value T) option[T] { return option[T]{document.String, text, value} }
func status(code int) option[int] {
	return option[int]{document.Number, strconv.Itoa(code), code}
}

func choice[T any](options ...option[T]) parser[T] {
	texts := make([]string, len(options))
	for i, o := range options {
		texts[i] = o.text
	}
	return func(r *resolver, name string, n *document.Node) (T, bool) {
		for _, o := range options {
			if n.Kind == o.kind && n.Value == o.text {
				return o.value, true
			}
		}
		hint := ""
		if i := slices.Index(texts, n.Value); i >= 0 && n.Kind == document.String {
			hint = "; write it without quotes"
		} else if n.Kind == document.String {
			hint = document.DidYouMean(n.Value, texts)
		}
		r.mustBe(name, n, document.OneOf(texts), hint)
		return *new(T), false
	}
}

func words(texts ...string) parser[string] {
	options := make([]option[string], len(texts))
	for i, text := range texts {
		options[i] = word(text, text)
	}
	return choice(options...)
}

var (
	durationForm = regexp.MustCompile(`^([0-9]+(ms|s|m|h|d))+$`)
	durationPart = regexp.MustCompile(`([0-9]+)([a-z]+)`)
	durationUnit = map[string]time.Duration{
		"ms": time.Millisecond, "s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour,
	}
)

func duration(least time.Duration) parser[time.Duration] {
	return func(r *resolver, name string, n *document.Node) (time.Duration, bool) {
		if n.Kind != document.String || !durationForm.MatchString(n.Value) {
			r.mustBe(name, n, "a duration with its units (ms, s, m, h, d), such as 24h or 1m30s")
			return 0, false
		}
		var total time.Duration
		for _, part := range durationPart.FindAllStringSubmatch(n.Value, -1) {
			unit := durationUnit[part[2]]
			count, err := strconv.ParseInt(part[1], 10, 64)
			if err != nil || count > int64((math.MaxInt64-total)/unit) {
				r.mustBe(name, n, "a duration of at most 106751d")
				return 0, false
			}
			total += time.Duration(count) * unit
		}
		if total < least {
			what := "longer than 0s"
			if least > 1 {
				what = "at least " + durationText(least)
			}
			r.mustBe(name, n, what)
			return 0, false
		}
		return total, true
	}
}

var (
	sizeForm = regexp.MustCompile(`^([0-9]+)(B|KiB|MiB|GiB)$`)
	sizeUnit = map[string]int64{"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
)

func size(r *resolver, name string, n *document.Node) (int64, bool) {
	if n.Kind == document.String {
		if m := sizeForm.FindStringSubmatch(n.Value); m != nil {
			count, err := strconv.ParseInt(m[1], 10, 64)
			if err == nil && count > 0 && count <= math.MaxInt64/sizeUnit[m[2]] {
				return count * sizeUnit[m[2]], true
			}
			r.mustBe(name, n, "larger than 0B and less than 8589934592GiB")
			return 0, false
		}
	}
	r.mustBe(name, n, "a size with its unit (B, KiB, MiB, GiB), such as 1MiB")
	return 0, false
}

var recordedStatus = regexp.MustCompile(`^[45][0-9][0-9]$`)

func recorded(r *resolver, name string, n *document.Node) (string, bool) {
	switch {
	case n.Kind == document.String && (n.Value == "4XX" || n.Value == "5XX"):
		return n.Value, true
	case (n.Kind == document.String || n.Kind == document.Number) && recordedStatus.MatchString(n.Value):
		return n.Value, true
	}
	r.mustBe(name, n, "4XX, 5XX or a status from 400 to 599 (2xx and 3xx always are recorded)")
	return "", false
}

func jsonPointer(r *resolver, name string, n *document.Node) (string, bool) {
	escapes := strings.NewReplacer("~0", "", "~1", "")
	if n.Kind == document.String && strings.HasPrefix(n.Value, "/") && !strings.Contains(escapes.Replace(n.Value), "~") {
		return n.Value, true
	}
	r.mustBe(name, n, "a JSON pointer to a member of the body, such as /meta/sentAt (RFC 6901: ~ is written ~0, and / within a name ~1)")
	return "", false
}

var (
	headerToken = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$") // RFC 9110, 5.6.2
	// hopByHop are the fields that end at the next proxy (RFC 9110, 7.6.1), and
	// Host, which net/http takes out of a request's header.
	hopByHop = []string{
		"connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
		"te", "trailer", "transfer-encoding", "upgrade",
	}
	// perAttempt are the fields that a client, or what is between it and the
	// server, sets anew when it sends a request again.
	perAttempt = []string{
		"b3", "baggage", "date", "request-id", "traceparent", "tracestate", "x-amzn-trace-id", "x-b3-parentspanid",
		"x-b3-sampled", "x-b3-spanid", "x-b3-traceid", "x-cloud-trace-context", "x-correlation-id", "x-request-id",
		"x-request-start",
	}
	// A key's field is none either that a browser never sends for a script, and
	// drops without a word: the forbidden request-headers of the Fetch standard
	// (https://fetch.spec.whatwg.org/#forbidden-request-header).
	requestHeader = header(append(hopByHop,
		"accept-charset", "accept-encoding", "authorization", "cookie", "cookie2", "date", "dnt", "expect", "origin",
		"referer", "retry-after", "set-cookie", "traceparent", "tracestate", "via",
	), "access-control-request-", "content-", "proxy-", "sec-")
	responseHeader = header(append(hopByHop, "set-cookie", "date", "retry-after"), "content-")
	endToEndHeader = header(hopByHop)
)

func comparedHeader(r *resolver, name string, n *document.Node) (string, bool) {
	if slices.Contains(perAttempt, strings.ToLower(n.Value)) {
		r.reject(n.Pos, "%s lists %s, which differs with each attempt, so that a retry would be taken for another request; remove it", r.full(name), n.Value)
		return "", false
	}
	return endToEndHeader(r, name, n)
}

// header parses the name of a header field that is not one of those forbidden
// and begins with none of the prefixes.
func header(forbidden []string, prefixes ...string) parser[string] {
	forbidden = slices.Clip(forbidden)
	return func(r *resolver, name string, n *document.Node) (string, bool) {
		if n.Kind != document.String || !headerToken.MatchString(n.Value) {
			r.mustBe(name, n, "the name of a header field, without spaces or a colon")
			return "", false
		}
		lower := strings.ToLower(n.Value)
		begins := func(prefix string) bool { return strings.HasPrefix(lower, prefix) }
		if slices.Contains(forbidden, lower) || slices.ContainsFunc(prefixes, begins) {
			r.reject(n.Pos, "%s cannot be %s, which has a meaning of its own in HTTP; write another header field", r.full(name), n.Value)
			return "", false
		}
		return n.Value, true
	}
}

func verbatim(s string) string { return s }

// list parses a list whose items differ in what identity makes of them.
func list(parse parser[string], identity func(string) string) parser[[]string] {
	return func(r *resolver, name string, n *document.Node) ([]string, bool) {
		if n.Kind != document.List {
			r.mustBe(name, n, "a list, such as [] or [a, b]")
			return nil, false
		}
		values := []string{}
		seen := make(map[string]bool)
		ok := true
		for _, item := range n.Items {
			v, itemOK := parse(r, name, item)
			if itemOK && seen[identity(v)] {
				r.reject(item.Pos, "%s lists %s twice; remove one of them", r.full(name), v)
				itemOK = false
			}
			ok = ok && itemOK
			seen[identity(v)] = true
			values = append(values, v)
		}
		return values, ok
	}
}
