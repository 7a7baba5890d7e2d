//go:build unix

package chaos

import (
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A proxy stands between a server's pool and PostgreSQL and cuts connections: at
// once, or when the answer to what was sent comes back, which is then lost.
type proxy struct {
	dsn      string // leads through the proxy
	backend  string
	listener net.Listener

	mu     sync.Mutex
	conns  map[*link]bool
	closed bool
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

func newProxy(t *testing.T, dsn string) *proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{backend: u.Host, listener: listener, conns: map[*link]bool{}}
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
			_, _ = io.Copy(server, client) // until either is cut
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

// cutNowAndThen cuts a third of the connections several times a second while on
// is set, until the proxy is closed.
func (p *proxy) cutNowAndThen(on *atomic.Bool) {
	for {
		time.Sleep(50*time.Millisecond + rand.N(200*time.Millisecond))
		p.mu.Lock()
		for l := range p.conns {
			switch turn := rand.N(6); {
			case !on.Load() || turn > 1:
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
