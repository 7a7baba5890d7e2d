package main

import (
	"context"
	"database/sql"

	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// open opens the PostgreSQL of a DSN, or the SQLite file if there is none, with
// the example's tables and the store's.
func open(ctx context.Context, postgres, sqlite string) (*sqlx.DB, *sqlstore.Store, error) {
	driver, dsn, id := "postgres", postgres, "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
	if postgres == "" {
		driver, dsn, id = "sqlite", sqlstore.SQLiteDSN(sqlite), "integer PRIMARY KEY"
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, nil, err
	}
	db.SetMaxOpenConns(16) // several servers share a PostgreSQL's hundred connections
	store, err := migrate(ctx, db, driver, id)
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return sqlx.NewDb(db, driver), store, nil
}

func migrate(ctx context.Context, db *sql.DB, driver, id string) (*sqlstore.Store, error) {
	newStore := sqlstore.NewPostgres
	if driver == "sqlite" {
		newStore = sqlstore.NewSQLite
	}
	store, err := newStore(db)
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	if driver == "postgres" { // where CREATE TABLE IF NOT EXISTS is no match for two processes
		if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(7246)`); err != nil {
			return nil, err
		}
	}
	_, err = tx.ExecContext(ctx, `
		CREATE TABLE IF NOT EXISTS orders (
			id `+id+`,
			idempotency_key text NOT NULL UNIQUE,
			item text NOT NULL,
			quantity integer NOT NULL,
			price double precision NOT NULL
		);
		CREATE TABLE IF NOT EXISTS payments (
			id `+id+`,
			amount bigint NOT NULL,
			currency text NOT NULL
		)`)
	if err != nil {
		return nil, err
	}
	return store, tx.Commit()
}
