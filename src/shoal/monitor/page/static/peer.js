// One peer: all of its numbers, and its curves.

import { Chart, drawn } from "./charts.js";
import { FRESH_S } from "./store.js";
import { Table, byName, bytes, bytesPerSecond, day, duration, element, number, rate, setAge, setText, share, whole } from "./text.js";

const OF_A_PEER = [
  ["Samples a second", ["samples_per_s"], rate],
  ["Share of the time in which its device works", ["busy"], share],
  ["Messages, bytes a second", ["sent_per_s", "received_per_s"], bytesPerSecond],
];
const CALLED = { samples_per_s: "samples/s", busy: "busy", sent_per_s: "sent", received_per_s: "received" };

export class Peer {
  constructor(section) {
    this.name = "";
    this.choice = element("select", { id: "choose-peer" });
    this.choice.addEventListener("change", () => {
      location.hash = `#peer/${encodeURIComponent(this.choice.value)}`;
    });
    this.heard = element("p", { class: "heard" });
    this.empty = element("p", { class: "empty" }, "no such peer has said anything");
    const box = element("div", { class: "charts" });
    section.append(element("label", { for: "choose-peer" }, "Peer "), this.choice, this.heard, this.empty, box);
    this.charts = OF_A_PEER.map(([title, names, format]) => ({ names, chart: new Chart(box, title, format) }));
    this.table = new Table(section, "Everything it has measured", ["number", "value"]);
    this.known = "";
  }

  choose(name) {
    this.name = name;
  }

  update(store) {
    const there = [...store.peers].filter(([each, peer]) => each === this.name || !store.isGone(peer));
    const names = there.map(([each]) => each).sort(byName);
    if (names.join("\n") !== this.known) {
      this.known = names.join("\n");
      this.choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    }
    const name = this.name || (names.find((each) => "stage" in store.peers.get(each).values) ?? names[0]);
    this.choice.value = name ?? "";
    const peer = store.peers.get(name);
    this.empty.hidden = Boolean(peer);
    for (const { names: drawnNames, chart } of this.charts) {
      const known = drawnNames.filter((each) => peer?.curves.has(each));
      chart.show(known.map((each) => drawn(CALLED[each], peer.curves.get(each), 0, store.begunS)), "time");
    }
    const ageS = peer ? store.age(peer.heardS) : 0;
    setAge(this.heard, !store.ended && ageS >= FRESH_S ? ageS : null);
    setText(this.heard, peer && !store.ended ? `heard ${duration(ageS)} ago` : "");
    const values = Object.entries(peer?.values ?? {}).sort(([one], [other]) => byName(one, other));
    this.table.show(values.map(([key, value]) => ({ key, cells: [key, written(key, value)] })));
  }
}

function written(name, value) {
  if (name.endsWith("_bytes")) return bytes(value);
  if (name === "sent_per_s" || name === "received_per_s") return bytesPerSecond(value);
  if (name === "busy") return share(value);
  if (name === "process.start_time_seconds") return day(value);
  if (name.endsWith("_us")) return `${rate(value / 1e6)} s`;
  return Number.isInteger(value) ? whole(value) : number(value);
}
