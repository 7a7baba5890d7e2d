// The server of examples/orders, and its types as openapi-fetch takes them.

import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import type { TestContext } from "node:test";
import { fileURLToPath } from "node:url";

interface Operation<New, Made> {
  parameters: { query?: never; header?: { "Idempotency-Key"?: string }; path?: never; cookie?: never };
  requestBody: { content: { "application/json": New } };
  responses: {
    200: { content: { "application/json": Made } };
    201: { content: { "application/json": Made } };
    422: { content: { "application/problem+json": { type: string; title: string; status: number; detail?: string } } };
  };
}

interface List<Made> {
  parameters: Record<string, never>;
  requestBody?: never;
  responses: { 200: { content: { "application/json": Made[] } } };
}

export interface NewPayment {
  amount: number;
  currency: string;
}

export interface Payment extends NewPayment {
  id: number;
}

export interface NewOrder {
  item: string;
  quantity: number;
  price: number;
}

export interface Order extends NewOrder {
  id: number;
}

export interface paths {
  "/payments": { post: Operation<NewPayment, Payment>; get: List<Payment> };
  "/orders": { post: Operation<NewOrder, Order>; get: List<Order> };
}

/** Starts the server on an empty database, until the test ends, and returns its URL. */
export async function startOrders(t: TestContext): Promise<string> {
  const dir = await mkdtemp(join(tmpdir(), "orders-"));
  const command = fileURLToPath(new URL("../orders.exe", import.meta.url));
  const server = spawn(command, ["-addr", "127.0.0.1:0", "-sqlite", join(dir, "orders.db")], {
    env: { ...process.env, DATABASE_URL: "" },
    stdio: ["ignore", "pipe", "inherit"],
  });
  const ended = new Promise((resolve) => server.once("close", resolve));
  t.after(async () => {
    server.kill();
    await ended;
    await rm(dir, { recursive: true });
  });
  const lines = createInterface(server.stdout);
  for await (const line of lines) {
    server.stdout.resume();
    return line.replace("listening on ", "");
  }
  throw new Error("the server did not start");
}
