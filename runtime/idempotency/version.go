package idempotency

// Version is the version of this module. Generated files name it.
const Version = "0.1.0"

// IsAtLeastVersion0_1 is used by generated code: a file generated for this
// contract does not compile with a runtime that is older than it.
const IsAtLeastVersion0_1 = true
