// Lists: waiting requests, pins, moved adapters, tenants with their colours.

import { colourOf, darkness } from "./colours.js";
import { fill, make } from "./dom.js";
import { bytes, clockTime, count, counted, seconds } from "./format.js";

const MOST_MOVES = 60;
const MOST_TENANTS = 14;
const LATE_S = 2;

export function showWaiting(home, waiting) {
  fill(home, [waiting, darkness.matches], () => [waiting.requests ? waitingTable(waiting) : make("p", { class: "nothing" }, "No request is waiting.")]);
}

export function showPins(home, pins) {
  fill(home, pins, () => (pins ? pinList(pins) : [make("p", { class: "nothing" }, "Not known: the catalog does not answer.")]));
}

function waitingTable({ requests, rows }) {
  const body = rows.map((row) =>
    make(
      "tr",
      {},
      make("td", {}, swatch(row.tenant), row.adapter ?? row.base_model, row.adapter ? null : make("span", { class: "aside" }, ` for ${row.tenant}`)),
      make("td", { class: "number" }, count(row.requests)),
      make("td", { class: row.oldest_s > LATE_S ? "number late" : "number" }, seconds(row.oldest_s)),
    ),
  );
  const others = requests - rows.reduce((sum, row) => sum + row.requests, 0);
  if (others) body.push(make("tr", {}, make("td", { class: "aside" }, "others"), make("td", { class: "number" }, count(others)), make("td")));
  const heads = ["Adapter", "Requests", "Oldest"].map((name, at) => make("th", { scope: "col", class: at ? "number" : "" }, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
}

function pinList({ met, loading, unmet, rows }) {
  const sum = met + loading + unmet;
  const parts = [`${count(met)} of ${counted(sum, "pin")} met`];
  if (loading) parts.push(`${count(loading)} loading`);
  if (unmet) parts.push(`${count(unmet)} unmet`);
  const list = rows.map(({ pin, state, adapter, reason }) =>
    make("li", { class: state }, make("b", {}, pin), state === "loading" ? " is loading" : state === "prompt" ? `, its prompt: ${reason}` : `${adapter ? ` (${adapter})` : ""}: ${reason}`),
  );
  return [make("p", { class: unmet ? "sum warm" : "sum" }, sum ? parts.join(", ") : "There are no pins."), make("ul", { class: "pins" }, ...list)];
}

/** Adapters that were loaded to a GPU or evicted between two polls. */
export class Moves {
  constructor(home) {
    this.home = home;
    this.before = null;
    this.rows = [];
    this.show();
  }

  see(fleet) {
    const now = new Map(fleet.replicas.map(({ replica, blocks }) => [replica, new Map(blocks.map((block) => [block.digest, block]))]));
    const rows = [];
    for (const [replica, blocks] of now) {
      const before = this.before?.get(replica);
      if (!before) continue;
      for (const [digest, block] of blocks) if (!before.has(digest)) rows.push({ at: fleet.now, replica, block, came: true });
      for (const [digest, block] of before) if (!blocks.has(digest)) rows.push({ at: fleet.now, replica, block, came: false });
    }
    // The last answer of a replica that is silent now is kept, to compare the next one with it.
    this.before = new Map([...(this.before ?? []), ...now]);
    if (!rows.length) return;
    this.rows = [...rows, ...this.rows].slice(0, MOST_MOVES);
    this.show();
  }

  show() {
    const list = make("ol", { class: "moves" }, ...this.rows.map(move));
    this.home.replaceChildren(this.rows.length ? list : make("p", { class: "nothing" }, "Nothing has moved since you opened this page."));
  }
}

function move({ at, replica, block, came }) {
  return make(
    "li",
    { class: came ? "came" : "went" },
    make("time", {}, clockTime(at)),
    make("span", { class: "what" }, came ? "loaded" : "evicted"),
    make("span", { class: "which" }, swatch(block.tenant), block.name),
    make("span", { class: "aside" }, `${bytes(block.size)} · ${replica}`),
  );
}

/** The tenants with the most bytes on GPUs. Pressing one shows only its blocks. */
export class Tenants {
  constructor(home, chosen) {
    this.home = home;
    this.chosen = chosen;
    this.pressed = null;
    this.buttons = new Map();
    this.rest = make("li", { class: "aside" });
  }

  show(fleet) {
    const held = new Map();
    for (const { blocks } of fleet.replicas) for (const { tenant, size } of blocks) held.set(tenant, (held.get(tenant) ?? 0) + size);
    // The largest tenants, sorted by name so that they keep their places.
    const most = [...held].sort((one, two) => two[1] - one[1]).slice(0, MOST_TENANTS).map(([tenant]) => tenant);
    if (this.pressed !== null && !most.includes(this.pressed)) most.push(this.pressed);
    const items = most.sort().map((tenant) => this.#item(tenant, held.get(tenant) ?? 0));
    const left = held.size - items.length;
    this.rest.textContent = left > 0 ? `and ${counted(left, "more tenant")}` : "";
    const wanted = [...items, this.rest];
    if (wanted.length !== this.home.children.length || wanted.some((item, at) => item !== this.home.children[at])) {
      const focused = document.activeElement;
      this.home.replaceChildren(...wanted);
      if (this.home.contains(focused)) focused.focus();
    }
  }

  #item(tenant, size) {
    if (!this.buttons.has(tenant)) {
      const amount = make("span", { class: "amount" });
      const button = make("button", { type: "button", "aria-pressed": "false", click: () => this.#press(tenant) }, swatch(tenant), tenant, amount);
      this.buttons.set(tenant, { item: make("li", {}, button), button, amount });
    }
    const { item, button, amount } = this.buttons.get(tenant);
    amount.textContent = bytes(size);
    button.querySelector(".swatch").style.background = colourOf(tenant);
    return item;
  }

  #press(tenant) {
    this.pressed = this.pressed === tenant ? null : tenant;
    for (const [name, { button }] of this.buttons) button.setAttribute("aria-pressed", `${name === this.pressed}`);
    this.chosen(this.pressed);
  }
}

function swatch(tenant) {
  const mark = make("i", { class: "swatch" });
  mark.style.background = colourOf(tenant);
  return mark;
}
