package policy

import (
	"strings"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/internal/wire"
)

// A setting is one value that a policy in the document gives.
type setting struct {
	field string // dotted
	pos   document.Position
	apply func(*Operation)
}

// A field is one member of a policy: a value, or a group of fields.
type field struct {
	name   string
	parse  func(r *resolver, name string, n *document.Node) func(*Operation) // a value's; nil result: it was rejected
	fields []field                                                           // a group's
	off    *toggle                                                           // of a group that one word replaces
}

// A toggle is the word that may stand in place of a group, and what it sets.
// The group's own form sets the opposite.
type toggle struct {
	kind document.Kind
	word string
	at   func(*Operation) *bool
}

// value makes the parser of a field out of its value's parser and its place.
func value[T any](parse parser[T], at func(*Operation) *T) func(*resolver, string, *document.Node) func(*Operation) {
	return func(r *resolver, name string, n *document.Node) func(*Operation) {
		v, ok := parse(r, name, n)
		if !ok {
			return nil
		}
		return func(o *Operation) { *at(o) = v }
	}
}

// policyFields are the fields of a policy at every level. Beside them stand
// `profile`, and at the document root `profiles` and `applyTo`.
var policyFields = []field{
	{name: "natural", parse: value(boolean, func(o *Operation) *bool { return &o.Natural })},
	{name: "header", parse: value(requestHeader, func(o *Operation) *string { return &o.Server.Header })},
	{name: "onMissing", parse: value(
		choice(status(400), status(422), word("run", 0)),
		func(o *Operation) *int { return &o.Server.OnMissing })},
	{name: "key", fields: []field{
		{name: "format", parse: value(words("any", "uuid"), func(o *Operation) *string { return &o.Server.KeyFormat })},
		{name: "minLength", parse: value(positive, func(o *Operation) *int { return &o.Server.KeyMinLength })},
		{name: "maxLength", parse: value(positive, func(o *Operation) *int { return &o.Server.KeyMaxLength })},
	}},
	{name: "scope", parse: value(
		words("principal", "operation", "global"),
		func(o *Operation) *string { return &o.Server.Scope })},
	{name: "ttl", parse: value(duration(1), func(o *Operation) *time.Duration { return &o.Server.TTL })},
	{name: "fingerprint", fields: []field{
		{name: "body", parse: value(
			words("auto", "json", "raw", "multipart", "none"),
			func(o *Operation) *string { return &o.Server.FingerprintBody })},
		{name: "query", parse: value(boolean, func(o *Operation) *bool { return &o.Server.FingerprintQuery })},
		{name: "mediaType", parse: value(boolean, func(o *Operation) *bool { return &o.Server.FingerprintMediaType })},
		{name: "headers", parse: value(
			list(comparedHeader, strings.ToLower),
			func(o *Operation) *[]string { return &o.Server.FingerprintHeaders })},
		{name: "ignore", parse: value(
			list(jsonPointer, verbatim),
			func(o *Operation) *[]string { return &o.Server.FingerprintIgnore })},
	}},
	{name: "onMismatch", parse: value(
		choice(status(400), status(409), status(422), word("replay", 0)),
		func(o *Operation) *int { return &o.Server.OnMismatch })},
	{name: "waitFor", parse: value(duration(0), func(o *Operation) *time.Duration { return &o.Server.WaitFor })},
	{name: "record", parse: value(list(recorded, verbatim), func(o *Operation) *[]string { return &o.Server.Record })},
	{
		name: "replay",
		off:  &toggle{document.String, "none", func(o *Operation) *bool { return &o.Server.ReplayNone }},
		fields: []field{
			{name: "status", parse: value(
				choice(word("original", 0), status(200)),
				func(o *Operation) *int { return &o.Server.ReplayStatus })},
			{name: "marker", parse: value(responseHeader, func(o *Operation) *string { return &o.Server.Marker })},
		},
	},
	{
		name: "client",
		off:  &toggle{document.Bool, "false", func(o *Operation) *bool { return &o.Client.Disabled }},
		fields: []field{{
			name: "retry",
			off:  &toggle{document.Bool, "false", func(o *Operation) *bool { return &o.Client.NoRetry }},
			fields: []field{
				{name: "maxAttempts", parse: value(positive, func(o *Operation) *int { return &o.Client.MaxAttempts })},
				{name: "base", parse: value(duration(1), func(o *Operation) *time.Duration { return &o.Client.Base })},
				{name: "max", parse: value(duration(1), func(o *Operation) *time.Duration { return &o.Client.Max })},
				{name: "maxElapsed", parse: value(duration(1), func(o *Operation) *time.Duration { return &o.Client.MaxElapsed })},
			},
		}},
	},
	{name: "server", fields: []field{
		{name: "guarantee", parse: value(
			words("atLeastOnce", "atMostOnce", "transaction"),
			func(o *Operation) *string { return &o.Server.Guarantee })},
		{name: "lease", parse: value(duration(wire.MinLease), func(o *Operation) *time.Duration { return &o.Server.Lease })},
		{name: "timeout", parse: value(duration(1), func(o *Operation) *time.Duration { return &o.Server.Timeout })},
		{name: "maxRequestBody", parse: value(size, func(o *Operation) *int64 { return &o.Server.MaxRequestBody })},
		{name: "maxRecordedBody", parse: value(size, func(o *Operation) *int64 { return &o.Server.MaxRecordedBody })},
	}},
}

// builtIn is the operation with the policy that every policy starts from.
func builtIn(o Operation) Operation {
	o.Server = Server{
		Header:               wire.HeaderKey,
		OnMissing:            wire.DefaultOnMissing,
		OnMismatch:           wire.DefaultOnMismatch,
		KeyFormat:            "any",
		KeyMinLength:         wire.DefaultKeyMinLength,
		KeyMaxLength:         wire.DefaultKeyMaxLength,
		Scope:                "principal",
		TTL:                  wire.DefaultTTL,
		WaitFor:              wire.DefaultWaitFor,
		Lease:                wire.DefaultLease,
		Timeout:              wire.DefaultTimeout,
		FingerprintBody:      "auto",
		FingerprintQuery:     true,
		FingerprintMediaType: true,
		Record:               []string{wire.DefaultRecord},
		Marker:               wire.HeaderReplayed,
		Guarantee:            "atLeastOnce",
		MaxRequestBody:       wire.DefaultMaxRequestBody,
		MaxRecordedBody:      wire.DefaultMaxRecordedBody,
	}
	o.Client = Client{
		MaxAttempts: wire.DefaultRetryMaxAttempts,
		Base:        wire.DefaultRetryBase,
		Max:         wire.DefaultRetryMax,
		MaxElapsed:  wire.DefaultRetryMaxElapsed,
	}
	o.Origins = make(map[string]Origin, len(fieldNames))
	for _, name := range fieldNames {
		o.Origins[name] = Origin{Level: "built-in"}
	}
	return o
}

// fieldNames are the dotted names of all values, key.pattern included, which
// only a declared header parameter can give.
var fieldNames = append(dotted("", policyFields), "key.pattern")

func dotted(prefix string, fields []field) []string {
	var names []string
	for _, f := range fields {
		if f.parse != nil || f.off != nil {
			names = append(names, prefix+f.name)
		}
		names = append(names, dotted(prefix+f.name+".", f.fields)...)
	}
	return names
}
