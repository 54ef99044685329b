// The outer rounds: how long each took, and on how many samples it trained.

import { Chart } from "./charts.js";
import { Table, bytes, clock, element, loss, number, rate, whole } from "./text.js";

const SHOWN = 50;

export class Rounds {
  constructor(section) {
    this.empty = element("p", { class: "empty" }, "no round is over yet");
    const box = element("div", { class: "charts" });
    section.append(this.empty, box);
    this.durations = new Chart(box, "Seconds a round", number, { bars: true });
    this.samples = new Chart(box, "Samples a round", whole, { bars: true });
    const titles = ["round", "ended (UTC)", "seconds", "waited", "samples", "loss", "held-out", "servers", "sent", "samples by trainer"];
    this.table = new Table(section, `The newest rounds`, titles);
  }

  update(store) {
    // Behind the last round no other one is trained, though it begins: its record is evaluated.
    const isTrained = (each) => each.round <= (store.info.rounds ?? Infinity);
    const rounds = [...store.rounds.values()].filter(isTrained).sort((one, other) => one.round - other.round);
    const over = rounds.filter((each) => each.ended);
    this.empty.hidden = over.length > 0;
    this.durations.show([column(over, "seconds", "duration_s")], "round");
    this.samples.show([column(over, "samples", "samples")], "round");
    const written = (value, write) => (value === undefined || value === null ? "-" : write(value));
    const newest = rounds.slice(-SHOWN).reverse();
    this.table.show(
      newest.map((each) => ({
        key: each.round,
        cells: [
          whole(each.round),
          written(each.ended, clock),
          written(each.duration_s, rate),
          written(each.waited_s, rate),
          written(each.samples, whole),
          written(each.loss, loss),
          written(each.eval_loss, loss),
          written(each.replicas, whole),
          written(each.sent_bytes, bytes),
          written(each.shares, shared),
        ],
      })),
    );
  }
}

function shared(shares) {
  return Object.entries(shares).map(([slot, samples]) => `${slot}: ${whole(samples)}`).join("  ");
}

function column(rounds, name, key) {
  const there = rounds.filter((each) => typeof each[key] === "number");
  const ys = there.map((each) => each[key]);
  const [least, most] = [Math.min(...ys), Math.max(...ys)];
  return { name, xs: there.map((each) => each.round), ys, last: ys.at(-1) ?? null, least, most };
}
