package routertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net"
	"net/http"
	"reflect"
	"slices"
	"testing"
	"time"

	ginrouter "github.com/gin-gonic/gin"
	"github.com/labstack/echo/v4"
	echov5 "github.com/labstack/echo/v5"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotencytest/guardtest"
)

// TestGuard runs the suite on what is generated for every target, with and
// without a strict server.
func TestGuard(t *testing.T) {
	for _, target := range slices.Concat(netHTTPTargets, echoTargets, ginTargets, fiberTargets, irisTargets) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			guardtest.Run(t, target)
		})
	}
}

// overHTTP serves what a target makes of a server over net/http.
func overHTTP(handler func(guardtest.Server) http.Handler) func(*testing.T, guardtest.Server) guardtest.Running {
	return func(t *testing.T, s guardtest.Server) guardtest.Running {
		server := &http.Server{Handler: handler(s), ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
		if s.Around != nil {
			server.Handler = s.Around(server.Handler)
		}
		return run(t, server.Serve, server.Shutdown, http.ErrServerClosed)
	}
}

// run runs a server until the test ends. Serving is to end with stopped.
func run(t *testing.T, serve func(net.Listener) error, shutdown func(context.Context) error, stopped error) guardtest.Running {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- serve(listener) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-done; !errors.Is(err, stopped) {
			t.Errorf("serving ended with %v", err)
		}
	})
	return guardtest.Running{URL: "http://" + listener.Addr().String(), Shutdown: shutdown}
}

// userIn returns the request's X-User as net/http's and strict handlers find it.
func userIn(ctx context.Context) string {
	user, ok := ctx.Value(guardtest.UserKey{}).(string)
	if !ok {
		user, _ = ctx.Value("user").(string) // a *gin.Context has its own values only
	}
	return user
}

// text is how a router is to render an error of a handler.
func text(err error) string { return "handled: " + err.Error() }

// status returns the status of a handler's error.
func status(err error) int {
	var failed *guardtest.Error
	if errors.As(err, &failed) {
		return failed.Status
	}
	return http.StatusInternalServerError
}

// A strictServer implements the StrictServerInterface of every strict package:
// the types of its requests and responses are the package's, and write makes a
// response object of a reply.
type strictServer[L, LR, H, HR, C, CR, P, PR, U, UR any] struct {
	handle guardtest.Handler
	write  func(guardtest.Reply) any
}

func (s strictServer[L, LR, H, HR, C, CR, P, PR, U, UR]) ListThings(ctx context.Context, r L) (LR, error) {
	return answerStrict[LR](ctx, s.handle, s.write, "listThings", r)
}

func (s strictServer[L, LR, H, HR, C, CR, P, PR, U, UR]) HeadThings(ctx context.Context, r H) (HR, error) {
	return answerStrict[HR](ctx, s.handle, s.write, "headThings", r)
}

func (s strictServer[L, LR, H, HR, C, CR, P, PR, U, UR]) CreateThing(ctx context.Context, r C) (CR, error) {
	return answerStrict[CR](ctx, s.handle, s.write, "createThing", r)
}

func (s strictServer[L, LR, H, HR, C, CR, P, PR, U, UR]) Pay(ctx context.Context, r P) (PR, error) {
	return answerStrict[PR](ctx, s.handle, s.write, "pay", r)
}

func (s strictServer[L, LR, H, HR, C, CR, P, PR, U, UR]) Upload(ctx context.Context, r U) (UR, error) {
	return answerStrict[UR](ctx, s.handle, s.write, "upload", r)
}

func answerStrict[R any](ctx context.Context, handle guardtest.Handler, write func(guardtest.Reply) any, operation string, request any) (none R, _ error) {
	body, err := decoded(request)
	if err != nil {
		return none, err
	}
	reply := handle(ctx, guardtest.Call{Operation: operation, Body: body, User: userIn(ctx)})
	if reply.Err != nil {
		return none, reply.Err
	}
	return write(reply).(R), nil
}

// decoded returns what a strict handler got, as text.
func decoded(request any) (string, error) {
	field := reflect.ValueOf(request).FieldByName("MultipartBody")
	if !field.IsValid() || field.IsNil() {
		body, err := json.Marshal(request)
		return string(body), err
	}
	var read string
	reader := field.Interface().(*multipart.Reader)
	for {
		part, err := reader.NextPart()
		if err == io.EOF {
			return read, nil
		}
		if err != nil {
			return "", err
		}
		content, err := io.ReadAll(part)
		if err != nil {
			return "", err
		}
		read += fmt.Sprintf("%s=%s\n", part.FormName(), content)
	}
}

// httpReply is the response object of strict servers over net/http.
type httpReply struct{ guardtest.Reply }

func newHTTPReply(r guardtest.Reply) any { return httpReply{r} }

func (r httpReply) VisitListThingsResponse(w http.ResponseWriter) error { return writeHTTP(w, r.Reply) }
func (r httpReply) VisitHeadThingsResponse(w http.ResponseWriter) error { return writeHTTP(w, r.Reply) }
func (r httpReply) VisitCreateThingResponse(w http.ResponseWriter) error {
	return writeHTTP(w, r.Reply)
}
func (r httpReply) VisitPayResponse(w http.ResponseWriter) error    { return writeHTTP(w, r.Reply) }
func (r httpReply) VisitUploadResponse(w http.ResponseWriter) error { return writeHTTP(w, r.Reply) }

func writeHTTP(w http.ResponseWriter, r guardtest.Reply) error {
	if r.Link != "" {
		w.Header().Set("Link", r.Link)
		below(w).WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
	}
	if r.Hijack != nil {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			r.Hijack(conn)
			err = conn.Close()
		}
		return err
	}
	for name, values := range r.Header {
		w.Header()[name] = values
	}
	if r.Write != nil {
		r.Write(w)
		return nil
	}
	if r.Status != 0 {
		w.WriteHeader(r.Status)
	}
	if r.Body != "" {
		if _, err := io.WriteString(w, r.Body); err != nil {
			return err
		}
	}
	if r.Panic != nil {
		panic(r.Panic)
	}
	return stream(w, r, func() error {
		w.(http.Flusher).Flush()
		return nil
	})
}

// below returns the writer below a router's own, which takes an informational
// response for the final one.
func below(w http.ResponseWriter) http.ResponseWriter {
	switch w := w.(type) {
	case interface{ Naive() http.ResponseWriter }: // iris
		return w.Naive()
	case ginrouter.ResponseWriter, *echo.Response, *echov5.Response:
		return w.(interface{ Unwrap() http.ResponseWriter }).Unwrap()
	}
	return w
}

// stream writes the parts of a reply that streams.
func stream(w io.Writer, r guardtest.Reply, flush func() error) error {
	for i, part := range r.Stream {
		if _, err := io.WriteString(w, part); err != nil {
			return err
		}
		if err := flush(); err != nil {
			return err
		}
		if i == 0 && r.Between != nil {
			r.Between()
		}
	}
	return nil
}
