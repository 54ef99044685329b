// All that the page knows of the run: the past, as chronicle.py gives it, and the news that follow.

import { Curve } from "./curve.js";

export const FRESH_S = 3;
const GONE_S = 60;
const OF_RUN = 3; // numbers of a point: seconds since the beginning, samples, value
const OF_PEER = 2; // seconds since the beginning, value
const MAX_EVENTS = 300;
const MAX_PEERS = 1024;
const MAX_CURVES = 32;
const OF_RUN_NEW = { max: 1000, stride: 1, count: 1, buckets: [] };
const OF_PEER_NEW = { max: 128, stride: 1, count: 1, buckets: [] };
const DRAWN = ["accuracy", "grad_norm", "loss", "lr", "router", "samples_per_s", "step_s", "targets_per_s", "traffic"];
const DRAWN_OF_PEERS = ["samples_per_s", "busy", "sent_per_s", "received_per_s"];

export class Store {
  constructor() {
    this.heardMs = 0;
    this.offsetS = 0;
    this.isFrozen = false;
    this.replace({ now: 0, info: {}, begun: 0, samples: 0, run: {}, curves: {}, peers: {}, events: [], rounds: [] });
  }

  // A report shows one moment: its time stands still.
  freeze() {
    this.isFrozen = true;
  }

  // Also after the end of another run: that one's time stands still no more.
  begin(past) {
    this.isFrozen = false;
    this.replace(past);
  }

  replace(past) {
    Object.assign(this, { info: past.info, begunS: past.begun, samples: past.samples, ended: past.ended ?? "" });
    this.commands = past.commands ?? [];
    this.run = new Map(Object.entries(past.run));
    this.curves = new Map(Object.entries(past.curves).map(([name, form]) => [name, new Curve(form, OF_RUN)]));
    this.peers = new Map(Object.entries(past.peers).map(([name, form]) => [name, peerOf(form)]));
    this.events = [...past.events];
    this.rounds = new Map(past.rounds.map((round) => [round.round, round]));
    this.tick(past.now);
  }

  // The server's time of day: its clock and this machine's may differ.
  tick(nowS) {
    this.nowS = nowS;
    this.offsetS = nowS - Date.now() / 1000;
    this.heard();
  }

  heard() {
    this.heardMs = performance.now();
    this.isLost = false;
  }

  end() {
    this.nowS = this.timeS;
    this.ended = "the run has ended";
    this.freeze();
    this.heard();
  }

  get timeS() {
    return this.isFrozen ? this.nowS : Date.now() / 1000 + this.offsetS;
  }

  get linkAgeS() {
    return this.isFrozen ? 0 : (performance.now() - this.heardMs) / 1000;
  }

  value(name) {
    return this.run.get(name)?.[0] ?? null;
  }

  // How old a number is that comes with every step, or with every report of a peer.
  age(unixS) {
    return Math.max(0, this.timeS - unixS);
  }

  // Who has been silent for so long is gone: the registry has forgotten it too.
  isGone(peer) {
    return this.age(peer.heardS) >= GONE_S;
  }

  row(news) {
    const at = Math.round(10 * (news.t - news.begun)) / 10;
    this.begunS = news.begun;
    this.samples = news.samples;
    for (const [name, value] of Object.entries(news.run)) {
      this.run.set(name, [value, news.t]);
      if (!DRAWN.includes(name.split("/")[0])) continue;
      const isNew = !this.curves.has(name);
      if (isNew && this.curves.size >= MAX_CURVES) continue;
      if (isNew) this.curves.set(name, new Curve({ ...OF_RUN_NEW, buckets: [] }, OF_RUN));
      this.curves.get(name).add([at, news.samples, value]);
    }
    for (const [name, values] of Object.entries(news.peers)) {
      if (!this.peers.has(name)) this.makePeer(name);
      const peer = this.peers.get(name);
      peer.heardS = news.t;
      Object.assign(peer.values, values);
      for (const drawn of DRAWN_OF_PEERS) {
        if (!(drawn in peer.values)) continue;
        if (!peer.curves.has(drawn)) peer.curves.set(drawn, new Curve({ ...OF_PEER_NEW, buckets: [] }, OF_PEER));
        peer.curves.get(drawn).add([at, peer.values[drawn]]);
      }
    }
    this.heard();
  }

  makePeer(name) {
    const oldest = (one, other) => (other[1].heardS < one[1].heardS ? other : one);
    if (this.peers.size >= MAX_PEERS) this.peers.delete([...this.peers].reduce(oldest)[0]);
    this.peers.set(name, peerOf({ heard: 0, values: {}, curves: {} }));
  }

  // An event, or what has become of a round.
  event(news) {
    if (news.event) {
      this.events.push(news.event);
      if (this.events.length > MAX_EVENTS) this.events.shift();
    }
    if (news.round) {
      for (const number of this.rounds.keys()) if (number > news.last) this.rounds.delete(number);
      this.rounds.set(news.round.round, news.round);
    }
    this.heard();
  }
}

function peerOf(form) {
  const curves = new Map(Object.entries(form.curves).map(([name, each]) => [name, new Curve(each, OF_PEER)]));
  return { heardS: form.heard, values: form.values, curves };
}
