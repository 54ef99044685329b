// The news, as the server sends them. Whatever breaks, it is tried again, and goes on after the last message that came.

const AGAIN_MS = 2000;
const NEXT_MS = 5000;

export class Feed {
  // `take(kind, data)` gets each message; `lost()` is called when the link breaks.
  constructor(take, lost) {
    this.take = take;
    this.lost = lost;
    this.last = "";
    // Whether another run may follow at the same address: where hosts are looked after.
    this.isLasting = false;
    this.open();
  }

  open() {
    this.source = new EventSource(`/events?after=${encodeURIComponent(this.last)}`);
    for (const kind of ["past", "row", "event", "tick"]) {
      this.source.addEventListener(kind, (message) => {
        if (message.lastEventId) this.last = message.lastEventId;
        this.take(kind, JSON.parse(message.data));
      });
    }
    this.source.addEventListener("end", () => {
      this.source.close();
      this.take("end", null);
      if (this.isLasting) setTimeout(() => this.open(), NEXT_MS);
    });
    this.source.addEventListener("error", () => {
      this.lost();
      // The browser itself tries again unless the answer was a refusal.
      if (this.source.readyState !== EventSource.CLOSED) return;
      setTimeout(() => this.open(), AGAIN_MS);
    });
  }
}
