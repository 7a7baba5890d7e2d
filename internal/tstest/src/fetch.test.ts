// The module's rules, against servers that misbehave.

import assert from "node:assert/strict";
import { test, type TestContext } from "node:test";

import { idempotency, keyOf, NoAnswerError, NotSentError, problemOf, replayed, type Attempt, type Options } from "../golden/idempotency.js";
import { answer, breakOff, created, problem, reset, script, type Seen, type Step } from "./server.js";

const urn = "urn:oapi-idempotent:";
const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;

/** Fails unless the server saw n attempts of one call, with one key and one body. It returns the key. */
function oneKey(seen: Seen[], n: number, body = "order"): string {
  assert.equal(seen.length, n, `attempts: ${JSON.stringify(seen)}`);
  const key = seen[0]?.headers["idempotency-key"];
  assert.ok(typeof key === "string" && key !== "");
  for (const request of seen) {
    assert.equal(request.headers["idempotency-key"], key);
    assert.equal(request.body, body);
  }
  return key;
}

async function order(t: TestContext, steps: Step[], options: Options = {}, init: RequestInit = {}) {
  const { url, seen } = await script(t, ...steps);
  const { fetch } = idempotency(url, options);
  const post = () => fetch(`${url}/orders`, { method: "POST", body: "order", ...init });
  return { url, seen, fetch, post };
}

const half = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n";

for (const [name, step] of Object.entries({
  "a reset": reset,
  "no answer": breakOff(""),
  "half a status line": breakOff("HTTP/1.1 201 Cre"),
  "half a header": breakOff(half),
  "half a body": breakOff(`${half}Content-Length: 8\r\n\r\n{"id"`),
  "half a chunked body": breakOff(`${half}Transfer-Encoding: chunked\r\n\r\n5\r\n{"id"\r\n`),
  "half a body that is no JSON": breakOff("HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\nhalf"),
  "something else than HTTP": breakOff("SSH-2.0-OpenSSH_9.6\r\n"),
  "half of a 503": breakOff("HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nbu"),
  ...Object.fromEntries([408, 425, 429, 500, 502, 503, 504].map((status) => [`a ${status}`, answer(status, "no")])),
  "a store that is down": problem(503, urn + "idempotency-store-unavailable", { "Retry-After": "0" }),
  "a problem of the operation's own": problem(500, "https://example.com/problems/out-of-tea"),
})) {
  test(`${name} is repeated with the same key`, async (t) => {
    const { seen, post } = await order(t, [step, created]);
    const response = await post();
    assert.equal(response.status, 201);
    assert.equal(await response.text(), `{"id":1}`);
    assert.match(oneKey(seen, 2), uuid);
    assert.equal(keyOf(response), oneKey(seen, 2));
  });
}

for (const [name, step] of Object.entries({
  ...Object.fromEntries([200, 400, 401, 404, 409, 413, 422, 501].map((status) => [`a ${status}`, answer(status, "no")])),
  "a reused key": problem(422, urn + "idempotency-key-reused"),
  "a key in flight that is no 409": problem(400, urn + "idempotency-in-flight"),
  "an answer that was not kept": problem(409, urn + "idempotency-not-replayable"),
  "an unknown outcome (409)": problem(409, urn + "idempotency-outcome-unknown"),
  "an unknown outcome (503)": problem(503, "https://example.com/problems#idempotency-outcome-unknown", { "Retry-After": "0" }),
  "a 409 of the operation's own": problem(409, "https://example.com/problems/sold-out"),
  "a replayed 500": answer(500, "no", { "Idempotent-Replayed": "true" }),
  "a replayed 409": problem(409, urn + "idempotency-in-flight", { "Idempotent-Replayed": "?1" }),
  "half of a 404": breakOff("HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\nno"),
})) {
  test(`${name} is final`, async (t) => {
    const { seen, post } = await order(t, [step, created]);
    const response = await post();
    assert.notEqual(response.status, 201);
    oneKey(seen, 1);
  });
}

test("a key in flight is waited for, and such answers do not count", async (t) => {
  const busy = problem(409, "https://example.com/problems/idempotency-in-flight");
  const { seen, post } = await order(t, [...Array<Step>(9).fill(busy), reset, created]);
  assert.equal((await post()).status, 201);
  oneKey(seen, 11);
});

test("a 409 without a problem is in flight if the options say so", async (t) => {
  const { seen, post } = await order(t, [answer(409, "Request in progress"), created], { conflictsInFlight: true });
  assert.equal((await post()).status, 201);
  oneKey(seen, 2);
  const { post: once } = await order(t, [answer(409, "Request in progress")], { conflictsInFlight: true, noRetry: true });
  assert.equal(problemOf(await once())?.code, "idempotency-in-flight");
});

test("a call without an answer tells that the first request was in flight", async (t) => {
  const busy = problem(409, "urn:x:idempotency-in-flight");
  const noAnswer = async (steps: Step[]) => {
    const { post } = await order(t, steps, { retry: { maxAttempts: 2 } });
    return post().then(
      () => assert.fail("there was an answer"),
      (error) => (error instanceof NoAnswerError ? error.inFlight?.code : assert.fail(String(error))),
    );
  };
  assert.equal(await noAnswer([busy, reset]), "idempotency-in-flight");
  assert.equal(await noAnswer([busy, busy, answer(503, ""), reset]), undefined);
});

test("the last answer is returned when no attempt is left", async (t) => {
  const attempts: Attempt[] = [];
  const { seen, post } = await order(t, [reset, answer(503, "busy")], { onAttempt: (attempt) => attempts.push(attempt) });
  const response = await post();
  assert.equal(response.status, 503);
  assert.equal(await response.text(), "busy");
  const key = oneKey(seen, 4);
  assert.deepEqual(
    attempts.map(({ operation, key, number, status, again }) => [operation, key, number, status, again]),
    [
      ["createOrder", key, 1, undefined, true],
      ["createOrder", key, 2, 503, true],
      ["createOrder", key, 3, 503, true],
      ["createOrder", key, 4, 503, false],
    ],
  );
});

test("a call without an answer throws its key, with which it is resumed", async (t) => {
  const { seen, post, fetch, url } = await order(t, [reset, reset, reset, reset, created]);
  const error = await post().then(() => assert.fail("it was answered"), (error: unknown) => error);
  assert.ok(error instanceof NoAnswerError);
  assert.equal(error.attempts, 4);
  assert.equal(error.key, oneKey(seen, 4));
  assert.ok(error.message.includes(error.key));
  const response = await fetch(`${url}/orders`, { method: "POST", body: "order", headers: { "Idempotency-Key": error.key } });
  assert.equal(response.status, 201);
  oneKey(seen, 5);
});

test("an answer that always breaks off is returned with its error", async (t) => {
  const { seen, post } = await order(t, [breakOff(`${half}Content-Length: 8\r\n\r\n{"id"`)]);
  const response = await post();
  oneKey(seen, 4);
  await assert.rejects(response.text());
});

test("Retry-After is followed up to the longest wait", async (t) => {
  for (const value of ["999999999999999999999", "3", new Date(Date.now() + 1e9).toUTCString()]) {
    const waits: number[] = [];
    const { post } = await order(t, [answer(503, "", { "Retry-After": value }), created], { retry: { max: 50 }, onAttempt: (attempt) => waits.push(attempt.wait) });
    const begun = performance.now();
    assert.equal((await post()).status, 201);
    assert.deepEqual(waits, [50, 0]);
    assert.ok(performance.now() - begun >= 45);
  }
  for (const value of ["-1", "soon", "0", new Date(0).toUTCString()]) {
    const waits: number[] = [];
    const { post } = await order(t, [answer(503, "", { "Retry-After": value }), created], { onAttempt: (attempt) => waits.push(attempt.wait) });
    assert.equal((await post()).status, 201);
    assert.ok((waits[0] ?? 9) <= 1);
  }
});

test("an answer that is not returned is given up", { timeout: 20_000 }, async (t) => {
  let closed: Promise<unknown> | undefined;
  const { post } = await order(t, [(response) => {
    closed = new Promise((resolve) => response.once("close", resolve));
    response.writeHead(503, { "Content-Type": "text/plain" }).write("and so on");
  }, created]);
  assert.equal((await post()).status, 201);
  await closed;
});

test("no attempt begins when the time is over", async (t) => {
  const { seen, post } = await order(t, [answer(503, "", { "Retry-After": "1" })], { retry: { maxElapsed: 500 } });
  assert.equal((await post()).status, 503);
  oneKey(seen, 1);
});

test("an abort ends the wait with its reason", { timeout: 60_000 }, async (t) => {
  const abort = new AbortController();
  const hours = { max: 3_600_000, maxElapsed: 7_200_000 };
  const { seen, post } = await order(t, [answer(503, "", { "Retry-After": "3600" })], { retry: hours, onAttempt: () => setImmediate(() => abort.abort("enough")) }, { signal: abort.signal });
  await assert.rejects(post(), (reason) => reason === "enough");
  oneKey(seen, 1);
});

test("an abort ends an attempt, and no other follows", async (t) => {
  const again: boolean[] = [];
  const late = new AbortController();
  const { seen, post } = await order(t, [() => late.abort(new DOMException("too late", "TimeoutError"))], { onAttempt: (attempt) => again.push(attempt.again) }, { signal: late.signal });
  await assert.rejects(post(), { name: "TimeoutError" });
  oneKey(seen, 1);
  assert.deepEqual(again, [false]);
});

test("noRetry, and a document that says so, send once, with a key", async (t) => {
  const { seen, post } = await order(t, [answer(503)], { noRetry: true });
  assert.equal((await post()).status, 503);
  oneKey(seen, 1);
  const bill = await order(t, [answer(503)], { retry: { maxAttempts: 9 } });
  await bill.fetch(`${bill.url}/orders/7/bill`, { method: "POST", body: "order" });
  oneKey(bill.seen, 1);
});

test("the caller's key is kept; a blank one and the nil UUID are none", async (t) => {
  const options: Options = { generateKey: async (operation) => `made for ${operation}` };
  for (const [given, want] of [
    ["mine", "mine"],
    [`"a, b"`, `"a, b"`],
    [" ", "made for createOrder"],
    [`""`, "made for createOrder"],
    ["00000000-0000-0000-0000-000000000000", "made for createOrder"],
  ] as const) {
    const { seen, post } = await order(t, [reset, created], options, { headers: { "idempotency-key": given } });
    const response = await post();
    assert.equal(oneKey(seen, 2), want);
    assert.equal(keyOf(response), want);
  }
});

test("no key outlives its call", async (t) => {
  const { seen, post } = await order(t, [created]);
  await Promise.all([post(), post(), post()]);
  assert.equal(new Set(seen.map((request) => request.headers["idempotency-key"])).size, 3);
});

test("a key that no server would take is not sent", async (t) => {
  for (const key of ["", "  ", "☕", "two, keys", `"a", "b"`, "line\nbreak"]) {
    const { seen, post } = await order(t, [created], { generateKey: () => key });
    await assert.rejects(post(), NotSentError);
    assert.equal(seen.length, 0);
  }
  const { seen, post } = await order(t, [created], {}, { headers: [["Idempotency-Key", "a"], ["Idempotency-Key", "b"]] });
  await assert.rejects(post(), NotSentError);
  assert.equal(seen.length, 0);
});

test("each operation is found by its method and path, below the base URL alone", async (t) => {
  const { url, seen } = await script(t, answer(503));
  const base = `${url}/v1/`;
  const { fetch } = idempotency(base, { retry: { maxAttempts: 2 } });
  for (const [method, path, attempts, header] of [
    ["post", "v1/orders", 2, "idempotency-key"],
    ["POST", "v1/orders?dry=1", 2, "idempotency-key"],
    ["GET", "v1/orders", 1, ""],
    ["POST", "v1/orders/", 1, ""],
    ["POST", "v1/orders/7", 2, "x-request-key"],
    ["PUT", "v1/orders/7", 2, ""], // natural
    ["POST", "v1/orders/search", 1, ""],
    ["POST", "v1/orders/import", 1, ""],
    ["POST", "v1/orders/7/lines", 1, ""],
    ["POST", "v1/invoices.pdf/2026-11", 2, "idempotency-key"],
    ["POST", "v1/invoicesXpdf/2026-11", 1, ""],
    ["POST", `v1/café/"7"`, 2, "idempotency-key"],
    ["POST", "orders", 1, ""],
    ["POST", "v10/orders", 1, ""],
    ["POST", "v2/orders", 1, ""],
  ] as const) {
    seen.length = 0;
    await fetch(url + "/" + path, { method });
    assert.equal(seen.length, attempts, `${method} ${path}`);
    for (const request of seen) {
      const keys = ["idempotency-key", "x-request-key"].filter((name) => request.headers[name] !== undefined);
      assert.equal(keys.join(), header, `${method} ${path}`);
    }
  }
  const other = await script(t, answer(503));
  await fetch(`${other.url}/v1/orders`, { method: "POST" });
  assert.equal(other.seen.length, 1);
  assert.equal(other.seen[0]?.headers["idempotency-key"], undefined);
});

test("a redirect is still the same call", async (t) => {
  const { seen, post } = await order(t, [answer(307, "", { Location: "/elsewhere" }), reset, answer(307, "", { Location: "/elsewhere" }), created]);
  const response = await post();
  assert.equal(response.status, 201);
  assert.equal(keyOf(response), oneKey(seen, 4));
  assert.deepEqual(seen.map(({ path }) => path), ["/orders", "/elsewhere", "/orders", "/elsewhere"]);
});

test("bodies of every kind are repeated", async (t) => {
  const form = new FormData();
  form.set("item", "tea");
  for (const [name, body] of Object.entries<NonNullable<RequestInit["body"]>>({
    text: "order", bytes: new TextEncoder().encode("order"), blob: new Blob(["order"], { type: "text/tea" }),
    query: new URLSearchParams({ item: "tea" }), form, empty: "",
    stream: new Blob(["order"]).stream(),
  })) {
    const { url, seen } = await script(t, reset, answer(503), created);
    const { fetch } = idempotency(url);
    const init = { method: "POST", body, duplex: "half" };
    const response = await fetch(new Request(`${url}/orders`, init));
    assert.equal(response.status, 201, name);
    oneKey(seen, 3, seen[0]?.body);
    assert.equal(new Set(seen.map((request) => request.headers["content-type"])).size, 1, name);
    assert.equal(seen[0]?.body === "", name === "empty");
  }
  const { url, seen } = await script(t, reset, created);
  await idempotency(url).fetch(`${url}/orders`, { method: "POST" });
  oneKey(seen, 2, "");
});

test("a request body over the limit is sent whole, and once", async (t) => {
  const body = "tea ".repeat(100_000);
  const { seen, post } = await order(t, [answer(503)], { bodyLimit: 1000 }, { body });
  assert.equal((await post()).status, 503);
  oneKey(seen, 1, body);
});

test("an answer over the limit, and one that is a stream, is not waited for", async (t) => {
  const large = JSON.stringify({ text: "tea ".repeat(100_000) });
  const { post } = await order(t, [answer(201, large, { "Content-Type": "application/json" })], { bodyLimit: 1000 });
  assert.equal(await (await post()).text(), large);

  let end = (): void => undefined;
  const stream = await order(t, [(response) => {
    response.writeHead(201, { "Content-Type": "text/event-stream" }).write("data: 1\n\n");
    end = () => response.end();
  }]);
  const response = await stream.post();
  const reader = response.body?.getReader();
  assert.equal(new TextDecoder().decode((await reader?.read())?.value), "data: 1\n\n");
  end();
  assert.equal((await reader?.read())?.done, true);
});

test("what the guard refused is known before and after the body was read", async (t) => {
  const { post } = await order(t, [problem(422, "https://example.com/problems/idempotency-key-reused")]);
  const response = await post();
  const want = {
    code: "idempotency-key-reused", status: 422, type: "https://example.com/problems/idempotency-key-reused",
    title: "A title.", detail: "What to do.", key: keyOf(response),
  };
  assert.deepEqual(problemOf(response), want);
  await response.json();
  assert.deepEqual(problemOf(response), want);
  assert.equal(replayed(response), false);

  const again = await (await order(t, [answer(201, "", { "Idempotent-Replayed": "true" })])).post();
  assert.equal(replayed(again), true);
  assert.equal(problemOf(again), undefined);
  const own = await (await order(t, [problem(404, "https://example.com/problems/sold-out")])).post();
  assert.equal(problemOf(own), undefined);
  const elsewhere = await globalThis.fetch("data:,");
  assert.deepEqual([keyOf(elsewhere), replayed(elsewhere), problemOf(elsewhere)], [undefined, false, undefined]);
});
