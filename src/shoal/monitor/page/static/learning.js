// How the model learns: losses, gradient, learning rate and speed, over samples or over time.

import { Chart, drawn } from "./charts.js";
import { element, loss, number, rate, whole } from "./text.js";

const LOSSES = {
  train: "training",
  eval: "held-out",
  round: "training, by round",
  baseline: "baseline",
  baseline_eval: "baseline, held-out",
};
const ORDER_OF_LOSSES = Object.keys(LOSSES);
// Title, which curves, what each is called, how a value is written.
const OF_THE_RUN = [
  ["Loss", (name) => name.startsWith("loss/"), (name) => LOSSES[name.slice(5)] ?? name.slice(5), loss],
  ["Accuracy", (name) => name.startsWith("accuracy"), (name) => name.split("/")[1] ?? name, number],
  ["Length of the gradient", (name) => name === "grad_norm", () => "before clipping", number],
  ["Learning rate", (name) => name === "lr", () => "inner optimizer", number],
  ["Samples a second", (name) => name.startsWith("samples_per_s"), (name) => name.split("/")[1] ?? "swarm", rate],
  ["Targets a second", (name) => name === "targets_per_s", () => "swarm", whole],
  ["Seconds a step", (name) => name === "step_s", () => "mean", number],
  ["Router", (name) => name.startsWith("router"), (name) => name.split("/")[1] ?? name, number],
];

export class Learning {
  constructor(section) {
    const choice = element("fieldset", { class: "choice" }, element("legend", {}, "Over"));
    this.axis = "samples";
    for (const axis of ["samples", "time"]) {
      const button = element("input", { type: "radio", name: "axis", value: axis, id: `over-${axis}` });
      button.checked = axis === this.axis;
      button.addEventListener("change", () => {
        this.axis = axis;
        this.update(this.store);
      });
      choice.append(button, element("label", { for: `over-${axis}` }, axis));
    }
    this.empty = element("p", { class: "empty" }, "nothing has been learned yet");
    const box = element("div", { class: "charts" });
    section.append(choice, this.empty, box);
    this.charts = OF_THE_RUN.map(([title, has, called, format]) => ({ has, called, chart: new Chart(box, title, format) }));
  }

  update(store) {
    this.store = store;
    this.empty.hidden = store.curves.size > 0;
    if (store.info.loss_unit) this.charts[0].chart.entitle(`Loss, ${store.info.loss_unit}`);
    const [index, offset] = this.axis === "time" ? [0, store.begunS] : [1, 0];
    for (const { has, called, chart } of this.charts) {
      const curves = [...store.curves].filter(([name]) => has(name)).sort(([one], [other]) => place(one) - place(other));
      const series = curves.map(([name, curve]) => drawn(called(name), curve, index, offset));
      chart.show(series, this.axis);
    }
  }
}

// Those that are known by a name come first, always in the same order and colour.
function place(name) {
  const at = ORDER_OF_LOSSES.indexOf(name.split("/")[1]);
  return at < 0 ? ORDER_OF_LOSSES.length : at;
}
