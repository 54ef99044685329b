// A chart: uPlot's canvas, and beside it a table with the last values for those who do not see it.

import { Table, clock, day, element, setText } from "./text.js";

const HEIGHT = 216;
// What is under the axis; each axis has a name of its own for `show`.
const AXES = { time: "time of day, UTC", samples: "samples trained on", round: "round" };
const DARK = matchMedia("(prefers-color-scheme: dark)");
const BAR_SCALES = {
  x: { time: false, range: (_, first, last) => [first - 0.6, last + 0.6] },
  y: { range: (_, least, most) => [0, most * 1.05 || 1] },
};
const charts = new Set();

DARK.addEventListener("change", () => charts.forEach((chart) => chart.rebuild()));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export class Chart {
  // `format` writes a value; `bars` draws bars over whole numbers in place of lines.
  constructor(parent, title, format, { bars = false } = {}) {
    this.format = format;
    this.bars = bars;
    this.canvas = element("div", { class: "canvas", "aria-hidden": "true" });
    this.hover = element("p", { class: "hover", "aria-hidden": "true" });
    this.caption = element("figcaption", {}, title);
    this.figure = element("figure", { class: "chart" }, this.caption, this.canvas, this.hover);
    this.table = new Table(this.figure, `${title}: last values`, ["curve", "last", "least", "most"]);
    parent.append(this.figure);
    this.plot = null;
    this.shape = "";
    this.data = [[]];
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    charts.add(this);
  }

  entitle(title) {
    setText(this.caption, title);
  }

  // `series`: of each its name, xs and ys, its last value, the least and the most; `axis`: "time", "samples", "round".
  show(series, axis) {
    const there = series.filter((each) => each.xs.length);
    this.figure.hidden = !there.length;
    if (!there.length) return;
    this.axis = axis;
    this.names = there.map((each) => each.name);
    const tables = there.map((each) => [each.xs, each.ys]);
    this.data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const shape = `${axis}:${this.names.join()}`;
    if (this.plot && shape === this.shape) this.plot.setData(this.data);
    else this.rebuild(shape);
    this.table.show(
      there.map((each, index) => ({
        key: each.name,
        mark: String(index % 4),
        cells: [each.name, this.written(each.last), this.written(each.least), this.written(each.most)],
      })),
    );
  }

  written(value) {
    return value === null || !Number.isFinite(value) ? "-" : this.format(value);
  }

  rebuild(shape = this.shape) {
    this.plot?.destroy();
    this.plot = null;
    this.shape = shape;
    const width = this.canvas.clientWidth;
    if (!width || !this.names) return;
    this.plot = new uPlot(this.options(width), this.data, this.canvas);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (!this.plot) this.rebuild();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  options(width) {
    const text = colour("muted");
    const grid = { stroke: colour("grid"), width: 1 };
    const font = "12px system-ui, sans-serif";
    const x = { stroke: text, font, grid, ticks: grid, size: 30, space: 80 };
    Object.assign(x, { label: AXES[this.axis], labelFont: font, labelSize: 16, labelGap: 0 });
    if (this.axis === "time") x.values = (_, splits, _axis, _space, step) => splits.map((each) => timeOfDay(each, step));
    else x.values = (_, splits) => splits.map((each) => (Number.isInteger(each) ? compact(each) : ""));
    const y = { stroke: text, font, grid, ticks: grid, size: widthOfLabels };
    y.values = (_, splits) => splits.map((each) => this.format(each));
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
      scales: this.bars ? BAR_SCALES : { x: { time: this.axis === "time" } },
      axes: [x, y],
      cursor: { y: false, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.point(plot)] },
      series: [{}, ...this.names.map((_, index) => this.line(index))],
    };
  }

  line(index) {
    const stroke = colour(`line-${index % 4}`);
    const common = { stroke, width: 1.5, spanGaps: true, points: { show: false } };
    if (!this.bars) return common;
    return { ...common, fill: stroke, paths: uPlot.paths.bars({ size: [0.7, 40] }) };
  }

  point(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.data[0][at] === undefined) {
      setText(this.hover, "");
      return;
    }
    const x = plot.data[0][at];
    const where = this.axis === "time" ? `${clock(x)} UTC` : `${this.axis} ${compact(x)}`;
    const values = this.names.map((name, index) => [name, plot.data[index + 1][at]]);
    const known = values.filter(([, value]) => value !== null && value !== undefined);
    setText(this.hover, [where, ...known.map(([name, value]) => `${name} ${this.written(value)}`)].join("  "));
  }
}

function widthOfLabels(plot, labels, axis, cycle) {
  // uPlot asks again until nothing moves: the first answer stands.
  if (cycle > 1) return plot.axes[axis]._size;
  return 20 + 7 * Math.max(3, ...(labels ?? []).map((label) => label.length));
}

function timeOfDay(unixS, stepS) {
  if (stepS >= 86400) return day(unixS).slice(5, 10);
  return clock(unixS).slice(0, stepS < 60 ? 8 : 5);
}

function compact(value) {
  return new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 }).format(value);
}

// A curve as a chart takes it.
export function drawn(name, curve, index, offset = 0) {
  const [xs, ys] = curve.over(index, offset);
  const [least, most] = curve.extent;
  return { name, xs, ys, last: curve.last, least, most };
}
