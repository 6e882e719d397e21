// The admins' view: the whole fleet.

import { introduce } from "./colours.js";
import { byId } from "./dom.js";
import { count } from "./format.js";
import { get } from "./gateway.js";
import { Lines } from "./lines.js";
import { Moves, Tenants, showPins, showWaiting } from "./lists.js";
import { Details, Replicas } from "./replicas.js";

const PINNED = 1;
const ARRIVING = 2;

export class FleetView {
  everyMs = 1000;

  constructor() {
    this.fleet = null;
  }

  /** Fetch the fleet's current state. Throws NoAnswer. */
  async ask(key) {
    return decoded(await get(key, "admin/v1/fleet"));
  }

  open() {
    for (const id of ["lines", "replicas", "tenants"]) byId(id).replaceChildren();
    this.replicas = new Replicas(byId("replicas"), new Details(byId("details")));
    this.lines = new Lines(byId("lines"));
    this.tenants = new Tenants(byId("tenants"), (tenant) => this.replicas.only(tenant));
    this.moves = new Moves(byId("moves"));
  }

  /** Show the fleet; return the page's totals, as pairs of name and text. */
  show(fleet) {
    this.fleet = fleet;
    introduce([...fleet.tenants, ...fleet.waiting.rows.map(({ tenant }) => tenant)]);
    this.lines.show(fleet.lines);
    this.replicas.show(fleet);
    this.tenants.show(fleet);
    this.moves.see(fleet);
    showWaiting(byId("waiting"), fleet.waiting);
    showPins(byId("pins"), fleet.pins);
    return totals(fleet);
  }

  /** Draw the same data again, in other colours. */
  repaint() {
    if (!this.fleet) return;
    this.replicas.redraw();
    this.tenants.show(this.fleet);
    this.moves.show();
    showWaiting(byId("waiting"), this.fleet.waiting);
  }
}

function totals({ replicas, waiting, gateways, catalog_seq: seq }) {
  const running = replicas.reduce((sum, replica) => sum + replica.running, 0);
  const onGpu = new Set(replicas.flatMap(({ blocks }) => blocks.map(({ digest }) => digest))).size;
  const silent = gateways.silent ? ` (${gateways.silent} silent)` : "";
  return [
    ["Replicas", count(replicas.length)],
    ["Gateways", `${count(gateways.answered)}${silent}`],
    ["Adapters on GPUs", count(onGpu)],
    ["Running", count(running)],
    ["Waiting", count(waiting.requests)],
    ["Catalog entry", count(seq)],
  ];
}

/** Replace indexes in the answer by the tenants and adapters that they stand for. */
function decoded(fleet) {
  const adapters = fleet.adapters.map(([tenant, name, version, rank, digest]) => ({
    tenant: fleet.tenants[tenant],
    name: `${fleet.tenants[tenant]}/${name}@${version}`,
    short: `${name}@${version}`,
    rank,
    digest,
  }));
  const replicas = fleet.replicas.map((replica) => ({
    ...replica,
    blocks: replica.blocks.map(([adapter, leases, marks, ...places]) => block(adapters[adapter], leases, marks, places)),
  }));
  return { ...fleet, replicas };
}

function block(adapter, leases, marks, places) {
  const pieces = [];
  let size = 0;
  for (let at = 0; at < places.length; at += 2) {
    pieces.push({ offset: places[at], size: places[at + 1] });
    size += places[at + 1];
  }
  return { ...adapter, leases, pinned: Boolean(marks & PINNED), arriving: Boolean(marks & ARRIVING), pieces, size };
}
