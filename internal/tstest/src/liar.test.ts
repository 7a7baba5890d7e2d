// A liar stands before the orders example and says something else than it does:
// each call has one effect, with one key on every attempt, and none follows an
// answer that is final.

import assert from "node:assert/strict";
import { request as forward } from "node:http";
import { text } from "node:stream/consumers";
import { test, type TestContext } from "node:test";
import { gzipSync } from "node:zlib";

import { idempotency, keyOf, NoAnswerError, replayed } from "../orders/idempotency.js";
import { startOrders } from "./orders.js";
import { serve } from "./server.js";

interface Lie {
  /** Raw bytes, behind which the connection is closed; undefined: it is reset. */
  readonly says?: string | Buffer;
  /** It never says the truth. */
  readonly forever?: boolean;
  /** The status that is final; undefined: the call is repeated. */
  readonly got?: number;
  /** How many requests there are, if not one, or two where it is repeated. */
  readonly requests?: number;
}

function http(status: number, body = "", headers: Record<string, string> = {}): string {
  const fields = Object.entries({ "Content-Length": String(Buffer.byteLength(body)), "Connection": "close", ...headers });
  return `HTTP/1.1 ${status} Lie\r\n${fields.map(([name, value]) => `${name}: ${value}\r\n`).join("")}\r\n${body}`;
}

function conflict(type: unknown, headers: Record<string, string> = {}): string {
  return http(409, JSON.stringify({ type }), { "Content-Type": "application/problem+json", ...headers });
}

const json = "Content-Type: application/json\r\n";
const packed = gzipSync(JSON.stringify({ id: "1".repeat(100) }));
const inFlight = "urn:x:idempotency-in-flight";
const replay = { "Idempotent-Replayed": "true" };

const lies: Record<string, Lie> = {
  "a reset": {},
  "nothing": { says: "" },
  "half a status line": { says: "HTTP/1.1 20" },
  "half a header": { says: "HTTP/1.1 201 Created\r\nContent-Le" },
  "half a body": { says: "HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\nhalf" },
  "half a chunked body": { says: `HTTP/1.1 201 Created\r\n${json}Transfer-Encoding: chunked\r\n\r\n5\r\n{"id"\r\n` },
  "a chunk that is none": { says: `HTTP/1.1 201 Created\r\n${json}Transfer-Encoding: chunked\r\n\r\nnone\r\n` },
  // Node's fetch takes what it could unpack for all.
  "half a gzip stream": {
    got: 201,
    says: Buffer.concat([Buffer.from(`HTTP/1.1 201 Created\r\n${json}Content-Encoding: gzip\r\nContent-Length: ${packed.length - 20}\r\n\r\n`), packed.subarray(0, -20)]),
  },
  "no gzip stream": { says: http(201, "plain", { "Content-Type": "application/json", "Content-Encoding": "gzip" }) },
  "two lengths": { says: "HTTP/1.1 201 Created\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} " },
  "a negative length": { says: "HTTP/1.1 201 Created\r\nContent-Length: -2\r\n\r\n{}" },
  "not HTTP": { says: "SSH-2.0-OpenSSH_9.6\r\n" },
  "bytes that no field has": { says: "HTTP/1.1 201 Created\r\nA\0b: c\r\n\r\n" },
  "trailers": { says: `HTTP/1.1 201 Created\r\n${json}Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n`, got: 201 },
  "HTTP/1.0 without a length": { says: "HTTP/1.0 201 Created\r\n\r\nall", got: 201 },
  "early hints": { says: "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n".repeat(3) + http(201, "{}"), got: 201 },

  "429 for ever": { says: http(429, "", { "Retry-After": "0" }), forever: true, got: 429, requests: 4 },
  "401, and then the truth": { says: http(401, "", { "WWW-Authenticate": "Bearer" }), got: 401 },
  "a replayed 500": { says: http(500, "", replay), got: 500 },
  "a replayed 201 that breaks off": { says: "HTTP/1.1 201 Created\r\nIdempotent-Replayed: true\r\nContent-Length: 100\r\n\r\nhalf" },
  "an empty marker": { says: http(503, "", { "Idempotent-Replayed": "" }) },

  "409 in HTML": { says: http(409, "<h1>Conflict</h1>", { "Content-Type": "text/html" }), got: 409 },
  "409 in broken JSON": { says: http(409, `{"type":`, { "Content-Type": "application/json" }), got: 409 },
  "409 in JSON of another shape": { says: http(409, `["${inFlight}"]`, { "Content-Type": "application/json" }), got: 409 },
  "409 with a type that is no string": { says: conflict({ type: inFlight }), got: 409 },
  "409 with the member's name in capitals": { says: http(409, JSON.stringify({ TYPE: inFlight }), { "Content-Type": "application/json" }), got: 409 },
  "in flight, as a fragment": { says: conflict("https://example.com/problems#idempotency-in-flight") },
  "in flight, relative": { says: conflict("idempotency-in-flight") },
  "in flight, a path": { says: conflict("../problems/idempotency-in-flight") },
  "in flight, media type in capitals": { says: conflict(inFlight, { "Content-Type": "APPLICATION/PROBLEM+JSON; Charset=UTF-8" }) },
  "in flight in capitals": { says: conflict(inFlight.toUpperCase()), got: 409 },
  "in flight, but with the marker": { says: conflict(inFlight, replay), got: 409 },
  "key reused": { says: http(422, JSON.stringify({ type: "urn:x:idempotency-key-reused" }), { "Content-Type": "application/problem+json" }), got: 422 },
  "outcome unknown": { says: http(503, JSON.stringify({ type: "urn:x:idempotency-outcome-unknown" }), { "Content-Type": "application/problem+json" }), got: 503 },

  // A redirect that fetch gives up, after 20, looks like a network error.
  "307 to itself": { says: http(307, "", { Location: "/payments" }), forever: true, requests: 4 * 21 },
  "307 nowhere": { says: http(307), got: 307 },
};
for (const status of [408, 425, 429, 500, 502, 503, 504]) {
  lies[status] = { says: http(status) };
}
for (const status of [200, 202, 204, 400, 402, 403, 404, 405, 406, 410, 411, 412, 413, 415, 416, 417, 418, 422, 423, 424, 426, 428, 431, 451, 501, 505, 511]) {
  lies[status] = { says: http(status, "", { "Retry-After": "0" }), got: status };
}
for (const after of ["9".repeat(30), "2147483648", "-1", "0.5", "1e9", "soon", "", "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "0, 0"]) {
  lies[`Retry-After: ${after}`] = { says: http(503, "", { "Retry-After": after }) };
}

/** Starts a liar before the server. It acts on what it lies about, or does not. */
async function lying(t: TestContext, server: string, lie: Lie, acts: boolean) {
  const seen: { key: string | undefined; body: string }[] = [];
  const url = await serve(t, async (request, response) => {
    const body = await text(request);
    seen.push({ key: request.headersDistinct["idempotency-key"]?.join(), body });
    const lies = lie.forever === true || seen.length === 1;
    const { host: _, ...headers } = request.headers;
    const truth = () =>
      forward(new URL(request.url ?? "/", server), { method: request.method ?? "GET", headers }, async (answered) => {
        if (!lies) {
          response.writeHead(answered.statusCode ?? 502, answered.headers);
          answered.pipe(response);
          return;
        }
        await text(answered);
        tell();
      }).end(body);
    const tell = () => (lie.says === undefined ? response.socket?.resetAndDestroy() : response.socket?.end(lie.says).destroySoon());
    if (acts || !lies) {
      truth();
    } else {
      tell();
    }
  });
  return { url, seen };
}

test("whatever a liar says, each call has one effect", { timeout: 300_000 }, async (t) => {
  const server = await startOrders(t);
  let amount = 1000;
  for (const [name, lie] of Object.entries(lies)) {
    for (const acts of [false, true]) {
      await t.test(`${name}, ${acts ? "and has acted" : "and has not acted"}`, async (t) => {
        const { url, seen } = await lying(t, server, lie, acts);
        const waits: number[] = [];
        const { fetch } = idempotency(url, { retry: { base: 1, max: 8 }, onAttempt: ({ wait }) => waits.push(wait) });
        const paid = ++amount;
        const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ amount: paid, currency: "EUR" }) };
        const again = lie.got === undefined;
        let response: Response | undefined;
        if (again && lie.forever === true) {
          await assert.rejects(fetch(`${url}/payments`, init), NoAnswerError);
        } else {
          response = await fetch(`${url}/payments`, init);
          assert.equal(response.status, lie.got ?? 201);
          await response.arrayBuffer();
        }
        assert.equal(seen.length, lie.requests ?? (again ? 2 : 1));
        const keys = new Set(seen.map(({ key }) => key));
        assert.equal(keys.size, 1);
        assert.match([...keys].join(), /^[0-9a-f-]{36}$/);
        assert.deepEqual(new Set(seen.map(({ body }) => body)), new Set([init.body]));
        if (response !== undefined) {
          assert.ok(keys.has(keyOf(response)));
          if (again) {
            assert.equal(replayed(response), acts);
          }
        }
        assert.ok(Math.max(...waits) <= 8, `waited ${waits.join()}`);
        const payments = (await (await globalThis.fetch(`${server}/payments`)).json()) as { amount: number }[];
        const effects = payments.filter((payment) => payment.amount === paid).length;
        assert.equal(effects, acts || (again && lie.forever !== true) ? 1 : 0);
      });
    }
  }
});
