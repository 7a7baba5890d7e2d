package idempotency

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// DefaultStoreTimeout bounds every call of the store; see [WithStoreTimeout].
const DefaultStoreTimeout = 5 * time.Second

// A Guard guards operations with one store. Build it with [New], pass it to the
// generated registration functions, and share it freely: it is safe for
// concurrent use.
type Guard struct {
	passthrough  bool
	store        Store
	namespace    string
	observe      func(context.Context, Event)
	problem      func(context.Context, *Request, Problem) Response
	problemBase  string
	storeTimeout time.Duration
	inner        []func(http.Handler) http.Handler
	principals   map[reflect.Type]principalFunc
	secrets      []Secret // the first is the current one
	sealer       Sealer
	replays      *replayCache
	optionalKeys bool

	mu         sync.RWMutex
	operations map[*Policy]*operation
	identities map[string]*Policy
}

// An Option configures a [Guard].
type Option interface{ apply(*Guard) }

type optionFunc func(*Guard)

func (f optionFunc) apply(g *Guard) { f(g) }

// New returns a guard over store. It starts no goroutine and makes no call.
func New(store Store, options ...Option) (*Guard, error) {
	if store == nil {
		return nil, errors.New("idempotency: New needs a store; Passthrough is the guard without one")
	}
	g := &Guard{
		store:        store,
		problemBase:  wire.ProblemBase,
		storeTimeout: DefaultStoreTimeout,
		principals:   map[reflect.Type]principalFunc{},
		operations:   map[*Policy]*operation{},
		identities:   map[string]*Policy{},
	}
	for _, o := range options {
		o.apply(g)
	}
	if err := checkSecrets(g.secrets, 1); err != nil {
		return nil, fmt.Errorf("idempotency: fingerprint secrets: %w", err)
	}
	if g.replays != nil && g.replays.max <= 0 {
		return nil, fmt.Errorf("idempotency: a replay cache of %d bytes holds nothing; leave WithReplayCache out, or give it more", g.replays.max)
	}
	if g.storeTimeout <= 0 {
		return nil, fmt.Errorf("idempotency: store timeout %v is not positive", g.storeTimeout)
	}
	return g, nil
}

// Passthrough returns a guard that guards nothing: every handler runs as if its
// operation were not annotated. It is for tests, and for incidents in which no
// guard is better than one that refuses.
func Passthrough() *Guard { return &Guard{passthrough: true} }

// WithNamespace separates the keys of this guard from those of others that
// share its store. The default is the empty namespace.
func WithNamespace(namespace string) Option {
	return optionFunc(func(g *Guard) { g.namespace = namespace })
}

// WithObserver has f called for every [Event], on the goroutine that serves the
// request or renews its lease. Given more than once, all are called, in order.
// The guard itself does not log.
func WithObserver(f func(context.Context, Event)) Option {
	return optionFunc(func(g *Guard) {
		first := g.observe
		if first == nil {
			g.observe = f
			return
		}
		g.observe = func(ctx context.Context, e Event) {
			first(ctx, e)
			f(ctx, e)
		}
	})
}

// WithOptionalKeys lets every request without a key run unguarded, whatever its
// policy says: for tests, and while clients learn to send keys. The observer
// hears of each.
func WithOptionalKeys() Option {
	return optionFunc(func(g *Guard) { g.optionalKeys = true })
}

// WithProblem replaces the body of every refusal by the caller's own error
// envelope. The response should keep p.Status; Retry-After is added to it when
// p has one and the response has none.
func WithProblem(f func(ctx context.Context, r *Request, p Problem) Response) Option {
	return optionFunc(func(g *Guard) { g.problem = f })
}

// WithProblemBase replaces what problem types begin with. The default is
// "urn:oapi-idempotent:".
func WithProblemBase(base string) Option {
	return optionFunc(func(g *Guard) { g.problemBase = base })
}

// WithStoreTimeout bounds every single call of the store; renewals are bounded
// by a third of the lease besides. The default is [DefaultStoreTimeout].
func WithStoreTimeout(d time.Duration) Option {
	return optionFunc(func(g *Guard) { g.storeTimeout = d })
}

// WithInner adds middlewares that run after a key is claimed and before the
// handler, the first one outermost: what they answer is recorded like a
// handler's answer, an encoding that they negotiate included, so compress
// outside. A handler that one of them leaves running, as http.TimeoutHandler
// does, has lost its claim. They apply to net/http targets only; registering another
// target on the guard panics.
func WithInner(middlewares ...func(http.Handler) http.Handler) Option {
	return optionFunc(func(g *Guard) { g.inner = append(g.inner, middlewares...) })
}

// ErrUnauthenticated and ErrForbidden, returned (or wrapped) by a principal
// function, are answered 401 and 403, also where the document asks for no
// authentication, as of a public webhook: for a caller without a name return "",
// which is answered 401 by the operations that are secured alone. Any other error
// is answered 500.
var (
	ErrUnauthenticated = errors.New("idempotency: unauthenticated")
	ErrForbidden       = errors.New("idempotency: forbidden")
)

type principalFunc func(native any) (string, error)

// WithPrincipal has who called before every claim and every replay, to name the
// caller on whose behalf a request is made. T is what the router's handlers
// get: *http.Request, or for example echo.Context; generated packages export
// it as PrincipalFrom. A guard may have one function for each T.
//
// The function must return the same text for the same caller for as long as
// answers are replayed, and it is where an authorisation that was revoked stops
// a replay: see [ErrUnauthenticated] and [ErrForbidden].
func WithPrincipal[T any](who func(T) (string, error)) Option {
	return optionFunc(func(g *Guard) {
		g.principals[reflect.TypeFor[T]()] = func(native any) (string, error) {
			request, ok := native.(T)
			if !ok {
				return "", fmt.Errorf("idempotency: principal function takes %v, the request is a %T", reflect.TypeFor[T](), native)
			}
			return who(request)
		}
	})
}

// Register prepares guard for the policies of a generated package whose
// handlers get a T. Generated code calls it where handlers are registered.
// Registering the same policies again does nothing.
//
// It panics, so that a mistake shows at start-up and not at the first request,
// when guard is nil, a policy is not valid, the store lacks what a policy
// needs, a secured operation has no principal function for T, two packages
// register one operation, or [WithInner] meets a T that is not *http.Request.
func Register[T any](guard *Guard, policies ...*Policy) {
	if guard == nil {
		panic("idempotency: the guard is nil: build one with idempotency.New, or pass idempotency.Passthrough() to guard nothing")
	}
	if guard.passthrough {
		return
	}
	native := reflect.TypeFor[T]()
	if len(guard.inner) > 0 && native != reflect.TypeFor[*http.Request]() {
		panic(fmt.Sprintf("idempotency: WithInner takes net/http middlewares, and these handlers get a %v", native))
	}
	guard.mu.Lock()
	defer guard.mu.Unlock()
	for _, p := range policies {
		if op := guard.operations[p]; op != nil {
			if op.native != native {
				panic(fmt.Sprintf("idempotency: operation %q is registered for %v and for %v", p.Operation, op.native, native))
			}
			continue
		}
		if guard.identities[p.Operation] != nil {
			panic(fmt.Sprintf("idempotency: two packages register operation %q on one guard, so that their keys would meet: give each a guard of its own with idempotency.WithNamespace", p.Operation))
		}
		op, err := newOperation(p, guard.store, guard.namespace, guard.principals[native])
		if err != nil {
			panic(fmt.Sprintf("idempotency: operation %q: %v", p.Operation, err))
		}
		op.native = native
		guard.operations[p] = op
		guard.identities[p.Operation] = p
	}
}

func (g *Guard) operation(p *Policy) *operation {
	g.mu.RLock()
	op := g.operations[p]
	g.mu.RUnlock()
	if op == nil {
		panic(fmt.Sprintf("idempotency: operation %q was not registered on this guard: call idempotency.Register where the handlers are registered", p.Operation))
	}
	return op
}
