package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers/legacy"
	"github.com/jmoiron/sqlx"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// newHandler wires the generated server: handlers, guard, routes.
func newHandler(db *sqlx.DB, store idempotency.Store, delay time.Duration) (http.Handler, error) {
	validate, err := validator()
	if err != nil {
		return nil, err
	}
	// Validation runs inside the guard: a key that is known gets its answer,
	// whatever the new request says.
	guard, err := idempotency.New(store, idempotency.WithInner(validate))
	if err != nil {
		return nil, err
	}
	server := api.NewStrictHandlerWithOptions(&handlers{db, delay}, nil, api.StrictHTTPServerOptions{
		// What is valid by the document and does not fit into Go, such as 1e30.
		RequestErrorHandlerFunc: func(w http.ResponseWriter, _ *http.Request, err error) { refuse(w, err) },
		ResponseErrorHandlerFunc: func(w http.ResponseWriter, r *http.Request, err error) {
			log.Printf("%s %s: %v", r.Method, r.URL.Path, err)
			http.Error(w, "internal error", http.StatusInternalServerError)
		},
	})
	return api.Handler(server, guard), nil
}

// validator checks requests against the document, which says what an order is.
func validator() (func(http.Handler) http.Handler, error) {
	document, err := api.GetSpec()
	if err != nil {
		return nil, err
	}
	router, err := legacy.NewRouter(document)
	if err != nil {
		return nil, err
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			route, params, err := router.FindRoute(r)
			if err == nil {
				err = openapi3filter.ValidateRequest(r.Context(), &openapi3filter.RequestValidationInput{Request: r, Route: route, PathParams: params})
			}
			if err != nil {
				refuse(w, err)
				return
			}
			next.ServeHTTP(w, r)
		})
	}, nil
}

func refuse(w http.ResponseWriter, err error) {
	status := http.StatusUnprocessableEntity
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		status = http.StatusRequestEntityTooLarge
	}
	detail, _, _ := strings.Cut(err.Error(), "\n")
	body, _ := json.Marshal(api.Problem{Type: "urn:orders:invalid", Title: "The request is not valid", Status: status, Detail: &detail})
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

type handlers struct {
	db    *sqlx.DB
	delay time.Duration
}

// CreateOrder has a second line of defence: the key's hash is UNIQUE in its own
// table. Should a process die after the order was made and before its answer was
// recorded, the run that follows finds the order and returns it.
func (h *handlers) CreateOrder(ctx context.Context, r api.CreateOrderRequestObject) (api.CreateOrderResponseObject, error) {
	key := idempotency.KeyFrom(ctx).ID()
	_, err := h.db.ExecContext(ctx, h.db.Rebind(`INSERT INTO orders (idempotency_key, item, quantity, price) VALUES (?, ?, ?, ?)
		ON CONFLICT (idempotency_key) DO NOTHING`), key, r.Body.Item, r.Body.Quantity, r.Body.Price)
	if err != nil {
		return nil, err
	}
	var order api.Order
	if err := h.db.GetContext(ctx, &order, h.db.Rebind(`SELECT id, item, quantity, price FROM orders WHERE idempotency_key = ?`), key); err != nil {
		return nil, err
	}
	return api.CreateOrder201JSONResponse(order), nil
}

func (h *handlers) CreatePayment(ctx context.Context, r api.CreatePaymentRequestObject) (api.CreatePaymentResponseObject, error) {
	select {
	case <-time.After(h.delay):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	payment := api.Payment{Amount: r.Body.Amount, Currency: r.Body.Currency}
	err := h.db.GetContext(ctx, &payment.Id, h.db.Rebind(`INSERT INTO payments (amount, currency) VALUES (?, ?) RETURNING id`), payment.Amount, payment.Currency)
	if err != nil {
		return nil, err
	}
	return api.CreatePayment201JSONResponse(payment), nil
}

func (h *handlers) ListOrders(ctx context.Context, _ api.ListOrdersRequestObject) (api.ListOrdersResponseObject, error) {
	orders := api.ListOrders200JSONResponse{}
	return orders, h.db.SelectContext(ctx, (*[]api.Order)(&orders), `SELECT id, item, quantity, price FROM orders ORDER BY id`)
}

func (h *handlers) ListPayments(ctx context.Context, _ api.ListPaymentsRequestObject) (api.ListPaymentsResponseObject, error) {
	payments := api.ListPayments200JSONResponse{}
	return payments, h.db.SelectContext(ctx, (*[]api.Payment)(&payments), `SELECT id, amount, currency FROM payments ORDER BY id`)
}
