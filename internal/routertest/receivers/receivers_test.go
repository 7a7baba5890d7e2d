// Package receivers drives the guarded receivers of webhooks and callbacks on
// every router over HTTP.
package receivers

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gin-gonic/gin"
	fiber2 "github.com/gofiber/fiber/v2"
	fiber3 "github.com/gofiber/fiber/v3"
	"github.com/kataras/iris/v12"
	"github.com/labstack/echo/v4"
	echo5 "github.com/labstack/echo/v5"

	onchi "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/chi"
	onecho "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/echo"
	onecho5 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/echo5"
	onfiber "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/fiber"
	onfiber3 "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/fiber-v3"
	ongin "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/gin"
	ongorilla "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/gorilla"
	oniris "github.com/oapi-idempotent/oapi-idempotent/internal/routertest/golden/receivers/iris"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/memorystore"
)

// ran counts the runs of the two handlers. Each answers 201 with its name.
type ran struct{ paid, delivered atomic.Int64 }

type onChi struct{ *ran }

func (r onChi) HandlePaidWebhook(w http.ResponseWriter, _ *http.Request, _ onchi.PaidParams) {
	r.paid.Add(1)
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, "paid")
}

func (r onChi) HandleDeliveredCallback(w http.ResponseWriter, _ *http.Request, _ onchi.DeliveredParams) {
	r.delivered.Add(1)
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, "delivered")
}

type onGorilla struct{ onChi }

func (r onGorilla) HandlePaidWebhook(w http.ResponseWriter, req *http.Request, _ ongorilla.PaidParams) {
	r.onChi.HandlePaidWebhook(w, req, onchi.PaidParams{})
}

func (r onGorilla) HandleDeliveredCallback(w http.ResponseWriter, req *http.Request, _ ongorilla.DeliveredParams) {
	r.onChi.HandleDeliveredCallback(w, req, onchi.DeliveredParams{})
}

type onEcho struct{ *ran }

func (r onEcho) HandlePaidWebhook(c echo.Context, _ onecho.PaidParams) error {
	r.paid.Add(1)
	return c.String(http.StatusCreated, "paid")
}

func (r onEcho) HandleDeliveredCallback(c echo.Context, _ onecho.DeliveredParams) error {
	r.delivered.Add(1)
	return c.String(http.StatusCreated, "delivered")
}

type onEcho5 struct{ *ran }

func (r onEcho5) HandlePaidWebhook(c *echo5.Context, _ onecho5.PaidParams) error {
	r.paid.Add(1)
	return c.String(http.StatusCreated, "paid")
}

func (r onEcho5) HandleDeliveredCallback(c *echo5.Context, _ onecho5.DeliveredParams) error {
	r.delivered.Add(1)
	return c.String(http.StatusCreated, "delivered")
}

type onGin struct{ *ran }

func (r onGin) HandlePaidWebhook(c *gin.Context, _ ongin.PaidParams) {
	r.paid.Add(1)
	c.String(http.StatusCreated, "paid")
}

func (r onGin) HandleDeliveredCallback(c *gin.Context, _ ongin.DeliveredParams) {
	r.delivered.Add(1)
	c.String(http.StatusCreated, "delivered")
}

type onFiber struct{ *ran }

func (r onFiber) HandlePaidWebhook(c *fiber2.Ctx, _ onfiber.PaidParams) error {
	r.paid.Add(1)
	return c.Status(http.StatusCreated).SendString("paid")
}

func (r onFiber) HandleDeliveredCallback(c *fiber2.Ctx, _ onfiber.DeliveredParams) error {
	r.delivered.Add(1)
	return c.Status(http.StatusCreated).SendString("delivered")
}

type onFiber3 struct{ *ran }

func (r onFiber3) HandlePaidWebhook(c fiber3.Ctx, _ onfiber3.PaidParams) error {
	r.paid.Add(1)
	return c.Status(http.StatusCreated).SendString("paid")
}

func (r onFiber3) HandleDeliveredCallback(c fiber3.Ctx, _ onfiber3.DeliveredParams) error {
	r.delivered.Add(1)
	return c.Status(http.StatusCreated).SendString("delivered")
}

type onIris struct{ *ran }

func (r onIris) HandlePaidWebhook(c iris.Context, _ oniris.PaidParams) {
	r.paid.Add(1)
	c.StatusCode(http.StatusCreated)
	_, _ = c.WriteString("paid")
}

func (r onIris) HandleDeliveredCallback(c iris.Context, _ oniris.DeliveredParams) {
	r.delivered.Add(1)
	c.StatusCode(http.StatusCreated)
	_, _ = c.WriteString("delivered")
}

func serve(t *testing.T, handler http.Handler) string {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func listen(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// routers serve both receivers, at /paid and /delivered, and return their URL.
var routers = map[string]func(*testing.T, *ran, *idempotency.Guard) string{
	"chi": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		mux := http.NewServeMux()
		mux.Handle("/paid", onchi.PaidWebhookHandler(onChi{r}, guard, nil))
		mux.Handle("/delivered", onchi.DeliveredCallbackHandler(onChi{r}, guard, nil))
		return serve(t, mux)
	},
	"gorilla": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		mux := http.NewServeMux()
		mux.Handle("/paid", ongorilla.PaidWebhookHandler(onGorilla{onChi{r}}, guard, nil))
		mux.Handle("/delivered", ongorilla.DeliveredCallbackHandler(onGorilla{onChi{r}}, guard, nil))
		return serve(t, mux)
	},
	"echo": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		e := echo.New()
		e.POST("/paid", onecho.PaidWebhookHandler(onEcho{r}, guard))
		e.POST("/delivered", onecho.DeliveredCallbackHandler(onEcho{r}, guard))
		return serve(t, e)
	},
	"echo5": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		e := echo5.New()
		e.POST("/paid", onecho5.PaidWebhookHandler(onEcho5{r}, guard))
		e.POST("/delivered", onecho5.DeliveredCallbackHandler(onEcho5{r}, guard))
		return serve(t, e)
	},
	"gin": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		gin.SetMode(gin.ReleaseMode)
		engine := gin.New()
		engine.POST("/paid", ongin.PaidWebhookHandler(onGin{r}, guard))
		engine.POST("/delivered", ongin.DeliveredCallbackHandler(onGin{r}, guard))
		return serve(t, engine)
	},
	"fiber": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		app := fiber2.New(fiber2.Config{DisableStartupMessage: true})
		app.Post("/paid", onfiber.PaidWebhookHandler(onFiber{r}, guard))
		app.Post("/delivered", onfiber.DeliveredCallbackHandler(onFiber{r}, guard))
		l := listen(t)
		ended := make(chan error, 1)
		go func() { ended <- app.Listener(l) }()
		t.Cleanup(func() { _, _ = app.Shutdown(), <-ended })
		return "http://" + l.Addr().String()
	},
	"fiber-v3": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		app := fiber3.New()
		app.Post("/paid", onfiber3.PaidWebhookHandler(onFiber3{r}, guard))
		app.Post("/delivered", onfiber3.DeliveredCallbackHandler(onFiber3{r}, guard))
		l := listen(t)
		ended := make(chan error, 1)
		go func() { ended <- app.Listener(l, fiber3.ListenConfig{DisableStartupMessage: true}) }()
		t.Cleanup(func() { _, _ = app.Shutdown(), <-ended })
		return "http://" + l.Addr().String()
	},
	"iris": func(t *testing.T, r *ran, guard *idempotency.Guard) string {
		app := iris.New()
		app.Logger().SetLevel("disable")
		app.Post("/paid", oniris.PaidWebhookHandler(onIris{r}, guard))
		app.Post("/delivered", oniris.DeliveredCallbackHandler(onIris{r}, guard))
		if err := app.Build(); err != nil {
			t.Fatal(err)
		}
		return serve(t, app)
	},
}

// TestReceivers sends a webhook and a callback without a key, and three times
// with one.
func TestReceivers(t *testing.T) {
	for name, router := range routers {
		t.Run(name, func(t *testing.T) {
			guard, err := idempotency.New(memorystore.New())
			if err != nil {
				t.Fatal(err)
			}
			var r ran
			url := router(t, &r, guard)
			post := func(path, key string) (status int, replayed, body string) {
				req, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(`{"order":"17"}`))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				if key != "" {
					req.Header.Set("Idempotency-Key", key)
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				return resp.StatusCode, resp.Header.Get("Idempotent-Replayed"), string(text)
			}
			for _, name := range []string{"paid", "delivered"} {
				if status, _, body := post("/"+name, ""); status != http.StatusBadRequest {
					t.Errorf("%s without a key: %d %s; want 400", name, status, body)
				}
				for i := range 3 {
					status, replayed, body := post("/"+name, "k")
					if status != http.StatusCreated || body != name || (replayed == "true") != (i > 0) {
						t.Errorf("%s, request %d: %d %q, replayed %q", name, i+1, status, body, replayed)
					}
				}
			}
			if paid, delivered := r.paid.Load(), r.delivered.Load(); paid != 1 || delivered != 1 {
				t.Errorf("ran %d and %d times; want once each", paid, delivered)
			}
		})
	}
}
