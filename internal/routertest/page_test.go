package routertest

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestPage holds that the page on routers names every case of the suite, and no
// other.
func TestPage(t *testing.T) {
	suite, err := os.ReadFile("../../runtime/idempotencytest/guardtest/cases.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/routers.md")
	if err != nil {
		t.Fatal(err)
	}
	var held, named []string
	for _, promise := range regexp.MustCompile(`(?m)^\t\{"(.+)", \w+\},$`).FindAllSubmatch(suite, -1) {
		held = append(held, string(promise[1]))
	}
	_, table, _ := strings.Cut(string(page), "## What is held")
	for _, row := range regexp.MustCompile(`(?m)^\| .+ \| (.+) \|$`).FindAllStringSubmatch(table, -1)[1:] {
		named = append(named, strings.Split(row[1], "; ")...)
	}
	slices.Sort(held)
	slices.Sort(named)
	if len(held) == 0 || !slices.Equal(held, named) {
		t.Errorf("the suite has the cases\n%s\n\nand docs/routers.md names\n%s", strings.Join(held, "\n"), strings.Join(named, "\n"))
	}
}
