// The workers with their state, what happened to them, and the kill switch of the demo.

import { call } from "./api.js";
import { byId, el, setText } from "./dom.js";

const MAX_EVENTS = 50;

export class Workers {
  constructor() {
    this.known = new Map(); // address to what was shown last
    byId("kill").addEventListener("click", () => this.#kill());
  }

  async #kill() {
    byId("kill").disabled = true;
    try {
      await call("v1/demo/kill-worker", { body: {} });
      this.tell("the page has killed the worker");
    } catch (error) {
      this.tell(`not killed: ${error.message}`);
    } finally {
      byId("kill").disabled = false;
    }
  }

  /** Adds a line to the events; readers of the screen hear it. */
  tell(text) {
    const time = new Date().toLocaleTimeString("en-GB");
    byId("events").prepend(el("li", {}, el("time", {}, time), el("span", {}, text)));
    while (byId("events").children.length > MAX_EVENTS) byId("events").lastChild.remove();
    setText(byId("news"), text);
  }

  /** Shows a frame's worker groups. */
  show(groups) {
    const items = groups.map((group) => this.#item(group));
    const list = byId("workers");
    if (list.children.length !== items.length || items.some((item, at) => list.children[at] !== item)) list.replaceChildren(...items);
    const numReady = groups.filter((group) => group.ready).length;
    setText(byId("workers-text"), `${numReady} of ${groups.length} ready`);
  }

  #item(group) {
    let known = this.known.get(group.address);
    if (!known) {
      const [lamp, address, state, more] = [el("span", { class: "lamp" }), el("span", { class: "address mono" }), el("strong"), el("span", { class: "more" })];
      known = { lamp, address, state, more, root: el("li", { class: "worker" }, lamp, address, state, more), losses: group.num_losses, ready: group.ready };
      this.known.set(group.address, known);
    }
    this.#notice(group, known);
    known.lamp.className = `lamp ${group.ready ? "good" : "bad"}`;
    setText(known.address, group.address);
    setText(known.state, group.ready ? "ready" : "away");
    known.root.dataset.state = group.ready ? "ready" : "away";
    const losses = `${group.num_losses} ${group.num_losses === 1 ? "recovery" : "recoveries"}`;
    known.more.title = group.reason;
    setText(known.more, group.ready ? `${[group.device, group.kv_cache_dtype && `KV in ${group.kv_cache_dtype}`, `term ${group.epoch}`, losses].filter(Boolean).join(", ")}` : group.reason);
    return known.root;
  }

  #notice(group, known) {
    if (group.num_losses > known.losses) {
      known.lostAt = performance.now();
      this.tell(`${group.address} is lost: ${group.why_lost}`);
    } else if (!known.ready && group.ready) {
      const after = known.lostAt ? ` after ${((performance.now() - known.lostAt) / 1e3).toFixed(1)} s` : "";
      const live = group.num_running + group.num_waiting;
      this.tell(`${group.address} is back${after}; ${live} request${live === 1 ? "" : "s"} go${live === 1 ? "es" : ""} on`);
    }
    [known.losses, known.ready] = [group.num_losses, group.ready];
  }
}
