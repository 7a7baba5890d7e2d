// Command worker takes orders and charges each once with the server of
// examples/orders, however often it is killed in between:
//
//	go run ./examples/orders               the server
//	go run ./examples/worker -orders 100   kill it at any time, and start it again, or several at once
//
// Orders and journal are in one database: an SQLite file, or the PostgreSQL that
// DATABASE_URL names. An order is taken, and its charge added to the journal, in
// one transaction; it is marked as charged, and the charge done, in another.
// Between the two the worker may die at any time. It ends when it has tried each
// charge that is pending, and fails if one stays so, having said what to do.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("worker: ")
	server := flag.String("server", "http://127.0.0.1:8080", "`URL` of the server of examples/orders")
	file := flag.String("sqlite", "worker.db", "`file` of the orders and their journal, unless DATABASE_URL names a PostgreSQL")
	orders := flag.Int("orders", 0, "how many orders to take before all that are not charged are charged")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *server, os.Getenv("DATABASE_URL"), *file, *orders); err != nil {
		stop()
		log.Fatal(err)
	}
}

func run(ctx context.Context, server, postgres, sqlite string, orders int) (err error) {
	w, err := open(ctx, server, postgres, sqlite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.db.Close()) }()
	fmt.Println("working")
	for range orders {
		if err := w.take(ctx); err != nil {
			return err
		}
	}
	return w.work(ctx)
}

type worker struct {
	db      *sqlx.DB
	journal *sqlstore.Journal
	client  *api.ClientWithResponses
}

// open opens the PostgreSQL of a DSN, or the SQLite file if there is none.
func open(ctx context.Context, server, postgres, sqlite string) (*worker, error) {
	client, err := api.NewClientWithResponses(server)
	if err != nil {
		return nil, err
	}
	driver, dsn := "postgres", postgres
	if postgres == "" {
		driver, dsn = "sqlite", sqlstore.SQLiteDSN(sqlite)
	}
	db, err := sqlx.Open(driver, dsn)
	if err != nil {
		return nil, err
	}
	journal, err := migrate(ctx, db)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &worker{db, journal, client}, nil
}

func migrate(ctx context.Context, db *sqlx.DB) (*sqlstore.Journal, error) {
	newJournal, id := sqlstore.NewPostgresJournal, "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
	if db.DriverName() == "sqlite" {
		newJournal, id = sqlstore.NewSQLiteJournal, "integer PRIMARY KEY"
	}
	journal, err := newJournal(db.DB, sqlstore.JournalConfig{})
	if err != nil {
		return nil, err
	}
	if err := journal.Migrate(ctx); err != nil {
		return nil, err
	}
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() // does nothing after Commit
	// Of two processes, PostgreSQL's CREATE TABLE IF NOT EXISTS lets one fail.
	if db.DriverName() == "postgres" {
		if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(7247)`); err != nil {
			return nil, err
		}
	}
	_, err = tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS orders (id `+id+`, amount bigint NOT NULL, payment bigint)`)
	if err != nil {
		return nil, err
	}
	return journal, tx.Commit()
}

// chargeOrder is the name of the call that charges an order.
const chargeOrder = "charge order %d"

// take takes an order and decides to charge it: both, or neither.
func (w *worker) take(ctx context.Context) error {
	tx, err := w.db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var order int64
	err = tx.QueryRowContext(ctx, `INSERT INTO orders (amount) SELECT 100 + count(*) FROM orders RETURNING id`).Scan(&order)
	if err != nil {
		return err
	}
	if err := w.journal.Add(ctx, tx, fmt.Sprintf(chargeOrder, order)); err != nil {
		return err
	}
	return tx.Commit()
}

// work makes each call that is pending, whatever becomes of the others.
func (w *worker) work(ctx context.Context) error {
	calls, err := w.journal.Pending(ctx)
	if err != nil {
		return err
	}
	// Workers that start together need not make the same calls.
	rand.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	left := 0
	for _, call := range calls {
		err := w.charge(ctx, call.Name)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil || errors.Is(err, sqlstore.ErrNotPending) { // another worker has done it
			continue
		}
		left++
		log.Printf("%s: %v\n\t%s", call.Name, err, todo(err))
	}
	if left > 0 {
		return fmt.Errorf("%d of %d calls stay pending", left, len(calls))
	}
	return nil
}

// errRefused says that the operation itself has refused the payment.
var errRefused = errors.New("the payment is refused")

// todo says what is to be done about a call that stays pending.
func todo(err error) string {
	const settle = "note that in orders, and in the same transaction delete the call from idempotent_calls"
	problem := &idempotentclient.Problem{}
	errors.As(err, &problem)
	switch code := problem.Code; {
	case errors.Is(err, errRefused):
		return "decide what becomes of the order, " + settle
	case errors.Is(err, idempotentclient.ErrStale),
		code == idempotentclient.NotReplayable,
		code == idempotentclient.OutcomeUnknown && problem.Status == http.StatusConflict:
		return "look for the payment at the server, " + settle
	case code == idempotentclient.KeyReused, code == idempotentclient.MissingKey, code == idempotentclient.InvalidKey:
		return "mend this program: its request is not that of before, or the server does not take its key"
	default: // in flight, in doubt (503), no answer, an answer that is not the operation's, no database
		return "mend what is wrong, if anything is, and start a worker again later: the key makes it safe"
	}
}

// charge makes the call of this name, for the first time or once more.
func (w *worker) charge(ctx context.Context, name string) error {
	var order, amount int64
	if _, err := fmt.Sscanf(name, chargeOrder, &order); err != nil {
		return err
	}
	if err := w.db.QueryRowContext(ctx, w.db.Rebind(`SELECT amount FROM orders WHERE id = ?`), order).Scan(&amount); err != nil {
		return err
	}
	call, err := w.journal.Begin(ctx, name)
	if err != nil {
		return err
	}
	resp, err := w.client.CreatePaymentWithResponse(call, api.NewPayment{Amount: amount, Currency: "EUR"})
	if err == nil {
		err = idempotentclient.Check(resp.HTTPResponse)
	}
	if err != nil {
		return err // it may be charged: the call stays pending, and its key
	}
	if resp.JSON201 == nil {
		err := fmt.Errorf("the server answers %s %s", resp.Status(), resp.Body)
		if resp.StatusCode() == http.StatusUnprocessableEntity {
			err = fmt.Errorf("%w: %w", errRefused, err)
		}
		return err // what another answer means for the payment is not known
	}
	if err := w.charged(ctx, name, order, resp.JSON201.Id); err != nil {
		return err
	}
	fmt.Printf("order %d is charged by payment %d\n", order, resp.JSON201.Id)
	return nil
}

// charged notes the payment and ends the call: both, or neither.
func (w *worker) charged(ctx context.Context, name string, order, payment int64) error {
	tx, err := w.db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, tx.Rebind(`UPDATE orders SET payment = ? WHERE id = ?`), payment, order); err != nil {
		return err
	}
	if err := w.journal.Done(ctx, tx, name); err != nil {
		return err
	}
	return tx.Commit()
}
