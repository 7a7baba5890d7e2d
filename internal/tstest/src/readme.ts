// README.md's example, with the modules of the orders example.

import createClient from "openapi-fetch";

import { idempotency, keyOf, NoAnswerError, problemOf, replayed } from "../orders/idempotency.js";
import type { paths } from "./orders.js";

const baseUrl = "https://api.example.com";
const { fetch } = idempotency(baseUrl, {
  onAttempt: ({ operation, number, status, again, key }) => console.log(operation, number, status, again, key),
});
const client = createClient<paths>({ baseUrl, fetch });

export async function pay(amount: number): Promise<void> {
  try {
    const { response } = await client.POST("/payments", { body: { amount, currency: "EUR" } });
    console.log(response.status, keyOf(response), replayed(response), problemOf(response)?.code);
  } catch (error) {
    if (error instanceof NoAnswerError) {
      console.log("it may have been paid; pay again with the key", error.key);
    }
    throw error;
  }
}
