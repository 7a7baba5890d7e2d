// Whatever a liar says, each call has one effect, with one key on every attempt, and
// none follows an answer that is final.

import { test } from "node:test";

import { judge, liar, lies } from "./liar.js";
import { startOrders } from "./orders.js";
import { pay } from "./pay.js";
import { serve } from "./server.js";

test("whatever a liar says, each call has one effect", { timeout: 300_000 }, async (t) => {
  const server = await startOrders(t);
  let amount = 1000;
  for (const [name, lie] of Object.entries(lies)) {
    for (const acts of [false, true]) {
      await t.test(`${name}, ${acts ? "and has acted" : "and has not acted"}`, async (t) => {
        const { listener, seen } = liar(server, lie, acts);
        const url = await serve(t, listener);
        await judge(server, lie, acts, seen, ++amount, await pay(url, amount));
      });
    }
  }
});
