package idempotency

import (
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
	"strconv"
)

// A Secret is a key with a name that is stored beside what it made, so that it
// can be replaced while what its predecessors made is still there.
type Secret struct {
	ID  string // 1 to 32 bytes, unique among those in use
	Key []byte
}

func checkSecrets(secrets []Secret, minKey int) error {
	seen := map[string]bool{}
	for _, s := range secrets {
		switch {
		case len(s.ID) < 1 || len(s.ID) > 32:
			return fmt.Errorf("the id of a secret has %d bytes, not 1 to 32", len(s.ID))
		case seen[s.ID]:
			return fmt.Errorf("two secrets have the id %q", s.ID)
		case len(s.Key) < minKey:
			return fmt.Errorf("the key of secret %q has %d bytes, less than %d", s.ID, len(s.Key), minKey)
		}
		seen[s.ID] = true
	}
	return nil
}

// WithFingerprintSecret has fingerprints stored as HMAC-SHA-256 under current,
// so that whoever reads the store cannot test guesses of what requests said.
// Fingerprints under the previous secrets, and those stored before there was
// any, are still compared; a request whose record names a secret that is gone
// is answered 409 idempotency-not-replayable.
func WithFingerprintSecret(current Secret, previous ...Secret) Option {
	return optionFunc(func(g *Guard) { g.secrets = append([]Secret{current}, previous...) })
}

func (g *Guard) currentSecret() *Secret {
	if len(g.secrets) == 0 {
		return nil
	}
	return &g.secrets[0]
}

// A Sealer encrypts recorded answers with associated data (an AEAD). It is safe
// for concurrent use. [NewSealer] makes one; one that asks a key management
// service is another.
type Sealer interface {
	Seal(plain, associated []byte) ([]byte, error)
	// Open fails when the associated data is not what was sealed with.
	Open(sealed, associated []byte) ([]byte, error)
}

// WithSealer has recorded header fields and bodies sealed at rest, bound to the
// key's hash, the claim and the status, so that none can be moved to another
// key or status. Records from before are still replayed. A record that cannot
// be opened any more is answered 409 idempotency-not-replayable. Statuses,
// operations and keys stay readable for operators.
func WithSealer(s Sealer) Option {
	return optionFunc(func(g *Guard) { g.sealer = s })
}

// NewSealer returns a sealer that seals with AES-GCM under current and opens
// what current or one of the previous keys sealed. Keys have 16, 24 or 32
// bytes; replace one before it has sealed 2^31 answers (NIST SP 800-38D,
// section 8.3, for two random nonces an answer).
func NewSealer(current Secret, previous ...Secret) (Sealer, error) {
	secrets := append([]Secret{current}, previous...)
	if err := checkSecrets(secrets, 16); err != nil {
		return nil, fmt.Errorf("idempotency: sealing keys: %w", err)
	}
	s := &aesSealer{current: current.ID, keys: map[string]cipher.AEAD{}}
	for _, secret := range secrets {
		block, err := aes.NewCipher(secret.Key)
		if err != nil {
			return nil, fmt.Errorf("idempotency: sealing key %q: %w", secret.ID, err)
		}
		if s.keys[secret.ID], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return nil, fmt.Errorf("idempotency: sealing key %q: %w", secret.ID, err)
		}
	}
	return s, nil
}

type aesSealer struct {
	current string
	keys    map[string]cipher.AEAD
}

func (s *aesSealer) Seal(plain, associated []byte) ([]byte, error) {
	return s.keys[s.current].Seal(appendField(nil, s.current), nil, plain, associated), nil
}

func (s *aesSealer) Open(sealed, associated []byte) ([]byte, error) {
	id, sealed, ok := cutField(sealed)
	key := s.keys[id]
	if !ok || key == nil {
		return nil, errors.New("idempotency: the key that sealed it is gone")
	}
	return key.Open(nil, nil, sealed, associated)
}

// seal seals an outcome for the claim that settles it. Header and body are
// sealed apart, since stores keep them apart, and each says which it is.
func seal(s Sealer, o Outcome, hash [32]byte, id ClaimID) (Outcome, error) {
	header, err := s.Seal(o.Header, associated("header", o.Status, hash, id))
	if err != nil {
		return Outcome{}, err
	}
	body, err := s.Seal(o.Body, associated("body", o.Status, hash, id))
	if err != nil {
		return Outcome{}, err
	}
	o.Header, o.Body = append([]byte{sealedEncoding}, header...), body
	return o, nil
}

func open(s Sealer, o Outcome, hash [32]byte, id ClaimID) (Outcome, error) {
	if s == nil {
		return Outcome{}, errors.New("idempotency: the record is sealed, and the guard has no sealer")
	}
	header, err := s.Open(o.Header[1:], associated("header", o.Status, hash, id))
	if err != nil {
		return Outcome{}, err
	}
	body, err := s.Open(o.Body, associated("body", o.Status, hash, id))
	if err != nil {
		return Outcome{}, err
	}
	o.Header, o.Body = header, body
	return o, nil
}

func associated(part string, status int, hash [32]byte, id ClaimID) []byte {
	b := appendField(nil, "oapi-idempotent seal 1")
	b = appendField(b, part)
	b = appendField(b, strconv.Itoa(status))
	b = appendField(b, hash[:])
	return appendField(b, id[:])
}
