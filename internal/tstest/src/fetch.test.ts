// The module's rules, against servers that misbehave.

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { test, type TestContext } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import createClient from "openapi-fetch";

import { idempotency, keyOf, NoAnswerError, NotSentError, problemOf, replayed, type Attempt, type Options } from "../golden/idempotency.js";
import type { paths } from "./orders.js";
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
  "half of a 409 in JSON": breakOff("HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"),
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
  "half of a 409 that is no JSON": breakOff("HTTP/1.1 409 Conflict\r\nContent-Length: 100\r\n\r\nno"),
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

test("a 409 that breaks off counts, whatever the options say", async (t) => {
  for (const conflictsInFlight of [false, true]) {
    const half = breakOff("HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{");
    const { seen, post } = await order(t, [half], { conflictsInFlight });
    const response = await post();
    assert.equal(response.status, 409);
    await assert.rejects(response.text());
    oneKey(seen, 4);
  }
});

test("a natural operation is never in flight", async (t) => {
  for (const conflictsInFlight of [false, true]) {
    for (const step of [answer(409), problem(409, urn + "idempotency-in-flight")]) {
      const { url, fetch, seen } = await order(t, [step, answer(200)], { conflictsInFlight });
      assert.equal((await fetch(`${url}/orders/7`, { method: "PUT" })).status, 409);
      assert.equal(seen.length, 1);
    }
  }
});

test("a small limit hides nothing that the guard says", async (t) => {
  const { seen, post } = await order(t, [problem(409, urn + "idempotency-in-flight"), problem(503, urn + "idempotency-outcome-unknown")], { bodyLimit: 1 }, { body: "o" });
  assert.equal(problemOf(await post())?.code, "idempotency-outcome-unknown");
  oneKey(seen, 2, "o");
});

test("a problem is one in any +json", async (t) => {
  const body = JSON.stringify({ type: urn + "idempotency-in-flight" });
  const { seen, post } = await order(t, [answer(409, body, { "Content-Type": "Problem/X+JSON ; a=b" }), created]);
  assert.equal((await post()).status, 201);
  oneKey(seen, 2);
});

test("an answer that the given fetch has read is no broken one", async (t) => {
  for (const read of [
    async (response: Response) => void (await response.text()),
    async (response: Response) => void response.body?.getReader(),
  ]) {
    const { seen, post } = await order(t, [created], {
      fetch: async (request) => {
        const response = await fetch(request);
        await read(response);
        return response;
      },
    });
    assert.equal((await post()).status, 201);
    oneKey(seen, 1);
  }
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
  // A second ahead of the server's clock, in the three forms of a date.
  for (const value of ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]) {
    const waits: number[] = [];
    const { post } = await order(t, [answer(503, "", { "Retry-After": value, "Date": "Sun, 06 Nov 1994 08:49:36 GMT" }), created], { retry: { max: 20 }, onAttempt: (attempt) => waits.push(attempt.wait) });
    assert.equal((await post()).status, 201);
    assert.deepEqual(waits, [20, 0]);
  }
  for (const value of ["-1", "soon", "0", "garbage 2999", "Sunrise 2999", "2999-01-01", new Date(0).toUTCString(), "Sun Nov  6 08:49:37 1994", "Sunday, 06-Nov-94 08:49:37 GMT"]) {
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

test("a wait is cut to what is left of the time", async (t) => {
  const waits: number[] = [];
  t.mock.method(Math, "random", () => 0.999);
  const { seen, post } = await order(t, [answer(503), created], { retry: { base: 60_000, max: 60_000, maxElapsed: 300 }, onAttempt: (attempt) => waits.push(attempt.wait) });
  assert.equal((await post()).status, 201);
  oneKey(seen, 2);
  assert.ok((waits[0] ?? 0) > 0 && (waits[0] ?? 0) <= 300, String(waits));
});

test("no wait is longer than a timer can be", { timeout: 60_000 }, async (t) => {
  const abort = new AbortController();
  const waits: number[] = [];
  const { post } = await order(t, [answer(503, "", { "Retry-After": "9999999" })], {
    retry: { max: Infinity, maxElapsed: Infinity },
    onAttempt: ({ wait }) => {
      waits.push(wait);
      abort.abort("seen");
    },
  }, { signal: abort.signal });
  await assert.rejects(post(), (reason) => reason === "seen");
  assert.deepEqual(waits, [2 ** 31 - 1]);
});

test("limits that are not positive are the document's", async (t) => {
  for (const limit of [0, -1, NaN, undefined] as number[]) {
    const waits: number[] = [];
    const { seen, post } = await order(t, [answer(503)], {
      retry: { maxAttempts: limit, base: limit, max: limit, maxElapsed: limit }, bodyLimit: limit,
      onAttempt: ({ wait }) => waits.push(wait),
    });
    assert.equal((await post()).status, 503);
    oneKey(seen, 4);
    assert.ok(waits.every((wait) => wait >= 0 && wait <= 4), String(waits));
  }
});

/** A body that stalls behind its first bytes, and notes that it is given up. */
function stalled(): { body: ReadableStream; given: Promise<void> } {
  let gave = (): void => undefined;
  const given = new Promise<void>((resolve) => (gave = resolve));
  const body = new ReadableStream({
    start: (controller) => controller.enqueue(new TextEncoder().encode("or")),
    cancel: () => gave(),
  });
  return { body, given };
}

test("an abort before the first attempt ends the call, and its body", { timeout: 60_000 }, async (t) => {
  const never = { generateKey: () => new Promise<string>(() => undefined) };
  for (const [name, aborted, options] of [
    ["before the call", true, {}],
    ["while its key is made", false, never],
    ["while its body is read", false, {}],
  ] as const) {
    const abort = new AbortController();
    const { body, given } = stalled();
    const attempts: Attempt[] = [];
    const { seen, post } = await order(t, [created], { ...options, onAttempt: (attempt) => attempts.push(attempt) }, { body, duplex: "half", signal: abort.signal } as RequestInit);
    if (aborted) {
      abort.abort(name);
    }
    const call = post();
    setImmediate(() => abort.abort(name));
    await assert.rejects(call, (reason) => reason === name);
    await given;
    assert.deepEqual([seen, attempts], [[], []], name);
  }
  const abort = new AbortController();
  const { middleware } = idempotency("https://example.com", never);
  const request = new Request("https://example.com/orders", { method: "POST", signal: abort.signal });
  const before = getEventListeners(request.signal, "abort").length;
  const attached = middleware.onRequest({ request, schemaPath: "/orders" });
  setImmediate(() => abort.abort("stop"));
  await assert.rejects(attached, (reason) => reason === "stop");
  assert.equal(getEventListeners(request.signal, "abort").length, before);
});

test("an abort in mid answer ends the call", { timeout: 60_000 }, async (t) => {
  for (const status of [201, 409, 503]) {
    const abort = new AbortController();
    const again: boolean[] = [];
    const { seen, post } = await order(t, [(response) => {
      response.writeHead(status, { "Content-Type": "application/json" }).write("{");
    }], {
      fetch: async (request) => {
        const response = await fetch(request);
        setImmediate(() => abort.abort("stop"));
        return response;
      },
      onAttempt: (attempt) => again.push(attempt.again),
    }, { signal: abort.signal });
    await assert.rejects(post(), (reason) => reason === "stop");
    oneKey(seen, 1);
    assert.deepEqual(again, [false]);
  }
});

test("after an abort in onAttempt there is no other", { timeout: 60_000 }, async (t) => {
  const abort = new AbortController();
  const numbers: number[] = [];
  const { seen, post } = await order(t, [answer(503), created], {
    onAttempt: ({ number }) => {
      numbers.push(number);
      abort.abort("enough");
    },
  }, { signal: abort.signal });
  await assert.rejects(post(), (reason) => reason === "enough");
  oneKey(seen, 1);
  assert.deepEqual(numbers, [1]);
});

test("what goes wrong before anything is sent is told so", { timeout: 60_000 }, async (t) => {
  const cause = new Error("no keys today");
  const notSent = (want: (cause: unknown) => boolean) => (error: unknown) => error instanceof NotSentError && want(error.cause);
  for (const generateKey of [
    () => {
      throw cause;
    },
    () => Promise.reject(cause),
  ]) {
    const { body, given } = stalled();
    const { seen, post } = await order(t, [created], { generateKey }, { body, duplex: "half" } as RequestInit);
    await assert.rejects(post(), notSent((it) => it === cause));
    await given;
    assert.equal(seen.length, 0);
  }
  const broken = new ReadableStream({ start: (controller) => controller.error(cause) });
  const { seen, post } = await order(t, [created], {}, { body: broken, duplex: "half" } as RequestInit);
  await assert.rejects(post(), notSent((it) => it === cause));
  assert.equal(seen.length, 0);

  t.mock.getter(globalThis, "crypto", () => ({})); // as a page of http has it
  const insecure = await order(t, [created]);
  await assert.rejects(insecure.post(), notSent((it) => it instanceof TypeError));
  assert.equal(insecure.seen.length, 0);
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
    ["POST", "v1/orders/7:cancel", 1, ""],
    ["POST", "v1/orders/7:pay", 2, "x-pay-key"],
    ["POST", "v1/orders/7:ship", 2, "x-request-key"],
    ["POST", "v1/files/tea", 2, "idempotency-key"],
    ["POST", "v1/files/tea.pdf", 1, ""],
    ["POST", "v1/files/tea/pages/last", 1, ""],
    ["POST", "v1/files/index/pages/last", 2, "idempotency-key"],
    ["POST", "v1/files/index/pages/7", 2, "idempotency-key"],
    ["POST", "v1/a b", 2, "idempotency-key"],
    ["POST", "v1/a%20b", 2, "idempotency-key"],
    ["POST", "v1/a[b]|c", 2, "idempotency-key"],
    ["POST", "orders", 1, ""],
    ["POST", "v10/orders", 1, ""],
    ["POST", "v2/orders", 1, ""],
  ] as const) {
    seen.length = 0;
    await fetch(url + "/" + path, { method });
    assert.equal(seen.length, attempts, `${method} ${path}`);
    for (const request of seen) {
      const keys = ["idempotency-key", "x-request-key", "x-pay-key"].filter((name) => request.headers[name] !== undefined);
      assert.equal(keys.join(), header, `${method} ${path}`);
    }
  }
  const other = await script(t, answer(503));
  await fetch(`${other.url}/v1/orders`, { method: "POST" });
  assert.equal(other.seen.length, 1);
  assert.equal(other.seen[0]?.headers["idempotency-key"], undefined);
});

test("what is not annotated reaches the global fetch as it came", async (t) => {
  const calls: unknown[][] = [];
  t.mock.method(globalThis, "fetch", async (...call: unknown[]) => {
    calls.push(call);
    return new Response();
  });
  const { fetch } = idempotency("https://example.com/v1");
  const init = { next: { revalidate: 60 } } as RequestInit;
  const request = new Request("https://example.com/v1/orders");
  await fetch(request, init);
  await fetch("https://example.com/orders");
  assert.equal(calls[0]?.[0], request);
  assert.equal(calls[0]?.[1], init);
  assert.deepEqual(calls[1], ["https://example.com/orders", undefined]);
});

test("what no Request keeps reaches every attempt", async (t) => {
  const next = { tags: ["tea"] };
  const extras: (RequestInit | undefined)[] = [];
  const answers = [503, 503, 201, 200];
  const send = async (request: Request, init?: RequestInit) => {
    assert.ok(request.method === "GET" || request.headers.has("Idempotency-Key"));
    extras.push(init);
    return Response.json({}, { status: answers.shift() ?? 200 });
  };
  const baseUrl = "https://example.com";
  const init = { method: "POST", body: "order", priority: "low", cache: "no-store", next, cf: undefined };
  await idempotency(baseUrl, { fetch: send }).fetch(`${baseUrl}/orders`, init as RequestInit);
  await idempotency(baseUrl, { fetch: send }).fetch(`${baseUrl}/elsewhere`, { next } as RequestInit);
  assert.deepEqual(extras.splice(0), [{ next }, { next }, { next }, { next }]);

  const dispatcher = {};
  t.mock.method(globalThis, "fetch", send); // the default's
  answers.push(503, 201);
  const client = createClient<paths>({ baseUrl, fetch: idempotency(baseUrl).fetch, requestInitExt: { dispatcher } });
  await client.POST("/orders", { body: { item: "tea", quantity: 1, price: 2 }, next } as never);
  assert.deepEqual(extras.splice(0), [{ next, dispatcher }, { next, dispatcher }]);
  await idempotency(baseUrl).fetch(`${baseUrl}/orders`, { method: "POST", body: "order" });
  assert.deepEqual(extras, [undefined]);
});

test("the referrer is that of the call", async (t) => {
  const { url, seen } = await script(t, reset, created);
  for (const [referrer, want] of [[`${url}/basket`, `${url}/basket`], ["", undefined]] as const) {
    seen.length = 0;
    await idempotency(url).fetch(`${url}/orders`, { method: "POST", body: "order", referrer, referrerPolicy: "unsafe-url" });
    oneKey(seen, 2);
    assert.deepEqual(seen.map(({ headers }) => headers.referer), [want, want]);
  }
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

// Node links signals by weak references, which the collector cuts.
test("an abort reaches a body that is still read after everything else was forgotten", async (t) => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as () => void;
  const stream = await order(t, [(response) => {
    response.writeHead(201, { "Content-Type": "text/event-stream" }).write("data: 1\n\n");
  }]);
  const controller = new AbortController();
  const open = async () => (await stream.fetch(`${stream.url}/orders`, { method: "POST", body: "order", signal: controller.signal })).body?.getReader();
  const reader = await open();
  await reader?.read();
  for (let i = 0; i < 5; i++) {
    await new Promise(setImmediate);
    collect();
  }
  const next = reader?.read();
  controller.abort(new Error("enough"));
  await assert.rejects(async () => next);
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
