// The page: which part of it is shown, and when it is drawn. At most once a frame, and once a second for the ages.

import { Feed } from "./feed.js";
import { Incidents } from "./incidents.js";
import { Learning } from "./learning.js";
import { Now, stateOf } from "./now.js";
import { Peer } from "./peer.js";
import { Rounds } from "./rounds.js";
import { FRESH_S, Store } from "./store.js";
import { duration, setText } from "./text.js";
import { Traffic } from "./traffic.js";

const PARTS = { now: Now, learning: Learning, traffic: Traffic, rounds: Rounds, incidents: Incidents, peer: Peer };
const store = new Store();
const parts = new Map();
let shown = "now";
let isDue = false;
// When the oldest row was made that no picture has shown yet; null: all are shown.
let made = null;
let feed = null;

// A page that has more than that of a run brings it along; its section is there. It outlives the run.
export function addPart(name, Part) {
  PARTS[name] = Part;
  feed.isLasting = true;
  choose();
}

function part(name) {
  if (!parts.has(name)) parts.set(name, new PARTS[name](document.getElementById(name)));
  return parts.get(name);
}

function choose() {
  const [name, peer] = location.hash.slice(1).split("/");
  shown = Object.hasOwn(PARTS, name) ? name : "now";
  for (const each of Object.keys(PARTS)) document.getElementById(each).hidden = each !== shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown === "peer") part("peer").choose(peer ? decodeURIComponent(peer) : "");
  draw();
}

function draw() {
  const start = performance.now();
  isDue = false;
  setText(document.getElementById("title"), store.info.title ?? "shoal");
  setText(document.getElementById("run"), store.info.run ?? "");
  setText(document.getElementById("link"), linkWords());
  const words = stateOf(store)[1];
  const title = `${words} - ${store.info.run ?? "shoal"}`;
  if (document.title !== title) document.title = title;
  part(shown).update(store);
  // Others are built and drawn when they are chosen, but for events, which are read aloud.
  if (shown !== "incidents") part("incidents").update(store);
  performance.measure("shoal.update", { start, detail: { made } });
  performance.clearMeasures("shoal.update");
  made = null;
}

function linkWords() {
  if (store.isFrozen) return store.isReport ? "a report, nothing in it changes" : "the run has ended";
  if (!store.heardMs) return "asking for the run";
  const ageS = store.linkAgeS;
  if (ageS >= FRESH_S) return `nothing heard for ${duration(ageS)}: the monitor is started again, or has ended`;
  return store.isLost ? "the connection is lost; asking again" : "live";
}

function due() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(draw);
}

function take(kind, data) {
  if (kind === "row") made ??= data.t;
  if (kind === "past") store.begin(data);
  else if (kind === "row") store.row(data);
  else if (kind === "event") store.event(data);
  else if (kind === "tick") store.tick(data);
  else store.end();
  due();
}

const past = document.getElementById("past");
if (past) {
  store.replace(JSON.parse(past.textContent));
  store.freeze();
  store.isReport = true;
} else {
  feed = new Feed(take, () => {
    store.isLost = true;
    due();
  });
  setInterval(due, 1000);
}
addEventListener("hashchange", choose);
choose();
