package generator

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"slices"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	"go.yaml.in/yaml/v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/policy"
)

// Config says what to read and what to generate. Its YAML form is
// oapi-codegen's config file with one block more, `idempotency`.
type Config struct {
	codegen.Configuration `yaml:",inline"`

	// Output names the file to generate, as in the config file. Generate does
	// not open it: it is the name of the returned File.
	Output string `yaml:"output,omitempty"`

	// Idempotency is the block that oapi-codegen does not have.
	Idempotency Idempotency `yaml:"idempotency,omitempty"`

	// Spec names the OpenAPI document within FS, or is an http(s) URL.
	Spec string `yaml:"-"`

	// FS is where Spec, what it refers to by relative references, an overlay
	// and user templates are read from. References are joined to the name of
	// the document that holds them, so FS must open names that begin with "../"
	// or "/" if those are to be followed; an [os.DirFS] refuses them.
	FS fs.FS `yaml:"-"`

	// HTTP fetches what is named by a URL and that AllowRemoteRefsFrom allows.
	// Nil: [http.DefaultClient].
	HTTP *http.Client `yaml:"-"`
}

// Idempotency is the config file's `idempotency` block.
type Idempotency struct {
	// Extension is the name of the extension. Default: x-idempotent.
	Extension string `yaml:"extension,omitempty"`
	// HeaderParam says what becomes of a header parameter that the document
	// declares for the key: relax (the default) makes it an optional plain
	// string, so that the guard and not the parameter binder answers for it;
	// keep leaves it as it is; strip removes it. What its schema says of strings
	// (minLength, maxLength, format: uuid, and pattern where RE2 can express it)
	// is the policy's default; of what is not applied [Explain] has notes.
	HeaderParam string `yaml:"header-param,omitempty"`
	// Unannotated says what becomes of a POST or PATCH that no annotation
	// covers: ignore (the default) or reject.
	Unannotated string `yaml:"unannotated,omitempty"`
}

// Defaults and values of the `idempotency` block.
const (
	defaultExtension = "x-idempotent"

	headerParamRelax = "relax"
	headerParamKeep  = "keep"
	headerParamStrip = "strip"

	unannotatedIgnore = "ignore"
	unannotatedReject = "reject"
)

// blockFields are the fields of the `idempotency` block, with the values that
// each may have; nil: any.
var blockFields = map[string][]string{
	"extension":    nil,
	"header-param": {headerParamRelax, headerParamKeep, headerParamStrip},
	"unannotated":  {unannotatedIgnore, unannotatedReject},
}

// ParseConfig reads a config file. A field that neither oapi-codegen nor this
// package knows is an error. What is wrong with the `idempotency` block is of
// type [Findings], whose positions lack the file's name.
func ParseConfig(data []byte) (Config, error) {
	var cfg Config
	if findings := checkBlock(data); findings != nil {
		return Config{}, findings
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.KnownFields(true)
	if err := decoder.Decode(&cfg); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, err
	}
	return cfg, nil
}

// checkBlock finds what is wrong with the `idempotency` block of a config file.
// Its shape, and all that is not YAML, is the decoder's to report.
func checkBlock(data []byte) Findings {
	var file struct {
		Idempotency yaml.Node `yaml:"idempotency"`
	}
	if err := yaml.Unmarshal(data, &file); err != nil || file.Idempotency.Kind != yaml.MappingNode {
		return nil
	}
	var findings Findings
	reject := func(at *yaml.Node, message string) {
		findings = append(findings, document.Finding{Pos: document.Position{Line: at.Line, Column: at.Column}, Message: message})
	}
	for i, content := 0, file.Idempotency.Content; i < len(content); i += 2 {
		key, value := content[i], content[i+1]
		switch values, known := blockFields[key.Value]; {
		case !known:
			instead := policy.DidYouMean(key.Value, slices.Sorted(maps.Keys(blockFields)))
			if instead == "" {
				instead = "; write extension, header-param or unannotated"
			}
			reject(key, fmt.Sprintf("idempotency.%s is not a field%s", key.Value, instead))
		case value.Kind == yaml.ScalarNode && value.Value != "" && values != nil:
			if err := oneOf(key.Value, value.Value, values...); err != nil {
				reject(value, err.Error())
			}
		}
	}
	return findings
}

// WithDefaults returns cfg with every field that has a default set.
func (cfg Config) WithDefaults() Config {
	cfg.Configuration = cfg.UpdateDefaults()
	orDefault(&cfg.Idempotency.Extension, defaultExtension)
	orDefault(&cfg.Idempotency.HeaderParam, headerParamRelax)
	orDefault(&cfg.Idempotency.Unannotated, unannotatedIgnore)
	if cfg.HTTP == nil {
		cfg.HTTP = http.DefaultClient
	}
	return cfg
}

// Validate reports the first thing that is wrong with cfg.
func (cfg Config) Validate() error {
	if err := cfg.Configuration.Validate(); err != nil {
		return err
	}
	if err := oneOf("header-param", cfg.Idempotency.HeaderParam, blockFields["header-param"]...); err != nil {
		return err
	}
	return oneOf("unannotated", cfg.Idempotency.Unannotated, blockFields["unannotated"]...)
}

func orDefault(field *string, value string) {
	if *field == "" {
		*field = value
	}
}

func oneOf(field, got string, values ...string) error {
	for _, value := range values {
		if got == value {
			return nil
		}
	}
	return fmt.Errorf("idempotency: %s is %q; write one of %q%s", field, got, values, policy.DidYouMean(got, values))
}
