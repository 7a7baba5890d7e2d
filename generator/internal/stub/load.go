package stub

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"
	"github.com/speakeasy-api/openapi/overlay/loader"
	"gopkg.in/yaml.v3"
)

// A Loader reads documents as oapi-codegen does, but from a file system and
// over HTTP where that is allowed. It is itself a file system, which opens URLs
// too, so that another reader of the same documents reads the same bytes.
type Loader struct {
	files  fs.FS
	client *http.Client
	// allowed is oapi-codegen's allow-remote-refs-from.
	allowed []string
	// read holds what was fetched, and what an overlay made.
	read map[string][]byte
}

// NewLoader returns a Loader of the document called spec and all it refers to.
func NewLoader(files fs.FS, client *http.Client, spec string, allowRemoteRefsFrom []string) *Loader {
	return &Loader{
		files:   files,
		client:  client,
		allowed: append([]string{spec}, allowRemoteRefsFrom...),
		read:    map[string][]byte{},
	}
}

// Open opens a file; what was fetched or made can only be read whole.
func (l *Loader) Open(name string) (fs.File, error) {
	if remote(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.ErrUnsupported}
	}
	return l.files.Open(name)
}

// ReadFile reads a file, or fetches a URL.
func (l *Loader) ReadFile(name string) ([]byte, error) {
	if data, ok := l.read[name]; ok {
		return data, nil
	}
	if !remote(name) {
		// Documents written on Windows separate with backslashes.
		return fs.ReadFile(l.files, path.Clean(strings.ReplaceAll(name, `\`, "/")))
	}
	// A relative reference was joined to a URL as if it were a path.
	scheme, rest, _ := strings.Cut(name, ":")
	location, err := url.Parse(scheme + "://" + strings.TrimLeft(rest, "/"))
	if err != nil {
		return nil, err
	}
	if !util.RemoteRefAllowed(l.allowed, location) {
		return nil, fmt.Errorf("%s is not listed in allow-remote-refs-from", location)
	}
	data, err := openapi3.ReadFromHTTP(l.client)(nil, location)
	if err != nil {
		return nil, err
	}
	l.read[name] = data
	return data, nil
}

func remote(name string) bool {
	return strings.HasPrefix(name, "http:/") || strings.HasPrefix(name, "https:/")
}

// Load loads the document called name and resolves its references.
func (l *Loader) Load(name string) (*openapi3.T, error) {
	location, err := url.Parse(name)
	if err != nil || location.Host == "" {
		return l.kin().LoadFromFile(name)
	}
	return l.kin().LoadFromURI(location)
}

// kin returns a kin-openapi loader; one serves one document.
func (l *Loader) kin() *openapi3.Loader {
	kin := openapi3.NewLoader()
	kin.IsExternalRefsAllowed = true
	kin.IncludeOrigin = true // oapi-codegen registers routes in the order of the document
	kin.ReadFromURIFunc = func(_ *openapi3.Loader, at *url.URL) ([]byte, error) {
		if at.Host == "" {
			return l.ReadFile(at.Path)
		}
		whole := *at
		whole.Fragment, whole.RawFragment = "", ""
		return l.ReadFile(whole.String())
	}
	return kin
}

// Overlay applies the overlay called overlayName to the document called name,
// and returns the name under which the result can be read and the result.
// Relative references in it are those of the original.
func (l *Loader) Overlay(name, overlayName string, strict bool) (string, *openapi3.T, error) {
	doc, err := l.Load(name)
	if err != nil {
		return "", nil, err
	}
	// The overlay is applied to what oapi-codegen applies it to: the document
	// as kin-openapi writes it again.
	var buf bytes.Buffer
	encoder := yaml.NewEncoder(&buf)
	encoder.SetIndent(2)
	if err := encoder.Encode(doc); err != nil {
		return "", nil, fmt.Errorf("writing %s again for its overlay: %w", name, err)
	}
	var node yaml.Node
	if err := yaml.Unmarshal(buf.Bytes(), &node); err != nil {
		return "", nil, fmt.Errorf("reading %s again for its overlay: %w", name, err)
	}
	text, err := l.ReadFile(overlayName)
	if err != nil {
		return "", nil, fmt.Errorf("reading the overlay: %w", err)
	}
	overlay, err := loader.LoadOverlayFromReader(bytes.NewReader(text))
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", overlayName, err)
	}
	if err := overlay.Validate(); err != nil {
		return "", nil, fmt.Errorf("%s: %w", overlayName, err)
	}
	if strict {
		if warnings, err := overlay.ApplyToStrict(&node); err != nil {
			return "", nil, fmt.Errorf("applying %s: %w\n%s", overlayName, err, strings.Join(warnings, "\n"))
		}
	} else if err := overlay.ApplyTo(&node); err != nil {
		return "", nil, fmt.Errorf("applying %s: %w", overlayName, err)
	}
	merged, err := yaml.Marshal(&node)
	if err != nil {
		return "", nil, fmt.Errorf("writing %s after its overlay: %w", name, err)
	}
	location, err := url.Parse(name)
	if err != nil || location.Host == "" {
		location = &url.URL{Path: name}
	}
	if doc, err = l.kin().LoadFromDataWithPath(merged, location); err != nil {
		return "", nil, err
	}
	mergedName := fmt.Sprintf("%s (with %s applied)", name, path.Base(overlayName))
	l.read[mergedName] = merged
	return mergedName, doc, nil
}
