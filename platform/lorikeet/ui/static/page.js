// The page: shows the view of the key's role, polls while it is visible, and warns if its data is old.

import { AccountView } from "./account.js";
import { darkness } from "./colours.js";
import { byId, fill, make, say } from "./dom.js";
import { FleetView } from "./fleet.js";
import { seconds } from "./format.js";
import { NoAnswer } from "./gateway.js";

const KEPT = "lorikeet-key";
const VIEWS = { account: AccountView, fleet: FleetView };
const LATE_MS = 3000;
const LOOK_MS = 500;

let key = null;
let view = null;
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
  darkness.addEventListener("change", () => view?.repaint());
  setInterval(sayHowOld, LOOK_MS);
  const kept = JSON.parse(sessionStorage.getItem(KEPT));
  if (kept) open(kept.key, kept.role, new VIEWS[kept.role]());
  else logOut("");
}

async function logIn(typed) {
  say(byId("login-error"), "");
  byId("login-form").inert = true;
  try {
    const { role, found, data } = await roleOf(typed);
    sessionStorage.setItem(KEPT, JSON.stringify({ key: typed, role }));
    byId("key").value = "";
    open(typed, role, found);
    show(data);
  } catch (error) {
    if (!(error instanceof NoAnswer)) throw error;
    say(byId("login-error"), error.message);
  } finally {
    byId("login-form").inert = false;
    if (!key) byId("key").focus();
  }
}

/** Return the role of a key, its view and that view's first data. Throws NoAnswer. */
async function roleOf(typed) {
  for (const role of ["account", "fleet"]) {
    const found = new VIEWS[role]();
    try {
      return { role, found, data: await found.ask(typed) };
    } catch (error) {
      if (![403, 404].includes(error.status)) throw error;
      if (role === "fleet" && error.status === 404) throw new NoAnswer("This key does not read a tenant’s data. The page for admins’ keys is /ui at the admin listener.");
    }
  }
  throw new NoAnswer("This key only pushes adapters: enter another key of its tenant.");
}

function logOut(why) {
  sessionStorage.removeItem(KEPT);
  clearTimeout(timer);
  key = view = answered = asking = null;
  byId("page").hidden = true;
  byId("details").hidden = true;
  byId("login").hidden = false;
  say(byId("login-error"), why);
  byId("key").focus();
}

function open(itsKey, role, itsView) {
  key = itsKey;
  view = itsView;
  byId("login").hidden = true;
  byId("page").hidden = false;
  for (const each of Object.keys(VIEWS)) byId(each).hidden = each !== role;
  byId("totals").replaceChildren();
  view.open();
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
    const data = await view.ask(key);
    if (asking !== round) return;
    trouble = "";
    show(data);
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
  if (key && !document.hidden) timer = setTimeout(ask, Math.max(100, view.everyMs - (performance.now() - began)));
}

function show(data) {
  answered = performance.now();
  const totals = view.show(data);
  fill(byId("totals"), totals, () => totals.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  sayHowOld();
}

function sayHowOld() {
  if (!view) return;
  const age = answered === null ? 0 : performance.now() - answered;
  const old = Boolean(trouble) || age > view.everyMs + LATE_MS;
  byId("freshness").className = answered === null && !trouble ? "freshness" : old ? "freshness old" : "freshness live";
  byId("content").classList.toggle("old", old);
  const wrong = trouble || "The gateway is slow to answer.";
  say(byId("freshness-text"), old ? wrong : answered === null ? "Asking…" : "Live");
  say(byId("age"), old && answered !== null ? `What you see is ${seconds(Math.floor(age / 1000))} old.` : "");
}

start();
