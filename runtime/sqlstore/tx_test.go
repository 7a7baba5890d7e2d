package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oapi-idempotent/oapi-idempotent/internal/pgtest"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

func TestTxSanity(t *testing.T) {
	for _, driver := range []string{"sqlite", "postgres"} {
		t.Run(driver, func(t *testing.T) {
			dsn, newStore := sqlstore.SQLiteDSN(t.TempDir()+"/x.db"), sqlstore.NewSQLite
			if driver == "postgres" {
				dsn, newStore = pgtest.DSN(t), sqlstore.NewPostgres
			}
			db, err := sql.Open(driver, dsn)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			db.SetMaxOpenConns(4)
			store, err := newStore(db)
			if err != nil {
				t.Fatal(err)
			}
			if err := store.Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := db.Exec("CREATE TABLE effects (n int)"); err != nil {
				t.Fatal(err)
			}
			p := idempotency.DefaultPolicy("POST /")
			p.Guarantee = idempotency.Transaction
			g, err := idempotency.New(store, idempotency.WithObserver(func(_ context.Context, e idempotency.Event) {
				if e.Err != nil {
					t.Log(e)
				}
			}))
			if err != nil {
				t.Fatal(err)
			}
			idempotency.Register[*http.Request](g, &p)
			post := func(key, q string) (int, string, string) {
				r := httptest.NewRequest("POST", "/?"+q, strings.NewReader("{}"))
				r.Header.Set("Idempotency-Key", key)
				w := httptest.NewRecorder()
				g.Handle(&p, w, r, func(w http.ResponseWriter, r *http.Request) {
					tx, ok := sqlstore.Tx(r.Context())
					if !ok {
						t.Error("no tx")
					}
					if _, err := tx.ExecContext(r.Context(), "INSERT INTO effects VALUES (1)"); err != nil {
						t.Error(err)
					}
					var code int
					fmt.Sscan(r.URL.Query().Get("status"), &code)
					if code == 999 {
						tx.Commit()
						code = 201
					}
					w.WriteHeader(code)
					io.WriteString(w, "x")
				})
				return w.Code, w.Body.String(), w.Header().Get("Idempotent-Replayed")
			}
			count := func() (n int) {
				if err := db.QueryRow("SELECT count(*) FROM effects").Scan(&n); err != nil {
					t.Fatal(err)
				}
				return n
			}
			for _, c := range []struct{ key, q string }{{"a", "status=201"}, {"a", "status=201"}, {"b", "status=500"}, {"b", "status=500"}, {"c", "status=404"}, {"c", "status=404"}, {"d", "status=999"}, {"d", "status=999"}} {
				s, b, r := post(c.key, c.q)
				t.Log(c, s, b, r, count())
			}
		})
	}
}
