// The page: polls every second while it is visible, and warns if its data is old.

import { darkness, introduce } from "./colours.js";
import { byId, fill, make, say } from "./dom.js";
import { NoAnswer, askFleet } from "./fleet.js";
import { count, seconds } from "./format.js";
import { Lines } from "./lines.js";
import { Moves, Tenants, showPins, showWaiting } from "./lists.js";
import { Details, Replicas } from "./replicas.js";

const KEY = "lorikeet-admin-key";
const EVERY_MS = 1000;
const OLD_MS = 4000;
const LOOK_MS = 500;

let key = sessionStorage.getItem(KEY);
let page = null;
let timer = null;
let asking = null; // the poll in progress; an answer to an earlier one, of a forgotten key, is dropped
let answered = null; // performance.now() of the last answer
let trouble = "";

function start() {
  byId("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    logIn(byId("key").value.trim());
  });
  byId("forget").addEventListener("click", () => logOut(""));
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (key) ask();
  });
  darkness.addEventListener("change", repaint);
  setInterval(sayHowOld, LOOK_MS);
  if (key) open();
  else logOut("");
}

async function logIn(typed) {
  say(byId("login-error"), "");
  byId("login-form").inert = true;
  try {
    const fleet = await askFleet(typed);
    key = typed;
    sessionStorage.setItem(KEY, key);
    byId("key").value = "";
    open();
    show(fleet);
  } catch (error) {
    if (!(error instanceof NoAnswer)) throw error;
    say(byId("login-error"), error.message);
  } finally {
    byId("login-form").inert = false;
    if (!key) byId("key").focus();
  }
}

function logOut(why) {
  sessionStorage.removeItem(KEY);
  clearTimeout(timer);
  key = page = answered = asking = null;
  byId("page").hidden = true;
  byId("details").hidden = true;
  byId("login").hidden = false;
  say(byId("login-error"), why);
  byId("key").focus();
}

function open() {
  byId("login").hidden = true;
  byId("page").hidden = false;
  for (const id of ["lines", "replicas", "tenants"]) byId(id).replaceChildren();
  const replicas = new Replicas(byId("replicas"), new Details(byId("details")));
  page = {
    replicas,
    lines: new Lines(byId("lines")),
    tenants: new Tenants(byId("tenants"), (tenant) => replicas.only(tenant)),
    moves: new Moves(byId("moves")),
    fleet: null,
  };
  trouble = "";
  sayHowOld();
  ask();
}

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  const round = (asking = {});
  const began = performance.now();
  try {
    const fleet = await askFleet(key);
    if (asking !== round) return;
    trouble = "";
    show(fleet);
  } catch (error) {
    if (!(error instanceof NoAnswer)) throw error;
    if (asking !== round) return;
    if (error.locked) {
      logOut(error.message);
      return;
    }
    trouble = error.message;
    sayHowOld();
  } finally {
    if (asking === round) asking = null;
  }
  if (key && !document.hidden) timer = setTimeout(ask, Math.max(100, EVERY_MS - (performance.now() - began)));
}

function show(fleet) {
  answered = performance.now();
  page.fleet = fleet;
  introduce([...fleet.tenants, ...fleet.waiting.rows.map(({ tenant }) => tenant)]);
  page.lines.show(fleet.lines);
  page.replicas.show(fleet);
  page.tenants.show(fleet);
  page.moves.see(fleet);
  showWaiting(byId("waiting"), fleet.waiting);
  showPins(byId("pins"), fleet.pins);
  showTotals(fleet);
  sayHowOld();
}

/** Draw the same data again, in other colours. */
function repaint() {
  if (!page?.fleet) return;
  page.replicas.redraw();
  page.tenants.show(page.fleet);
  page.moves.show();
  showWaiting(byId("waiting"), page.fleet.waiting);
}

function showTotals({ replicas, waiting, gateways, catalog_seq: seq }) {
  const running = replicas.reduce((sum, replica) => sum + replica.running, 0);
  const onGpu = new Set(replicas.flatMap(({ blocks }) => blocks.map(({ digest }) => digest))).size;
  const silent = gateways.silent ? ` (${gateways.silent} silent)` : "";
  const totals = [
    ["Replicas", count(replicas.length)],
    ["Gateways", `${count(gateways.answered)}${silent}`],
    ["Adapters on GPUs", count(onGpu)],
    ["Running", count(running)],
    ["Waiting", count(waiting.requests)],
    ["Catalog entry", count(seq)],
  ];
  fill(byId("totals"), totals, () => totals.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function sayHowOld() {
  if (!page) return;
  const age = answered === null ? 0 : performance.now() - answered;
  const old = Boolean(trouble) || age > OLD_MS;
  byId("freshness").className = answered === null && !trouble ? "freshness" : old ? "freshness old" : "freshness live";
  byId("content").classList.toggle("old", old);
  const wrong = trouble || "The gateway is slow to answer.";
  say(byId("freshness-text"), old ? wrong : answered === null ? "Asking…" : "Live");
  say(byId("age"), old && answered !== null ? `What you see is ${seconds(Math.floor(age / 1000))} old.` : "");
}

start();
