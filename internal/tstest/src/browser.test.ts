import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFile, mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { RequestListener } from "node:http";
import { text } from "node:stream/consumers";
import { test, type TestContext } from "node:test";

import { judge, liar, lies } from "./liar.js";
import { startOrders } from "./orders.js";
import type { Outcome } from "./pay.js";
import { faults, want } from "./scenarios.js";
import { proxy, serve } from "./server.js";

/** A page that reports what an expression of modules below /dist/src comes to. */
function page(imports: string, expression: string): string {
  return `<!doctype html>
<script type="importmap">{"imports": {"openapi-fetch": "/openapi-fetch.js"}}</script>
<script type="module">
  ${imports}
  const query = new URLSearchParams(location.search);
  const report = await (async () => ${expression})().catch((error) => ({ error: String(error.stack) }));
  await fetch("/report", { method: "POST", body: JSON.stringify(report) });
</script>`;
}

/** Serves the page and its modules, and passes on what the page reports. */
async function site(t: TestContext, page: string, others?: RequestListener): Promise<{ url: string; report: Promise<unknown> }> {
  let reported = (_: unknown): void => undefined;
  const report = new Promise((resolve) => (reported = resolve));
  const root = new URL("../../", import.meta.url);
  const url = await serve(t, async (request, response) => {
    const { pathname } = new URL(request.url ?? "/", "http://localhost");
    if (request.method === "POST" && pathname !== "/report") {
      others?.(request, response);
    } else if (pathname === "/report") {
      reported(JSON.parse(await text(request)));
      response.end();
    } else if (pathname === "/") {
      response.setHeader("Content-Type", "text/html").end(page);
    } else {
      const file = pathname === "/openapi-fetch.js" ? "node_modules/openapi-fetch/dist/index.mjs" : pathname.slice(1);
      const script = await readFile(new URL(file, root)).catch(() => undefined);
      response.writeHead(script === undefined ? 404 : 200, { "Content-Type": "text/javascript" }).end(script);
    }
  });
  return { url, report };
}

async function open(t: TestContext, url: string): Promise<void> {
  const profile = await mkdtemp(join(tmpdir(), "chromium-"));
  const browser = spawn(
    process.env["CHROMIUM"] ?? "chromium",
    ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", `--user-data-dir=${profile}`, "--remote-debugging-port=0", url],
    { stdio: "ignore" },
  );
  const ended = new Promise((resolve) => browser.once("close", resolve));
  t.after(async () => {
    browser.kill();
    await ended;
    await rm(profile, { recursive: true, force: true, maxRetries: 5 });
  });
}

test("Chromium has each effect once with the orders example of another origin, over connections that break", { timeout: 60_000 }, async (t) => {
  const { url, report } = await site(t, page(`import { play } from "/dist/src/scenarios.js";`, `play(query.get("api"))`));
  const api = await proxy(t, await startOrders(t), { origin: url, faults });
  await open(t, `${url}/?api=${encodeURIComponent(api)}`);
  assert.deepEqual(await report, want);
});

test("a page's calls are found where it is, and none is sent whose key would be dropped", { timeout: 60_000 }, async (t) => {
  let requests = 0;
  const { url, report } = await site(t, `<base href="/based/">` + page(`import { rules } from "/dist/src/page.js";`, `rules()`), (request, response) => {
    request.resume().on("end", () => {
      const heard = { path: request.url, key: request.headers["idempotency-key"], referer: request.headers.referer };
      response.writeHead(++requests % 2 === 1 ? 503 : 201, { "Content-Type": "application/json" }).end(JSON.stringify(heard));
    });
  });
  await open(t, url);
  assert.deepEqual(await report, {
    "no-cors": "not sent",
    "openapi-fetch without a baseUrl": "/orders, its key, from /",
    "below the base": "/based/v1/orders, its key, from /",
    "below where the page has moved": "/moved/v1/orders, its key, from /moved/page",
    "without a referrer": "/moved/v1/orders, its key, from undefined",
    "with a referrer": "/moved/v1/orders, its key, from /basket",
  });
});

test("whatever a liar says to Chromium, each call has one effect", { timeout: 300_000 }, async (t) => {
  const server = await startOrders(t);
  const told = Object.entries(lies).flatMap(([name, { chromium, ...lie }]) => [false, true].map((acts) => ({ name, lie: chromium === undefined ? lie : { ...lie, got: chromium }, acts, ...liar(server, lie, acts) })));
  // Of the page's own origin, as CORS would make another error of most lies.
  const { url, report } = await site(
    t,
    page(
      `import { pay } from "/dist/src/pay.js";`,
      `{
        const outcomes = [];
        for (let i = 0; i < Number(query.get("lies")); i++) {
          outcomes.push(await pay(location.origin + "/" + i, 1000 + i));
        }
        return outcomes;
      }`,
    ),
    (request, response) => told[Number(request.url?.split("/")[1])]?.listener(request, response),
  );
  await open(t, `${url}/?lies=${told.length}`);
  const outcomes = (await report) as Outcome[];
  assert.equal(outcomes.length, told.length, JSON.stringify(outcomes));
  for (const [i, { name, lie, acts, seen }] of told.entries()) {
    await t.test(`${name}, ${acts ? "and has acted" : "and has not acted"}`, () => judge(server, lie, acts, seen, 1000 + i, outcomes[i] as Outcome));
  }
});
