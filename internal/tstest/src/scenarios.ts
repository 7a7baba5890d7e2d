// What a client does with the server of examples/orders, in Node and in browsers:
// this file and what it imports run in both.

import createClient from "openapi-fetch";

import { idempotency, keyOf, problemOf, replayed, type Attempt } from "../orders/idempotency.js";
import type { paths, Payment } from "./orders.js";

/** What became of the scenarios, for a test to compare. */
export interface Report {
  /** Amounts, statuses and whether replayed, in the order of the calls. */
  readonly calls: readonly string[];
  /** Of payments that are there at the end. */
  readonly amounts: readonly number[];
  readonly orders: number;
}

/**
 * Plays against a server whose connections break as in faults: it pays 1 to 4,
 * and orders tea twice with one key.
 */
export async function play(baseUrl: string): Promise<Report> {
  const calls: string[] = [];
  const attempts: Attempt[] = [];
  const { fetch, middleware } = idempotency(baseUrl, { retry: { base: 20 }, onAttempt: (attempt) => attempts.push(attempt) });
  const note = (name: string, response: Response) => {
    const own = attempts.filter((attempt) => attempt.key === keyOf(response));
    calls.push(`${name}: ${response.status}${replayed(response) ? ", replayed" : ""}, attempt ${own.length}`);
  };
  const signed: (string | null)[] = [];
  const client = createClient<paths>({ baseUrl, fetch });
  client.use(middleware, {
    onRequest({ request }) {
      signed.push(request.headers.get("Idempotency-Key"));
    },
  });

  const first = await client.POST("/payments", { body: { amount: 1, currency: "EUR" } });
  note("openapi-fetch", first.response);
  if (first.data?.amount !== 1) {
    throw new Error(`the payment is ${JSON.stringify(first)}`);
  }
  if (signed.length !== 1 || signed[0] !== keyOf(first.response)) {
    throw new Error(`the middleware saw the keys ${signed.join()}`);
  }

  const plain = await fetch(`${baseUrl}/payments`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ amount: 2, currency: "EUR" }),
  });
  note("plain fetch", plain);
  const payment = (await plain.json()) as Payment;
  if (payment.amount !== 2) {
    throw new Error(`the payment is ${JSON.stringify(payment)}`);
  }

  const header = { "Idempotency-Key": `mine-${payment.id}` };
  for (const amount of [3, 3, 999]) {
    const { response, error } = await client.POST("/payments", { params: { header }, body: { amount, currency: "EUR" } });
    note("my key", response);
    if ((error !== undefined) !== (amount === 999) || problemOf(response)?.code !== (amount === 999 ? "idempotency-key-reused" : undefined)) {
      throw new Error(`the error is ${JSON.stringify(error)}`);
    }
  }

  const invalid = await client.POST("/payments", { body: { amount: 0, currency: "EUR" } });
  note("invalid", invalid.response);
  if (problemOf(invalid.response) !== undefined || invalid.error?.type !== "urn:orders:invalid") {
    throw new Error(`the error is ${JSON.stringify(invalid.error)}`);
  }

  const race = await Promise.all(Array.from({ length: 8 }, () => client.POST("/payments", { params: { header: { "Idempotency-Key": `race-${payment.id}` } }, body: { amount: 4, currency: "EUR" } })));
  calls.push(`race: ${new Set(race.map(({ data }) => data?.id)).size} payment, ${race.filter(({ response }) => !replayed(response)).length} ran`);

  for (const item of ["tea", "coffee"]) {
    const { response, data } = await client.POST("/orders", { params: { header: { "Idempotency-Key": `order-${payment.id}` } }, body: { item, quantity: 1, price: 2.5 } });
    note(`order of ${data?.item}`, response);
  }

  const payments = await client.GET("/payments");
  const orders = await client.GET("/orders");
  return { calls, amounts: payments.data?.map(({ amount }) => amount).sort() ?? [], orders: orders.data?.length ?? 0 };
}

/** What breaks, for each POST: the first payment's answer, then the second's request and answer. */
export const faults = [{ after: true }, {}, { before: true }, { after: true }, {}];

export const want: Report = {
  calls: [
    "openapi-fetch: 201, replayed, attempt 2",
    "plain fetch: 201, replayed, attempt 3",
    "my key: 201, attempt 1",
    "my key: 201, replayed, attempt 2",
    "my key: 422, attempt 3",
    "invalid: 422, attempt 1",
    "race: 1 payment, 1 ran",
    "order of tea: 201, attempt 1",
    "order of tea: 200, replayed, attempt 2",
  ],
  amounts: [1, 2, 3, 4],
  orders: 1,
};
