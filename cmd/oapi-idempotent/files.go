package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/oapi-idempotent/oapi-idempotent/generator"
)

// hostFS is the file system as a command line names it: relative to the
// working directory, or absolute. An os.DirFS refuses names that begin with
// "/" or "../", which documents and the references in them have.
type hostFS struct{}

func (hostFS) Open(name string) (fs.File, error) { return os.Open(filepath.FromSlash(name)) }

func (hostFS) ReadFile(name string) ([]byte, error) { return os.ReadFile(filepath.FromSlash(name)) }

// write writes a generated file, whole or not at all: readers see the old
// contents or the new.
func write(file generator.File) error {
	name := filepath.FromSlash(file.Name)
	if resolved, err := filepath.EvalSymlinks(name); err == nil {
		name = resolved // a link stays one
	}
	if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() {
		if info.IsDir() {
			return fmt.Errorf("%s is a directory; name a file to write to", file.Name)
		}
		return os.WriteFile(name, file.Content, 0o666) // a device or a pipe
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	temporary := fmt.Sprintf("%s.%d.tmp", name, os.Getpid())
	err := os.WriteFile(temporary, file.Content, 0o644)
	if err == nil {
		err = os.Rename(temporary, name)
	}
	if err != nil {
		return errors.Join(err, removeIfThere(temporary))
	}
	return nil
}

// create writes a file that is not there yet, whole or not at all.
func create(name string, content []byte) error {
	temporary := fmt.Sprintf("%s.%d.tmp", name, os.Getpid())
	err := os.WriteFile(temporary, content, 0o644)
	if err == nil {
		err = os.Link(temporary, name) // which, unlike a renaming, replaces nothing
	}
	return errors.Join(err, removeIfThere(temporary))
}

func removeIfThere(name string) error {
	if err := os.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
