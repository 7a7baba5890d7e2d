package idempotentclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A Doer sends requests; [http.Client] is one. What it does, and the body of its
// answer, must end with the request's context.
type Doer interface {
	Do(*http.Request) (*http.Response, error)
}

// A Call is one logical call: one key, one body, any number of attempts. It is
// for one goroutine.
type Call struct {
	config *Config
	op     *Operation
	req    *http.Request
	body   io.ReadCloser // as it was when the call started

	key   string
	given bool // by the caller, so that no editor may change it
	err   error
	hop   *exchange // the call's last one, if the call goes on behind a redirect
}

// Start begins a call of op and attaches its key to req, before request editors
// run on req. What is wrong with the key is reported by [Call.Do].
func (c *Config) Start(op *Operation, req *http.Request) *Call {
	call := &Call{config: c, op: op, req: req, body: req.Body}
	if op.Natural {
		// Parameters that must be given have the nil UUID where they were not.
		if values := fieldValues(req.Header, call.header()); len(slices.DeleteFunc(values, absent)) == 0 {
			removeField(req.Header, call.header())
		}
		return call
	}
	ctx := req.Context()
	if given, ok := ctx.Value(contextKey{}).(*givenKey); ok {
		call.key, call.given = given.key, true
		if !given.bind(req.Method + " " + req.URL.String()) {
			call.err = notSent("the key in the context was used for another method or URL; give each call its own with WithKey")
			return call
		}
	} else if values := slices.DeleteFunc(fieldValues(req.Header, call.header()), absent); len(values) > 0 {
		call.key, call.given = values[0], true
		if len(slices.Compact(values)) > 1 {
			call.err = notSent("the request has more than one idempotency key; give one")
			return call
		}
	} else {
		generate := UUIDv4
		if c.generate != nil {
			generate = c.generate
		}
		if call.key, call.err = generate(ctx); call.err != nil {
			call.err = notSent("making an idempotency key: %w", call.err)
			return call
		}
	}
	if call.err = checkKey(call.key); call.err == nil {
		setField(req.Header, call.header(), call.key)
	}
	return call
}

func (c *Call) header() string { return cmp.Or(c.op.Header, wire.HeaderKey) }

// settleKey decides the key after the request editors ran.
func (c *Call) settleKey() error {
	if c.err != nil || c.op.Natural {
		return c.err
	}
	values := fieldValues(c.req.Header, c.header())
	others := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return v == c.key })
	if c.given {
		if len(values) == 0 || len(others) > 0 {
			return notSent("a request editor changed the field %s, whose key the caller gave; leave it alone or give no key", c.header())
		}
	} else if others = slices.DeleteFunc(others, absent); len(others) > 1 {
		return notSent("request editors gave the field %s more than one key; give one", c.header())
	} else if len(others) == 1 {
		c.key = others[0]
	}
	setField(c.req.Header, c.header(), c.key)
	return checkKey(c.key)
}

// Do sends the request, as the request editors left it, through client, and
// repeats it as the package comment says. It returns the last answer whatever
// its status, or an [*Error] when the last attempt had none, or an error with
// [ErrNotSent] in its chain. Where an answer breaks off, reading its body returns
// an [*Error] too. As with [http.Client] the caller closes the body of an answer,
// and the body of the request is closed.
func (c *Call) Do(client Doer) (*http.Response, error) {
	ctx := c.req.Context()
	err := c.settleKey()
	if err == nil && ctx.Err() != nil {
		err = c.early(ctx.Err())
	}
	if err != nil {
		if c.req.Body != nil {
			c.req.Body.Close()
		}
		return nil, err
	}
	limits := c.config.retry.or(c.op.Retry).or(defaultRetry)
	limit := cmp.Or(max(c.config.bodyLimit, 0), defaultBodyLimit)
	body := payload{once: c.req.Body}
	if !c.config.noRetry && !c.op.NoRetry && limits.MaxAttempts > 1 && ctx.Value(withoutRetry{}) == nil {
		if body, err = newPayload(ctx, c.req, c.body, limit); err != nil {
			return nil, c.early(fmt.Errorf("reading its body: %w", err))
		}
	}

	begun, counted := time.Now(), 0
	if c.hop != nil {
		begun, counted = c.hop.begun, c.hop.counted
	}
	var last *Problem // the last answer, if it said that a request with the key is in flight
	for number := 1; ; number++ {
		got, err := c.attempt(ctx, client, body, limit, max(1, limits.MaxAttempts-counted))
		if err != nil && number == 1 {
			return nil, c.early(fmt.Errorf("opening its body: %w", err))
		}
		if err != nil {
			return nil, c.lost(number-1, last, err)
		}
		again, cost := c.judge(client, got)
		if got.err == nil && got.cut == nil {
			last = got.inFlight()
		}
		left := limits.MaxElapsed - time.Since(begun)
		wait := backoff(limits, number, got.resp, left)
		deadline, bounded := ctx.Deadline()
		again = again && body.open != nil && counted+cost < limits.MaxAttempts && left > 0 && wait <= left &&
			ctx.Err() == nil && (!bounded || wait < time.Until(deadline))
		var waited <-chan time.Time // also for the observer
		if again {
			waited = time.After(wait)
		}
		c.observe(ctx, number, got, again, wait)
		if !again {
			got.begun, got.counted = begun, counted
			return c.finish(got, number, last)
		}
		counted += cost
		if errors.Is(got.err, errResent) {
			closeIdle(client) // as broken as those that were tried
		}
		got.discard(limit, wait)
		select {
		case <-waited:
		case <-ctx.Done():
		}
		if err := ctx.Err(); err != nil {
			return nil, c.lost(number, last, err)
		}
	}
}

// early returns the error of a call that fails before its first attempt.
func (c *Call) early(err error) error {
	if c.hop != nil { // what was redirected was sent
		return c.lost(0, nil, err)
	}
	return notSent("%w", err)
}

func (c *Call) lost(attempts int, last *Problem, err error) *Error {
	return &Error{Key: c.key, Attempts: attempts, Err: err, InFlight: last}
}

// finish returns how the last attempt ended, as the caller is to have it.
func (c *Call) finish(got result, number int, last *Problem) (*http.Response, error) {
	lost := c.lost(number, last, got.err)
	if got.err != nil {
		got.stop()
		return got.resp, lost
	}
	if got.ended {
		got.stop()
		return got.resp, nil
	}
	body := &answered{ReadCloser: got.resp.Body, lost: lost, stop: got.stop}
	got.resp.Body = body
	if w, ok := body.ReadCloser.(io.Writer); ok { // of an answer that switches protocols
		got.resp.Body = upgraded{body, w}
	}
	return got.resp, nil
}

func closeIdle(client any) {
	if c, ok := client.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// A result is how one attempt ended.
type result struct {
	*exchange
	resp    *http.Response
	err     error  // from the client
	ended   bool   // the answer's body was read to its end
	cut     error  // what broke off the answer's body
	stop    func() // ends the attempt, and with it what is left of the answer's body
	sends   int    // how many times net/http tried to send the request; 0 if it was not asked
	answers int    // how many times an answer to it began
}

// errResent ends an attempt that net/http was about to repeat more often than it
// may: its connections are kept alive no longer, and one after the other breaks.
var errResent = errors.New("its connections broke, and it may not be sent as often as net/http would send it again")

// attempt makes one attempt of those that are left. Its error is that of opening
// the body.
func (c *Call) attempt(ctx context.Context, client Doer, body payload, limit int64, left int) (result, error) {
	got := result{exchange: &exchange{key: c.key}}
	valued := context.WithValue(ctx, exchangeKey{}, got.exchange)
	ctx, stop := context.WithCancelCause(valued)
	got.stop = func() { stop(nil) }

	// A connection may be asked for in vain, as one of HTTP/2 that is going away.
	var asked, sent, answers atomic.Int32
	over := func() bool { // one is left for a connection that is new
		return body.open != nil && int(sent.Load()-answers.Load()) >= max(1, left-1)
	}
	trace := &httptrace.ClientTrace{
		GetConn: func(string) {
			if over() {
				stop(errResent)
			}
			asked.Add(1)
		},
		GotFirstResponseByte: func() {
			if answers.Load() < sent.Load() { // else it is another's
				answers.Add(1)
			}
		},
	}
	if c.op.Natural {
		trace.WroteHeaders = func() { sent.Add(1) }
	} else { // requests of others, such as one for a token, may have the context, but not the key
		trace.WroteHeaderField = func(name string, values []string) {
			// What net/http begins to write before it looks at the context stays here.
			if strings.EqualFold(name, c.header()) && slices.Contains(values, c.key) && ctx.Err() == nil {
				sent.Add(1)
			}
		}
	}
	// Clients may change a request, so each attempt has its own.
	req := c.req.Clone(httptrace.WithClientTrace(ctx, trace))
	if body.open != nil {
		var err error
		if req.Body, err = body.open(); err != nil {
			got.stop()
			return got, err
		}
		req.GetBody = func() (io.ReadCloser, error) {
			if over() {
				return nil, errResent
			}
			return body.open()
		}
	} else {
		req.Body, req.Trailer = body.once, c.req.Trailer // which the body may fill in at its end
		if !same(body.once, c.body) {
			req.GetBody = nil // it may be that of a body that an editor replaced
		}
	}

	got.resp, got.err = client.Do(req)
	got.over.Store(true)
	got.sends, got.answers = int(cmp.Or(sent.Load(), asked.Load())), int(answers.Load())
	if got.err == nil && got.resp == nil {
		got.err = errors.New("the client returned neither an answer nor an error")
	}
	if got.err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errResent) {
			got.err = cause
		}
		return got, nil
	}
	if exchangeOf(got.resp) != got.exchange { // not every client is net/http's
		got.resp.Request = req
	}
	got.resp.Request = got.resp.Request.WithContext(valued) // the other ends with the attempt
	if got.resp.Body == nil {
		got.resp.Body = http.NoBody
	}
	var head []byte
	head, got.ended, got.cut = readAhead(got.resp, limit)
	got.note(got.resp, c.op.Marker, head)
	untold := got.problem == nil && (got.cut == nil || !isJSON(got.resp.Header)) // what broke off may have been another
	if c.config.conflicts && c.key != "" && got.resp.StatusCode == http.StatusConflict && untold && !got.replayed {
		got.problem = &Problem{Code: InFlight, Status: http.StatusConflict, Key: c.key}
	}
	return got, nil
}

// discard gives an answer up. What is left of its body is read, so that its
// connection serves the next attempt, unless it is more than limit bytes or has
// not ended when the wait has.
func (r result) discard(limit int64, wait time.Duration) {
	if r.resp != nil {
		late := time.AfterFunc(wait, r.stop)
		io.CopyN(io.Discard, r.resp.Body, limit)
		late.Stop()
		r.resp.Body.Close()
	}
	r.stop()
}

func (c *Call) observe(ctx context.Context, number int, got result, again bool, wait time.Duration) {
	if c.config.observe == nil {
		return
	}
	a := Attempt{Operation: c.op.ID, Key: c.key, Number: number, Err: got.err, Again: again}
	if got.err == nil {
		a.Status, a.Err = got.resp.StatusCode, got.cut
	}
	if again {
		a.Wait = wait
	}
	c.config.observe(ctx, a)
}
