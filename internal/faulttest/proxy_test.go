//go:build unix

package faulttest

import (
	"net"
	"net/url"
	"sync"
	"testing"
)

// A proxy stands between a server and PostgreSQL and can keep all connections
// open and forward nothing, as a network does that drops packets.
type proxy struct {
	listener net.Listener
	backend  string

	mu      sync.Mutex
	changed *sync.Cond
	silent  bool
	closed  bool
	accepts int // how many connections were accepted
	dead    int // how many of them, from the first, are silent for ever
	conns   []net.Conn
}

func newProxy(t *testing.T, backend string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, backend: backend}
	p.changed = sync.NewCond(&p.mu)
	go p.serve()
	t.Cleanup(func() {
		listener.Close()
		p.change(func() {
			p.closed = true
			for _, conn := range p.conns {
				conn.Close()
			}
		})
	})
	return p
}

// dsn returns a DSN that leads through the proxy.
func (p *proxy) dsn(t *testing.T, direct string) string {
	t.Helper()
	u, err := url.Parse(direct)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = p.listener.Addr().String()
	return u.String()
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
		p.change(func() {
			p.accepts++
			p.conns = append(p.conns, client, server)
			if p.closed {
				client.Close()
				server.Close()
			}
		})
		number := p.accepts // which nobody else writes
		go p.forward(number, server, client)
		go p.forward(number, client, server)
	}
}

func (p *proxy) forward(number int, to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	chunk := make([]byte, 16<<10)
	for {
		n, err := from.Read(chunk)
		p.await(number)
		if err != nil {
			return
		}
		if _, err := to.Write(chunk[:n]); err != nil {
			return
		}
	}
}

// await returns when the connection of that number may be heard.
func (p *proxy) await(number int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.closed && (p.silent || number <= p.dead) {
		p.changed.Wait()
	}
}

func (p *proxy) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

// silence holds back everything on every connection, new ones too.
func (p *proxy) silence() { p.change(func() { p.silent = true }) }

// speak forwards what was held back, and all that follows.
func (p *proxy) speak() { p.change(func() { p.silent = false }) }

// forget makes the connections that there are silent for ever.
func (p *proxy) forget() { p.change(func() { p.dead = p.accepts }) }
