// What has happened, the newest first, each with why that happens, and what can be done about it.

import { day, element, sentence } from "./text.js";

export class Incidents {
  constructor(section) {
    this.empty = element("p", { class: "empty" }, "nothing to tell");
    // What is added is read aloud, when nothing else is.
    this.list = element("ol", { class: "events", "aria-live": "polite", "aria-relevant": "additions" });
    section.append(this.empty, this.list);
    this.newest = null;
  }

  update(store) {
    this.empty.hidden = store.events.length > 0;
    const known = store.events.lastIndexOf(this.newest);
    if (known < 0) this.list.replaceChildren();
    for (const event of store.events.slice(known + 1)) this.list.prepend(line(event));
    while (this.list.childElementCount > store.events.length) this.list.lastElementChild.remove();
    this.newest = store.events.at(-1) ?? null;
  }
}

function line(event) {
  const says = element("p", {}, event.says);
  const parts = [element("time", {}, day(event.t)), element("code", {}, event.event), says];
  if (event.level !== "INFO") parts.splice(1, 0, element("strong", {}, event.level.toLowerCase()));
  for (const more of [event.why, event.do]) if (more) parts.push(element("p", { class: "do" }, sentence(more)));
  return element("li", { "data-level": event.level }, ...parts);
}
