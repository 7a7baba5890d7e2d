package idempotentclient_test

import (
	"context"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotentclient"
)

func TestABodyLimitWithoutABound(t *testing.T) {
	got := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- string(b)
	}))
	defer server.Close()
	req, err := http.NewRequestWithContext(t.Context(), "POST", server.URL, io.MultiReader(strings.NewReader("body")))
	if err != nil {
		t.Fatal(err)
	}
	config := idempotentclient.NewConfig(idempotentclient.WithBodyLimit(math.MaxInt64))
	resp, err := config.Start(&idempotentclient.Operation{}, req).Do(server.Client())
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if body := <-got; body != "body" {
		t.Fatalf("the server got %q", body)
	}
}

func TestAJournalByAnotherNameIsTheSameJournal(t *testing.T) {
	dir := t.TempDir()
	target, link := filepath.Join(dir, "journal"), filepath.Join(dir, "link")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	j, err := idempotentclient.OpenJournal(target, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := idempotentclient.OpenJournal(link, time.Hour); err == nil {
		t.Error("the journal was opened twice", second.Close())
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = idempotentclient.OpenJournal(link, time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Begin(context.Background(), "charge"); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = idempotentclient.OpenJournal(target, time.Hour); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if pending := j.Pending(); len(pending) != 1 {
		t.Errorf("begun behind the link, pending before it: %v", pending)
	}
}
