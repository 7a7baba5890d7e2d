// Command transfers is a server that moves money under guarantee: transaction:
// what a transfer writes commits together with the record of its answer, so that
// no crash separates them and no retry moves the money twice.
//
//	go run ./examples/transfers            on an SQLite file, unless DATABASE_URL names a PostgreSQL
package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/examples/transfers/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("transfers: ")
	addr := flag.String("addr", "127.0.0.1:8080", "`address` to listen on")
	file := flag.String("sqlite", "transfers.db", "`file` of the SQLite database, unless DATABASE_URL names a PostgreSQL")
	delay := flag.Duration("delay", 0, "how long a transfer takes: time to kill this process in the middle of one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *addr, os.Getenv("DATABASE_URL"), *file, *delay); err != nil {
		stop()
		log.Fatal(err)
	}
}

// serve serves until ctx ends, and then finishes the requests in flight.
func serve(ctx context.Context, addr, postgres, sqlite string, delay time.Duration) error {
	db, store, err := open(ctx, postgres, sqlite)
	if err != nil {
		return err
	}
	defer db.Close()
	guard, err := idempotency.New(store)
	if err != nil {
		return err
	}
	strict := api.NewStrictHandlerWithOptions(&handlers{New(db), delay}, nil, api.StrictHTTPServerOptions{
		ResponseErrorHandlerFunc: func(w http.ResponseWriter, r *http.Request, err error) {
			log.Printf("%s %s: %v", r.Method, r.URL.Path, err)
			http.Error(w, "internal error", http.StatusInternalServerError)
		},
	})
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: api.Handler(strict, guard), ReadHeaderTimeout: 10 * time.Second}
	fmt.Printf(`listening on http://%[1]s

Send the first line again and again, and see the money move once:

  curl -i http://%[1]s/transfers -d '{"from":"alice","to":"bob","amount":30}' -H 'Content-Type: application/json' -H 'Idempotency-Key: rent-1'
  curl -i http://%[1]s/accounts
`, listener.Addr())

	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		stopped <- server.Shutdown(grace)
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}

type handlers struct {
	queries *Queries
	delay   time.Duration
}

// CreateTransfer writes through the guard's transaction, and neither commits nor
// rolls back: an answer that refuses undoes what was written before.
func (h *handlers) CreateTransfer(ctx context.Context, r api.CreateTransferRequestObject) (api.CreateTransferResponseObject, error) {
	tx, ok := sqlstore.Tx(ctx)
	if !ok {
		return nil, errors.New("a transfer needs the guard's transaction")
	}
	q := h.queries.WithTx(tx.Tx)
	t := api.Transfer{From: r.Body.From, To: r.Body.To, Amount: r.Body.Amount}
	if t.Amount < 1 {
		return refusal("The amount is not positive"), nil
	}
	changes := []Account{{t.From, -t.Amount}, {t.To, t.Amount}}
	// Two transfers that meet lock the accounts in one order.
	slices.SortStableFunc(changes, func(a, b Account) int { return cmp.Compare(a.Name, b.Name) })
	for _, change := range changes {
		balance, err := q.AddToBalance(ctx, change.Name, change.Balance)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return api.CreateTransfer404ApplicationProblemPlusJSONResponse{
				Type: "urn:transfers:unknown-account", Title: "There is no account " + change.Name, Status: http.StatusNotFound,
			}, nil
		case err != nil:
			return nil, err
		case balance < 0:
			return refusal("The account does not hold as much"), nil
		}
	}
	log.Printf("moving %d from %s to %s", t.Amount, t.From, t.To)
	select {
	case <-time.After(h.delay):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var err error
	t.Id, err = q.CreateTransfer(ctx, t.From, t.To, t.Amount)
	return api.CreateTransfer201JSONResponse(t), err
}

func refusal(title string) api.CreateTransferResponseObject {
	return api.CreateTransfer422ApplicationProblemPlusJSONResponse{
		Type: "urn:transfers:refused", Title: title, Status: http.StatusUnprocessableEntity,
	}
}

func (h *handlers) ListAccounts(ctx context.Context, _ api.ListAccountsRequestObject) (api.ListAccountsResponseObject, error) {
	accounts, err := h.queries.ListAccounts(ctx)
	list := api.ListAccounts200JSONResponse{}
	for _, a := range accounts {
		list = append(list, api.Account{Name: a.Name, Balance: a.Balance})
	}
	return list, err
}

// open opens the PostgreSQL of a DSN, or the SQLite file if there is none, with
// the store's table and two accounts.
func open(ctx context.Context, postgres, sqlite string) (*sql.DB, *sqlstore.Store, error) {
	var db *sql.DB
	var err error
	newStore, id := sqlstore.NewPostgres, "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
	if postgres != "" {
		db, err = sql.Open("postgres", postgres)
	} else {
		newStore, id = sqlstore.NewSQLite, "integer PRIMARY KEY"
		db, err = sqlstore.OpenSQLite(sqlite)
	}
	if err != nil {
		return nil, nil, err
	}
	store, err := newStore(db)
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		err = migrate(ctx, db, id)
	}
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return db, store, nil
}

func migrate(ctx context.Context, db *sql.DB, id string) error {
	if _, err := db.ExecContext(ctx, `
		CREATE TABLE IF NOT EXISTS accounts (
			name text PRIMARY KEY,
			balance bigint NOT NULL
		);
		CREATE TABLE IF NOT EXISTS transfers (
			id `+id+`,
			from_account text NOT NULL REFERENCES accounts (name),
			to_account text NOT NULL REFERENCES accounts (name),
			amount bigint NOT NULL
		)`); err != nil {
		return err
	}
	return errors.Join(New(db).CreateAccount(ctx, "alice", 100), New(db).CreateAccount(ctx, "bob", 0))
}
