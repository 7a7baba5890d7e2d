package policy

import (
	"fmt"
	"strings"
	"time"
)

// A Value is the value of one field as a document writes it: a bool, an int, a
// string or a []string, which is never nil.
type Value struct {
	Field string // dotted
	Value any
}

// Values returns the values that are in force, in the order of the
// documentation: one word in place of those of a group that is off, and of a
// natural operation only what its client needs.
func (o *Operation) Values() []Value {
	s, c := &o.Server, &o.Client
	values := []Value{{"natural", o.Natural}}
	add := func(more ...Value) { values = append(values, more...) }
	if !o.Natural {
		add(
			Value{"header", s.Header},
			Value{"onMissing", statusOr(s.OnMissing, "run")},
			Value{"key.format", s.KeyFormat},
			Value{"key.minLength", s.KeyMinLength},
			Value{"key.maxLength", s.KeyMaxLength},
		)
		if s.KeyPattern != "" {
			add(Value{"key.pattern", s.KeyPattern})
		}
		add(
			Value{"scope", s.Scope},
			Value{"ttl", durationText(s.TTL)},
			Value{"fingerprint.body", s.FingerprintBody},
			Value{"fingerprint.query", s.FingerprintQuery},
			Value{"fingerprint.mediaType", s.FingerprintMediaType},
			Value{"fingerprint.headers", append([]string{}, s.FingerprintHeaders...)},
			Value{"fingerprint.ignore", append([]string{}, s.FingerprintIgnore...)},
			Value{"onMismatch", statusOr(s.OnMismatch, "replay")},
			Value{"waitFor", durationText(s.WaitFor)},
			Value{"record", s.Record},
		)
		if s.ReplayNone {
			add(Value{"replay", "none"})
		} else {
			add(Value{"replay.status", statusOr(s.ReplayStatus, "original")}, Value{"replay.marker", s.Marker})
		}
	}
	switch {
	case c.Disabled:
		add(Value{"client", false})
	case c.NoRetry && c.MaxAttempts != 1:
		add(Value{"client.retry", false})
	default:
		add(
			Value{"client.retry.maxAttempts", c.MaxAttempts},
			Value{"client.retry.base", durationText(c.Base)},
			Value{"client.retry.max", durationText(c.Max)},
			Value{"client.retry.maxElapsed", durationText(c.MaxElapsed)},
		)
	}
	if !o.Natural {
		add(
			Value{"server.guarantee", s.Guarantee},
			Value{"server.lease", durationText(s.Lease)},
			Value{"server.timeout", durationText(s.Timeout)},
			Value{"server.maxRequestBody", sizeText(s.MaxRequestBody)},
			Value{"server.maxRecordedBody", sizeText(s.MaxRecordedBody)},
		)
	}
	return values
}

func statusOr(status int, zero string) any {
	if status == 0 {
		return zero
	}
	return status
}

// durationText writes d as the extension reads it, in days from two whole ones.
func durationText(d time.Duration) string {
	const day = 24 * time.Hour
	if d == 0 {
		return "0s"
	}
	if d >= 2*day && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	var text strings.Builder
	for _, unit := range []string{"h", "m", "s", "ms"} {
		if n := d / durationUnit[unit]; n > 0 {
			fmt.Fprintf(&text, "%d%s", n, unit)
			d -= n * durationUnit[unit]
		}
	}
	return text.String()
}

// sizeText writes a number of bytes as the extension reads it.
func sizeText(bytes int64) string {
	for _, unit := range []string{"GiB", "MiB", "KiB"} {
		if bytes%sizeUnit[unit] == 0 {
			return fmt.Sprintf("%d%s", bytes/sizeUnit[unit], unit)
		}
	}
	return fmt.Sprintf("%dB", bytes)
}
