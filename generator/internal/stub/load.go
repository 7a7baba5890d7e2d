package stub

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oapi-codegen/oapi-codegen/v2/pkg/util"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/document"
)

// A Loader reads documents as oapi-codegen does, but from a file system and
// over HTTP where that is allowed. It is itself a file system, which opens URLs
// too, so that another reader of the same documents reads the same bytes.
type Loader struct {
	files  fs.FS
	client *http.Client
	// allowed is oapi-codegen's allow-remote-refs-from.
	allowed []string
	// read holds what has been read, and what an overlay made of it.
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

// ReadFile reads a file, or fetches a URL, once.
func (l *Loader) ReadFile(name string) ([]byte, error) {
	name = canonical(name)
	if data, ok := l.read[name]; ok {
		return data, nil
	}
	data, err := l.readOnce(name)
	if err == nil {
		l.read[name] = data
	}
	return data, err
}

// canonical is the one name by which a file or a URL is known.
func canonical(name string) string {
	if remote(name) {
		// A relative reference was joined to a URL as if it were a path.
		scheme, rest, _ := strings.Cut(name, ":")
		return scheme + "://" + strings.TrimLeft(rest, "/")
	}
	// Documents written on Windows separate with backslashes.
	return path.Clean(strings.ReplaceAll(name, `\`, "/"))
}

func (l *Loader) readOnce(name string) ([]byte, error) {
	if !remote(name) {
		return fs.ReadFile(l.files, name)
	}
	location, err := url.Parse(name)
	if err != nil {
		return nil, err
	}
	if !util.RemoteRefAllowed(l.allowed, location) {
		return nil, fmt.Errorf("%s is not listed in allow-remote-refs-from", location)
	}
	return openapi3.ReadFromHTTP(l.client)(nil, location)
}

func remote(name string) bool {
	return strings.HasPrefix(name, "http:/") || strings.HasPrefix(name, "https:/")
}

// Document reads the document called name.
func (l *Loader) Document(name string) (*document.Document, error) { return document.Load(l, name) }

// Load makes of doc, which has been read from name, what oapi-codegen sees, and
// resolves its references. The error is of type [document.Findings] wherever the
// fault has a place.
func (l *Loader) Load(name string, doc *document.Document) (*openapi3.T, error) {
	location, err := url.Parse(name)
	if err != nil || location.Host == "" {
		location = &url.URL{Path: name}
	}
	// kin-openapi reads YAML by making JSON of it, and of what it then knows of
	// places oapi-codegen uses the lines of paths, to order their routes. doc has
	// all of that already, but for path items that are elsewhere.
	fromNodes := doc.Root().Home() != 0 && ownPathItems(doc.Root())
	var text []byte
	if fromNodes {
		if text, err = doc.JSON(); err != nil {
			return nil, err
		}
	} else if text, err = l.ReadFile(name); err != nil {
		return nil, err
	}
	spec, err := l.kin(location, text).LoadFromDataWithPath(text, location)
	if err != nil {
		return nil, explainLoading(doc, err)
	}
	if circularComponents(doc) {
		return nil, doc.Unresolved() // kin-openapi leaves these empty
	}
	if fromNodes {
		paths := doc.Root().Field("paths")
		for name, item := range spec.Paths.Map() {
			item.Origin = &openapi3.Origin{Key: &openapi3.Location{Line: paths.Get(name).Home()}}
		}
	}
	return spec, nil
}

// ownPathItems reports whether every path item stands in one place of this file.
func ownPathItems(root *document.Node) bool {
	paths := root.Field("paths")
	if paths == nil {
		return true
	}
	for _, m := range paths.Members {
		if m.Value.Home() <= 0 || m.Value.Ref() != nil {
			return false
		}
	}
	return true
}

func circularComponents(doc *document.Document) bool {
	components := doc.Root().Field("components")
	if components == nil {
		return false
	}
	for _, section := range components.Members {
		for _, m := range section.Value.Members {
			if end, err := doc.Follow(m.Value); err == nil && end == nil {
				return true
			}
		}
	}
	return false
}

// kin returns a kin-openapi loader for one document, the text of which is given.
func (l *Loader) kin(root *url.URL, text []byte) *openapi3.Loader {
	kin := openapi3.NewLoader()
	kin.IsExternalRefsAllowed = true
	kin.IncludeOrigin = true // oapi-codegen registers routes in the order of the document
	kin.ReadFromURIFunc = func(_ *openapi3.Loader, at *url.URL) ([]byte, error) {
		whole := *at
		whole.Fragment, whole.RawFragment = "", ""
		switch {
		case whole.String() == root.String():
			return text, nil
		case at.Host == "":
			return l.ReadFile(at.Path)
		}
		return l.ReadFile(whole.String())
	}
	return kin
}
