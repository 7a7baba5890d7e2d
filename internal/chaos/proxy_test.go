//go:build unix

package chaos

import (
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A proxy stands between a server's pool and PostgreSQL and cuts connections: at
// once, or when the answer to what was sent comes back, which is then lost, or
// in the middle of a COMMIT.
type proxy struct {
	dsn      string // leads through the proxy
	backend  string
	listener net.Listener

	mu     sync.Mutex
	conns  map[*link]bool
	closed bool

	faults *atomic.Bool // whether COMMITs meet one
}

// A link is one connection and its other half.
type link struct {
	client, server net.Conn
	deaf           atomic.Bool // the next answer is lost
}

func (l *link) cut() {
	l.client.Close()
	l.server.Close()
}

func newProxy(t *testing.T, dsn string, faults *atomic.Bool) *proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{backend: u.Host, listener: listener, conns: map[*link]bool{}, faults: faults}
	u.Host = listener.Addr().String()
	p.dsn = u.String()
	go p.serve()
	t.Cleanup(func() {
		listener.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		p.closed = true
		for l := range p.conns {
			l.cut()
		}
	})
	return p
}

func (p *proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.backend)
		if err != nil {
			client.Close()
			continue
		}
		l := &link{client: client, server: server}
		p.mu.Lock()
		p.conns[l] = true
		if p.closed {
			l.cut()
		}
		p.mu.Unlock()
		go func() {
			p.ask(l)
			l.cut()
		}()
		go func() {
			p.answer(l)
			l.cut()
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.conns, l)
		}()
	}
}

// commit is the message that commits.
const commit = "Q\x00\x00\x00\x0bCOMMIT\x00"

// ask passes on what is sent until either half is cut. One COMMIT in eight is
// lost, or its answer is, or it is late.
func (p *proxy) ask(l *link) {
	chunk := make([]byte, 16<<10)
	for {
		n, err := l.client.Read(chunk)
		if err != nil {
			return
		}
		if p.faults.Load() && strings.EqualFold(string(chunk[:n]), commit) {
			switch rand.N(24) {
			case 0:
				return
			case 1:
				l.deaf.Store(true)
			case 2:
				time.Sleep(rand.N(2 * storeTimeout))
			}
		}
		if _, err := l.server.Write(chunk[:n]); err != nil {
			return
		}
	}
}

func (p *proxy) answer(l *link) {
	chunk := make([]byte, 16<<10)
	for {
		n, err := l.server.Read(chunk)
		if err != nil || l.deaf.Load() {
			return
		}
		if _, err := l.client.Write(chunk[:n]); err != nil {
			return
		}
	}
}

// cutNowAndThen cuts a third of the connections several times a second while
// faults is set, until the proxy is closed.
func (p *proxy) cutNowAndThen() {
	for {
		time.Sleep(50*time.Millisecond + rand.N(200*time.Millisecond))
		p.mu.Lock()
		for l := range p.conns {
			switch turn := rand.N(6); {
			case !p.faults.Load() || turn > 1:
			case turn == 0:
				l.deaf.Store(true)
			default:
				l.cut()
			}
		}
		closed := p.closed
		p.mu.Unlock()
		if closed {
			return
		}
	}
}
