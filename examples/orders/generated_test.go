package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// TestGenerated holds that the committed code is what its document generates.
func TestGenerated(t *testing.T) {
	data, err := os.ReadFile("api/oapi-idempotent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := generator.ParseConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	cfg.FS, cfg.Spec = os.DirFS("api"), "openapi.yaml"
	files, err := generator.Generate(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 1 {
		t.Fatalf("%d files are generated, want one", len(files))
	}
	want, err := os.ReadFile("api/" + files[0].Name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(files[0].Content, want) {
		t.Errorf("api/%s is out of date: run go generate ./examples/...", files[0].Name)
	}
}
