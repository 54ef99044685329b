// How the run is at this moment: state in words, its numbers, which server does what.

import { FRESH_S } from "./store.js";
import { byName, clock, day, duration, element, loss, rate, sentence, setAge, setText, share, whole } from "./text.js";

const QUIET_S = 10;
const QUIET_STEPS = 5;
const LATEST = 5;
// Title, name of the number, how it is written, and whether it comes with each step, so that it is old when none comes.
const TILES = [
  ["step", "step", whole, true],
  ["samples", "samples", whole, true],
  ["loss", "loss/train", loss, true],
  ["held-out loss", "loss/eval", loss, false],
  ["baseline loss", "loss/baseline", loss, false],
  ["samples/s", "samples_per_s", rate, true],
  ["targets/s", "targets_per_s", whole, true],
  ["pipelines", "pipelines", whole, false],
  ["peers", "alive_peers", whole, false],
];
const ALWAYS = ["step", "loss/train", "samples_per_s"];

export function stateOf(store) {
  if (store.ended) return ["ended", store.ended];
  const missing = [...store.run].filter(([name, [value]]) => name.startsWith("replicas/") && value === 0);
  const isPaused = Boolean(store.value("paused"));
  const step = store.run.get("step");
  if (missing.length) {
    const stages = missing.map(([name]) => name.slice("replicas/".length)).sort(byName);
    const named = stages.length > 1 ? `stages ${stages.join(", ")} have` : `stage ${stages[0]} has`;
    if (!step) return ["waiting", `starting: ${named} no server yet`];
    const sinceS = Math.min(...missing.map(([, [, atS]]) => atS));
    return ["stopped", `${isPaused ? "paused; " : ""}stopped: ${named} no server for ${duration(store.age(sinceS))}`];
  }
  if (isPaused) return ["waiting", "paused"];
  if (!step) return ["waiting", "starting"];
  const quietS = store.age(step[1]);
  if (quietS >= Math.max(QUIET_S, QUIET_STEPS * (store.value("step_s") ?? 0))) {
    return ["stopped", `no step for ${duration(quietS)}`];
  }
  return ["training", "training"];
}

// Since when the run goes on, and how long it still takes: as many rounds as are left take as long as most have taken.
function whenOf(store, kind) {
  if (!store.begunS) return "";
  const begun = `began ${day(store.begunS)}`;
  if (store.ended) return `${begun}, last heard ${day(store.nowS)}`;
  const over = [...store.rounds.values()].filter((each) => each.duration_s !== undefined);
  if (kind !== "training" || !over.length) return `${begun}, ${duration(store.age(store.begunS))} ago`;
  const sorted = over.map((each) => each.duration_s).sort((one, other) => one - other);
  const usualS = sorted[Math.floor(sorted.length / 2)];
  const last = over.reduce((one, other) => (other.round > one.round ? other : one));
  const rounds = Math.max(0, (store.info.rounds ?? 0) - last.round);
  const leftS = Math.max(0, rounds * usualS - Math.min(usualS, store.age(last.ended)));
  return `${begun}, ${duration(store.age(store.begunS))} ago; about ${duration(leftS)} left`;
}

export class Now {
  constructor(section) {
    this.state = element("p", { class: "state" });
    this.progress = element("progress", { "aria-label": "rounds", max: "1", value: "0" });
    this.round = element("p", { class: "round" });
    this.when = element("p", { class: "round when" });
    this.next = element("div", { class: "next" });
    this.tiles = element("dl", { class: "tiles" });
    this.map = element("div", { class: "map", tabindex: "0", role: "region", "aria-label": "Stages and their servers" });
    this.others = element("ul", { class: "others" });
    this.noOthers = element("p", { class: "empty" }, "none has said anything");
    this.latest = element("ul", { class: "latest" });
    const head = (text) => element("h2", {}, text);
    section.append(this.state, this.progress, this.round, this.when, this.next, this.tiles, head("Stages"), this.map);
    section.append(head("Other peers"), this.others, this.noOthers, head("Latest"), this.latest);
    this.tile = new Map(TILES.map((each) => [each[1], this.madeTile(each[0])]));
    this.cards = new Map();
    this.rows = new Map();
    this.names = new Map();
  }

  update(store) {
    const [kind, words] = stateOf(store);
    this.state.dataset.state = kind;
    setText(this.state, words);
    this.showRound(store);
    setText(this.when, whenOf(store, kind));
    this.showNext(store);
    for (const [title, name, write, isOfStep] of TILES) this.showTile(store, title, name, write, isOfStep);
    this.showMap(store);
    this.showOthers(store);
    this.showLatest(store);
  }

  showRound(store) {
    const round = store.value("round");
    const rounds = store.info.rounds ?? 0;
    const last = Math.max(0, ...[...store.rounds.values()].filter((each) => each.ended).map((each) => each.round));
    this.progress.max = rounds || 1;
    this.progress.value = Math.min(last, rounds);
    const now = round === null ? "no round has begun" : `round ${whole(Math.min(round, rounds))} of ${whole(rounds)}`;
    setText(this.round, `${now}; ${whole(last)} ${last === 1 ? "is" : "are"} over`);
  }

  showNext(store) {
    if (this.next.childElementCount === store.commands.length) return;
    this.next.replaceChildren(...store.commands.map((each) => element("code", {}, each)));
  }

  madeTile(title) {
    const value = element("dd");
    const age = element("dd", { class: "age" });
    const tile = element("div", {}, element("dt", {}, title), value, age);
    this.tiles.append(tile);
    return { tile, value, age };
  }

  showTile(store, title, name, write, isOfStep) {
    const { tile, value, age } = this.tile.get(name);
    const known = store.run.get(name);
    tile.hidden = !known && !ALWAYS.includes(name);
    setText(value, known ? write(known[0]) : "-");
    const ageS = known && isOfStep && !store.ended ? store.age(known[1]) : store.linkAgeS;
    const isOld = Boolean(known) && ageS >= FRESH_S;
    setAge(tile, isOld ? ageS : null);
    setText(age, isOld ? `${duration(ageS)} old` : "");
  }

  showMap(store) {
    const servers = [...store.peers].filter(([, peer]) => "stage" in peer.values);
    const there = servers.filter(([, peer]) => !store.isGone(peer));
    const stages = store.info.stages ?? 0;
    for (let stage = 0; stage < stages; stage += 1) if (!this.rows.has(stage)) this.madeRow(stage);
    const wanted = new Map(there.map(([name, peer]) => [name, peer.values.stage]));
    for (const [name, card] of this.cards) {
      if (wanted.get(name) === card.stage) continue;
      card.node.remove();
      this.cards.delete(name);
    }
    for (const [name, peer] of there.sort(([one], [other]) => byName(one, other))) {
      const card = this.cards.get(name) ?? this.madeCard(name, peer.values.stage);
      if (card) showCard(card, peer, store);
    }
    for (const [stage, row] of this.rows) {
      const number = store.value(`replicas/${stage}`);
      row.empty.hidden = row.cards.childElementCount > 0;
      setText(row.count, number === null ? "" : `${whole(number)} server${number === 1 ? "" : "s"}`);
    }
  }

  madeRow(stage) {
    const count = element("span", { class: "count" });
    const cards = element("ul", { class: "cards" });
    const empty = element("p", { class: "empty" }, "no server has said anything yet");
    this.map.append(element("div", { class: "stage" }, element("h3", {}, `stage ${stage} `, count), cards, empty));
    this.rows.set(stage, { count, cards, empty });
  }

  madeCard(name, stage) {
    const row = this.rows.get(stage);
    if (!row) return null;
    const link = element("a", { href: `#peer/${encodeURIComponent(name)}` }, name);
    const speed = element("span", { class: "speed" });
    const busy = element("meter", { min: "0", max: "1", "aria-label": `${name}: share of the time in which its device works` });
    const note = element("span", { class: "age" });
    const node = element("li", {}, link, speed, busy, note);
    const after = [...row.cards.children].find((each) => byName(each.firstElementChild.textContent, name) > 0);
    row.cards.insertBefore(node, after ?? null);
    const card = { node, speed, busy, note, stage };
    this.cards.set(name, card);
    return card;
  }

  showOthers(store) {
    const others = [...store.peers].filter(([, peer]) => !("stage" in peer.values));
    const there = others.filter(([, peer]) => !store.isGone(peer));
    this.others.hidden = !there.length;
    this.noOthers.hidden = there.length > 0;
    const kept = new Set(there.map(([name]) => name));
    for (const [name, node] of this.names) {
      if (kept.has(name)) continue;
      node.remove();
      this.names.delete(name);
    }
    for (const [name, peer] of there.sort(([one], [other]) => byName(one, other))) {
      if (!this.names.has(name)) {
        const node = element("li", {}, element("a", { href: `#peer/${encodeURIComponent(name)}` }, name), element("span", { class: "age" }));
        this.names.set(name, node);
        this.others.append(node);
      }
      const ageS = store.age(peer.heardS);
      const isOld = !store.ended && ageS >= FRESH_S;
      setAge(this.names.get(name), isOld ? ageS : null);
      setText(this.names.get(name).lastElementChild, isOld ? `${duration(ageS)} old` : "");
    }
  }

  showLatest(store) {
    const events = store.events.slice(-LATEST).reverse();
    const key = events.map((each) => `${each.t}${each.says}`).join();
    if (key === this.latestKey) return;
    this.latestKey = key;
    const lines = events.map(latestLine);
    this.latest.replaceChildren(...(lines.length ? lines : [element("li", {}, "nothing to tell")]));
  }
}

function latestLine(event) {
  const remedy = event.do ? [element("p", { class: "do" }, sentence(event.do))] : [];
  return element("li", { "data-level": event.level }, element("time", {}, clock(event.t)), " ", event.says, ...remedy);
}

function showCard(card, peer, store) {
  const { samples_per_s: speed, busy, held_round: held } = peer.values;
  const ageS = store.age(peer.heardS);
  const isOld = !store.ended && ageS >= FRESH_S;
  setText(card.speed, speed === undefined ? "no step yet" : `${rate(speed)} samples/s`);
  card.busy.hidden = busy === undefined;
  card.busy.value = busy ?? 0;
  const work = busy === undefined ? "" : `busy ${share(busy)}, `;
  const holds = held >= 0 ? `round ${whole(held)}` : "no round";
  setAge(card.node, isOld ? ageS : null);
  // What it took from the last record it had no time to say.
  const round = store.ended ? `held ${holds} when last heard` : `holds ${holds}, heard ${duration(ageS)} ago`;
  setText(card.note, `${work}${round}`);
}
