// A tenant's view: its limits, requests, adapters and usage.

import { byId, fill, make } from "./dom.js";
import { bytes, clockTime, count, counted, milliseconds } from "./format.js";
import { NoAnswer, get } from "./gateway.js";
import { Bar } from "./replicas.js";

const SLOWLY_MS = 60_000; // between polls of adapters and usage
const MONTHS = 3; // each costs fifteen reads
const MOST_ADAPTERS = 500;
const LIMITS = {
  requests_per_min: ["Requests a minute", count],
  tokens_per_min: ["Tokens a minute", count],
  bytes_per_min: ["Pushed bytes a minute", bytes],
  max_concurrent: ["Requests at once", count],
  tokens_per_month: ["Tokens this month", count],
  cost_per_month: ["Cost this month", money],
  max_adapters: ["Adapters", count],
  max_total_bytes: ["Adapters’ files", bytes],
  pin_budget_bytes: ["Pinned on one GPU", bytes],
  max_context: ["Prompt and answer", (tokens) => counted(tokens, "token")],
  max_rank: ["Rank of an adapter", count],
  max_adapter_bytes: ["Size of an adapter", bytes],
  files_bytes: ["Files", bytes],
  max_files: ["Number of files", count],
  open_batches: ["Open batches", count],
  batch_lines: ["Batch lines at once", count],
};
const TIERS = { gpu: "the GPU", host: "host memory", disk: "the local disk", remote: "the store" };
const STAGES = {
  validate: () => "checking key, limits and body",
  route: () => "waiting for a replica to take it",
  queue: () => "waiting for earlier requests on the replica",
  adapter: ({ residency }) => `loading the adapter from ${TIERS[residency] ?? "the store"}`,
  prefill: ({ tokens }) => (tokens ? `computing ${counted(tokens.prompt - tokens.cached, "prompt token")}` : "computing the prompt"),
  decode: ({ tokens }) => (tokens ? `generating ${counted(tokens.output, "token")}` : "generating the answer"),
  overhead: () => "tokenizing, and reading by the client",
  "first bytes": () => "waiting for the first bytes",
  rest: () => "passing on the answer",
};

export class AccountView {
  everyMs = 2000;

  constructor() {
    this.slow = null; // adapters and usage
    this.slowAt = 0;
    this.slowestFirst = false;
    this.rows = [];
    this.silent = 0;
  }

  /** Fetch the tenant's current state. Throws NoAnswer. */
  async ask(key) {
    const [limits, requests] = await Promise.all([get(key, "v1/limits"), get(key, "v1/requests")]);
    if (!this.slow || performance.now() - this.slowAt > SLOWLY_MS) {
      const usage = get(key, `v1/usage?from=${firstDay()}&by=month,adapter`).then(({ data }) => data, refusal);
      this.slow = { models: (await get(key, "v1/models")).data, usage: await usage };
      this.slowAt = performance.now();
    }
    return { limits, requests, ...this.slow };
  }

  open() {
    byId("slowest").checked = this.slowestFirst;
    byId("slowest").onchange = () => {
      this.slowestFirst = byId("slowest").checked;
      this.#showRequests();
    };
  }

  /** Show the tenant's state; return the page's totals, as pairs of name and text. */
  show({ limits, requests, models, usage }) {
    showLimits(byId("limits"), limits);
    showAdapters(byId("adapters"), models, limits);
    showUsage(byId("usage"), usage);
    this.rows = requests.data;
    this.silent = requests.silent;
    this.#showRequests();
    const running = requests.data.filter(({ outcome }) => outcome === "running").length;
    return [
      ["Tenant", limits.tenant],
      ["Key", limits.key_name || limits.key_id],
      ["Running", count(running)],
    ];
  }

  repaint() {} // colours come from the style sheet alone

  #showRequests() {
    const rows = this.slowestFirst ? this.rows.toSorted((one, two) => two.total_ms - one.total_ms) : this.rows;
    showRequests(byId("requests"), rows, this.silent);
  }
}

/** Return an error's message. Throws the error if the key is refused. */
function refusal(error) {
  if (!(error instanceof NoAnswer) || error.locked) throw error;
  return error.message;
}

/** Return the first day of the first shown month, UTC. */
function firstDay() {
  const now = new Date();
  return new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - MONTHS + 1)).toISOString().slice(0, 10);
}

function money(amount) {
  return amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: amount < 1 ? 6 : 2 });
}

const nothing = (text) => make("p", { class: "nothing" }, text);

function table(heads, rows) {
  const cells = heads.map(([name, kind]) => make("th", { scope: "col", class: kind }, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...cells)), make("tbody", {}, ...rows));
}

const cell = (kind, ...children) => make("td", { class: kind }, ...children);

function showLimits(home, { data }) {
  const meters = () => data.map(({ of, limit, most, used, burst }) => {
    const [name, text] = LIMITS[limit] ?? [limit, String];
    const bar = new Bar(of === "key" ? `${name}, this key` : name);
    const whole = burst ?? most;
    const lasting = burst !== null && burst !== most ? `, ${text(most)} on average` : "";
    if (used === null) bar.show(0, 0, `${text(most)} at most`);
    else bar.show(used, whole, `${text(used)} of ${text(whole)}${lasting}`);
    bar.track.hidden = used === null;
    return bar.element;
  });
  fill(home, data, () => (data.length ? meters() : [nothing("No limits are set.")]));
}

function showAdapters(home, models, { tenant, adapters: allowed }) {
  fill(home, [models, allowed], () => {
    const rows = models.slice(0, MOST_ADAPTERS).map(({ id, owned_by: owner, parent, created }) => {
      const shared = parent && owner !== tenant ? make("span", { class: "aside" }, ` shared by ${owner}`) : null;
      const since = parent ? new Date(1000 * created).toLocaleDateString("en-CA") : "";
      return make("tr", {}, cell("", id, shared), cell("", parent ?? "base model"), cell("number", since));
    });
    const left = models.length - rows.length;
    return [
      allowed ? make("p", { class: "aside" }, `This key may use only ${allowed.join(", ")}.`) : "",
      models.length ? table([["Model", ""], ["Base model", ""], ["Since", "number"]], rows) : nothing("There are no adapters."),
      left ? make("p", { class: "aside" }, `and ${count(left)} more`) : "",
    ];
  });
}

function showUsage(home, usage) {
  fill(home, usage, () => {
    if (typeof usage === "string") return [nothing(usage)];
    if (!usage.length) return [nothing("Nothing was used in the last three months.")];
    const all = usage.map((row) => ({ ...row, flex: row.flex_prompt_tokens + row.flex_output_tokens }));
    const [priced, flex] = [all.some(({ cost }) => cost), all.some((row) => row.flex)];
    const heads = [["Model", ""], ["Requests", "number"], ["Prompt", "number"], ["Cached", "number"], ["Output", "number"]];
    heads.push(...(flex ? [["Batches, flex", "number"]] : []), ...(priced ? [["Cost", "number"]] : []));
    const months = [...new Set(all.map(({ month }) => month))].sort().reverse();
    return [table(heads, months.flatMap((month) => monthRows(month, all.filter((row) => row.month === month), priced, flex)))];
  });
}

function monthRows(month, rows, priced, flex) {
  const names = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", ...(flex ? ["flex"] : [])];
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  const numbers = (of) => [...names.map((name) => cell("number", count(of(name)))), ...(priced ? [cell("number", money(of("cost")))] : [])];
  return [
    make("tr", { class: "sum" }, make("th", { scope: "row" }, month), ...numbers(sum)),
    ...rows.map((row) => make("tr", {}, cell("", row.adapter ?? row.base_model), ...numbers((name) => row[name]))),
  ];
}

function showRequests(home, rows, silent) {
  fill(home, [rows, silent], () => {
    const heads = [["Arrived", ""], ["Model", ""], ["Outcome", ""], ["First token", "number"], ["Total", "number"], ["Where its time went", "went-by"]];
    const others = silent === null ? "The other gateways" : counted(silent, "gateway");
    const missing = silent === 0 ? "" : nothing(`${others} did not answer: some requests are missing.`);
    return [missing, rows.length ? table(heads, rows.map(requestRow)) : nothing("No request in the last hour.")];
  });
}

function requestRow(row) {
  const { id, received, model, outcome, code, first_token_ms: first, total_ms: total, stages } = row;
  const bad = outcome === "failed" || outcome === "refused";
  const took = stages.map(({ stage, ms }) => `${stage} ${milliseconds(ms)}`).join(", ");
  const parts = stages.filter(({ ms }) => ms > 0).map(({ stage, ms }) => {
    const part = make("i", { class: stage.replace(" ", "-") });
    part.style.flexGrow = ms;
    return part;
  });
  return make(
    "tr",
    { title: `${id}: ${took}` },
    cell("", clockTime(received)),
    cell("", model || row.request),
    cell(bad ? "warm" : "", code ? `${outcome}: ${code}` : outcome),
    cell("number", milliseconds(first)),
    cell("number", milliseconds(total)),
    cell("went-by", make("span", { class: "stages", role: "img", "aria-label": took }, ...parts), make("span", { class: "aside" }, reason(row))),
  );
}

/** Return in words what took most of a request's time, and what made it repeat work. */
function reason(row) {
  if (!row.stages.length) return "";
  const { stage, ms } = row.stages.reduce((one, two) => (two.ms > one.ms ? two : one));
  const said = [`${milliseconds(ms)} ${STAGES[stage]?.(row) ?? stage}`];
  if (row.retries) said.push(`${counted(row.retries, "attempt")} failed`);
  if (row.resumed.length) said.push("went on at another replica");
  if (row.preemptions) said.push(`preempted ${counted(row.preemptions, "time")}`);
  return said.join("; ");
}
