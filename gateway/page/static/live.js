// The live stream: one connection while the page is in sight, and the state that it tells.

import { ApiError, call, events } from "./api.js";

const RETRY_MS = 1000, MOST_RETRY_MS = 8000;

/** Keeps the stream open; `on` gets {hello, frame, away, lost} as they come. */
export class Live {
  constructor(on) {
    this.on = on;
    this.facts = new Map(); // address to a map of number to facts
    this.stopper = null;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Begins anew: with another key, or since the page is seen again. */
  restart() {
    this.stopper?.abort();
    this.stopper = null;
    if (!document.hidden) this.#run((this.stopper = new AbortController()).signal);
  }

  async #run(signal) {
    for (let pause = RETRY_MS; !signal.aborted; pause = Math.min(2 * pause, MOST_RETRY_MS)) {
      try {
        const answer = await call("v1/live", { signal });
        for await (const event of events(answer)) {
          if (signal.aborted) return;
          this.#take(event.name, JSON.parse(event.data));
          pause = RETRY_MS;
        }
        throw new ApiError(0, "The server has closed the stream.");
      } catch (error) {
        if (signal.aborted) return;
        this.on.lost(error);
        if ([401, 403, 404].includes(error.status)) return; // until there is another key
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  #take(name, body) {
    if (name === "facts") this.#learn(body);
    else this.on[name]?.(body);
  }

  #learn({ all, groups }) {
    if (all) this.facts.clear();
    for (const [address, rows] of Object.entries(groups)) {
      const known = this.facts.get(address) ?? new Map();
      for (const [number, id, tenant, prompt, cached, arrived_s] of rows) {
        known.set(number, { id, tenant, prompt, cached, arrived_s });
      }
      this.facts.set(address, known);
    }
  }

  /** What is known of the requests of a group, by number; forgets those that have ended. */
  factsOf(address, numbers) {
    const known = this.facts.get(address) ?? new Map();
    if (known.size > 2 * Math.max(numbers.length, 64)) {
      const live = new Set(numbers);
      for (const number of known.keys()) if (!live.has(number)) known.delete(number);
    }
    return known;
  }
}
