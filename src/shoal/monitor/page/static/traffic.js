// Who sends and receives how much.

import { Chart, drawn } from "./charts.js";
import { FRESH_S } from "./store.js";
import { Table, byName, bytes, bytesPerSecond } from "./text.js";

const NAMES = { "traffic/sent_per_s": "sent", "traffic/received_per_s": "received" };

export class Traffic {
  constructor(section) {
    this.chart = new Chart(section, "Messages of all peers, bytes a second", bytesPerSecond);
    this.table = new Table(section, "Bytes by peer, since each was started", ["peer", "sent", "received", "sends", "receives"]);
  }

  update(store) {
    const curves = Object.keys(NAMES).filter((name) => store.curves.has(name));
    this.chart.show(curves.map((name) => drawn(NAMES[name], store.curves.get(name), 0, store.begunS)), "time");
    const peers = [...store.peers].filter(([, peer]) => !store.isGone(peer)).sort(([one], [other]) => byName(one, other));
    const written = (value, write) => (value === undefined ? "-" : write(value));
    this.table.show(
      peers.map(([name, { values, heardS }]) => ({
        key: name,
        href: `#peer/${encodeURIComponent(name)}`,
        old: !store.ended && store.age(heardS) >= FRESH_S,
        cells: [
          name,
          written(values["transport.sent_bytes"], bytes),
          written(values["transport.received_bytes"], bytes),
          written(values.sent_per_s, bytesPerSecond),
          written(values.received_per_s, bytesPerSecond),
        ],
      })),
    );
  }
}
