package idempotency

// A verdict is what the state of a key means for a request.
type verdict int

const (
	verdictRun           verdict = iota // the claim is this request's
	verdictTakeOver                     // the row counts as absent, or its run died
	verdictReplay                       // answer what was recorded
	verdictMismatch                     // the key belongs to another request
	verdictInFlight                     // another run holds the lease
	verdictNotReplayable                // completed; the answer is not there
	verdictUnknown                      // a run began and nobody knows how it ended
)

// decide is the one place where a row becomes a verdict, for a row read in any
// way: by a claim, after a wait, in place of a takeover or settlement that lost.
func (e *execution) decide(row *Row) verdict {
	if row.Won {
		return verdictRun
	}
	if row.Expired {
		return verdictTakeOver
	}
	if row.Owner != e.claim.Owner {
		return verdictMismatch
	}
	if e.op.OnMismatch != ReplayAnyway {
		same, known := e.sameRequest(row.Fingerprint)
		if !known {
			return verdictNotReplayable
		}
		if !same {
			return verdictMismatch
		}
	}
	switch row.State {
	case Processing:
		switch {
		case !row.Lapsed:
			return verdictInFlight
		case row.AtMostOnce:
			return verdictUnknown
		}
		return verdictTakeOver
	case Completed:
		return verdictReplay
	case NotReplayable:
		return verdictNotReplayable
	}
	return verdictUnknown
}
