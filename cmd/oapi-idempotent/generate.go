package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oapi-codegen/oapi-codegen/v2/pkg/codegen"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"
	"go.yaml.in/yaml/v3"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

const help = `oapi-idempotent generates Go servers, clients and models from an OpenAPI document.
It is oapi-codegen (same flags, same config files, same output) and guards the
operations that the document annotates:

  paths:
    /orders:
      post:
        x-idempotent: true        # or a policy: {ttl: 24h, onMissing: 400, ...}

Usage:

  oapi-idempotent [generate] [flags] <document>

Other verbs, each with a help of its own (oapi-idempotent <verb> -h):

  check      is the generated file up to date? Writes nothing
  explain    what holds for each operation, and where the document says so
  lint       what the document says of keys and retries, and likely does not mean
  sql        print the table's DDL, or write it as a migration
  keys       list, show, settle and sweep the keys in a PostgreSQL database
  typescript write the client's half for fetch and openapi-fetch

<document> is a file or an http(s) URL, YAML or JSON. A minimal config:

  # api.yaml
  package: api
  output: api/api.gen.go
  generate: {std-http-server: true, strict-server: true, client: true, models: true}

  oapi-idempotent -config api.yaml openapi.yaml

The config file may have one block that oapi-codegen does not know:

  idempotency:
    extension: x-idempotent     # the annotation's name
    header-param: relax         # a declared key header parameter: relax, keep or strip
    unannotated: ignore         # or reject: every POST and PATCH must say what it is

Findings are printed as file:line:column: what to write instead. Exit codes:
1 for findings and failures, with nothing written; 2 for a wrong command line.

Flags:
`

// flags are oapi-codegen's.
type flags struct {
	output         string
	config         string
	oldConfigStyle bool
	outputConfig   bool
	version        bool
	packageName    string
	generate       string
	templates      string

	// Deprecated by oapi-codegen in favour of the config file.
	includeTags         string
	excludeTags         string
	includeOperationIDs string
	excludeOperationIDs string
	importMapping       string
	excludeSchemas      string
	responseTypeSuffix  string
	aliasTypes          bool
}

// defaultGenerate is the value of -generate that counts as not given.
const defaultGenerate = "types,client,server,spec"

func (f *flags) declare(set *flag.FlagSet) {
	set.StringVar(&f.output, "o", "", "write to this `file`; default: standard output")
	set.StringVar(&f.config, "config", "", "read this config `file`")
	set.BoolVar(&f.oldConfigStyle, "old-config-style", false, "the config file is in oapi-codegen's old style")
	set.BoolVar(&f.outputConfig, "output-config", false, "print the config file that the flags amount to, and exit")
	set.BoolVar(&f.version, "version", false, "print the versions and exit")
	set.StringVar(&f.packageName, "package", "", "`name` of the generated package")
	set.StringVar(&f.generate, "generate", defaultGenerate, "comma-separated `list` of: types, client, server (echo), echo5, chi-server, gin, gorilla, fiber, fiber-v3, iris, std-http, strict-server, spec, skip-fmt, skip-prune")
	set.StringVar(&f.templates, "templates", "", "`directory` of templates that replace oapi-codegen's")
	set.StringVar(&f.includeTags, "include-tags", "", "only operations with one of these `tags` (deprecated: use the config file)")
	set.StringVar(&f.excludeTags, "exclude-tags", "", "no operation with one of these `tags` (deprecated)")
	set.StringVar(&f.includeOperationIDs, "include-operation-ids", "", "only operations with one of these `ids` (deprecated)")
	set.StringVar(&f.excludeOperationIDs, "exclude-operation-ids", "", "no operation with one of these `ids` (deprecated)")
	set.StringVar(&f.importMapping, "import-mapping", "", "Go packages of referenced documents, as `file:package,...` (deprecated)")
	set.StringVar(&f.excludeSchemas, "exclude-schemas", "", "do not generate these `schemas` (deprecated)")
	set.StringVar(&f.responseTypeSuffix, "response-type-suffix", "", "`suffix` of response types (deprecated)")
	set.BoolVar(&f.aliasTypes, "alias-types", false, "not supported any more")
}

func generate(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flag.NewFlagSet("generate", flag.ContinueOnError)
	cfg, err := configure(ctx, set, help, args, stdout, stderr)
	if cfg == nil || err != nil {
		return err
	}
	files, err := generator.Generate(ctx, *cfg)
	if err != nil {
		return err
	}
	for _, file := range files {
		if file.Name == "" {
			_, err = stdout.Write(file.Content)
		} else {
			err = write(file)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// configure reads a command line of generate's flags and those that set has
// already, and the config file. The config is nil when the command line only
// asked for what has been printed by now, such as the help.
func configure(ctx context.Context, set *flag.FlagSet, help string, args []string, stdout, stderr io.Writer) (*generator.Config, error) {
	var f flags
	f.declare(set)
	operands, done, err := parseFlags(set, help, args, stdout)
	if done || err != nil {
		return nil, err
	}
	if f.version {
		fmt.Fprintf(stdout, "oapi-idempotent v%s\noapi-codegen %s\n", idempotency.Version, generator.OapiCodegenVersion())
		return nil, nil
	}
	switch len(operands) {
	case 1:
	case 0:
		return nil, usageError{"name an OpenAPI document"}
	default:
		return nil, usageError{fmt.Sprintf("name one OpenAPI document, not %q", operands)}
	}

	if operands[0] == "" {
		return nil, usageError{"name an OpenAPI document"}
	}
	cfg, err := f.configuration(set)
	if err != nil {
		return nil, err
	}
	cfg.Spec = filepath.ToSlash(operands[0])
	cfg.FS = hostFS{}
	cfg = cfg.WithDefaults()
	if cfg.PackageName == "" {
		cfg.PackageName = packageName(ctx, cfg.Output, cfg.Spec)
		if !token.IsIdentifier(cfg.PackageName) {
			cfg.PackageName = ""
		}
	}
	if reads := set.Name() != "generate" && set.Name() != "check"; reads && cfg.PackageName == "" {
		cfg.PackageName = "api" // of nothing that is written
	}
	if cfg.PackageName == "" {
		return nil, usageError{"name the generated package with -package, or as package in the config file"}
	}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	for _, input := range []string{operands[0], f.config, cfg.OutputOptions.Overlay.Path} {
		if sameFile(cfg.Output, input) {
			return nil, fmt.Errorf("the output, %s, would replace %s, which is read; name another file", cfg.Output, input)
		}
	}
	warn(stderr, targetWarnings(cfg.Generate))
	warn(stderr, cfg.Warnings())
	if f.outputConfig {
		return nil, printConfig(stdout, cfg)
	}
	return &cfg, nil
}

// targetWarnings are oapi-codegen's of a target, which looks for the go.mod file
// and panics at one that has no go directive.
func targetWarnings(targets codegen.GenerateOptions) (warnings map[string]string) {
	defer func() {
		if recover() != nil {
			warnings = map[string]string{"std-http-server": "the go.mod file has no go directive, and net/http has patterns with methods since Go 1.22; write the directive, such as go 1.26.0"}
		}
	}()
	return targets.Warnings()
}

func warn(stderr io.Writer, warnings map[string]string) {
	for _, about := range slices.Sorted(maps.Keys(warnings)) {
		fmt.Fprintf(stderr, "warning: %s: %s\n", about, warnings[about])
	}
}

// sameFile reports whether two names, which may be empty, are of one file that
// exists.
func sameFile(a, b string) bool {
	first, errA := os.Stat(a)
	second, errB := os.Stat(b)
	return errA == nil && errB == nil && first.Mode().IsRegular() && os.SameFile(first, second)
}

// printConfig prints what oapi-codegen does, and the idempotency block where it
// says something.
func printConfig(stdout io.Writer, cfg generator.Config) error {
	if cfg.Idempotency == (generator.Config{}).WithDefaults().Idempotency {
		cfg.Idempotency = generator.Idempotency{}
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(cfg); err != nil {
		return err
	}
	_, err := stdout.Write(out.Bytes())
	return err
}

// packageName guesses the name of the generated package as oapi-codegen means
// to: that of the package that is there already, else the document's name.
func packageName(ctx context.Context, output, spec string) string {
	if output != "" {
		list := exec.CommandContext(ctx, "go", "list", "-find", "-f", "{{.Name}}", ".")
		list.Dir = filepath.Dir(output)
		if name, err := list.Output(); err == nil && len(bytes.TrimSpace(name)) > 0 {
			return string(bytes.TrimSpace(name))
		}
	}
	base, _, _ := strings.Cut(filepath.Base(spec), ".")
	return codegen.LowercaseFirstCharacter(codegen.ToCamelCase(base))
}

// oldConfig is oapi-codegen's config file of before its version 1.11.
type oldConfig struct {
	PackageName         string                       `yaml:"package"`
	GenerateTargets     []string                     `yaml:"generate"`
	Output              string                       `yaml:"output"`
	IncludeTags         []string                     `yaml:"include-tags"`
	ExcludeTags         []string                     `yaml:"exclude-tags"`
	IncludeOperationIDs []string                     `yaml:"include-operation-ids"`
	ExcludeOperationIDs []string                     `yaml:"exclude-operation-ids"`
	TemplatesDir        string                       `yaml:"templates"`
	ImportMapping       map[string]string            `yaml:"import-mapping"`
	ExcludeSchemas      []string                     `yaml:"exclude-schemas"`
	ResponseTypeSuffix  string                       `yaml:"response-type-suffix"`
	Compatibility       codegen.CompatibilityOptions `yaml:"compatibility"`
}

func parseOldConfig(data []byte) (oldConfig, error) {
	var old oldConfig
	err := generator.DecodeConfig(data, &old)
	return old, err
}

// configuration reads the config file and applies the flags to it. Which style
// the file has is decided as oapi-codegen does: by the flag that says so, by
// which of the two it can be read as, then by whether a deprecated flag is
// given.
func (f *flags) configuration(set *flag.FlagSet) (generator.Config, error) {
	if f.config == "" {
		if f.oldConfigStyle || deprecatedFlagGiven(set) {
			return f.oldConfiguration(oldConfig{})
		}
		cfg := generator.Config{Output: f.output}
		cfg.Generate = codegen.GenerateOptions{EchoServer: true, Client: true, Models: true, EmbeddedSpec: true}
		return f.update(cfg)
	}
	data, err := os.ReadFile(f.config)
	if err != nil {
		return generator.Config{}, fmt.Errorf("reading the config file: %w", err)
	}
	cfg, newErr := generator.ParseConfig(data)
	old, oldErr := parseOldConfig(data)
	switch {
	case oldErr != nil && (f.oldConfigStyle || newErr != nil && old.GenerateTargets != nil):
		return generator.Config{}, inFile(f.config, oldErr)
	case newErr != nil && oldErr != nil:
		return generator.Config{}, inFile(f.config, newErr)
	case f.oldConfigStyle, newErr != nil, oldErr == nil && deprecatedFlagGiven(set):
		return f.oldConfiguration(old)
	}
	return f.update(cfg)
}

// inFile names the file in which findings stand.
func inFile(name string, err error) error {
	var findings generator.Findings
	if !errors.As(err, &findings) {
		return fmt.Errorf("%s: %w", name, err)
	}
	for i := range findings {
		findings[i].Pos.File = name
	}
	return findings
}

func deprecatedFlagGiven(set *flag.FlagSet) bool {
	deprecated := []string{"include-tags", "exclude-tags", "import-mapping", "exclude-schemas", "response-type-suffix", "alias-types"}
	given := false
	set.Visit(func(f *flag.Flag) { given = given || slices.Contains(deprecated, f.Name) })
	return given
}

// update applies the flags to a config file's contents: flags win, but -o.
func (f *flags) update(cfg generator.Config) (generator.Config, error) {
	if f.packageName != "" {
		cfg.PackageName = f.packageName
	}
	if f.generate != defaultGenerate {
		if err := setTargets(&cfg, util.ParseCommandLineList(f.generate)); err != nil {
			return cfg, err
		}
	}
	out := &cfg.OutputOptions
	for _, list := range []struct {
		flag  string
		field *[]string
	}{
		{f.includeTags, &out.IncludeTags},
		{f.excludeTags, &out.ExcludeTags},
		{f.includeOperationIDs, &out.IncludeOperationIDs},
		{f.excludeOperationIDs, &out.ExcludeOperationIDs},
		{f.excludeSchemas, &out.ExcludeSchemas},
	} {
		if list.flag != "" {
			*list.field = util.ParseCommandLineList(list.flag)
		}
	}
	if f.templates != "" {
		templates, err := readTemplates(f.templates)
		if err != nil {
			return cfg, err
		}
		out.UserTemplates = templates
	}
	if f.importMapping != "" {
		mapping, err := util.ParseCommandlineMap(f.importMapping)
		if err != nil {
			return cfg, usageError{"-import-mapping: " + err.Error()}
		}
		cfg.ImportMapping = mapping
	}
	if f.responseTypeSuffix != "" {
		out.ResponseTypeSuffix = f.responseTypeSuffix
	}
	if f.aliasTypes {
		return cfg, usageError{"-alias-types is not supported any more; remove it"}
	}
	if cfg.Output == "" {
		cfg.Output = f.output
	}
	return cfg, nil
}

// oldConfiguration applies the flags to an old-style config file's contents:
// the file wins. What it ignores, oapi-codegen ignores.
func (f *flags) oldConfiguration(old oldConfig) (generator.Config, error) {
	list := func(field []string, flag string) []string {
		if field == nil {
			return util.ParseCommandLineList(flag)
		}
		return field
	}
	text := func(field, flag string) string {
		if field == "" {
			return flag
		}
		return field
	}
	cfg := generator.Config{Output: text(old.Output, f.output)}
	cfg.PackageName = text(old.PackageName, f.packageName)
	cfg.Compatibility = old.Compatibility
	cfg.OutputOptions = codegen.OutputOptions{
		ResponseTypeSuffix: f.responseTypeSuffix,
		IncludeTags:        list(old.IncludeTags, f.includeTags),
		ExcludeTags:        list(old.ExcludeTags, f.excludeTags),
		ExcludeSchemas:     list(old.ExcludeSchemas, f.excludeSchemas),
	}
	err := setTargets(&cfg, list(old.GenerateTargets, f.generate))
	if err != nil && old.GenerateTargets != nil {
		return cfg, fmt.Errorf("%s: %v", f.config, err) // and no usage error
	}
	if err != nil {
		return cfg, err
	}
	if dir := text(old.TemplatesDir, f.templates); dir != "" {
		if cfg.OutputOptions.UserTemplates, err = readTemplates(dir); err != nil {
			return cfg, err
		}
	}
	cfg.ImportMapping = old.ImportMapping
	if old.ImportMapping == nil && f.importMapping != "" {
		if cfg.ImportMapping, err = util.ParseCommandlineMap(f.importMapping); err != nil {
			return cfg, usageError{"-import-mapping: " + err.Error()}
		}
	}
	return cfg, nil
}

// setTargets makes cfg generate these targets and no others.
func setTargets(cfg *generator.Config, targets []string) error {
	g := codegen.GenerateOptions{}
	for _, target := range targets {
		switch target {
		case "iris", "iris-server":
			g.IrisServer = true
		case "chi-server", "chi":
			g.ChiServer = true
		case "fiber-server", "fiber":
			g.FiberServer = true
		case "fiber-v3-server", "fiber-v3":
			g.FiberV3Server = true
		case "server", "echo-server", "echo":
			g.EchoServer = true
		case "echo5", "echo5-server":
			g.Echo5Server = true
		case "gin", "gin-server":
			g.GinServer = true
		case "gorilla", "gorilla-server":
			g.GorillaServer = true
		case "std-http", "std-http-server":
			g.StdHTTPServer = true
		case "strict-server":
			g.Strict = true
		case "client":
			g.Client = true
		case "types", "models":
			g.Models = true
		case "spec", "embedded-spec":
			g.EmbeddedSpec = true
		case "skip-fmt":
			cfg.OutputOptions.SkipFmt = true
		case "skip-prune":
			cfg.OutputOptions.SkipPrune = true
		default:
			return usageError{fmt.Sprintf("%q cannot be generated; see -generate", target)}
		}
	}
	cfg.Generate = g
	return nil
}

// readTemplates reads a directory of templates, named by their paths within it.
func readTemplates(dir string) (map[string]string, error) {
	templates := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		templates[filepath.ToSlash(name)] = string(data)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the templates: %w", err)
	}
	return templates, nil
}
