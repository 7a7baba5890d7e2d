package main

import (
	"context"
	"database/sql"
)

// What follows has the shape of what sqlc generates: queries that run on a pool,
// or in whatever transaction they are given.

type DBTX interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func New(db DBTX) *Queries { return &Queries{db: db} }

type Queries struct{ db DBTX }

func (q *Queries) WithTx(tx *sql.Tx) *Queries { return &Queries{db: tx} }

const addToBalance = `UPDATE accounts SET balance = balance + $2 WHERE name = $1 RETURNING balance`

// AddToBalance returns the new balance, or sql.ErrNoRows if there is no such
// account.
func (q *Queries) AddToBalance(ctx context.Context, name string, amount int64) (balance int64, err error) {
	err = q.db.QueryRowContext(ctx, addToBalance, name, amount).Scan(&balance)
	return balance, err
}

const createTransfer = `INSERT INTO transfers (from_account, to_account, amount) VALUES ($1, $2, $3) RETURNING id`

func (q *Queries) CreateTransfer(ctx context.Context, from, to string, amount int64) (id int64, err error) {
	err = q.db.QueryRowContext(ctx, createTransfer, from, to, amount).Scan(&id)
	return id, err
}

const createAccount = `INSERT INTO accounts (name, balance) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING`

func (q *Queries) CreateAccount(ctx context.Context, name string, balance int64) error {
	_, err := q.db.ExecContext(ctx, createAccount, name, balance)
	return err
}

const listAccounts = `SELECT name, balance FROM accounts ORDER BY name`

type Account struct {
	Name    string
	Balance int64
}

func (q *Queries) ListAccounts(ctx context.Context) ([]Account, error) {
	rows, err := q.db.QueryContext(ctx, listAccounts)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var accounts []Account
	for rows.Next() {
		var a Account
		if err := rows.Scan(&a.Name, &a.Balance); err != nil {
			return nil, err
		}
		accounts = append(accounts, a)
	}
	return accounts, rows.Err()
}
