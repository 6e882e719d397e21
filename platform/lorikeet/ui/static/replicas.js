// A row for each replica: its load, its arena, the fill of its tiers.

import { Arena } from "./arena.js";
import { colourOf } from "./colours.js";
import { fill, make, say } from "./dom.js";
import { bytes, bytesOf, count, counted, seconds } from "./format.js";

const REMEMBERED_MS = 20000;

export class Replicas {
  constructor(home, details) {
    this.home = home;
    this.details = details;
    this.rows = new Map();
    this.tenant = null;
  }

  show(fleet) {
    const now = performance.now();
    for (const replica of fleet.replicas) {
      if (!this.rows.has(replica.replica)) {
        this.rows.set(replica.replica, new Row(replica, (...chosen) => this.#choose(...chosen)));
      }
      this.rows.get(replica.replica).show(replica, now);
    }
    const heard = new Set(fleet.replicas.map(({ replica }) => replica));
    for (const [name, row] of this.rows) {
      if (heard.has(name)) continue;
      row.silent(now);
      if (now - row.heard > REMEMBERED_MS) this.rows.delete(name);
    }
    const wanted = [...this.rows.values()].sort((one, two) => (one.order < two.order ? -1 : 1)).map(({ element }) => element);
    if (!wanted.length) wanted.push(make("p", { class: "nothing" }, "No replica has reported."));
    if (wanted.length !== this.home.children.length || wanted.some((element, at) => element !== this.home.children[at])) {
      this.home.replaceChildren(...wanted);
    }
  }

  /** Show only one tenant's blocks; null: all. */
  only(tenant) {
    this.tenant = tenant;
    this.#emphasise(null);
  }

  redraw() {
    for (const row of this.rows.values()) row.arena.draw();
  }

  #choose(replica, span, place) {
    this.#emphasise(span?.block?.digest ?? null);
    this.details.show(replica, span, place);
  }

  #emphasise(digest) {
    for (const row of this.rows.values()) row.arena.emphasise(this.tenant, digest);
  }
}

class Row {
  constructor({ replica, base_model: baseModel }, chosen) {
    this.order = `${baseModel} ${replica}`;
    this.heard = 0;
    this.state = make("p", { class: "state" });
    this.kv = new Bar("KV pages");
    this.states = new Bar("States");
    this.hostPages = new Bar("Host KV");
    this.host = new Bar("Host");
    this.disk = new Bar("Disk");
    this.caption = make("p", { class: "arena-caption" });
    this.arena = new Arena((span, place) => chosen(this.replica, span, place));
    this.element = make(
      "article",
      { class: "card replica", "aria-label": `Replica ${replica}` },
      make("div", { class: "who" }, make("h3", { title: replica }, replica), make("p", { class: "model" }, baseModel), this.state),
      make("div", { class: "memory" }, this.caption, this.arena.element),
      make("div", { class: "bars" }, this.host.element, this.disk.element, this.kv.element, this.states.element, this.hostPages.element),
    );
  }

  show(replica, now) {
    this.replica = replica;
    this.heard = now;
    this.element.classList.remove("silent");
    const waits = replica.waiting ? ` · ${count(replica.waiting)} waiting, the first for ${seconds(replica.oldest_wait_s)}` : "";
    say(this.state, `${count(replica.running)} running${waits}`);
    this.state.classList.toggle("waits", replica.waiting > 0);
    const { gpu, host, disk, blocks } = replica;
    const used = blocks.filter(({ leases }) => leases).length;
    const pinned = blocks.filter((block) => block.pinned).length;
    const what = [counted(blocks.length, "adapter"), `${count(used)} in use`, ...(pinned ? [`${count(pinned)} pinned`] : [])];
    const text = `${bytesOf(gpu.used_bytes, gpu.total_bytes)} · ${what.join(", ")}`;
    say(this.caption, text);
    this.arena.canvas.setAttribute("aria-label", `GPU arena of ${replica.replica}: ${text}. Arrow keys go from adapter to adapter.`);
    this.arena.show(gpu.total_bytes, blocks);
    this.host.show(host.used_bytes, host.total_bytes, `${bytesOf(host.used_bytes, host.total_bytes)} · ${count(host.adapters)}`);
    this.disk.show(disk.used_bytes, disk.total_bytes, `${bytesOf(disk.used_bytes, disk.total_bytes)} · ${count(disk.adapters)}`);
    const [pages, all] = [replica.kv_pages_used, replica.kv_pages_total];
    this.kv.show(pages, all, `${count(pages)} of ${count(all)}`);
    this.hostPages.element.hidden = !replica.host_pages;
    if (replica.host_pages) {
      const { used, pages, on_disk: onDisk, disk_pages: diskPages } = replica.host_pages;
      const disk = diskPages ? ` · disk ${count(onDisk)} of ${count(diskPages)}` : "";
      this.hostPages.show(used, pages, `${count(used)} of ${count(pages)}${disk}`);
    }
    this.states.element.hidden = !replica.states;
    if (replica.states) {
      const { running, cached, slots } = replica.states;
      this.states.show(running, slots, `${count(running)} and ${count(cached)} cached of ${count(slots)}`);
    }
  }

  silent(now) {
    this.element.classList.add("silent");
    say(this.state, `no answer for ${seconds((now - this.heard) / 1000)}`);
  }
}

export class Bar {
  constructor(name) {
    this.fill = make("i");
    this.text = make("span", { class: "amount" });
    this.track = make("div", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" }, this.fill);
    this.element = make("div", { class: "bar" }, make("span", { class: "name" }, name), this.text, this.track);
  }

  show(used, total, text) {
    const share = total ? Math.min(1, used / total) : 0;
    this.fill.style.transform = `scaleX(${share})`;
    this.track.setAttribute("aria-valuenow", `${Math.round(100 * share)}`);
    this.track.setAttribute("aria-valuetext", text);
    this.track.classList.toggle("full", share > 0.97);
    say(this.text, text);
  }
}

/** Details of the selected block or hole. */
export class Details {
  constructor(element) {
    this.element = element;
  }

  show(replica, span, place) {
    this.element.hidden = span === null;
    if (span === null) return;
    const what = span.block ? [replica.replica, span.block] : span;
    fill(this.element, what, () => (span.block ? aboutBlock(replica, span.block) : aboutHole(span)));
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.max(8, Math.min(innerWidth - width - 8, place.x - width / 2));
    const below = place.bottom + 8 + height < innerHeight;
    this.element.style.transform = `translate(${left}px, ${below ? place.bottom + 8 : Math.max(8, place.top - 8 - height)}px)`;
  }
}

function aboutBlock(replica, block) {
  const swatch = make("i", { class: "swatch" });
  swatch.style.background = colourOf(block.tenant);
  const marks = [block.leases ? `used by ${counted(block.leases, "sequence")}` : "idle", ...(block.pinned ? ["pinned"] : []), ...(block.arriving ? ["arriving"] : [])];
  const places = block.pieces.map(({ offset, size }) => `${bytes(size)} at ${bytes(offset)}`);
  const shown = places.length > 3 ? [...places.slice(0, 3), `${places.length - 3} more`] : places;
  return [
    make("h4", {}, swatch, block.name),
    make(
      "dl",
      {},
      ...pair("Tenant", block.tenant),
      ...pair("Rank", `${block.rank}`),
      ...pair("Size", bytes(block.size)),
      ...pair("Now", marks.join(", ")),
      ...pair(places.length > 1 ? `${places.length} pieces` : "Lies", shown.join("; ")),
      ...pair("Digest", block.digest),
      ...pair("Replica", replica.replica),
    ),
  ];
}

function aboutHole({ offset, size }) {
  return [make("h4", {}, "Free"), make("dl", {}, ...pair("Size", bytes(size)), ...pair("Lies", `at ${bytes(offset)}`))];
}

const pair = (name, value) => [make("dt", {}, name), make("dd", {}, value)];
