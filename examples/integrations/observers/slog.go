// Package observers has what a guard does logged, counted and traced. Each
// function is small enough to be copied and changed.
package observers

import (
	"context"
	"log/slog"

	"github.com/oapi-idempotent/oapi-idempotent/runtime/idempotency"
)

// An Observer is what [idempotency.WithObserver] takes.
type Observer = func(context.Context, idempotency.Event)

// All has every observer see every event.
func All(observers ...Observer) Observer {
	return func(ctx context.Context, e idempotency.Event) {
		for _, observe := range observers {
			observe(ctx, e)
		}
	}
}

// Slog logs every event as one record, with the request's context.
func Slog(logger *slog.Logger) Observer {
	return func(ctx context.Context, e idempotency.Event) {
		attrs := []slog.Attr{slog.String("operation", e.Operation)}
		if e.KeyHash != "" {
			attrs = append(attrs, slog.String("key_hash", e.KeyHash))
		}
		if e.Attempt > 0 {
			attrs = append(attrs, slog.Int("attempt", e.Attempt))
		}
		if e.Status > 0 {
			attrs = append(attrs, slog.Int("status", e.Status))
		}
		if e.Problem != "" {
			attrs = append(attrs, slog.String("problem", e.Problem))
		}
		if e.StoreTime > 0 {
			attrs = append(attrs, slog.Duration("store_time", e.StoreTime))
		}
		if e.Err != nil {
			attrs = append(attrs, slog.Any("error", e.Err))
		}
		logger.LogAttrs(ctx, level(e.Kind), "idempotency: "+string(e.Kind), attrs...)
	}
}

// level is Error for what somebody must look at, Warn for what the guard coped
// with, and Info for its daily work.
func level(kind idempotency.EventKind) slog.Level {
	switch kind {
	case idempotency.EventUnknown, idempotency.EventPanicked, idempotency.EventSealFailed, idempotency.EventStoreFailed:
		return slog.LevelError
	case idempotency.EventTakenOver, idempotency.EventNotReplayable, idempotency.EventRenewFailed, idempotency.EventLeaseLost:
		return slog.LevelWarn
	}
	return slog.LevelInfo
}
