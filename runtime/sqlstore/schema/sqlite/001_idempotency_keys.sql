-- SQLite 3.42 or newer. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS idempotency_keys (
  key_hash     BLOB NOT NULL PRIMARY KEY,  -- SHA-256 of key and scope; its uniqueness is the claim
  claim_id     BLOB NOT NULL,              -- 16 random bytes of the current claim; every later write compares them
  owner        BLOB NOT NULL,              -- SHA-256 of operation and principal
  fingerprint  BLOB NOT NULL,              -- of the request
  state        INTEGER NOT NULL DEFAULT 0, -- 0 processing, 1 completed, 2 completed but not replayable, 3 outcome unknown
  at_most_once INTEGER NOT NULL DEFAULT 0, -- never taken over
  attempt      INTEGER NOT NULL DEFAULT 1,
  lease_until  INTEGER NOT NULL,
  expires_at   INTEGER NOT NULL,           -- 9223372036854775807: never
  created_at   INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
  operation    TEXT NOT NULL,              -- for operators, as is key
  key          TEXT NOT NULL,
  status       INTEGER,
  headers      BLOB,
  body         BLOB
);
CREATE INDEX IF NOT EXISTS idempotency_keys_expires_at ON idempotency_keys (expires_at);
