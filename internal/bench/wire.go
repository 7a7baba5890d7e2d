package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
)

// A tap is a proxy to PostgreSQL that counts and notes what a store sends.
type tap struct {
	listener net.Listener
	backend  string

	mu sync.Mutex
	// trips counts what the client waits for: queries, and the ends of batches.
	trips int
	// commits counts the transactions that a COMMIT ended.
	commits    int
	statements []sent
	prepared   map[string]string // by their names; connections do not differ
}

// A sent is a statement as it went over the wire.
type sent struct {
	text string
	args [][]byte // as texts that PostgreSQL reads
}

// listen returns a tap on the server of dsn, and the DSN that leads through it.
func (b *bench) listen(dsn string) (*tap, string, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, "", err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	b.onClose(listener.Close)
	t := &tap{listener: listener, backend: u.Host, prepared: map[string]string{}}
	go t.serve()
	u.Host = listener.Addr().String()
	return t, u.String(), nil
}

func (t *tap) serve() {
	for {
		client, err := t.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", t.backend)
		if err != nil {
			client.Close()
			continue
		}
		go t.forward(server, client, true)
		go t.forward(client, server, false)
	}
}

// forward copies messages until a side ends. A client's first has no type.
func (t *tap) forward(to, from net.Conn, client bool) {
	defer to.Close()
	defer from.Close()
	for first := client; ; first = false {
		head := make([]byte, 5)
		if first {
			head = head[1:]
		}
		if _, err := io.ReadFull(from, head); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head[len(head)-4:])-4)
		if _, err := io.ReadFull(from, body); err != nil {
			return
		}
		if !first {
			t.note(client, head[0], body)
		}
		if _, err := to.Write(append(head, body...)); err != nil {
			return
		}
	}
}

func (t *tap) note(client bool, kind byte, body []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !client:
		if kind == 'C' && string(body) == "COMMIT\x00" {
			t.commits++
		}
	case kind == 'Q':
		t.trips++
		t.statements = append(t.statements, sent{text: string(body[:len(body)-1])})
	case kind == 'S':
		t.trips++
	case kind == 'P':
		name, rest, _ := bytes.Cut(body, []byte{0})
		text, _, _ := bytes.Cut(rest, []byte{0})
		t.prepared[string(name)] = string(text)
	case kind == 'B':
		_, rest, _ := bytes.Cut(body, []byte{0})
		name, rest, _ := bytes.Cut(rest, []byte{0})
		t.statements = append(t.statements, sent{t.prepared[string(name)], arguments(rest)})
	}
}

// arguments reads the values of a Bind message, from their formats on.
func arguments(b []byte) (args [][]byte) {
	number := func() int {
		n := int(int16(binary.BigEndian.Uint16(b)))
		b = b[2:]
		return n
	}
	formats := make([]int, number())
	for i := range formats {
		formats[i] = number()
	}
	for i := range number() {
		size := int(int32(binary.BigEndian.Uint32(b)))
		b = b[4:]
		if size < 0 {
			args = append(args, nil)
			continue
		}
		value := b[:size]
		b = b[size:]
		format := 0
		switch len(formats) {
		case 0:
		case 1:
			format = formats[0]
		default:
			format = formats[i]
		}
		if format == 1 { // drivers send bytes so, and nothing else that we use
			value = append([]byte(`\x`), hex.EncodeToString(value)...)
		}
		args = append(args, bytes.Clone(value))
	}
	return args
}

// reset forgets what was counted.
func (t *tap) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trips, t.commits, t.statements = 0, 0, nil
}

func (t *tap) counts() (trips, commits int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trips, t.commits
}

// one returns the one statement that was sent since reset.
func (t *tap) one() (sent, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.statements) != 1 {
		return sent{}, fmt.Errorf("the store sent %d statements where it should send one", len(t.statements))
	}
	for _, arg := range t.statements[0].args {
		if arg == nil {
			return sent{}, errors.New("the store sent a NULL, which pgbench cannot")
		}
	}
	return t.statements[0], nil
}
