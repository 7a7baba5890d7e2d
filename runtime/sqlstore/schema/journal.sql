-- PostgreSQL and SQLite: the calls of a client that are not done. Times are
-- microseconds since 1970, UTC, by the database's clock.
CREATE TABLE IF NOT EXISTS idempotent_calls (
  name     text NOT NULL PRIMARY KEY, -- which effect is meant; PostgreSQL: as encode(name, 'escape') writes it
  added_at bigint NOT NULL,
  key      text NOT NULL,             -- that its requests carry
  begun_at bigint                     -- when it was first begun; NULL: not yet
);
