// What of the module's rules only a page of a browser shows.

import createClient from "openapi-fetch";

import { idempotency, keyOf, NotSentError } from "../golden/idempotency.js";
import type { paths } from "./orders.js";

/** What the server, which answers 503 first, says of a call's second attempt. */
export interface Heard {
  readonly path: string;
  readonly key?: string;
  readonly referer?: string;
}

/** Makes calls from a page whose base is /based/, and returns what each came to. */
export async function rules(): Promise<Record<string, string>> {
  const came: Record<string, string> = {};
  const note = async (name: string, response: Response) => {
    const { path, key, referer } = (await response.json()) as Heard;
    came[name] = `${path}, ${key !== undefined && key === keyOf(response) ? "its key" : "no key"}, from ${referer?.replace(location.origin, "")}`;
  };
  const init = { method: "POST", body: "order" };

  const dropped = await idempotency(location.origin).fetch("/orders", { ...init, mode: "no-cors" }).catch((error: unknown) => error);
  came["no-cors"] = dropped instanceof NotSentError ? "not sent" : String(dropped);

  const client = createClient<paths>({ fetch: idempotency("").fetch });
  const { response } = await client.POST("/orders", { body: { item: "tea", quantity: 1, price: 2 }, parseAs: "stream" });
  await note("openapi-fetch without a baseUrl", response);

  const { fetch } = idempotency("v1/");
  await note("below the base", await fetch("v1/orders", init));
  document.querySelector("base")?.remove();
  history.pushState(null, "", "/moved/page");
  await note("below where the page has moved", await fetch("v1/orders", init));

  await note("without a referrer", await fetch("v1/orders", { ...init, referrerPolicy: "no-referrer" }));
  await note("with a referrer", await fetch("v1/orders", { ...init, referrer: "/basket" }));
  return came;
}
