package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// trips counts what one request waits for on the wire, once its connection and
// its statements are there.
func trips(b *bench, name string) (*contest, error) {
	_, dsn, err := b.database()
	if err != nil {
		return nil, err
	}
	if err := b.table(dsn, defaultTable, b.fewRows); err != nil {
		return nil, err
	}
	if err := createOrders(b.ctx, dsn); err != nil {
		return nil, err
	}
	t, through, err := b.listen(dsn)
	if err != nil {
		return nil, err
	}
	direct, err := open(b.ctx, dsn, 1)
	if err != nil {
		return nil, err
	}
	b.onClose(direct.Close)
	store, closeStore, err := grouped.open(b.ctx, through, 2)
	if err != nil {
		return nil, err
	}
	b.onClose(closeStore)
	db, err := open(b.ctx, through, 2)
	if err != nil {
		return nil, err
	}
	b.onClose(db.Close)
	g := newGuarded(store, idempotency.AtLeastOnce)
	transacted := newGuarded(must(sqlstore.NewPostgres(db)), idempotency.Transaction)
	prepared := newGuarded(must(sqlstore.NewPostgres(db, sqlstore.WithPreparedStatements())), idempotency.Transaction)
	cached := newGuarded(store, idempotency.AtLeastOnce, idempotency.WithReplayCache(1<<20))

	post := func(key, body string, status int) error {
		return g.do(b.ctx, key, body, status, pay)
	}
	died := errors.New("died")
	die := func(context.Context) (resp *idempotency.Response, err error) { panic(died) }
	// set changes the row that was written last.
	set := func(assignments string) error {
		_, err := direct.ExecContext(b.ctx, "UPDATE "+defaultTable+" SET "+assignments+" WHERE created_at = (SELECT max(created_at) FROM "+defaultTable+")")
		return err
	}
	counting := func(name string, before, request func(key string) error) side {
		return side{name, func(time.Duration) (sample, error) {
			key := uuid()
			if before != nil {
				if err := before(key); err != nil {
					return sample{}, err
				}
			}
			t.reset()
			start := time.Now()
			if err := request(key); err != nil {
				return sample{}, err
			}
			s := sample{ops: 1, took: time.Since(start)}
			trips, commits := t.counts()
			s.per = map[string]float64{"trips/op": float64(trips), "commits/op": float64(commits)}
			return s, nil
		}}
	}
	fresh := func(key string) error { return post(key, requestBody, http.StatusCreated) }
	fromCache := func(key string) error { return cached.do(b.ctx, key, requestBody, http.StatusCreated, pay) }
	contest := &contest{name: name, sides: []side{
		counting("fresh", nil, fresh),
		counting("replay", fresh, fresh),
		counting("cached", fromCache, fromCache),
		counting("in-flight", func(key string) error {
			return errors.Join(fresh(key), set("state = 0, lease_until = now() + interval '1 day', expires_at = now() + interval '2 days'"))
		}, func(key string) error { return post(key, requestBody, http.StatusConflict) }),
		counting("mismatch", fresh, func(key string) error { return post(key, "{}", http.StatusUnprocessableEntity) }),
		counting("takeover", func(key string) (err error) {
			defer func() {
				if r := recover(); r != died {
					err = fmt.Errorf("the handler did not die: %v", r)
				}
				err = errors.Join(err, set("lease_until = now() - interval '1 second'"))
			}()
			return g.do(b.ctx, key, requestBody, 0, die)
		}, fresh),
		counting("transaction", nil, func(key string) error {
			return transacted.do(b.ctx, key, requestBody, http.StatusCreated, order)
		}),
		counting("prepared", func(string) error {
			return prepared.do(b.ctx, uuid(), requestBody, http.StatusCreated, order)
		}, func(key string) error {
			return prepared.do(b.ctx, key, requestBody, http.StatusCreated, order)
		}),
	}}
	contest.figures = []figure{
		measure("fresh", "trips/op", exactly(2)),
		measure("replay", "trips/op", exactly(1)),
		measure("cached", "trips/op", exactly(0)),
		measure("in-flight", "trips/op", exactly(1)),
		measure("mismatch", "trips/op", exactly(1)),
		measure("takeover", "trips/op", exactly(3)),
		measure("transaction", "trips/op", exactly(5)),
		measure("transaction", "commits/op", exactly(1)),
		measure("prepared", "trips/op", exactly(5)),
		measure("prepared", "commits/op", exactly(1)),
	}
	return contest, nil
}
