// Line charts of the last minutes.

import { make, makeSvg, say } from "./dom.js";
import { milliseconds, percent, rate } from "./format.js";

const WIDTH = 360;
const HEIGHT = 92;
const FOOT = 14;

const CHARTS = [
  {
    title: "Requests a second",
    series: [
      { of: "requests", name: "came", kind: "main" },
      { of: "refused", name: "refused", kind: "warm" },
      { of: "failed", name: "failed", kind: "bad" },
    ],
    text: rate,
    scale: upward,
  },
  {
    title: "Found on the GPU",
    series: [{ of: "hit_rate", name: "hit rate", kind: "main" }],
    text: percent,
    scale: () => ({ least: 0, most: 1, marks: [0, 0.5, 1], at: (value) => value }),
  },
  {
    title: "Time to first token",
    series: [
      { of: "ttft_p50_ms", name: "p50", kind: "main" },
      { of: "ttft_p99_ms", name: "p99", kind: "warm" },
    ],
    text: milliseconds,
    scale: logarithmic,
  },
];

export class Lines {
  constructor(home) {
    this.charts = CHARTS.map((about) => new Chart(about));
    home.append(...this.charts.map((chart) => chart.element));
  }

  show(lines) {
    for (const chart of this.charts) chart.show(lines);
  }
}

class Chart {
  constructor(about) {
    this.about = about;
    this.values = about.series.map(() => make("b"));
    const legend = about.series.map(({ name, kind }, at) => make("span", { class: `key ${kind}` }, make("i"), `${name} `, this.values[at]));
    this.grid = makeSvg("g", { class: "grid" });
    this.paths = about.series.map(({ kind }) => makeSvg("path", { class: `line ${kind}` }));
    this.cross = makeSvg("line", { class: "cross", y1: "0", y2: `${HEIGHT - FOOT}` });
    this.when = make("span", { class: "when" });
    this.svg = makeSvg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", pointermove: (event) => this.#look(event), pointerleave: () => this.#look(null) },
      this.grid, ...this.paths, this.cross,
    );
    this.scaleTexts = make("div", { class: "scale", "aria-hidden": "true" });
    this.element = make(
      "figure",
      { class: "card chart" },
      make("figcaption", {}, make("h2", {}, about.title), make("span", { class: "legend" }, ...legend)),
      make("div", { class: "plot" }, this.svg, this.scaleTexts),
      make("div", { class: "foot", "aria-hidden": "true" }, make("span", {}, "3 min ago"), this.when, make("span", {}, "now")),
    );
    this.lines = null;
    this.looked = null;
  }

  show(lines) {
    this.lines = lines;
    const { series, scale } = this.about;
    const { least, most, marks, at } = scale(series.flatMap(({ of }) => lines[of]).filter((value) => value !== null));
    const y = (value) => (HEIGHT - FOOT - 3) * (1 - (at(value) - least) / (most - least)) + 2;
    this.grid.replaceChildren(...marks.map((mark) => makeSvg("line", { x1: "0", x2: `${WIDTH}`, y1: `${y(mark)}`, y2: `${y(mark)}` })));
    this.scaleTexts.replaceChildren(...marks.map((mark) => placed(make("span", {}, this.about.text(mark)), y(mark) / HEIGHT)));
    series.forEach(({ of }, index) => this.paths[index].setAttribute("d", pathOf(lines[of], y)));
    this.#tell();
  }

  #look(event) {
    const share = event && event.offsetX / this.svg.clientWidth;
    this.looked = event && Math.max(0, Math.min(1, share));
    this.#tell();
  }

  #tell() {
    if (!this.lines) return;
    const length = this.lines[this.about.series[0].of].length;
    const index = this.looked === null ? length - 1 : Math.round(this.looked * (length - 1));
    this.about.series.forEach(({ of }, at) => say(this.values[at], this.about.text(this.lines[of][index])));
    const x = `${(index / (length - 1)) * WIDTH}`;
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.cross.classList.toggle("shown", this.looked !== null);
    say(this.when, this.looked === null ? "" : `${length - 1 - index} s ago`);
  }
}

function placed(element, share) {
  element.style.top = `${100 * share}%`;
  return element;
}

/** Return the path of a line, with gaps at seconds without a value. */
function pathOf(values, y) {
  let path = "";
  let drawing = false;
  values.forEach((value, index) => {
    if (value !== null) path += `${drawing ? "L" : "M"}${((index / (values.length - 1)) * WIDTH).toFixed(1)} ${y(value).toFixed(1)}`;
    if (value !== null && !drawing) path += "h0.01"; // makes a single point visible
    drawing = value !== null;
  });
  return path;
}

function upward(values) {
  const largest = Math.max(1, ...values);
  const step = [1, 2, 5, 10].map((part) => part * 10 ** Math.floor(Math.log10(largest))).find((top) => top >= largest);
  return { least: 0, most: step, marks: [0, step / 2, step], at: (value) => value };
}

/** Return a logarithmic scale of whole decades, on which both 10 ms and 1 s can be read. */
function logarithmic(values) {
  const at = (value) => Math.log10(Math.max(0.1, value));
  const logs = values.map(at);
  const least = Math.floor(Math.min(1, ...logs));
  const most = Math.max(least + 2, Math.ceil(Math.max(3, ...logs)));
  return { least, most, marks: Array.from({ length: most - least + 1 }, (_, step) => 10 ** (least + step)), at };
}
