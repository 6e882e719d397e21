// Drawing of one replica's GPU arena to scale: its bytes in order, wrapped into a few lines like text.

import { colourOf } from "./colours.js";
import { make } from "./dom.js";

const LEAST_BLOCK_PX = 10;
const MOST_LINES = 8;
const LINE_GAP = 3;
const HEIGHTS = { 1: 44, 2: 26, 4: 19, 8: 14 };
const NEWS_MS = 1100;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Arena {
  /** chosen: called with the selected block or hole and its screen position; with null for none. */
  constructor(chosen) {
    const canvas = make("canvas", { tabindex: "0", role: "img" });
    this.canvas = canvas;
    this.element = make("div", { class: "arena" }, canvas);
    this.chosen = chosen;
    this.total = 0;
    this.spans = []; // {offset, size, block}, sorted by offset
    this.digests = null;
    this.news = new Map(); // digest → time of its arrival
    this.gone = []; // {offset, size, block, at}
    this.at = null; // offset selected by pointer or keyboard
    this.lines = 1;
    this.tenant = null;
    this.digest = null;
    canvas.addEventListener("pointermove", (event) => this.#choose(this.#offsetAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.#choose(this.#offsetAt(event)));
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && this.leave());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.at === null && this.#choose(this.spans[0]?.offset ?? 0));
    canvas.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(total, blocks) {
    const spans = blocks.flatMap((block) => block.pieces.map((piece) => ({ ...piece, block })));
    const digests = new Map(blocks.map((block) => [block.digest, block]));
    if (this.digests) this.#compare(digests);
    this.total = total;
    this.digests = digests;
    this.spans = spans.sort((one, two) => one.offset - two.offset);
    if (this.at !== null) this.#tell();
    this.#animate();
  }

  /** Fade out all blocks of other tenants, and mark the adapter `digest`; null: no tenant, no mark. */
  emphasise(tenant, digest) {
    if (tenant === this.tenant && digest === this.digest) return;
    this.tenant = tenant;
    this.digest = digest;
    this.draw();
  }

  leave() {
    if (this.at === null) return;
    this.at = null;
    this.chosen(null);
  }

  #compare(digests) {
    const now = performance.now();
    for (const digest of digests.keys()) if (!this.digests.has(digest)) this.news.set(digest, now);
    for (const [digest, block] of this.digests) {
      if (!digests.has(digest)) this.gone.push(...block.pieces.map((piece) => ({ ...piece, block, at: now })));
    }
  }

  #animate() {
    const now = performance.now();
    for (const [digest, at] of this.news) if (now - at > NEWS_MS) this.news.delete(digest);
    this.gone = this.gone.filter(({ at }) => now - at < NEWS_MS);
    if (still.matches) {
      this.news.clear();
      this.gone = [];
    }
    this.draw();
    if (this.news.size || this.gone.length) setTimeout(() => requestAnimationFrame(() => this.#animate()), 40);
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || !this.total) return;
    this.#chooseLines(width);
    const height = this.lines * (this.#lineHeight() + LINE_GAP) - LINE_GAP;
    const pen = sized(this.canvas, width, height);
    const style = getComputedStyle(this.canvas);
    const [ink, free, ground] = ["--ink", "--free", "--card"].map((name) => style.getPropertyValue(name).trim());
    pen.fillStyle = free;
    for (let line = 0; line < this.lines; line += 1) pen.fillRect(0, line * (this.#lineHeight() + LINE_GAP), width, this.#lineHeight());
    const now = performance.now();
    for (const { offset, size, block, at } of this.gone) {
      if (this.#hides(block)) continue;
      pen.globalAlpha = 0.35 * (1 - (now - at) / NEWS_MS);
      pen.fillStyle = colourOf(block.tenant);
      for (const box of this.#boxes(offset, size, width)) pen.fillRect(...box);
    }
    for (const span of this.spans) this.#fill(pen, span, width, ground, now);
    for (const span of this.spans) this.#mark(pen, span, width, ink, ground, now);
    pen.globalAlpha = 1;
    if (this.at !== null) {
      const { offset, size } = this.#spanAt(this.at);
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      for (const [x, y, w, h] of this.#boxes(offset, size, width)) pen.strokeRect(x + 1, y + 1, Math.max(2, w - 2), h - 2);
    }
  }

  #fill(pen, { offset, size, block }, width, ground, now) {
    const colour = colourOf(block.tenant);
    const fresh = this.news.has(block.digest) ? 1 - (now - this.news.get(block.digest)) / NEWS_MS : 0;
    for (const [x, y, w, h] of this.#boxes(offset, size, width)) {
      const inner = w > 4 ? w - 1 : w;
      pen.fillStyle = ground; // keeps the free space from showing through a faint block
      pen.globalAlpha = 1;
      pen.fillRect(x, y, inner, h);
      pen.fillStyle = colour;
      pen.globalAlpha = this.#hides(block) ? 0.1 : Math.min(1, (block.leases ? 1 : block.arriving ? 0.2 : 0.45) + 0.4 * Math.max(0, fresh));
      pen.fillRect(x, y, inner, h);
    }
    pen.globalAlpha = 1;
  }

  /** Draw marks over the fills: glow if in use, band if pinned, dashes if arriving, and names. */
  #mark(pen, { offset, size, block }, width, ink, ground, now) {
    if (this.#hides(block)) return;
    const colour = colourOf(block.tenant);
    for (const [x, y, w, h] of this.#boxes(offset, size, width)) {
      const inner = w > 4 ? w - 1 : w;
      if (block.leases) glow(pen, x, y, inner, h, colour);
      if (block.pinned) band(pen, x, y, inner, h, ink, ground);
      if (block.arriving) dashes(pen, x, y, inner, h, colour);
      if (inner >= 58 && h >= 18) caption(pen, x, y, inner, h, block, ink, ground);
      if (block.digest === this.digest || this.news.has(block.digest)) {
        pen.globalAlpha = block.digest === this.digest ? 1 : Math.max(0, 1 - (now - this.news.get(block.digest)) / NEWS_MS);
        pen.strokeStyle = ink;
        pen.lineWidth = 1.5;
        pen.strokeRect(x + 0.75, y + 0.75, Math.max(1, inner - 1.5), h - 1.5);
        pen.globalAlpha = 1;
      }
    }
  }

  #hides(block) {
    return this.tenant !== null && block.tenant !== this.tenant;
  }

  /** Return [x, y, width, height] of a range of the arena, one box for each line that it touches. */
  #boxes(offset, size, width) {
    const perLine = this.total / this.lines;
    const boxes = [];
    for (let line = Math.floor(offset / perLine); line < this.lines && line * perLine < offset + size; line += 1) {
      const begin = Math.max(offset, line * perLine) - line * perLine;
      const end = Math.min(offset + size, (line + 1) * perLine) - line * perLine;
      const [x, to] = [(begin / perLine) * width, (end / perLine) * width];
      boxes.push([x, line * (this.#lineHeight() + LINE_GAP), Math.max(to - x, 0.5), this.#lineHeight()]);
    }
    return boxes;
  }

  #lineHeight() {
    return HEIGHTS[this.lines];
  }

  /** Choose enough lines to tell blocks apart. Halve them only if a quarter would be enough. */
  #chooseLines(width) {
    const wanted = (this.spans.length * LEAST_BLOCK_PX) / width;
    while (this.lines < MOST_LINES && this.lines < wanted) this.lines *= 2;
    while (this.lines > 1 && this.lines > 4 * wanted) this.lines /= 2;
  }

  #offsetAt(event) {
    const width = this.canvas.clientWidth;
    const line = Math.floor(event.offsetY / (this.#lineHeight() + LINE_GAP));
    const share = Math.min(1, Math.max(0, event.offsetX / width));
    return ((Math.min(this.lines - 1, Math.max(0, line)) + Math.min(share, 0.9999)) * this.total) / this.lines;
  }

  /** Return the piece of a block, or the hole, at an offset. */
  #spanAt(offset) {
    const after = this.spans.findIndex((span) => span.offset > offset);
    const before = this.spans.at(after === -1 ? -1 : after - 1);
    if (after !== 0 && before && offset < before.offset + before.size) return before;
    const begin = after === 0 || !before ? 0 : before.offset + before.size;
    const end = after === -1 ? this.total : this.spans[after].offset;
    return { offset: begin, size: end - begin, block: null };
  }

  #choose(offset) {
    if (!this.total) return;
    this.at = offset;
    this.#tell();
  }

  #tell() {
    const span = this.#spanAt(this.at);
    const [x, y, w, h] = this.#boxes(span.offset, span.size, this.canvas.clientWidth)[0] ?? [0, 0, 0, 0];
    const place = this.canvas.getBoundingClientRect();
    this.chosen(span, { x: place.left + x + w / 2, top: place.top + y, bottom: place.top + y + h });
    this.draw();
  }

  #key(event) {
    if (event.key === "Escape") {
      this.leave();
      return;
    }
    const here = this.at === null ? -1 : this.spans.findLastIndex((span) => span.offset <= this.at);
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: this.spans.length - 1 }[event.key];
    if (next === undefined || !this.spans.length) return;
    event.preventDefault();
    this.#choose(this.spans[Math.min(this.spans.length - 1, Math.max(0, next))].offset);
  }
}

function sized(canvas, width, height) {
  const dots = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * dots), Math.round(height * dots)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function glow(pen, x, y, w, h, colour) {
  pen.save();
  pen.shadowColor = colour;
  pen.shadowBlur = 7;
  pen.fillStyle = colour;
  pen.fillRect(x, y, w, h);
  pen.restore();
}

function band(pen, x, y, w, h, ink, ground) {
  pen.fillStyle = ground;
  pen.fillRect(x, y, w, 5);
  pen.fillStyle = ink;
  pen.fillRect(x, y, w, 3.5);
}

function dashes(pen, x, y, w, h, colour) {
  pen.save();
  pen.setLineDash([3, 2]);
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, Math.max(1, w - 1), h - 1);
  pen.restore();
}

function caption(pen, x, y, w, h, block, ink, ground) {
  pen.font = "600 11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = block.leases ? ground : ink;
  let name = block.short;
  while (name.length > 2 && pen.measureText(name).width > w - 10) name = `${name.slice(0, -2)}…`;
  pen.fillText(name, x + 5, y + h / 2 + (block.pinned ? 2 : 0));
}
