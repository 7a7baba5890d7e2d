//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package idempotentclient

import (
	"errors"
	"os"
	"syscall"
)

// lockFile takes the lock that a file stands for, until the file is closed or
// the process ends.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
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

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(fsync(dir), dir.Close())
}
