package idempotentclient

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A Code names what a server's guard has to say about a key: what follows the
// last '/', '#' or ':' of a problem type.
type Code string

// The codes that [Check] reports.
const (
	MissingKey       Code = wire.MissingKey       // the operation wants a key
	InvalidKey       Code = wire.InvalidKey       // the server does not accept this key
	KeyReused        Code = wire.KeyReused        // the key was used for another request
	InFlight         Code = wire.InFlight         // the first request with the key is still under way
	NotReplayable    Code = wire.NotReplayable    // the call took effect, but its answer was not kept
	StoreUnavailable Code = wire.StoreUnavailable // nothing happened: the server cannot check keys now
	OutcomeUnknown   Code = wire.OutcomeUnknown   // the call may have taken effect: with status 503 the same key may tell later, else look for the effect before another key is used
)

func (c Code) known() bool {
	switch c {
	case MissingKey, InvalidKey, KeyReused, InFlight, NotReplayable, StoreUnavailable, OutcomeUnknown:
		return true
	}
	return false
}

// A Problem is an answer by which a server's guard refused a call.
type Problem struct {
	Code   Code
	Status int
	Type   string
	Title  string
	Detail string
	Key    string // the key that was used
}

func (p *Problem) Error() string {
	text := p.Detail
	if text == "" {
		text = p.Title
	}
	if text != "" {
		text = ": " + text
	}
	return fmt.Sprintf("%s (status %d, key %q)%s", p.Code, p.Status, p.Key, text)
}

// Check returns a [*Problem] if resp, an answer of a [Call], is a refusal by the
// server's guard, and nil if it is the operation's own answer, whatever its
// status. It does not touch the body, and works after the body was read.
func Check(resp *http.Response) error {
	if e := exchangeOf(resp); e != nil && e.problem != nil && e.problem.Code.known() {
		return e.problem
	}
	return nil
}

// Replayed reports whether resp, an answer of a [Call], is the recorded answer
// of an earlier request with the same key.
func Replayed(resp *http.Response) bool {
	e := exchangeOf(resp)
	return e != nil && e.replayed
}

// KeyOf returns the key that was sent for resp, an answer of a [Call]; empty if
// none was.
func KeyOf(resp *http.Response) string {
	if e := exchangeOf(resp); e != nil {
		return e.key
	}
	return ""
}

// An Error is why a call has no answer, or not the whole one. The request may have
// taken effect: only the same key makes it safe to call again.
type Error struct {
	Key      string   // the key that was used; empty for a natural operation
	Attempts int      // how many times it was tried
	Err      error    // the last attempt's error, or the context's
	InFlight *Problem // the last answer, if it was that the first request with the key is under way
}

func (e *Error) Error() string {
	text := fmt.Sprintf("no answer after attempt %d", e.Attempts)
	if e.Key != "" {
		text += fmt.Sprintf(" with idempotency key %q", e.Key)
	}
	if e.InFlight != nil {
		text += ", of which the last answer was that it is in flight"
	}
	return fmt.Sprintf("%s: %v", text, e.Err)
}

// Unwrap returns e.Err and, unless it is nil, e.InFlight.
func (e *Error) Unwrap() []error {
	if e.InFlight == nil {
		return []error{e.Err}
	}
	return []error{e.Err, e.InFlight}
}

// An exchange is what is remembered of the attempt that a response answers. It
// travels in the context of the response's request.
type exchange struct {
	key      string
	replayed bool
	problem  *Problem
	over     atomic.Bool // the client has answered or failed

	// What the call had spent before, if this is its last.
	begun   time.Time
	counted int
}

// inFlight returns the problem of an answer that says that the first request
// with the key is still under way, and nil for any other.
func (e *exchange) inFlight() *Problem {
	if e.key == "" || e.replayed || e.problem == nil || e.problem.Code != InFlight || e.problem.Status != http.StatusConflict {
		return nil
	}
	return e.problem
}

type exchangeKey struct{}

func exchangeOf(resp *http.Response) *exchange {
	if resp == nil || resp.Request == nil {
		return nil
	}
	e, _ := resp.Request.Context().Value(exchangeKey{}).(*exchange)
	return e
}

// note remembers what resp, whose body begins with head, says of the key.
func (e *exchange) note(resp *http.Response, marker string, head []byte) {
	if marker != "" {
		switch strings.ToLower(resp.Header.Get(marker)) {
		case "", "false", "?0":
		default:
			e.replayed = true
		}
	}
	// Not a struct, for which the case of the names would not count.
	var members map[string]any
	if resp.StatusCode < 400 || !isJSON(resp.Header) || json.Unmarshal(head, &members) != nil {
		return
	}
	text := func(name string) string { text, _ := members[name].(string); return text }
	kind := text("type")
	if kind == "" || kind == "about:blank" {
		return
	}
	e.problem = &Problem{
		Code:   Code(kind[strings.LastIndexAny(kind, "/#:")+1:]),
		Status: resp.StatusCode, Type: kind, Title: text("title"), Detail: text("detail"), Key: e.key,
	}
}
