package sqlstore_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// A proxy stands between a pool and PostgreSQL. It counts the client's trips
// and can fall silent, as a network does that drops packets.
type proxy struct {
	// trips counts the client's messages that the server answers with "ready
	// for query": Query and Sync.
	trips atomic.Int64
	// loseAnswer breaks the connection when the server's next message comes.
	loseAnswer atomic.Bool
	// reset breaks it so that the client sees a reset instead of an end.
	reset atomic.Bool
	// onQuery, if set, sees the text of each simple query, and says whether it
	// passes and whether the connection breaks at once afterwards.
	onQuery atomic.Pointer[func(text string) (pass, cut bool)]

	listener net.Listener

	mu       sync.Mutex
	backend  string
	resume   chan struct{}   // not nil: silent until closed
	silenced []chan struct{} // of the connections that stay silent
	conns    []net.Conn
}

// newProxy returns a proxy to the server of dsn, and the DSN that leads
// through it.
func newProxy(t *testing.T, dsn string) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, backend: u.Host}
	go p.serve(listener)
	t.Cleanup(func() {
		p.refuse()
		p.speak()
		p.cut()
	})
	u.Host = listener.Addr().String()
	return p, u.String()
}

func (p *proxy) serve(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		backend := p.backend
		p.mu.Unlock()
		server, err := net.Dial("tcp", backend)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		lost := new(atomic.Bool)
		go p.forward(server, client, true, lost)
		go p.forward(client, server, false, lost)
	}
}

// forward copies messages: a client's first has no type. Once the connection is
// lost no answer passes, however soon it comes.
func (p *proxy) forward(to, from net.Conn, client bool, lost *atomic.Bool) {
	defer to.Close()
	defer from.Close()
	for first := client; ; first = false {
		head := make([]byte, 5)
		if first {
			head = head[:4]
		}
		if _, err := io.ReadFull(from, head); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head[len(head)-4:])-4)
		if _, err := io.ReadFull(from, body); err != nil {
			return
		}
		pass, cut := true, false
		if on := p.onQuery.Load(); on != nil && client && !first && head[0] == 'Q' {
			pass, cut = (*on)(string(body[:len(body)-1]))
		}
		p.await()
		if cut {
			lost.Store(true)
		}
		if !client && lost.Load() {
			return
		}
		if !client && p.loseAnswer.CompareAndSwap(true, false) {
			if p.reset.Load() {
				_ = to.(*net.TCPConn).SetLinger(0)
			}
			return
		}
		if client && !first && (head[0] == 'Q' || head[0] == 'S') {
			p.trips.Add(1)
		}
		if pass {
			if _, err := to.Write(append(head, body...)); err != nil {
				return
			}
		}
		if cut {
			return
		}
	}
}

// await returns when the proxy is not silent.
func (p *proxy) await() {
	p.mu.Lock()
	resume := p.resume
	p.mu.Unlock()
	if resume != nil {
		<-resume
	}
}

func (p *proxy) silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resume = make(chan struct{})
}

func (p *proxy) speak() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.resume != nil {
		close(p.resume)
		p.resume = nil
	}
	for _, resume := range p.silenced {
		close(resume)
	}
	p.silenced = nil
}

// speakToOthers ends the silence for connections that have not run into it.
func (p *proxy) speakToOthers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silenced = append(p.silenced, p.resume)
	p.resume = nil
}

// leadTo leads the connections to come to another server.
func (p *proxy) leadTo(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.backend = addr
}

// refuse refuses connections until accept is called.
func (p *proxy) refuse() { p.listener.Close() }

func (p *proxy) accept(t *testing.T) {
	t.Helper()
	listener, err := net.Listen("tcp", p.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	p.listener = listener
	go p.serve(listener)
}

// cut breaks every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		conn.Close()
	}
	p.conns = nil
}
