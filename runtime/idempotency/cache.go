package idempotency

import (
	"container/list"
	"slices"
	"sync"
	"time"
)

// WithReplayCache keeps the recorded answers that this process has settled or
// read of late, at most maxBytes of them, so that a replay asks nothing of the
// store. There is none by default.
//
// A copy takes the place of the row that the store would return, and of nothing
// else: the principal function is asked first, and whose key it is and whether
// the request is the same is decided as ever. It is not used once the row has
// expired, counted from before the store was asked, and for a minute at most: as
// long as it may take until this process heeds that an operator has overruled or
// forgotten a recorded answer, or that the store's clock was set. A sealed
// answer (see [WithSealer]) is kept sealed. What was used least of late makes
// room.
func WithReplayCache(maxBytes int64) Option {
	return optionFunc(func(g *Guard) { g.replays = &replayCache{max: maxBytes} })
}

// replayAge bounds how long a copy is used. A recorded answer hardly ever changes
// before it expires, but it may.
const replayAge = time.Minute

// A replayCache holds rows that can be replayed. A nil one holds none.
type replayCache struct {
	max int64

	mu     sync.Mutex
	used   int64
	copies map[[32]byte]*list.Element // of *replayCopy
	recent list.List                  // the least used one last
}

type replayCopy struct {
	hash  [32]byte
	row   Row
	asked time.Time
	lasts time.Duration
	size  int64
}

// replayOverhead is about what a copy takes beside its bytes.
const replayOverhead = 512

// get returns the copy of a row that is not expired. Its bytes are shared.
func (c *replayCache) get(hash *[32]byte) (Row, bool) {
	if c == nil {
		return Row{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	element, ok := c.copies[*hash]
	if !ok {
		return Row{}, false
	}
	kept := element.Value.(*replayCopy)
	if kept.over(time.Now()) {
		c.remove(element)
		return Row{}, false
	}
	c.recent.MoveToFront(element)
	return kept.row, true
}

// over reports whether the copy must not be used any more. The monotonic clock
// stands still while a machine sleeps, and the other one may be set back.
func (k *replayCopy) over(now time.Time) bool {
	return now.Sub(k.asked) >= k.lasts || now.Round(0).Sub(k.asked.Round(0)) >= k.lasts
}

// put keeps a copy of row if it can be replayed and says when it expires. The
// store was asked for it no earlier than at asked.
func (c *replayCache) put(hash *[32]byte, row *Row, asked time.Time) {
	// A store's clock may tick in milliseconds, and run apart from this one by
	// the 500 parts in a million by which NTP slews clocks.
	lasts := row.ExpiresIn - row.ExpiresIn/1000 - time.Millisecond
	if c == nil || row.State != Completed || lasts <= 0 {
		return
	}
	o := &row.Outcome
	size := int64(len(row.Fingerprint)+len(o.Header)+len(o.Body)) + replayOverhead
	if size > c.max {
		return
	}
	kept := &replayCopy{hash: *hash, row: *row, asked: asked, lasts: min(lasts, replayAge), size: size}
	kept.row.Won, kept.row.ExpiresIn = false, 0
	// What is not copied may be the caller's, or part of something larger.
	bytes := slices.Concat(row.Fingerprint, o.Header, o.Body)
	kept.row.Fingerprint, bytes = cut(bytes, len(row.Fingerprint))
	kept.row.Outcome.Header, kept.row.Outcome.Body = cut(bytes, len(o.Header))

	c.mu.Lock()
	defer c.mu.Unlock()
	if former, ok := c.copies[*hash]; ok {
		c.remove(former)
	}
	for c.used+size > c.max {
		c.remove(c.recent.Back())
	}
	if c.copies == nil {
		c.copies = map[[32]byte]*list.Element{}
	}
	c.copies[*hash] = c.recent.PushFront(kept)
	c.used += size
}

func cut(b []byte, n int) (front, rest []byte) { return b[:n:n], b[n:] }

// remove is called with c.mu held.
func (c *replayCache) remove(element *list.Element) {
	kept := c.recent.Remove(element).(*replayCopy)
	delete(c.copies, kept.hash)
	c.used -= kept.size
}
