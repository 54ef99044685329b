// What the hosts of an operator do, and orders to them. Only the page that `shoal up --ui` serves has this part.

import { addPart } from "./main.js";
import { clock, day, duration, element, setAge, setText, whole } from "./text.js";

const ASK_MS = 2000;
const OLD_S = 20;
const ORDERS = ["up", "restart", "down"];

class Hosts {
  constructor(section) {
    this.problem = element("p", { class: "empty", role: "status" });
    this.list = element("ul", { class: "machines" });
    const head = element("h2", {}, "What was done (times in UTC)");
    // What is added is read aloud, when nothing else is.
    this.course = element("ol", { class: "course", "aria-live": "polite", "aria-relevant": "additions" });
    this.nothing = element("p", { class: "empty" }, "nothing was done from this page");
    section.append(element("h2", {}, "Hosts"), this.problem, this.list, head, this.nothing, this.course);
    this.machines = new Map();
    this.token = "";
    this.askedMs = -ASK_MS;
    this.heardMs = performance.now();
    this.isAsking = false;
  }

  // Is called once a second while this part is shown: nobody looks at the hosts for a page that is not seen.
  update() {
    if (!this.isAsking && performance.now() - this.askedMs >= ASK_MS) this.ask();
    for (const machine of this.machines.values()) machine.tick((performance.now() - this.heardMs) / 1000);
  }

  async ask() {
    this.isAsking = true;
    this.askedMs = performance.now();
    try {
      this.show(await answered("/hosts"));
      setText(this.problem, "");
    } catch (error) {
      setText(this.problem, `nothing is known: ${error.message}; does \`shoal up --ui\` still run?`);
    } finally {
      this.isAsking = false;
    }
  }

  show(board) {
    this.token = board.token;
    this.heardMs = performance.now();
    for (const host of board.hosts) {
      if (!this.machines.has(host.name)) {
        const machine = new Machine(this.list, host, (order) => this.order(host.name, order));
        this.machines.set(host.name, machine);
      }
      this.machines.get(host.name).show(host);
    }
    const lines = board.course.map((each) => `${clock(each.t)}  ${each.host ? `${each.host}: ` : ""}${each.says}`);
    this.nothing.hidden = lines.length > 0;
    this.tell(lines);
  }

  // Only what is new is added, so that nothing is read twice.
  tell(lines) {
    const known = [...this.course.children].map((line) => line.textContent);
    let from = 0;
    while (from < known.length && known.slice(from).some((line, index) => line !== lines[index])) from += 1;
    for (const line of [...this.course.children].slice(0, from)) line.remove();
    for (const line of lines.slice(known.length - from)) {
      this.course.append(element("li", line.includes(": error: ") ? { class: "why" } : {}, line));
    }
  }

  async order(name, order) {
    try {
      const headers = { "X-Shoal-Order": this.token };
      await answered(`/hosts/${encodeURIComponent(name)}/${order}`, { method: "POST", headers });
    } catch (error) {
      this.machines.get(name).complain(error.message);
    }
    await this.ask();
  }
}

// One host: what it is, what it does, what it says, and what can be done with it.
class Machine {
  constructor(list, host, order) {
    this.name = host.name;
    this.order = order;
    this.ageS = null;
    this.state = element("p", { class: "reach" });
    this.facts = element("p", { class: "age" });
    this.units = element("ul", { class: "units" });
    this.problem = element("p", { class: "why" });
    // Why an order was not taken: it is read aloud, as the answer to a press.
    this.complaint = element("p", { class: "why", role: "alert" });
    this.age = element("p", { class: "age" });
    this.buttons = new Map(ORDERS.map((each) => [each, this.button(each, () => this.wanted(each))]));
    const id = `logs-of-${host.name}`;
    this.logs = element("pre", { id, tabindex: "0", role: "region", "aria-label": `Logs of ${host.name}`, hidden: "" });
    this.shows = this.button("logs", () => this.toggle());
    this.shows.setAttribute("aria-expanded", "false");
    this.shows.setAttribute("aria-controls", id);
    this.asks = element("span");
    this.yes = element("button", { type: "button", class: "yes" });
    this.no = element("button", { type: "button" }, "no");
    this.question = element("p", { class: "question", role: "group", hidden: "" }, this.asks, this.yes, this.no);
    this.yes.addEventListener("click", () => this.answer(true));
    this.no.addEventListener("click", () => this.answer(false));
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.answer(false);
    });
    const row = element("p", { class: "orders" }, ...this.buttons.values(), this.shows);
    const title = element("h3", {}, host.name);
    list.append(
      element("li", {}, title, this.state, this.facts, this.units, this.problem, this.age, row, this.complaint, this.question, this.logs),
    );
  }

  button(word, press) {
    const made = element("button", { type: "button", "aria-label": `${word} ${this.name}` }, word);
    made.addEventListener("click", press);
    return made;
  }

  show(host) {
    // What kept an order from being taken is over.
    if (this.host?.busy && !host.busy) this.complain("");
    this.host = host;
    this.ageS = host.ageS;
    const [mark, words] = stateOf(host);
    this.state.dataset.state = mark;
    setText(this.state, words);
    setText(this.facts, factsOf(host));
    const units = host.units.map(unitLine);
    if (units.map((each) => each.textContent).join("\n") !== this.known) {
      this.known = units.map((each) => each.textContent).join("\n");
      this.units.replaceChildren(...units);
    }
    setText(this.problem, host.problem);
    // One that is disabled would lose the keyboard's focus.
    for (const each of this.buttons.values()) each.setAttribute("aria-disabled", String(Boolean(host.busy)));
    if (!this.logs.hidden) this.read();
  }

  tick(sinceS) {
    const ageS = this.ageS === null ? null : this.ageS + sinceS;
    const isOld = ageS !== null && ageS >= OLD_S;
    setText(this.age, ageS === null ? "" : `looked at ${duration(ageS)} ago`);
    setAge(this.state.parentElement, isOld ? ageS : null);
  }

  complain(why) {
    setText(this.complaint, why);
  }

  wanted(order) {
    if (this.host.busy) {
      this.complain(`${this.host.busy} is under way there`);
      return;
    }
    this.complain("");
    const cost = costOf(this.host, order);
    if (!cost) {
      this.order(order);
      return;
    }
    this.asked = order;
    setText(this.asks, cost);
    setText(this.yes, `yes, ${order} ${this.name}`);
    this.question.hidden = false;
    this.no.focus();
  }

  answer(isYes) {
    this.question.hidden = true;
    this.buttons.get(this.asked).focus();
    if (isYes) this.order(this.asked);
  }

  toggle() {
    this.logs.hidden = !this.logs.hidden;
    this.shows.setAttribute("aria-expanded", String(!this.logs.hidden));
    if (!this.logs.hidden) this.read();
  }

  async read() {
    if (this.isReading) return;
    this.isReading = true;
    let text = "";
    try {
      const units = await answered(`/hosts/${encodeURIComponent(this.name)}/logs`);
      text = units.map((unit) => [unit.unit && `== ${unit.unit}`, ...unit.lines].filter(Boolean).join("\n")).join("\n\n");
    } catch (error) {
      text = error.message;
    }
    this.isReading = false;
    const isAtEnd = this.logs.scrollTop + this.logs.clientHeight >= this.logs.scrollHeight - 4;
    setText(this.logs, text || "it has said nothing");
    if (isAtEnd) this.logs.scrollTop = this.logs.scrollHeight;
  }
}

function stateOf(host) {
  if (host.busy) return ["waiting", `${host.busy} is under way`];
  if (host.isReached === null) return ["waiting", "is being looked at"];
  if (!host.isReached) return ["stopped", "not reached"];
  if (!host.servers && !host.isClient) return ["waiting", "reached; the file has nothing run there"];
  if (!host.units.length) return ["waiting", "reached; what runs there is not known"];
  const running = host.units.filter((unit) => unit.isRunning).length;
  if (running === host.units.length) return ["training", "runs"];
  if (host.units.some((unit) => !unit.isWell && unit.since)) return ["stopped", "something there has failed"];
  return ["waiting", running ? "a part of it runs" : "does not run"];
}

function factsOf(host) {
  const servers = host.servers === 1 ? "1 server" : `${whole(host.servers)} servers`;
  const parts = [`ssh ${host.ssh}`, host.isClient ? `client, ${servers}` : servers, `device ${host.device}`];
  if (host.system) parts.push(host.system);
  if (host.gpus) parts.push(host.gpus === 1 ? "1 NVIDIA GPU" : `${whole(host.gpus)} NVIDIA GPUs`);
  if (host.freeKb !== null) parts.push(`${whole(host.freeKb / 1048576)} GiB free`);
  if (host.version) parts.push(`shoal ${host.version}`);
  return parts.join(" · ");
}

function unitLine(unit) {
  const state = unit.isRunning ? `runs since ${day(unit.since)}` : unit.state;
  const parts = [element("strong", {}, unit.name), ` ${state}`];
  if (unit.said) parts.push(element("q", {}, unit.said));
  return element("li", { "data-level": unit.isWell ? "INFO" : "ERROR" }, ...parts);
}

// What an order costs that takes something away; of one that does not, nothing.
function costOf(host, order) {
  if (order === "up") return "";
  if (host.isClient) return order === "down" ? "With its client the run ends. " : "With its client the run ends on all hosts, and another one begins. ";
  return order === "down" ? "Its servers leave the run. " : "Its servers leave the run and join it again. ";
}

async function answered(address, options = {}) {
  const answer = await fetch(address, { ...options, cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.status === 202 ? null : answer.json();
}

addPart("hosts", Hosts);
