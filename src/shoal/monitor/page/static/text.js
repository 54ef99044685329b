// Numbers and times as people read them, and elements. Text is only ever set as text: names and events come from peers.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const RATE = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const DIGITS = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });

export function whole(value) {
  return WHOLE.format(value);
}

export function rate(value) {
  return RATE.format(value);
}

export function loss(value) {
  return value.toFixed(3);
}

export function share(value) {
  return `${WHOLE.format(100 * value)} %`;
}

export function number(value) {
  const size = Math.abs(value);
  return size > 0 && (size < 1e-3 || size >= 1e9) ? value.toExponential(2) : DIGITS.format(value);
}

export function bytes(value) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${DIGITS.format(Number((value / size).toPrecision(3)))} ${unit}`;
  }
  return `${WHOLE.format(value)} B`;
}

export function bytesPerSecond(value) {
  return `${bytes(value)}/s`;
}

export function duration(seconds) {
  if (seconds < 120) return `${WHOLE.format(seconds)} s`;
  return seconds < 7200 ? `${WHOLE.format(seconds / 60)} min` : `${WHOLE.format(seconds / 3600)} h`;
}

export function clock(unixS) {
  return new Date(1000 * unixS).toISOString().slice(11, 19);
}

export function day(unixS) {
  return `${new Date(1000 * unixS).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

export function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1).replace(/\.?$/, ".");
}

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAge(node, ageS) {
  node.classList.toggle("old", ageS !== null);
}

// Sorts "server 2" before "server 10".
const ORDER = new Intl.Collator("en", { numeric: true });
export function byName(one, other) {
  return ORDER.compare(one, other);
}

// A table whose cells are only touched where their text has changed; rows are known by a key.
export class Table {
  constructor(parent, caption, titles) {
    this.rows = new Map();
    this.body = element("tbody");
    const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
    const table = element("table", {}, element("caption", {}, caption), element("thead", {}, head), this.body);
    // Wide ones scroll in their own box, which the keyboard reaches.
    this.box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    parent.append(this.box);
  }

  // `rows`: of each its key, the texts of its cells, and where its first cell leads, if it does.
  show(rows) {
    const kept = new Set(rows.map((row) => row.key));
    for (const [key, line] of this.rows) {
      if (kept.has(key)) continue;
      line.remove();
      this.rows.delete(key);
    }
    let place = this.body.firstElementChild;
    for (const row of rows) {
      const line = this.rows.get(row.key) ?? this.made(row);
      row.cells.forEach((text, index) => setText(line.cells[index].firstElementChild ?? line.cells[index], text));
      line.classList.toggle("old", Boolean(row.old));
      if (line === place) place = place.nextElementSibling;
      else this.body.insertBefore(line, place);
    }
  }

  made(row) {
    const line = element("tr");
    row.cells.forEach((_, index) => {
      const cell = element(index ? "td" : "th", index ? {} : { scope: "row" });
      if (!index && row.href) cell.append(element("a", { href: row.href }));
      if (!index && row.mark) cell.append(element("span", {}));
      if (!index && row.mark) cell.classList.add(`line-${row.mark}`);
      line.append(cell);
    });
    this.rows.set(row.key, line);
    return line;
  }
}
