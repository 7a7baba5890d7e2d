package sqlstore

// Singles is how many calls of one kind run alone before others queue, of a
// store with so many connections.
func Singles(conns int) int { return singles(conns) }
