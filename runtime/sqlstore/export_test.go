package sqlstore

// Singles is how many calls of one kind run alone before others queue, of a
// store with so many connections.
func Singles(conns int) int { return singles(conns) }

// Queued is how many calls of a store that OpenPostgres returned have queued.
func Queued(s *Store) (n int) {
	for _, g := range s.direct.groups {
		g.mu.Lock()
		n += len(g.queue)
		g.mu.Unlock()
	}
	return n
}
