import assert from "node:assert/strict";
import { test } from "node:test";

import { startOrders } from "./orders.js";
import { faults, play, want } from "./scenarios.js";
import { proxy } from "./server.js";

test("Node has each effect once with the orders example, over connections that break", { timeout: 60_000 }, async (t) => {
  const url = await proxy(t, await startOrders(t), { faults });
  assert.deepEqual(await play(url), want);
});
