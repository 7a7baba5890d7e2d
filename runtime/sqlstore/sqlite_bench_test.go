package sqlstore_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// BenchmarkSQLite measures clients of one store on one file: fresh keys, which are
// claimed and settled, with group commit and without; and replays beside fresh
// keys. What is compared takes turns of a few keys, so that whatever else the
// machine does meets both, and ratio is the median of the turns' ratios: of
// grouped to alone, and of replay to grouped.
func BenchmarkSQLite(b *testing.B) {
	for _, clients := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("fresh/clients=%d", clients), func(b *testing.B) {
			s := newSQLiteBench(b, clients)
			s.compare("grouped", s.fresh(s.grouped), "alone", s.fresh(s.alone))
		})
	}
	b.Run("replay/clients=8", func(b *testing.B) {
		s := newSQLiteBench(b, 8)
		done := newClaim()
		if err := fresh(b.Context(), s.grouped, done); err != nil {
			b.Fatal(err)
		}
		s.compare("replay", func() error {
			row, err := s.grouped.Claim(b.Context(), rival(done))
			if err == nil && row.State != idempotency.Completed {
				err = fmt.Errorf("not a replay: %+v", row)
			}
			return err
		}, "grouped", s.fresh(s.grouped))
	})
}

type sqliteBench struct {
	b              *testing.B
	clients        int
	grouped, alone *sqlstore.Store
}

func newSQLiteBench(b *testing.B, clients int) *sqliteBench {
	b.Helper()
	db, err := sqlstore.OpenSQLite(filepath.Join(b.TempDir(), "keys.db"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { db.Close() })
	s := &sqliteBench{b: b, clients: clients}
	if s.grouped, err = sqlstore.NewSQLite(db); err != nil {
		b.Fatal(err)
	}
	if s.alone, err = sqlstore.NewSQLite(db, sqlstore.WithoutGrouping()); err != nil {
		b.Fatal(err)
	}
	if err := s.grouped.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	return s
}

func (s *sqliteBench) fresh(store *sqlstore.Store) func() error {
	return func() error { return fresh(s.b.Context(), store, newClaim()) }
}

// compare lets two ways take turns, and reports operations per second, each the
// median turn's, and the ratio of the first to the second.
func (s *sqliteBench) compare(name1 string, way1 func() error, name2 string, way2 func() error) {
	var first, second, ratio []float64
	for s.b.Loop() {
		var one, two float64
		if len(ratio)%2 == 0 {
			one, two = s.turn(way1), s.turn(way2)
		} else {
			two, one = s.turn(way2), s.turn(way1)
		}
		first, second, ratio = append(first, one), append(second, two), append(ratio, one/two)
	}
	for name, all := range map[string][]float64{name1 + "/s": first, name2 + "/s": second, "ratio": ratio} {
		slices.Sort(all)
		s.b.ReportMetric(all[len(all)/2], name)
	}
	s.b.ReportMetric(0, "ns/op") // of a turn, which says nothing
}

// turn returns how many operations per second all clients together do.
func (s *sqliteBench) turn(op func() error) float64 {
	each := max(8, 128/s.clients)
	began := time.Now()
	inParallel(s.clients, func(int) {
		for range each {
			if err := op(); err != nil {
				s.b.Error(err)
				return
			}
		}
	})
	return float64(s.clients*each) / time.Since(began).Seconds()
}
