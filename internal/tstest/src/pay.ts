// One call of the orders example, in Node and in browsers.

import { idempotency, keyOf, NoAnswerError, replayed } from "../orders/idempotency.js";

/** What became of a call. */
export interface Outcome {
  /** Undefined: there was no answer. */
  readonly status?: number;
  readonly key: string | undefined;
  readonly replayed: boolean;
  readonly longestWait: number;
}

export async function pay(baseUrl: string, amount: number): Promise<Outcome> {
  let longestWait = 0;
  const { fetch } = idempotency(baseUrl, { retry: { base: 1, max: 8 }, onAttempt: ({ wait }) => (longestWait = Math.max(wait, longestWait)) });
  try {
    const response = await fetch(`${baseUrl}/payments`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ amount, currency: "EUR" }),
    });
    await response.arrayBuffer();
    return { status: response.status, key: keyOf(response), replayed: replayed(response), longestWait };
  } catch (error) {
    if (error instanceof NoAnswerError) {
      return { key: error.key, replayed: false, longestWait };
    }
    throw error;
  }
}
