package main

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// sqlite compares the store with what it cannot be faster than without sharing
// commits: one connection that writes a row and changes it.
func sqlite(b *bench, name string) (*contest, error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, err
	}
	b.onClose(func() error { return os.RemoveAll(dir) })
	const clients = 8
	stored := func(name string, opts ...sqlstore.Option) side {
		return side{name, func(d time.Duration) (_ sample, err error) {
			db, err := sql.Open("sqlite", sqlstore.SQLiteDSN(filepath.Join(dir, name)))
			if err != nil {
				return sample{}, err
			}
			defer func() { err = errors.Join(err, db.Close()) }()
			store, err := sqlstore.NewSQLite(db, opts...)
			if err != nil {
				return sample{}, err
			}
			if err := store.Migrate(b.ctx); err != nil {
				return sample{}, err
			}
			return b.drive(clients, d, func(int) error { return claimAndSettle(b.ctx, store) })
		}}
	}
	bare := side{"bare", func(d time.Duration) (_ sample, err error) {
		db, err := sql.Open("sqlite", sqlstore.SQLiteDSN(filepath.Join(dir, "bare")))
		if err != nil {
			return sample{}, err
		}
		defer func() { err = errors.Join(err, db.Close()) }()
		db.SetMaxOpenConns(1)
		if _, err := db.Exec("CREATE TABLE IF NOT EXISTS keys (hash blob PRIMARY KEY, state int, body blob)"); err != nil {
			return sample{}, err
		}
		insert, err := db.Prepare("INSERT INTO keys VALUES (?, 0, NULL)")
		if err != nil {
			return sample{}, err
		}
		update, err := db.Prepare("UPDATE keys SET state = 1, body = ? WHERE hash = ? AND state = 0")
		if err != nil {
			return sample{}, err
		}
		return b.drive(clients, d, func(int) error {
			hash := hashOf(freshKey())
			if _, err := insert.ExecContext(b.ctx, hash[:]); err != nil {
				return err
			}
			_, err := update.ExecContext(b.ctx, answer.Body, hash[:])
			return err
		})
	}}
	return &contest{
		name:  name,
		sides: []side{bare, stored("ungrouped", sqlstore.WithoutGrouping()), stored("NewSQLite")},
		figures: []figure{
			speed("ungrouped", "bare", target{}),
			speed("NewSQLite", "bare", target{}),
			speed("NewSQLite", "ungrouped", target{}),
		},
	}, nil
}
