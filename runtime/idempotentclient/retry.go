package idempotentclient

import (
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// judge reports whether another attempt may mend what got is, and how many
// attempts got counts for.
func (c *Call) judge(client Doer, got result) (again bool, cost int) {
	switch {
	case got.err != nil:
		sends := got.sends
		if isNetHTTP(client) {
			sends -= got.answers // by redirects, which it followed to the one that failed
		}
		// A client that returns an answer, too, has decided.
		return got.resp == nil && !permanent(client, got.err, got.sends), max(1, sends)
	case got.inFlight() != nil:
		return true, max(0, got.sends-c.redirects(got.resp)-1)
	default:
		return repeatable(got.resp, got.exchange, got.cut), max(1, got.sends-c.redirects(got.resp))
	}
}

// repeatable reports whether another attempt may end better than with resp,
// whose body broke off with cut.
func repeatable(resp *http.Response, e *exchange, cut error) bool {
	switch resp.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return !e.replayed && (e.problem == nil || e.problem.Code != OutcomeUnknown)
	case http.StatusConflict: // who knows why
		return cut != nil && !e.replayed && isJSON(resp.Header)
	}
	return cut != nil && resp.StatusCode/100 == 2
}

// permanent reports whether another attempt would fail with err again.
func permanent(client Doer, err error, sends int) bool {
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

// backoff returns the wait after the attempt with this number: not longer than
// what is left of the call's time, unless the server asks for more.
func backoff(limits Retry, number int, resp *http.Response, left time.Duration) time.Duration {
	longest := limits.Max
	if limits.Base <= limits.Max>>(number-1) {
		longest = limits.Base << (number - 1)
	}
	return max(min(rand.N(longest), left), min(retryAfter(resp), limits.Max))
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
