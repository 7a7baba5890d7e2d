//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package idempotentclient

import (
	"errors"
	"os"
	"syscall"
)

// openLocked opens a file for this process alone, until it is closed or the
// process ends.
func openLocked(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|flag, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			break
		}
	}
	if err == nil {
		return f, nil
	}
	if err == syscall.EWOULDBLOCK {
		err = errInUse
	}
	return nil, errors.Join(err, f.Close())
}

// closeLocked lets go of the lock itself: a child that is being started has a copy
// of the file, and would keep it a little longer.
func closeLocked(f *os.File) error {
	return errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.Close())
}

// replace puts next in the place of old, and returns the file that is there. It
// is locked at every moment.
func replace(old, next *os.File, path string) (*os.File, error) {
	if err := os.Rename(next.Name(), path); err != nil {
		return old, errors.Join(err, next.Close(), os.Remove(next.Name()))
	}
	return next, old.Close()
}

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(fsync(dir), dir.Close())
}
