// A liar stands before the orders example and says something else than it does.
// It and what is to be made of its lies are the same for Node and for browsers.

import assert from "node:assert/strict";
import { request as forward, type RequestListener } from "node:http";
import { text } from "node:stream/consumers";
import { gzipSync } from "node:zlib";

import type { Outcome } from "./pay.js";

/** What is said in place of the truth, once or for ever. */
export interface Lie {
  /** Raw bytes, behind which the connection is closed; undefined: it is reset. */
  readonly says?: string | Buffer;
  /** It never says the truth. */
  readonly forever?: boolean;
  /** The status that is final; undefined: the call is repeated. */
  readonly got?: number;
  /** The status of what Chromium takes for an answer, and others for none. */
  readonly chromium?: number;
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

export const lies: Record<string, Lie> = {
  "a reset": {},
  "nothing": { says: "" },
  "half a status line": { says: "HTTP/1.1 20", chromium: 20 },
  "half a header": { says: "HTTP/1.1 201 Created\r\nContent-Le", chromium: 201 },
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
  "a negative length": { says: "HTTP/1.1 201 Created\r\nContent-Length: -2\r\n\r\n{}", chromium: 201 },
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
  "307 to itself": { says: http(307, "", { Location: "payments" }), forever: true, requests: 4 * 21 },
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

/** What a liar saw of one attempt. */
export interface Seen {
  readonly key: string | undefined;
  readonly body: string;
}

/** A liar before the server, which acts on what it lies about, or does not. */
export function liar(server: string, lie: Lie, acts: boolean): { listener: RequestListener; seen: Seen[] } {
  const seen: Seen[] = [];
  const listener: RequestListener = async (request, response) => {
    const body = await text(request);
    seen.push({ key: request.headersDistinct["idempotency-key"]?.join(), body });
    const lies = lie.forever === true || seen.length === 1;
    const tell = () => (lie.says === undefined ? response.socket?.resetAndDestroy() : response.socket?.end(lie.says).destroySoon());
    const { host: _, ...headers } = request.headers;
    const act = () =>
      forward(new URL("/payments", server), { method: "POST", headers }, async (answered) => {
        if (lies) {
          await text(answered);
          tell();
        } else {
          response.writeHead(answered.statusCode ?? 502, { ...answered.headers, connection: "close" });
          answered.pipe(response);
        }
      }).end(body);
    if (acts || !lies) {
      act();
    } else {
      tell();
    }
  };
  return { listener, seen };
}

/** Fails unless the call of an amount had one effect, with one key on every attempt, and none after an answer that is final. */
export async function judge(server: string, lie: Lie, acts: boolean, seen: Seen[], amount: number, outcome: Outcome): Promise<void> {
  const again = lie.got === undefined;
  const lost = again && lie.forever === true;
  assert.equal(outcome.status, lost ? undefined : (lie.got ?? 201));
  assert.equal(seen.length, lie.requests ?? (again ? 2 : 1));
  const keys = new Set(seen.map(({ key }) => key));
  assert.deepEqual(keys, new Set([outcome.key]));
  assert.match(outcome.key ?? "", /^[0-9a-f-]{36}$/);
  assert.deepEqual(new Set(seen.map(({ body }) => (JSON.parse(body) as { amount: number }).amount)), new Set([amount]));
  assert.equal(new Set(seen.map(({ body }) => body)).size, 1);
  if (again && !lost) {
    assert.equal(outcome.replayed, acts);
  }
  assert.ok(outcome.longestWait <= 8, `waited ${outcome.longestWait}`);
  const payments = (await (await fetch(`${server}/payments`)).json()) as { amount: number }[];
  assert.equal(payments.filter((payment) => payment.amount === amount).length, acts || (again && !lost) ? 1 : 0);
}
