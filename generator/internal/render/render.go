// Package render prints models through the templates.
package render

import (
	"strings"
	"text/template"

	"github.com/oapi-idempotent/oapi-idempotent/generator/internal/model"
	"github.com/oapi-idempotent/oapi-idempotent/templates"
)

// Server returns the source of a server's section, not yet formatted.
func Server(m *model.Server) (string, error) {
	return render("server", m, "server.tmpl", m.Family+".tmpl")
}

// Client returns the source of a client's section, not yet formatted.
func Client(m *model.Client) (string, error) {
	return render("client", m, "client.tmpl")
}

func render(name string, data any, files ...string) (string, error) {
	t, err := template.New(name).Option("missingkey=error").ParseFS(templates.Files, files...)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	if err := t.ExecuteTemplate(&out, name, data); err != nil {
		return "", err
	}
	return out.String(), nil
}
