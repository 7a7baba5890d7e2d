package guardtest

import "testing"

// A promise is a case of the suite.
type promise struct {
	name  string
	check func(*testing.T, Target)
}

// promises are what the guard keeps on every router.
var promises = []promise{
	// Requests.
	{"a request without one valid key is refused", badKeys},
	{"a key is the same in whatever form", keyForms},
	{"a key is optional where the policy says so", optionalKey},
	{"a key that the document declares is bound too", declaredKey},
	{"another request with the key is refused", mismatch},
	{"a body is not compared where the policy says so", replayAnyway},
	{"a path is compared as it was sent", paths},
	{"a request is the same however it is written", wireForms},
	{"a request without a body is one however it says so", noRequestBody},
	{"a request that is cut short does not run", cutShort},
	{"a chunked request is the same request", chunked},
	{"a multipart form is the same whatever its boundary", multipartForm},
	{"a urlencoded form reaches the handler and is compared", urlencodedForm},
	{"a body that does not decode frees the key", undecodable},
	{"a request body over the limit is refused and frees the key", bodyLimit},
	{"bodies are as large as the limits", large},
	{"the principal function sees what middlewares found out", principals},

	// Answers.
	{"a duplicate gets the recorded answer", replay},
	{"an answer is replayed with what it has and no more", sparse},
	{"an answer without a body stays one", noBody},
	{"header fields of middlewares around are not recorded", outerFields},
	{"what a compressor around the guard does is not recorded", compressed},
	{"an answer that is compressed already is replayed as it is", compressedAlready},
	{"an informational response is sent and not recorded", earlyHints},
	{"refusals are rendered as the application has it", ownEnvelope},
	{"a record that cannot be read is not run again", unreadableRecord},
	{"the handler's context is the run's", contexts},
	{"the handler's context has what middlewares put there", outerContext},

	// Answers that leave before they end.
	{"an answer that is too large is sent and not replayed", tooLarge},
	{"an answer that streams is sent as it is written and not replayed", streams},
	{"a stream may be compressed", compressedStream},
	{"a hijacked connection is recorded first", hijacks},
	{"a connection is not hijacked unrecorded", hijackUnrecorded},

	// Requests at once.
	{"a duplicate of a request in flight is refused", inFlight},
	{"a duplicate waits for the request in flight", waiting},
	{"a race for one key has one run", race},
	{"requests at once are not mixed up", notMixedUp},

	// What goes wrong.
	{"an error is rendered by the router and recorded by its status", failures},
	{"a server error frees the key", serverError},
	{"at-most-once records a server error too", atMostOnce},
	{"a panic reaches the recovery and holds the key until its lease ends", panics},
	{"a panic after a marked effect leaves the outcome unknown", markedPanic},
	{"a recovery answers for half an answer", recovered},
	{"a client that hangs up changes nothing", hangUp},
	{"a graceful shutdown waits for the request in flight", shutdown},
	{"without its store nothing runs", storeDown},
	{"an answer that cannot be recorded is not sent", storeDownMeanwhile},

	// Transactions.
	{"a transaction commits its record or nothing", inTransaction},
	{"a transaction that fails leaves nothing", failingTransaction},

	// Ways to mount, and what is not guarded.
	{"a base URL changes nothing", baseURL},
	{"a group of routes is guarded", group},
	{"a wrapper mounted by hand is guarded", byHand},
	{"an alias is guarded", alias},
	{"two APIs share a guard and a table", twoAPIs},
	{"an operation that is not annotated is left alone", unannotated},
	{"safe methods beside an annotated operation are left alone", neighbours},
	{"what runs without a key may stream", unguardedStreams},
	{"what runs without a key fails as ever", unguardedFailures},
	{"the guard that guards nothing leaves things as they are", passthrough},
}

// httpPromises are about what handlers can do that have an http.ResponseWriter.
var httpPromises = []promise{
	{"whatever a handler does with its writer is replayed", writers},
	{"what is written after the handler returned changes nothing", writesLater},
	{"trailers are sent and not recorded", trailers},
	{"a flush sends what was written", flushes},
	{"a flush waits for the transaction", flushedTransaction},
	{"a panic that nothing recovers sends nothing", unrecovered},
	{"a recovery comes too late behind a flush", recoveredFlush},
	{"a handler outlives http.TimeoutHandler", timeoutHandler},
}
