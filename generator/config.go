package generator

import (
	"cmp"
	"errors"
	"fmt"
	"go/token"
	"io/fs"
	"net/http"
	"strings"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
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

// blockValues are the values that fields of the `idempotency` block may have.
var blockValues = map[string][]string{
	"header-param": {headerParamRelax, headerParamKeep, headerParamStrip},
	"unannotated":  {unannotatedIgnore, unannotatedReject},
}

// ParseConfig reads a config file. A field that neither oapi-codegen nor this
// package knows is an error. Errors are as [DecodeConfig]'s.
func ParseConfig(data []byte) (Config, error) {
	var cfg Config
	var findings Findings
	if err := DecodeConfig(data, &cfg); err != nil && !errors.As(err, &findings) {
		return Config{}, err
	}
	if root, err := document.Parse("", data); err == nil {
		findings = append(findings, checkValues(root)...)
	}
	if findings != nil {
		return Config{}, findings.Sorted()
	}
	return cfg, nil
}

// checkValues finds values that are of the right type, and yet cannot be.
func checkValues(root *document.Node) Findings {
	var findings Findings
	check := func(n *document.Node, valid func(string) error) {
		if n == nil || n.Kind == document.Null || n.Kind == document.List || n.Kind == document.Object || n.Value == "" {
			return
		}
		if err := valid(n.Value); err != nil {
			findings = append(findings, document.Finding{Pos: n.Pos, Message: err.Error()})
		}
	}
	block := root.Get("idempotency")
	check(root.Get("package"), validPackage)
	check(block.Get("extension"), validExtension)
	for field, values := range blockValues {
		check(block.Get(field), func(value string) error { return oneOf(field, value, values...) })
	}
	return findings
}

func validPackage(name string) error {
	if !token.IsIdentifier(name) || name == "_" {
		return fmt.Errorf("package is %q, which Go does not allow; write letters and digits, and no word of the language", name)
	}
	return nil
}

func validExtension(name string) error {
	if !strings.HasPrefix(name, "x-") || name == "x-" || strings.ContainsAny(name, " \t\r\n") {
		return fmt.Errorf("idempotency: extension is %q, which is no name of an extension; write one that begins with x-, such as %s", name, defaultExtension)
	}
	return nil
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
	return cmp.Or(
		validPackage(cfg.PackageName),
		validExtension(cfg.Idempotency.Extension),
		oneOf("header-param", cfg.Idempotency.HeaderParam, blockValues["header-param"]...),
		oneOf("unannotated", cfg.Idempotency.Unannotated, blockValues["unannotated"]...),
	)
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
	return fmt.Errorf("idempotency: %s is %q; write one of %q%s", field, got, values, document.DidYouMean(got, values))
}
