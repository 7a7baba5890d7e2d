package idempotentclient

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A Doer sends requests; [http.Client] is one.
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
}

// Start begins a call of op and attaches its key to req, before request editors
// run on req. What is wrong with the key is reported by [Call.Do].
func (c *Config) Start(op *Operation, req *http.Request) *Call {
	call := &Call{config: c, op: op, req: req, body: req.Body}
	if op.Natural {
		return call
	}
	ctx := req.Context()
	if given, ok := ctx.Value(contextKey{}).(*givenKey); ok {
		call.key, call.given = given.key, true
		target := *req.URL
		target.User, target.RawQuery, target.Fragment = nil, "", ""
		if !given.bind(req.Method + " " + target.String()) {
			call.err = notSent("the key in the context was used for another method or URL; give each call its own with WithKey")
			return call
		}
	} else if values := slices.DeleteFunc(fieldValues(req.Header, call.header()), absent); len(values) > 0 {
		call.key, call.given = values[0], true
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
	switch {
	case c.given && (len(values) == 0 || len(others) > 0):
		return notSent("a request editor changed the field %s, whose key the caller gave; leave it alone or give no key", c.header())
	case c.given:
	default:
		others = slices.DeleteFunc(others, absent)
		if len(others) > 1 {
			return notSent("request editors gave the field %s more than one key; give one", c.header())
		}
		if len(others) == 1 {
			c.key = others[0]
		}
	}
	setField(c.req.Header, c.header(), c.key)
	return checkKey(c.key)
}

// Do sends the request, as the request editors left it, through client, and
// repeats it as the package comment says. It returns the last answer whatever
// its status, or an [*Error] when the last attempt had none, or an error with
// [ErrNotSent] in its chain. As with [http.Client] the caller closes the body of
// an answer, and the body of the request is closed.
func (c *Call) Do(client Doer) (*http.Response, error) {
	if err := c.settleKey(); err != nil {
		if c.req.Body != nil {
			c.req.Body.Close()
		}
		return nil, err
	}
	ctx := c.req.Context()
	limits := c.config.retry.or(c.op.Retry).or(defaultRetry)
	limit := cmp.Or(max(c.config.bodyLimit, 0), defaultBodyLimit)
	body := payload{once: c.req.Body}
	if !c.config.noRetry && !c.op.NoRetry && limits.MaxAttempts > 1 && ctx.Value(withoutRetry{}) == nil {
		var err error
		if body, err = newPayload(ctx, c.req, c.body, limit); err != nil {
			return nil, err
		}
	}

	begun := time.Now()
	for number, counted := 1, 0; ; number++ {
		e := &exchange{key: c.key}
		req, sends, err := c.attempt(ctx, e, body)
		if err != nil {
			return nil, &Error{Key: c.key, Attempts: number - 1, Err: err}
		}
		resp, err := client.Do(req)
		var cut error // what broke the answer's body off
		if err == nil {
			if exchangeOf(resp) != e { // not every client is net/http's
				resp.Request = req
			}
			if resp.Body == nil {
				resp.Body = http.NoBody
			}
			var head []byte
			head, cut = readAhead(resp, limit)
			e.note(resp, c.op.Marker, head)
		}

		mendable := body.open != nil && ctx.Err() == nil
		switch {
		case err != nil:
			mendable = mendable && resp == nil && !permanent(client, err, sends.Load())
			counted += max(1, int(sends.Load()))
		case c.inFlight(resp, e):
		default:
			mendable = mendable && repeatable(resp, e, cut)
			counted += max(1, int(sends.Load())-c.redirects(resp))
		}
		wait := backoff(limits, number, resp)
		mendable = mendable && counted < limits.MaxAttempts && wait <= limits.MaxElapsed-time.Since(begun)
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
			mendable = false
		}
		c.observe(ctx, Attempt{Number: number, Again: mendable, Wait: wait}, resp, err, cut)
		if !mendable {
			if err != nil {
				err = &Error{Key: c.key, Attempts: number, Err: err}
			}
			return resp, err
		}
		if resp != nil {
			resp.Body.Close()
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, &Error{Key: c.key, Attempts: number, Err: ctx.Err()}
		}
	}
}

// attempt returns the request of one attempt, and the number of times that it
// was sent, which net/http counts. Clients may change the request, so each
// attempt has its own.
func (c *Call) attempt(ctx context.Context, e *exchange, body payload) (*http.Request, *atomic.Int32, error) {
	sends := new(atomic.Int32)
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { sends.Add(1) },
	})
	req := c.req.Clone(context.WithValue(ctx, exchangeKey{}, e))
	if body.open == nil {
		req.Body = body.once
		if !same(body.once, c.body) {
			req.GetBody = nil
		}
		return req, sends, nil
	}
	var err error
	req.GetBody = body.open
	req.Body, err = body.open()
	return req, sends, err
}

// inFlight reports whether resp says that the first request with the key is
// still under way.
func (c *Call) inFlight(resp *http.Response, e *exchange) bool {
	if resp.StatusCode != http.StatusConflict || e.replayed {
		return false
	}
	if e.problem == nil {
		return c.config.conflicts
	}
	return e.problem.Code == InFlight
}

// repeatable reports whether another attempt may end better than with resp,
// whose body broke off with cut.
func repeatable(resp *http.Response, e *exchange, cut error) bool {
	switch resp.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return !e.replayed && (e.problem == nil || e.problem.Code != OutcomeUnknown)
	}
	return cut != nil && resp.StatusCode/100 == 2
}

// permanent reports whether another attempt would fail with err again.
func permanent(client Doer, err error, sends int32) bool {
	var untrusted *tls.CertificateVerificationError
	// net/http refuses what it cannot send, such as a bad URL or a bad header
	// field, with untyped errors, before it asks for a connection.
	return errors.As(err, &untrusted) || sends == 0 && isNetHTTP(client)
}

func isNetHTTP(client Doer) bool {
	var via http.RoundTripper
	switch client := client.(type) {
	case *http.Client:
		via = client.Transport
	case roundTripper:
		via = client.RoundTripper
	default:
		return false
	}
	if via == nil {
		via = http.DefaultTransport
	}
	_, ok := via.(*http.Transport)
	return ok
}

// redirects counts the redirects that client followed to resp: requests that
// were sent but are no attempts.
func (c *Call) redirects(resp *http.Response) (n int) {
	for r := resp.Request; r != nil && r.Response != nil && r.Response != c.req.Response; r = r.Response.Request {
		n++
	}
	return n
}

// backoff returns the wait after the attempt with this number.
func backoff(limits Retry, number int, resp *http.Response) time.Duration {
	longest := limits.Max
	if limits.Base <= limits.Max>>(number-1) {
		longest = limits.Base << (number - 1)
	}
	return max(rand.N(longest), min(retryAfter(resp), limits.Max))
}

// retryAfter returns how long resp asks to wait; 0 if it does not.
func retryAfter(resp *http.Response) time.Duration {
	if resp == nil {
		return 0
	}
	value := resp.Header.Get("Retry-After")
	seconds, err := strconv.ParseUint(value, 10, 31)
	if err == nil || errors.Is(err, strconv.ErrRange) { // then it is the largest
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	// The server's clock, if it tells: ours may be wrong.
	now, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return at.Sub(now)
}

func (c *Call) observe(ctx context.Context, a Attempt, resp *http.Response, err, cut error) {
	if c.config.observe == nil {
		return
	}
	a.Operation, a.Key, a.Err = c.op.ID, c.key, err
	if err == nil {
		a.Status, a.Err = resp.StatusCode, cut
	}
	if !a.Again {
		a.Wait = 0
	}
	c.config.observe(ctx, a)
}
