package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"

	"github.com/oapi-idempotent/oapi-idempotent/examples/orders/api"
)

// What follows holds POST /orders, which is generated from its annotation and
// knows nothing of keys but the UNIQUE column of its table, against the system
// that it reproduces: the how-to docs/howto/idempotency.md of NENE2.

const (
	tea     = `{"item":"tea","quantity":1,"price":2.5}`
	coffee  = `{"item":"coffee","quantity":99,"price":0.01}`
	missing = "missing-idempotency-key"
	invalid = "invalid"
)

// teaAs and coffeeAs are the orders that tea and coffee make.
func teaAs(id int64) api.Order { return api.Order{Id: id, Item: "tea", Quantity: 1, Price: 2.5} }
func coffeeAs(id int64) api.Order {
	return api.Order{Id: id, Item: "coffee", Quantity: 99, Price: 0.01}
}

func header(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header[name] = []string{value} }
}

// refusedAsInvalid sends orders that are none, each with a key of its own, and
// checks that nothing came of them and that their keys are free.
func refusedAsInvalid(bodies ...string) func(*testing.T, *shop) {
	return func(t *testing.T, s *shop) {
		for i, body := range bodies {
			s.order(t, fmt.Sprint("key-", i), body).refused(t, http.StatusUnprocessableEntity, invalid)
		}
		s.holds(t)
		var want []api.Order
		for i := range bodies {
			order := s.order(t, fmt.Sprint("key-", i), tea).created(t)
			want = append(want, teaAs(order.Id))
		}
		s.holds(t, want...)
	}
}

// TestNENE2 plays the how-to's twelve attacks.
func TestNENE2(t *testing.T) {
	onEach(t, "ATK-01 no key", func(t *testing.T, s *shop) {
		for _, body := range []string{tea, `{"quantity":-1}`, `{`, ``} {
			s.order(t, "", body).refused(t, http.StatusUnprocessableEntity, missing)
		}
		s.holds(t)
	})
	onEach(t, "ATK-02 blank key", func(t *testing.T, s *shop) {
		for _, blank := range []string{"", " ", " \t ", `""`, `"  "`} {
			for _, body := range []string{tea, `{"quantity":-1}`, `{`, ``} {
				s.order(t, "", body, header("Idempotency-Key", blank)).refused(t, http.StatusUnprocessableEntity, missing)
			}
		}
		s.holds(t)
	})
	onEach(t, "ATK-03 replay with a changed body", func(t *testing.T, s *shop) {
		first := s.order(t, "key", tea)
		order := first.created(t)
		s.order(t, "key", coffee).replays(t, http.StatusOK, first)
		s.holds(t, teaAs(order.Id))
	})
	onEach(t, "ATK-04 two keys are two orders", func(t *testing.T, s *shop) {
		one, two := s.order(t, "key-1", tea).created(t), s.order(t, "key-2", tea).created(t)
		if one.Id == two.Id {
			t.Errorf("both keys got the order %d", one.Id)
		}
		s.holds(t, teaAs(one.Id), teaAs(two.Id))
	})
	onEach(t, "ATK-05 concurrent same key", func(t *testing.T, s *shop) {
		for i := range 10 {
			answers := race(2, func(int) answer { return s.order(t, fmt.Sprint("key-", i), tea) })
			winner, loser := answers[0], answers[1]
			if winner.StatusCode != http.StatusCreated {
				winner, loser = loser, winner
			}
			winner.created(t)
			loser.replays(t, http.StatusOK, winner)
		}
		if n := s.count(t, "orders"); n != 10 {
			t.Errorf("10 keys made %d orders", n)
		}
	})
	onEach(t, "ATK-06 negative quantity", refusedAsInvalid(
		`{"item":"tea","quantity":-1,"price":2.5}`,
		`{"item":"tea","quantity":-9223372036854775808,"price":2.5}`,
		`{"item":"tea","quantity":1,"price":2.5,"Quantity":-5}`,
	))
	onEach(t, "ATK-07 zero quantity", refusedAsInvalid(
		`{"item":"tea","quantity":0,"price":2.5}`,
		`{"item":"tea","quantity":-0,"price":2.5}`,
	))
	onEach(t, "ATK-08 missing fields", refusedAsInvalid(
		`{"quantity":1,"price":2.5}`,
		`{"item":"tea","price":2.5}`,
		`{"item":"tea","quantity":1}`,
		`{"item":"","quantity":1,"price":2.5}`,
		`{"item":null,"quantity":1,"price":2.5}`,
		`{"item":"tea","quantity":null,"price":2.5}`,
		`{"item":"te\u0000a","quantity":1,"price":2.5}`,
		`{}`, `[]`, `null`, `{`, ``,
	))
	onEach(t, "ATK-09 cross-origin form post", func(t *testing.T, s *shop) {
		form := "item=tea&quantity=1&price=2.5"
		origin := header("Origin", "https://elsewhere.example")
		// What a form of another site can send carries no key.
		for kind, body := range map[string]string{
			"application/x-www-form-urlencoded": form,
			"multipart/form-data; boundary=b":   "--b\r\nContent-Disposition: form-data; name=\"item\"\r\n\r\ntea\r\n--b--\r\n",
			"text/plain":                        tea,
		} {
			s.order(t, "", body, origin, header("Content-Type", kind)).refused(t, http.StatusUnprocessableEntity, missing)
			// And had it one, it would not be JSON.
			s.order(t, "guessed", body, origin, header("Content-Type", kind)).refused(t, http.StatusUnprocessableEntity, invalid)
		}
		// Its script may send neither the key nor JSON: a browser asks first.
		preflight := s.request(t, "/orders", "", nil)
		preflight.Method = http.MethodOptions
		preflight.Header = http.Header{
			"Origin":                         {"https://elsewhere.example"},
			"Access-Control-Request-Method":  {"POST"},
			"Access-Control-Request-Headers": {"content-type,idempotency-key"},
		}
		if a := s.do(t, preflight); a.StatusCode < 400 || a.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("the preflight is answered %s", a)
		}
		s.holds(t)
		s.holds(t, teaAs(s.order(t, "guessed", tea).created(t).Id))
	})
	onEach(t, "ATK-10 negative price", refusedAsInvalid(
		`{"item":"tea","quantity":1,"price":-100.0}`,
		`{"item":"tea","quantity":1,"price":-0.01}`,
		`{"item":"tea","quantity":1,"price":2.5,"PRICE":-5}`,
	))
	onEach(t, "ATK-11 quantity as a string or a fraction", refusedAsInvalid(
		`{"item":"tea","quantity":"1","price":2.5}`,
		`{"item":"tea","quantity":1.5,"price":2.5}`,
		`{"item":"tea","quantity":true,"price":2.5}`,
		`{"item":"tea","quantity":[1],"price":2.5}`,
		`{"item":"tea","quantity":1,"price":"2.5"}`,
		`{"item":7,"quantity":1,"price":2.5}`,
		`{"item":"tea","quantity":1.0,"price":2.5}`,
		`{"item":"tea","quantity":1e30,"price":2.5}`,
		`{"item":"tea","quantity":3000000000,"price":2.5}`,
	))
	onEach(t, "ATK-12 SQL in the key", func(t *testing.T, s *shop) {
		var want []api.Order
		for _, key := range []string{
			`'; DROP TABLE orders; --`,
			`'; DELETE FROM idempotency_keys; --`,
			`' OR '1'='1`,
			`\'; DROP TABLE orders; --`,
			`') ON CONFLICT DO NOTHING; --`,
			`$1`, `?`, `:key`, `$$`, `%`, `*/`,
		} {
			first := s.order(t, key, tea)
			want = append(want, teaAs(first.created(t).Id))
			s.order(t, key, coffee).replays(t, http.StatusOK, first)
		}
		s.holds(t, want...)
		if n := s.count(t, "idempotency_keys"); n != len(want) {
			t.Errorf("%d keys left %d records", len(want), n)
		}
	})
}

// TestNENE2Rules holds what the how-to promises beside the attacks.
func TestNENE2Rules(t *testing.T) {
	onEach(t, "201 returns the order", func(t *testing.T, s *shop) {
		order := s.order(t, "key", coffee).created(t)
		if order != coffeeAs(order.Id) {
			t.Errorf("the answer is the order %v", order)
		}
		s.holds(t, order)
	})
	onEach(t, "a known key gets its order, whatever the new request says", func(t *testing.T, s *shop) {
		first := s.order(t, "key", tea)
		order := first.created(t)
		for _, body := range []string{tea, coffee, `{"item":"tea","quantity":-1,"price":2.5}`, `{}`, `{`, ``, strings.Repeat("x", 2<<20)} {
			s.order(t, "key", body).replays(t, http.StatusOK, first)
		}
		s.order(t, "key", "item=tea", header("Content-Type", "application/x-www-form-urlencoded")).replays(t, http.StatusOK, first)
		s.order(t, "", tea, header("idempotency-key", "key")).replays(t, http.StatusOK, first)
		s.order(t, "", tea, header("Idempotency-Key", "  key ")).replays(t, http.StatusOK, first)
		s.holds(t, teaAs(order.Id))
	})
	onEach(t, "an invalid order frees the key", func(t *testing.T, s *shop) {
		for range 2 {
			s.order(t, "key", `{"item":"tea","quantity":0,"price":2.5}`).refused(t, http.StatusUnprocessableEntity, invalid)
		}
		s.holds(t)
		s.holds(t, teaAs(s.order(t, "key", tea).created(t).Id))
	})
	onEach(t, "another server knows the key", func(t *testing.T, s *shop) {
		first := s.order(t, "key", tea)
		order := first.created(t)
		s.second(t).order(t, "key", coffee).replays(t, http.StatusOK, first)
		s.holds(t, teaAs(order.Id))
	})
	onEach(t, "a key is known for a hundred years", func(t *testing.T, s *shop) {
		s.order(t, "key", tea).created(t)
		days := `(expires_at - created_at) / 86400e6`
		if s.db.DriverName() == "postgres" {
			days = `extract(epoch FROM expires_at - created_at) / 86400`
		}
		var kept float64
		if err := s.db.GetContext(t.Context(), &kept, `SELECT `+days+` FROM idempotency_keys`); err != nil {
			t.Fatal(err)
		}
		if kept < 36500 {
			t.Errorf("a key is kept for %g days", kept)
		}
	})
	onEach(t, "a race of 50 on two servers has one winner", func(t *testing.T, s *shop) {
		servers := []*shop{s, s.second(t)}
		answers := race(50, func(i int) answer {
			return servers[i%2].order(t, "key", fmt.Sprintf(`{"item":"tea","quantity":%d,"price":2.5}`, i+1))
		})
		var winner answer
		for _, a := range answers {
			if a.StatusCode == http.StatusCreated {
				winner = a
			}
		}
		if winner.Response == nil {
			t.Fatalf("nobody won; the first answer is %s", answers[0])
		}
		s.holds(t, winner.created(t))
		created := 0
		for _, a := range answers {
			if a.StatusCode == http.StatusCreated {
				created++
			} else {
				a.replays(t, http.StatusOK, winner)
			}
		}
		if created != 1 {
			t.Errorf("%d requests created the order", created)
		}
	})
	// The first request holds the key while its body is still on its way. The
	// second is sent meanwhile.
	for name, test := range map[string]struct {
		body  string
		check func(t *testing.T, s *shop, first, second answer)
	}{
		"the loser waits for the winner's order": {tea, func(t *testing.T, s *shop, first, second answer) {
			order := first.created(t)
			second.replays(t, http.StatusOK, first)
			s.holds(t, teaAs(order.Id))
		}},
		"the loser makes the order if the first is refused": {`{"quantity":-1}`, func(t *testing.T, s *shop, first, second answer) {
			first.refused(t, http.StatusUnprocessableEntity, invalid)
			s.holds(t, coffeeAs(second.created(t).Id))
		}},
	} {
		onEach(t, name, func(t *testing.T, s *shop) {
			body, send := io.Pipe()
			firstDone, secondDone := make(chan answer, 1), make(chan answer, 1)
			slow := s.request(t, "/orders", "key", body)
			go func() { firstDone <- s.do(t, slow) }()
			eventually(t, "the first request holds the key", func() bool { return s.count(t, "idempotency_keys") == 1 })

			sent := make(chan struct{})
			late := s.request(t, "/orders", "key", strings.NewReader(coffee))
			late = late.WithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				WroteRequest: func(httptrace.WroteRequestInfo) { close(sent) },
			}))
			go func() { secondDone <- s.do(t, late) }()
			<-sent
			if _, err := io.WriteString(send, test.body); err != nil {
				t.Fatal(err)
			}
			if err := send.Close(); err != nil {
				t.Fatal(err)
			}
			test.check(t, s, <-firstDone, <-secondDone)
		})
	}
	onEach(t, "UNIQUE in the business table is a second line", func(t *testing.T, s *shop) {
		order := s.order(t, "key", tea).created(t)
		for _, body := range []string{tea, coffee} {
			if _, err := s.db.ExecContext(t.Context(), `DELETE FROM idempotency_keys`); err != nil {
				t.Fatal(err)
			}
			if again := s.order(t, "key", body).created(t); again != order {
				t.Errorf("without its record the key got the order %v, want %v", again, order)
			}
		}
		s.holds(t, teaAs(order.Id))
		_, err := s.db.ExecContext(t.Context(), `INSERT INTO orders (idempotency_key, item, quantity, price) SELECT idempotency_key, item, quantity, price FROM orders`)
		if err == nil {
			t.Error("the table took a second order with the same key")
		}
		s.holds(t, teaAs(order.Id))
	})
}
