package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

func secret(id string, b byte) idempotency.Secret {
	return idempotency.Secret{ID: id, Key: bytes.Repeat([]byte{b}, 32)}
}

func sealer(t *testing.T, current idempotency.Secret, previous ...idempotency.Secret) idempotency.Option {
	t.Helper()
	s, err := idempotency.NewSealer(current, previous...)
	if err != nil {
		t.Fatal(err)
	}
	return idempotency.WithSealer(s)
}

// A spy keeps what was written to the store, and may change what is read.
type spy struct {
	idempotency.Store
	claim   idempotency.Claim
	outcome idempotency.Outcome
	change  func(*idempotency.Row)
}

func (s *spy) Claim(ctx context.Context, c *idempotency.Claim) (idempotency.Row, error) {
	row, err := s.Store.Claim(ctx, c)
	if row.Won {
		s.claim = *c
	} else if s.change != nil {
		s.change(&row)
	}
	return row, err
}

func (s *spy) Settle(ctx context.Context, c *idempotency.Claim, o idempotency.Outcome) (idempotency.Row, error) {
	s.outcome = o
	return s.Store.Settle(ctx, c, o)
}

func TestSealedAnswers(t *testing.T) {
	store := &spy{Store: memorystore.New()}
	handler := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", "/secret/location")
		w.WriteHeader(201)
		_, _ = io.WriteString(w, "secret body")
	}
	with := func(options ...idempotency.Option) *fixture {
		return serve(t, setup{store: store, options: options}, handler)
	}
	with(sealer(t, secret("k1", 1))).post("k", `{}`).is(t, 201, "secret body")
	for _, stored := range [][]byte{store.outcome.Header, store.outcome.Body} {
		if len(stored) == 0 || bytes.Contains(stored, []byte("secret")) {
			t.Fatalf("stored in clear: %q", stored)
		}
	}
	again := with(sealer(t, secret("k2", 2), secret("k1", 1))).post("k", `{}`)
	again.is(t, 201, "secret body")
	if again.Header.Get("Location") != "/secret/location" {
		t.Fatal("the header was lost")
	}
	with(sealer(t, secret("k2", 2))).post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
	with(sealer(t, secret("k1", 9))).post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
	with().post("k", `{}`).refused(t, 409, "idempotency-not-replayable")

	for name, change := range map[string]func(*idempotency.Row){
		"another status": func(r *idempotency.Row) { r.Outcome.Status = 200 },
		"another claim":  func(r *idempotency.Row) { r.ID[0]++ },
		"parts swapped": func(r *idempotency.Row) {
			r.Outcome.Header, r.Outcome.Body = append([]byte{2}, r.Outcome.Body...), r.Outcome.Header[1:]
		},
		"a flipped bit": func(r *idempotency.Row) {
			r.Outcome.Body = append(bytes.Clone(r.Outcome.Body[:len(r.Outcome.Body)-1]), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store.change = change
			defer func() { store.change = nil }()
			with(sealer(t, secret("k1", 1))).post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
		})
	}

	with().post("plain", `{}`).is(t, 201, "secret body")
	a := with(sealer(t, secret("k1", 1))).post("plain", `{}`)
	a.is(t, 201, "secret body")
	a.replayed(t, true)
}

type brokenSealer struct{ idempotency.Sealer }

func (brokenSealer) Seal([]byte, []byte) ([]byte, error) { return nil, errors.New("no key service") }

func TestAnAnswerThatCannotBeSealedIsNotRecorded(t *testing.T) {
	f := serve(t, setup{options: []idempotency.Option{idempotency.WithSealer(brokenSealer{})}}, created)
	f.post("k", `{}`).is(t, 201, `{"id":1}`)
	f.post("k", `{}`).refused(t, 409, "idempotency-not-replayable")
	f.ran(1)
}

func TestFingerprintSecrets(t *testing.T) {
	store := &spy{Store: memorystore.New()}
	with := func(options ...idempotency.Option) *fixture {
		return serve(t, setup{store: store, options: options}, created)
	}
	plain, old := with(), with(idempotency.WithFingerprintSecret(secret("s1", 1)))
	rotated := with(idempotency.WithFingerprintSecret(secret("s2", 2), secret("s1", 1)))
	gone := with(idempotency.WithFingerprintSecret(secret("s2", 2)))

	plain.post("before", `{"n":1}`)
	clear := store.claim.Fingerprint
	old.post("k", `{"n":1}`)
	if bytes.Contains(store.claim.Fingerprint, clear[2:]) {
		t.Fatal("the digest is stored in clear")
	}
	for _, f := range []*fixture{old, rotated} {
		f.post("k", `{"n":1}`).replayed(t, true)
		f.post("k", `{"n":2}`).refused(t, 422, "idempotency-key-reused")
		f.post("before", `{"n":1}`).replayed(t, true)
		f.post("before", `{"n":2}`).refused(t, 422, "idempotency-key-reused")
	}
	gone.post("k", `{"n":1}`).refused(t, 409, "idempotency-not-replayable")
	plain.post("k", `{"n":1}`).refused(t, 409, "idempotency-not-replayable")
}

func TestSecretsAreChecked(t *testing.T) {
	for _, bad := range [][]idempotency.Secret{
		{{ID: "", Key: make([]byte, 32)}},
		{{ID: string(make([]byte, 33)), Key: make([]byte, 32)}},
		{secret("a", 1), secret("a", 2)},
		{{ID: "a"}},
	} {
		if _, err := idempotency.NewSealer(bad[0], bad[1:]...); err == nil {
			t.Errorf("NewSealer takes %v", bad)
		}
		if _, err := idempotency.New(memorystore.New(), idempotency.WithFingerprintSecret(bad[0], bad[1:]...)); err == nil {
			t.Errorf("WithFingerprintSecret takes %v", bad)
		}
	}
	if _, err := idempotency.NewSealer(idempotency.Secret{ID: "a", Key: make([]byte, 17)}); err == nil {
		t.Error("NewSealer takes a key of 17 bytes")
	}
}
