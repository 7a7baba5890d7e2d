//go:build unix

package pgtest

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startTimeout is how long a cluster may take to accept connections, or to
// shut down.
const startTimeout = 30 * time.Second

const install = `no PostgreSQL found: install its server binaries so that initdb and postgres are in PATH or in
/usr/lib/postgresql/*/bin (Debian: apt-get install postgresql; macOS: brew install postgresql),
or set ` + EnvDSN + ` to a server on which tests may create databases`

// A Server is a throw-away cluster. It listens on 127.0.0.1 and on a Unix
// socket in its own directory, and trusts every local user.
type Server struct {
	bin      string // where initdb and postgres are
	dir      string // socket, log, and the directory data
	port     int
	settings []string
	owner    *syscall.Credential // nil: this process's user

	watcher io.Closer
	cmd     *exec.Cmd
	exited  chan struct{}
	frozen  []int
}

// Start starts a cluster for the one test, which ends with it. Settings are
// lines of postgresql.conf such as "fsync=on"; fsync is off by default.
func Start(t testing.TB, settings ...string) *Server {
	t.Helper()
	s, err := start(settings)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return s
}

// Open starts a cluster as [Start] does, for a program that is no test. It ends
// with Close, or with the process.
func Open(settings ...string) (*Server, error) { return start(settings) }

// Close stops the server at once and removes its data.
func (s *Server) Close() error {
	s.Thaw()
	err := s.halt(syscall.SIGQUIT)
	s.watcher.Close()
	return errors.Join(err, os.RemoveAll(s.dir))
}

// DSN returns the DSN of a fresh, empty database of a running server.
func (s *Server) DSN(t testing.TB) string {
	t.Helper()
	name, err := createDatabase(s.dsn("postgres"))
	if err != nil {
		t.Fatalf("pgtest: creating a database: %v", err)
	}
	return s.dsn(name)
}

// Addr returns the TCP address that the server listens on, running or not.
func (s *Server) Addr() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
}

// SocketDir returns the directory of the Unix socket: the host of a DSN.
func (s *Server) SocketDir() string { return s.dir }

// Stop breaks every connection and shuts down in good order, as pg_ctl stop -m
// fast does.
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	if err := s.halt(syscall.SIGINT); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
}

// Crash stops the server at once, without a checkpoint, as pg_ctl stop -m
// immediate does.
func (s *Server) Crash(t testing.TB) {
	t.Helper()
	if err := s.halt(syscall.SIGQUIT); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
}

// Restart starts a stopped server on the same data and port.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	if err := s.run(); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
}

// Freeze suspends the server's processes: connections stay open and silent.
func (s *Server) Freeze(t testing.TB) {
	t.Helper()
	pids, err := s.pids()
	if err != nil {
		t.Fatalf("pgtest: listing the server's processes: %v", err)
	}
	for _, pid := range pids {
		// A backend may have ended since.
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatalf("pgtest: suspending process %d: %v", pid, err)
		}
	}
	s.frozen = pids
}

// Thaw lets a frozen server go on.
func (s *Server) Thaw() {
	for _, pid := range s.frozen {
		_ = syscall.Kill(pid, syscall.SIGCONT) // ended since: nothing to resume
	}
	s.frozen = nil
}

// pids returns the process ids of the server, the postmaster's first. Backends
// are in sessions of their own, so that no signal reaches all of them at once.
func (s *Server) pids() ([]int, error) {
	db, err := sql.Open("postgres", s.dsn("postgres"))
	if err != nil {
		return nil, err
	}
	defer db.Close()
	rows, err := db.Query("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	pids := []int{s.cmd.Process.Pid}
	for rows.Next() {
		var pid int
		if err := rows.Scan(&pid); err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, rows.Err()
}

func (s *Server) dsn(database string) string {
	return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", s.Addr(), database)
}

func start(settings []string) (_ *Server, err error) {
	s := &Server{settings: settings}
	if s.bin, err = binaries(); err != nil {
		return nil, err
	}
	// A socket's path may not exceed some 100 bytes, which a test's own
	// temporary directory often does.
	if s.dir, err = os.MkdirTemp("", "pgtest-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(s.dir)
		}
	}()
	if err := s.chooseOwner(); err != nil {
		return nil, err
	}
	initdb := s.command("initdb", "--pgdata", s.data(), "--username=postgres", "--auth=trust",
		"--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions")
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	if s.watcher, err = s.watch(); err != nil {
		return nil, err
	}
	// Another process may take the free port before the server does.
	for range 3 {
		if s.port, err = freePort(); err != nil {
			break
		}
		if err = s.run(); err == nil {
			return s, nil
		}
	}
	s.watcher.Close()
	return nil, err
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) log() string { return filepath.Join(s.dir, "log") }

// chooseOwner picks the user that the server runs as: PostgreSQL refuses root.
func (s *Server) chooseOwner() error {
	if os.Geteuid() != 0 {
		return nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		if u, err = user.Lookup("nobody"); err != nil {
			return fmt.Errorf("PostgreSQL does not run as root, and there is neither a user postgres nor nobody: %w", err)
		}
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return err
	}
	s.owner = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return os.Chown(s.dir, int(uid), int(gid))
}

// command returns a command of PostgreSQL's, away from the terminal's signals.
func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.owner, Setsid: true}
	return cmd
}

// run starts the server and returns when it accepts connections.
func (s *Server) run() error {
	args := []string{
		"-D", s.data(), "-k", s.dir, "-p", strconv.Itoa(s.port),
		"-c", "listen_addresses=127.0.0.1", "-c", "max_connections=200",
		"-c", "shared_buffers=32MB", "-c", "fsync=off",
	}
	for _, setting := range s.settings {
		args = append(args, "-c", setting)
	}
	log, err := os.Create(s.log())
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := s.command("postgres", args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting PostgreSQL: %w", err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(exited)
	}()
	s.cmd, s.exited = cmd, exited
	if err := s.awaitReady(); err != nil {
		_ = s.halt(syscall.SIGQUIT) // the first error says more
		return err
	}
	return nil
}

func (s *Server) awaitReady() error {
	db, err := sql.Open("postgres", s.dsn("postgres"))
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if err = db.PingContext(ctx); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-s.exited:
			log, _ := os.ReadFile(s.log())
			return fmt.Errorf("PostgreSQL ended while it started:\n%s", log)
		case <-ctx.Done():
			log, _ := os.ReadFile(s.log())
			return fmt.Errorf("PostgreSQL accepts no connection: %w\n%s", err, log)
		}
	}
}

// halt sends a running server the signal and waits until it has ended.
func (s *Server) halt(sig syscall.Signal) error {
	select {
	case <-s.exited:
		return nil
	default:
	}
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping PostgreSQL: %w", err)
	}
	select {
	case <-s.exited:
		return nil
	case <-time.After(startTimeout):
		return fmt.Errorf("PostgreSQL did not stop within %v", startTimeout)
	}
}

// watch starts a shell that waits for the end of this process, or for the
// returned Closer, and then stops the server and removes its directory. A
// killed test binary runs no code of its own.
func (s *Server) watch() (io.Closer, error) {
	const script = `
cat >/dev/null
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
if [ -n "$pid" ]; then
	kill -CONT "$pid"; kill -QUIT "$pid"
	n=0
	while kill -0 "$pid" && [ "$n" -lt 100 ]; do sleep 0.1; n=$((n+1)); done
fi 2>/dev/null
rm -rf "$1"
`
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	// Without outputs of its own the shell does not keep go test waiting.
	cmd := exec.Command("sh", "-c", script, "pgtest", s.dir)
	cmd.Stdin = r
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("starting the watcher: %w", err)
	}
	go func() { _ = cmd.Wait() }()
	return w, nil
}

// binaries returns the directory that holds initdb and postgres.
func binaries() (string, error) {
	var dirs []string
	if path, err := exec.LookPath("initdb"); err == nil {
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	packaged, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return "", err
	}
	slices.SortFunc(packaged, func(a, b string) int { return cmp.Compare(version(b), version(a)) })
	for _, dir := range append(dirs, packaged...) {
		_, noInitdb := os.Stat(filepath.Join(dir, "initdb"))
		_, noServer := os.Stat(filepath.Join(dir, "postgres"))
		if noInitdb == nil && noServer == nil {
			return dir, nil
		}
	}
	return "", errors.New(install)
}

// version returns the major version in /usr/lib/postgresql/15/bin; 9.6 is 9.
func version(dir string) int {
	major, _, _ := strings.Cut(filepath.Base(filepath.Dir(dir)), ".")
	n, _ := strconv.Atoi(major) // what is no number sorts last
	return n
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
