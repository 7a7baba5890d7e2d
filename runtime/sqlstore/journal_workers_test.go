package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/sqlstore"
)

// conflict says that a transaction failed because of another at the same time,
// and may be run again.
func conflict(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == "40001"
}

// An effects is a server that runs each key once: what it does for a name are the
// keys with which it was asked.
type effects struct {
	mu   sync.Mutex
	keys map[string][]string
}

func (e *effects) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if key := r.Header.Get("Idempotency-Key"); !slices.Contains(e.keys[string(name)], key) {
		e.keys[string(name)] = append(e.keys[string(name)], key)
	}
}

// work makes the calls that are pending until none is.
func work(ctx context.Context, db *sql.DB, j *sqlstore.Journal, server string) error {
	client := &http.Client{Transport: &idempotentclient.Transport{}}
	for {
		calls, err := j.Pending(ctx)
		if err != nil || len(calls) == 0 {
			return err
		}
		for _, pending := range calls {
			call, err := j.Begin(ctx, pending.Name)
			if errors.Is(err, sqlstore.ErrNotPending) {
				continue
			}
			if err != nil {
				return err
			}
			req, err := http.NewRequestWithContext(call, http.MethodPost, server, strings.NewReader(pending.Name))
			if err != nil {
				return err
			}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			resp.Body.Close()
			if err := note(ctx, db, j, pending.Name); err != nil && !conflict(err) { // else it is pending, or done by another
				return err
			}
		}
	}
}

func note(ctx context.Context, db *sql.DB, j *sqlstore.Journal, name string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO notes (name) VALUES ('%s')", name)); err != nil {
		return err
	}
	if err := j.Done(ctx, tx, name); err != nil {
		return err
	}
	return tx.Commit()
}

// charge fills a journal, lets workers work, and demands that each name was
// charged once and noted.
func charge(t *testing.T, db journalDB, workers func(server string)) {
	j := db.journal(t, sqlstore.JournalConfig{})
	_, err := db.Exec("CREATE TABLE notes (name text NOT NULL)")
	ok(t, err)
	var names []string
	for i := range 40 {
		names = append(names, fmt.Sprintf("charge order %02d", i))
		ok(t, j.Add(t.Context(), db, names[i]))
	}
	done := &effects{keys: map[string][]string{}}
	server := httptest.NewServer(done)
	defer server.Close()
	workers(server.URL)
	if left := pending(t, j); left != "" {
		t.Errorf("pending are %q", left)
	}
	if asked := slices.Sorted(maps.Keys(done.keys)); !slices.Equal(asked, names) {
		t.Errorf("charged were %q", asked)
	}
	for name, keys := range done.keys {
		if len(keys) != 1 {
			t.Errorf("%s has the effects %q", name, keys)
		}
	}
	var noted int
	ok(t, db.QueryRow("SELECT count(DISTINCT name) FROM notes").Scan(&noted))
	if noted != len(names) {
		t.Errorf("%d of %d are noted", noted, len(names))
	}
}

func TestJournalOfManyWorkersHasOneEffectPerName(t *testing.T) {
	for _, workers := range []int{2, 4} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) {
			onJournals(t, func(t *testing.T, db journalDB) {
				charge(t, db, func(server string) {
					var wg sync.WaitGroup
					for range workers {
						own := db.again(t)
						j := own.journal(t, sqlstore.JournalConfig{})
						wg.Go(func() {
							if err := work(t.Context(), own.DB, j, server); err != nil {
								t.Error(err)
							}
						})
					}
					wg.Wait()
				})
			})
		})
	}
}

// TestJournalOfManyProcessesHasOneEffectPerName runs this test binary as each of
// the workers.
func TestJournalOfManyProcessesHasOneEffectPerName(t *testing.T) {
	const driver, dsn, url = "JOURNAL_WORKER_DRIVER", "JOURNAL_WORKER_DSN", "JOURNAL_WORKER_SERVER"
	if os.Getenv(driver) != "" {
		db := journalDB{driver: os.Getenv(driver), dsn: os.Getenv(dsn)}.again(t)
		ok(t, work(t.Context(), db.DB, db.journal(t, sqlstore.JournalConfig{}), os.Getenv(url)))
		return
	}
	onJournals(t, func(t *testing.T, db journalDB) {
		charge(t, db, func(server string) {
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestJournalOfManyProcessesHasOneEffectPerName$")
					cmd.Env = append(os.Environ(), driver+"="+db.driver, dsn+"="+db.dsn, url+"="+server)
					if out, err := cmd.CombinedOutput(); err != nil {
						t.Errorf("a worker failed: %v: %s", err, out)
					}
				})
			}
			wg.Wait()
		})
	})
}
