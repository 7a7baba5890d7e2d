package idempotentclient

import (
	"errors"
	"os"
	"syscall"
)

// sharingViolation is ERROR_SHARING_VIOLATION.
const sharingViolation syscall.Errno = 32

// openLocked opens a file for this process alone, until it is closed or the
// process ends: others can only read it.
func openLocked(path string, flag int) (*os.File, error) {
	name, err := syscall.UTF16PtrFromString(path)
	if err != nil {
		return nil, err
	}
	disposition, attributes := uint32(syscall.OPEN_ALWAYS), uint32(syscall.FILE_ATTRIBUTE_NORMAL)
	if flag&os.O_EXCL != 0 {
		disposition, attributes = syscall.CREATE_NEW, attributes|syscall.FILE_FLAG_OPEN_REPARSE_POINT
	}
	handle, err := syscall.CreateFile(name, syscall.GENERIC_READ|syscall.GENERIC_WRITE, syscall.FILE_SHARE_READ, nil,
		disposition, attributes, 0)
	if err == sharingViolation {
		return nil, errInUse
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(handle), path), nil
}

func closeLocked(f *os.File) error { return f.Close() }

// replace puts next in the place of old, and returns the file that is there, or
// none. Windows renames and replaces no file that is open: whoever takes it in
// between finds every key, and this process fails.
func replace(old, next *os.File, path string) (*os.File, error) {
	if err := errors.Join(next.Close(), old.Close()); err != nil {
		return nil, err
	}
	if err := os.Rename(next.Name(), path); err != nil {
		return nil, err
	}
	return openLocked(path, 0)
}

// syncDir does nothing: Windows has no call for it, and NTFS journals its names.
func syncDir(string) error { return nil }
