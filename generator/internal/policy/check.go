package policy

import (
	"slices"
	"strings"
)

// checkPolicy rejects values that contradict one another or mean nothing beside
// one another. A value that a stronger level silences is not wrong: defaults
// are there to be overruled.
func (r *resolver) checkPolicy(o *Operation) {
	s, c := &o.Server, &o.Client
	if o.Natural {
		r.silenced(o, "natural", func(field string) bool {
			return field != "natural" && !strings.HasPrefix(field, "client")
		}, "means nothing beside natural: true, which leaves the operation unguarded; remove one of them")
		return
	}
	is := func(names ...string) func(string) bool {
		return func(field string) bool { return slices.Contains(names, field) }
	}
	if s.ReplayNone {
		if s.WaitFor > 0 {
			r.silenced(o, "replay", is("waitFor"), "means nothing with replay: none, as there is no answer to wait for; remove one of them")
		}
		r.silenced(o, "replay", is("server.maxRecordedBody"), "means nothing with replay: none, as no body is recorded; remove one of them")
		if s.OnMismatch == 0 {
			r.rejectStronger(o, "replay", "onMismatch", "replay: none leaves no answer for onMismatch: replay; write onMismatch: 422, or remove replay: none")
		}
	} else if o.Streaming {
		r.reject(o.Pos, "%s %s declares a response that streams, which cannot be recorded and replayed; write replay: none, or %s: false", o.Method, o.Path, r.cfg.Extension)
	}
	if !s.ReplayNone && strings.EqualFold(s.Header, s.Marker) {
		r.rejectStronger(o, "header", "replay.marker", "%s cannot carry the key and mark replays both; write another header field", s.Header)
	}
	if s.OnMismatch == 0 {
		r.silenced(o, "onMismatch", func(field string) bool { return strings.HasPrefix(field, "fingerprint.") },
			"means nothing with onMismatch: replay, which compares nothing; remove one of them")
	}
	switch s.FingerprintBody {
	case "raw", "multipart", "none":
		if len(s.FingerprintIgnore) > 0 {
			r.silenced(o, "fingerprint.body", is("fingerprint.ignore"),
				"names members of a JSON body, which means nothing with fingerprint.body: "+s.FingerprintBody+"; remove one of them")
		}
	}
	if s.Guarantee == "atMostOnce" {
		r.silenced(o, "server.guarantee", is("record"), "means nothing with server.guarantee: atMostOnce, which records every answer; remove one of them")
	}
	for _, name := range s.FingerprintHeaders {
		if strings.EqualFold(name, s.Header) {
			r.reject(o.Origins["fingerprint.headers"].Pos, "%s lists %s, the key's own header field; remove it", r.full("fingerprint.headers"), name)
		}
	}
	const uuidLength = 36
	switch {
	case s.KeyMinLength > s.KeyMaxLength:
		r.rejectStronger(o, "key.minLength", "key.maxLength", "no key is at least %d and at most %d long; write a minLength that is not above maxLength", s.KeyMinLength, s.KeyMaxLength)
	case s.KeyFormat == "uuid" && (s.KeyMinLength > uuidLength || s.KeyMaxLength < uuidLength):
		r.rejectStronger(o, "key.minLength", "key.maxLength", "a UUID is %d long, which key.minLength %d and key.maxLength %d do not allow; remove them", uuidLength, s.KeyMinLength, s.KeyMaxLength)
	}
	if c.MaxAttempts == 1 {
		r.silenced(o, "client.retry.maxAttempts", is("client.retry.base", "client.retry.max", "client.retry.maxElapsed"),
			"means nothing with client.retry.maxAttempts: 1, which sends nothing again; remove one of them")
	}
	if c.Base > c.Max {
		r.rejectStronger(o, "client.retry.base", "client.retry.max", "client.retry.base %v is longer than client.retry.max %v; write a max that is not below base", c.Base, c.Max)
	}
	if c.Base > c.MaxElapsed {
		r.rejectStronger(o, "client.retry.base", "client.retry.maxElapsed", "client.retry.base %v is longer than client.retry.maxElapsed %v, so that nothing would be sent again; write retry: false, or a longer maxElapsed", c.Base, c.MaxElapsed)
	}
	r.checkKept(o)
}

// checkInheritedNatural rejects an operation that is annotated, and that a level
// above leaves unguarded all the same, which who reads its annotation cannot see.
func (r *resolver) checkInheritedNatural(o *Operation, own *annotation) {
	from := o.Origins["natural"]
	ownProfile := from.rank == rankProfile && own != nil && own.profile != nil
	if own == nil || !o.Natural || from.rank == rankOperation || ownProfile {
		return
	}
	r.reject(own.pos, "%s: natural: true of the %s leaves this operation unguarded; write natural: true here too, or natural: false", r.cfg.Extension, from.Level)
}

// checkKept rejects what a declared header parameter makes impossible when it is
// kept: oapi-codegen's own binder answers first.
func (r *resolver) checkKept(o *Operation) {
	if o.HeaderParam == nil || r.cfg.HeaderParam != "keep" {
		return
	}
	if o.HeaderParam.Required && o.Server.OnMissing != 400 {
		r.reject(o.Origins["onMissing"].Pos, "%s cannot take hold: header-param is keep and %s is a required parameter, so that a request without it is answered 400 first; write 400, or header-param: relax", r.full("onMissing"), o.HeaderParam.Name)
	}
}

// silenced reports the fields for which match holds that were given at the level
// of the field by, or at a stronger one.
func (r *resolver) silenced(o *Operation, by string, match func(field string) bool, why string) {
	for _, name := range fieldNames {
		if origin := o.Origins[name]; match(name) && origin.rank > rankHeaderParam && origin.rank >= o.Origins[by].rank {
			r.reject(origin.Pos, "%s %s", r.full(name), why)
		}
	}
}

// rejectStronger reports at whichever of two fields was given at the stronger
// level, or in an overlay.
func (r *resolver) rejectStronger(o *Operation, a, b, format string, args ...any) {
	at := o.Origins[a]
	sameFile := at.Pos.File == o.Origins[b].Pos.File || at.Pos.File == r.doc.Root().Pos.File
	if rank := o.Origins[b].rank; rank > at.rank || rank == at.rank && sameFile {
		at = o.Origins[b]
	}
	r.reject(at.Pos, r.cfg.Extension+": "+format, args...)
}
