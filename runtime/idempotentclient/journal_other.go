//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd || windows)

package idempotentclient

import (
	"errors"
	"os"
)

func openLocked(string, int) (*os.File, error) {
	return nil, errors.New("this system has no lock that ends with its process; keep the journal in a database")
}

func closeLocked(f *os.File) error { return f.Close() }

func replace(old, _ *os.File, _ string) (*os.File, error) { return old, errors.ErrUnsupported }

func syncDir(string) error { return nil }
