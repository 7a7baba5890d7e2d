package idempotentclient_test

import (
	"os/exec"
	"strings"
	"testing"
)

// An SDK that imports this package inherits nothing.
func TestStandardLibraryOnly(t *testing.T) {
	const module = "github.com/oapi-idempotent/oapi-idempotent"
	list := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".")
	out, err := list.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := []string{module + "/internal/wire", module + "/runtime/idempotentclient"}
	if got := strings.Fields(string(out)); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("the package depends on %v, want %v", got, want)
	}
}
