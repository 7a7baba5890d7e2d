package idempotentclient_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

// A worker that is killed in mid-call resumes the call with the same key.
func ExampleJournal() {
	keys := map[string]bool{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys[r.Header.Get("Idempotency-Key")] = true
		w.WriteHeader(http.StatusCreated)
	}))
	defer server.Close()
	dir, err := os.MkdirTemp("", "journal")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	client := &http.Client{Transport: &idempotentclient.Transport{}}

	noted := false // in the database of the orders
	charge := func(killed bool) error {
		journal, err := idempotentclient.OpenJournal(filepath.Join(dir, "charges.journal"), 0)
		if err != nil {
			return err
		}
		defer journal.Close()
		call, err := journal.Begin(context.Background(), "charge order 17")
		if err != nil {
			return err
		}
		if noted {
			return journal.Done("charge order 17")
		}
		req, err := http.NewRequestWithContext(call, http.MethodPost, server.URL+"/payments", strings.NewReader(`{"order":17}`))
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err // still pending: call again later
		}
		resp.Body.Close()
		if killed {
			return nil
		}
		noted = true // and from then on the key is of no more use
		return journal.Done("charge order 17")
	}
	for _, killed := range []bool{true, false} {
		if err := charge(killed); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println("two attempts,", len(keys), "key")
	// Output: two attempts, 1 key
}
