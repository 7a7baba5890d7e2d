package idempotentclient

import "os"

// SetSync makes sync the journals' fsync until restore is called.
func SetSync(sync func(*os.File) error) (restore func()) {
	before := fsync
	fsync = sync
	return func() { fsync = before }
}
