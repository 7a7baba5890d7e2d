// Servers for tests, each on a port of its own until the test ends.

import { createServer, request as forward, type IncomingMessage, type RequestListener, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { text } from "node:stream/consumers";
import type { TestContext } from "node:test";

/** Starts a server and returns its URL. */
export async function serve(t: TestContext, listener: RequestListener): Promise<string> {
  const server = createServer(listener);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

/** What a server saw of one attempt. */
export interface Seen {
  readonly method: string;
  readonly path: string;
  readonly headers: IncomingMessage["headers"];
  readonly body: string;
}

/** What a server does with a request that it has read. */
export type Step = (response: ServerResponse) => void;

/** Starts a server that does one step for each request, and the last for all that follow. */
export async function script(t: TestContext, ...steps: Step[]): Promise<{ url: string; seen: Seen[] }> {
  const seen: Seen[] = [];
  const url = await serve(t, async (request, response) => {
    const body = await text(request);
    seen.push({ method: request.method ?? "", path: request.url ?? "", headers: request.headers, body });
    steps[Math.min(seen.length, steps.length) - 1]?.(response);
  });
  return { url, seen };
}

export function answer(status: number, body = "", headers: Record<string, string> = {}): Step {
  return (response) => response.writeHead(status, headers).end(body);
}

export function problem(status: number, type: string, headers: Record<string, string> = {}): Step {
  const body = JSON.stringify({ type, title: "A title.", detail: "What to do." });
  return answer(status, body, { "Content-Type": "application/problem+json", ...headers });
}

export const created = answer(201, `{"id":1}`, { "Content-Type": "application/json" });

/** Breaks the connection instead of an answer. */
export const reset: Step = (response) => response.socket?.resetAndDestroy();

/** Sends these bytes and breaks the connection. */
export function breakOff(bytes: string): Step {
  return (response) => response.socket?.end(bytes);
}

/** What a proxy does with one request. */
export interface Fault {
  /** The request does not reach the server. */
  readonly before?: boolean;
  /** The answer does not reach the client. */
  readonly after?: boolean;
}

/**
 * Starts a proxy that lets scripts of an origin use a server as the wire contract
 * says, and has a fault for each POST, none for those that follow.
 */
export async function proxy(t: TestContext, server: string, options: { origin?: string; faults?: Fault[] }): Promise<string> {
  const faults = [...(options.faults ?? [])];
  return serve(t, (request, response) => {
    // On a connection that it has used before, a browser sends a request once
    // more by itself, with the same key, and attempts could not be counted.
    response.shouldKeepAlive = false;
    if (options.origin !== undefined) {
      response.setHeader("Access-Control-Allow-Origin", options.origin);
      response.setHeader("Access-Control-Allow-Headers", "Content-Type, Idempotency-Key");
      response.setHeader("Access-Control-Expose-Headers", "Idempotent-Replayed, Retry-After, Date");
    }
    if (request.method === "OPTIONS") {
      response.writeHead(204).end();
      return;
    }
    const fault = request.method === "POST" ? faults.shift() : undefined;
    if (fault?.before === true) {
      request.resume().on("end", () => reset(response));
      return;
    }
    const { host: _, ...headers } = request.headers;
    const onward = forward(new URL(request.url ?? "/", server), { method: request.method ?? "GET", headers }, (answered) => {
      if (fault?.after === true) {
        answered.resume().on("end", () => reset(response));
        return;
      }
      response.writeHead(answered.statusCode ?? 502, answered.headers);
      answered.pipe(response);
    });
    onward.on("error", () => reset(response));
    request.pipe(onward);
  });
}
