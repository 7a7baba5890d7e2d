package idempotency

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"strconv"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// An operation is a policy that was checked and prepared for requests.
type operation struct {
	*Policy
	header     string // canonical
	marker     string // canonical, or empty
	native     reflect.Type
	pattern    *regexp.Regexp
	ignore     *pointerTree
	headers    []string // canonical, in the policy's order
	readsBody  bool
	hashPrefix []byte
	principal  principalFunc
	transactor Transactor // nil unless the guarantee is Transaction
	leases     leaseQueue
}

func newOperation(p *Policy, store Store, namespace string, who principalFunc) (*operation, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	var transactor Transactor
	if p.Guarantee == Transaction {
		var ok bool
		if transactor, ok = store.(Transactor); !ok {
			return nil, fmt.Errorf("guarantee: transaction needs a store in the handlers' own database, and %T is none; use a sqlstore", store)
		}
		if err := transactor.CheckTx(); err != nil {
			return nil, fmt.Errorf("guarantee: transaction: %w", err)
		}
	}
	if p.Secured && who == nil {
		return nil, errors.New("it is secured, and the guard has no principal function for it: pass the generated PrincipalFrom(…) to idempotency.New")
	}
	op := &operation{
		Policy:    p,
		header:    http.CanonicalHeaderKey(p.Header),
		marker:    http.CanonicalHeaderKey(p.Replay.Marker),
		readsBody: p.OnMismatch != ReplayAnyway && p.Fingerprint.Body != BodyNone,
		principal: who,

		transactor: transactor,
	}
	if p.Key.Pattern != "" {
		op.pattern = regexp.MustCompile(p.Key.Pattern)
	}
	for _, h := range p.Fingerprint.Headers {
		op.headers = append(op.headers, http.CanonicalHeaderKey(h))
	}
	op.ignore, _ = newPointerTree(p.Fingerprint.Ignore)
	op.hashPrefix = appendField(appendField(nil, namespace), string(p.Scope))
	return op, nil
}

func (p *Policy) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(p.Operation != "", "Operation is empty")
	check(p.Header != "", "Header is empty")
	switch p.OnMissing {
	case RunUnguarded, 400, 422:
	default:
		check(false, "OnMissing is %d, not 400, 422 or RunUnguarded", p.OnMissing)
	}
	switch p.OnMismatch {
	case ReplayAnyway, 400, 409, 422:
	default:
		check(false, "OnMismatch is %d, not 400, 409, 422 or ReplayAnyway", p.OnMismatch)
	}
	check(p.Key.Format == FormatAny || p.Key.Format == FormatUUID, "Key.Format is %q", p.Key.Format)
	check(p.Key.MinLength >= 1 && p.Key.MinLength <= p.Key.MaxLength, "Key lengths %d to %d are not a range from 1", p.Key.MinLength, p.Key.MaxLength)
	_, err := regexp.Compile(p.Key.Pattern)
	check(err == nil, "Key.Pattern: %v", err)
	check(p.Scope == ScopePrincipal || p.Scope == ScopeOperation || p.Scope == ScopeGlobal, "Scope is %q", p.Scope)
	check(p.TTL > 0, "TTL is not positive")
	check(p.Lease >= wire.MinLease, "Lease is %v, less than %v", p.Lease, wire.MinLease)
	check(p.Timeout > 0, "Timeout is not positive")
	check(p.WaitFor >= 0, "WaitFor is negative")
	check(p.MaxRequestBody >= 0, "MaxRequestBody is negative")
	check(p.MaxRecordedBody >= 0, "MaxRecordedBody is negative")
	switch p.Fingerprint.Body {
	case BodyAuto, BodyJSON, BodyRaw, BodyMultipart, BodyNone:
	default:
		check(false, "Fingerprint.Body is %q", p.Fingerprint.Body)
	}
	_, err = newPointerTree(p.Fingerprint.Ignore)
	check(err == nil, "Fingerprint.Ignore: %v", err)
	for _, s := range p.Record {
		check(s.valid(), "Record holds %q, not 4XX, 5XX or a status from 400 to 599", s)
	}
	check(p.Replay.Status == 0 || p.Replay.Status == http.StatusOK, "Replay.Status is %d, not 0 or 200", p.Replay.Status)
	switch p.Guarantee {
	case AtLeastOnce, AtMostOnce, Transaction:
	default:
		check(false, "Guarantee is %q", p.Guarantee)
	}
	return errors.Join(errs...)
}

// DefaultPolicy returns the policy of an operation that is annotated with
// `x-idempotent: true` and nothing else. The operation is named by method and
// path template: "POST /orders".
func DefaultPolicy(operation string) Policy {
	return Policy{
		Operation:       operation,
		Header:          wire.HeaderKey,
		OnMissing:       wire.DefaultOnMissing,
		Key:             KeyRule{Format: FormatAny, MinLength: wire.DefaultKeyMinLength, MaxLength: wire.DefaultKeyMaxLength},
		Scope:           ScopePrincipal,
		TTL:             wire.DefaultTTL,
		Fingerprint:     FingerprintRule{Body: BodyAuto, Query: true, MediaType: true},
		OnMismatch:      wire.DefaultOnMismatch,
		WaitFor:         wire.DefaultWaitFor,
		Record:          []StatusPattern{wire.DefaultRecord},
		Replay:          ReplayRule{Marker: wire.HeaderReplayed},
		Guarantee:       AtLeastOnce,
		Lease:           wire.DefaultLease,
		Timeout:         wire.DefaultTimeout,
		MaxRequestBody:  wire.DefaultMaxRequestBody,
		MaxRecordedBody: wire.DefaultMaxRecordedBody,
	}
}

func (s StatusPattern) valid() bool {
	if s == "4XX" || s == "5XX" {
		return true
	}
	code, err := strconv.Atoi(string(s))
	return err == nil && len(s) == 3 && code >= 400 && code <= 599
}

// Matches reports whether the pattern covers status.
func (s StatusPattern) Matches(status int) bool {
	if code, err := strconv.Atoi(string(s)); err == nil {
		return code == status
	}
	return len(s) == 3 && status/100 == int(s[0]-'0') && !onlyByNumber(status)
}

func onlyByNumber(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout,
		http.StatusConflict, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
		http.StatusUnprocessableEntity, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return false
}

// records reports whether an answer with status is recorded under p.
func (p *Policy) records(status int) bool {
	if status >= 200 && status < 400 {
		return true
	}
	for _, s := range p.Record {
		if s.Matches(status) {
			return true
		}
	}
	return false
}

// identify returns the hash that stands for key in the store, and the hash of
// the operation and principal that own it. Every field is prefixed by its
// length, so that no two lists of fields run together.
func (op *operation) identify(principal, key string) (hash, owner [32]byte) {
	var scratch [512]byte
	b := append(scratch[:0], op.hashPrefix...)
	switch op.Scope {
	case ScopePrincipal:
		b = appendField(appendField(b, principal), op.Operation)
	case ScopeOperation:
		b = appendField(b, op.Operation)
	}
	hash = sha256.Sum256(appendField(b, key))
	owner = sha256.Sum256(appendField(appendField(b[:0], op.Operation), principal))
	return hash, owner
}

func appendField[T string | []byte](b []byte, field T) []byte {
	b = binary.AppendUvarint(b, uint64(len(field)))
	return append(b, field...)
}
