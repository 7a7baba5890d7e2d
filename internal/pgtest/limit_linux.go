package pgtest

import (
	"math"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
)

// NoLimit is the size of files that are not limited.
const NoLimit = math.MaxUint64

// LimitFiles has the server fail to write any file beyond the size in bytes, as
// on a full disk, from its next statement on. It needs prlimit, of util-linux.
// Files of the write-ahead log have 16 MiB, and a server that cannot write them
// dies.
func (s *Server) LimitFiles(t testing.TB, size uint64) {
	t.Helper()
	limit := "unlimited"
	if size != NoLimit {
		limit = strconv.FormatUint(size, 10)
	}
	pids, err := s.pids()
	if err != nil {
		t.Fatalf("pgtest: listing the server's processes: %v", err)
	}
	for _, pid := range pids {
		// Only the soft limit, so that it can be raised again.
		prlimit := exec.Command("prlimit", "--pid", strconv.Itoa(pid), "--fsize="+limit+":")
		prlimit.SysProcAttr = &syscall.SysProcAttr{Credential: s.owner}
		out, err := prlimit.CombinedOutput()
		if err != nil && syscall.Kill(pid, 0) == nil {
			t.Fatalf("pgtest: prlimit, which Debian has in util-linux: %v: %s", err, out)
		}
	}
}
