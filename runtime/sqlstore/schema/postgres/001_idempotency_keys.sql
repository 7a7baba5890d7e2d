-- PostgreSQL 14 or newer, built with lz4.
CREATE TABLE idempotency_keys (
  key_hash     bytea PRIMARY KEY,              -- SHA-256 of key and scope; its uniqueness is the claim
  claim_id     bytea NOT NULL,                 -- 16 random bytes of the current claim; every later write compares them
  owner        bytea NOT NULL,                 -- SHA-256 of operation and principal
  fingerprint  bytea NOT NULL,                 -- of the request
  state        smallint NOT NULL DEFAULT 0,    -- 0 processing, 1 completed, 2 completed but not replayable, 3 outcome unknown
  at_most_once boolean NOT NULL DEFAULT false, -- never taken over
  attempt      int NOT NULL DEFAULT 1,
  lease_until  timestamptz NOT NULL,
  expires_at   timestamptz NOT NULL,           -- infinity: never
  created_at   timestamptz NOT NULL DEFAULT now(),
  operation    text NOT NULL,                  -- as encode(bytes, 'escape') writes it, as is key: for operators
  key          text NOT NULL,
  status       smallint,
  headers      bytea,
  body         bytea COMPRESSION lz4
) WITH (fillfactor = 85);                      -- room for HOT updates; an index more would prevent them
