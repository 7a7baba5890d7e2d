package document

import "fmt"

// What an operation can be. Callbacks are those of operations under paths:
// oapi-codegen generates no code for others.
const (
	Path     = "path"
	Webhook  = "webhook"
	Callback = "callback"
)

// A Place is where a document has a path item.
type Place struct {
	Kind string
	Name string // of a path itself, "/orders/{id}", else of the webhook or callback
	// Of a callback: the operation that has it, and the expression of its URL.
	Method, Path, URL string
}

// String returns what follows the method in the name of an operation.
func (p Place) String() string {
	switch p.Kind {
	case Webhook:
		return "webhook " + p.Name
	case Callback:
		return fmt.Sprintf("callback %s of %s %s at %s", p.Name, p.Method, p.Path, p.URL)
	}
	return p.Name
}
