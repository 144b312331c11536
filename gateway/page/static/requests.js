// The live requests as rows that move through queue, grammar, prefill and decode.

import { byId, el, setText } from "./dom.js";

const STAGES = ["q", "g", "p", "d"];
const NAMES = { q: "queue", g: "grammar", p: "prefill", d: "decode", e: "preempted", w: "worker away", k: "KV", "?": "unknown" };

class Row {
  constructor() {
    this.track = STAGES.map((stage) => el("i", { class: `s-${stage}` }, el("b", { hidden: true })));
    this.cells = Array.from({ length: 8 }, (_, at) => el("td", { class: ["state", "id", "tenant", "num", "num", "num", "num", "num"][at] }));
    this.root = el("tr", {}, el("td", {}, el("span", { class: "track", "aria-hidden": "true" }, ...this.track)), ...this.cells);
    this.stage = "";
  }

  show({ phase, tokens, computed, blocks, fact, timeS }) {
    const { id = "", tenant = "", prompt = tokens, cached = null, arrived_s: arrivedS = timeS } = fact ?? {};
    if (phase !== this.stage) this.#move(phase, tokens > prompt);
    const share = Math.min(1, computed / Math.max(tokens, 1));
    if (phase === "p") this.track[2].firstChild.style.setProperty("--share", share.toFixed(3));
    const texts = [
      phase === "p" ? `prefill ${Math.round(100 * share)} %` : NAMES[phase], id, tenant || "–", `${prompt}`,
      cached == null ? "" : `${cached}`, `${Math.max(tokens - prompt, 0)}`, `${blocks}`, `${Math.max(timeS - arrivedS, 0).toFixed(1)} s`,
    ];
    texts.forEach((text, at) => setText(this.cells[at], text));
    if (this.cells[1].title !== id) this.cells[1].title = id;
  }

  #move(phase, hasOutput) {
    this.stage = phase;
    const isLost = phase === "e" || phase === "w";
    this.root.className = isLost ? "lost" : "";
    // One that lost its slot stands again before the prefill, which computes its tokens anew.
    const before = isLost ? (hasOutput ? "p" : "q") : phase === "k" ? "q" : phase;
    const now = STAGES.indexOf(before);
    this.track.forEach((cell, at) => {
      cell.classList.toggle("past", at < now && STAGES[at] !== "g");
      cell.classList.toggle("now", at === now);
      cell.firstChild.hidden = at > now || (at < now && STAGES[at] === "g");
      cell.firstChild.style.setProperty("--share", "1");
    });
  }
}

/** The table. */
export class Requests {
  constructor() {
    this.rows = new Map();
    this.body = byId("rows");
  }

  /** Shows a frame's requests, in its order. */
  show(frame, factsOf) {
    const shown = [], before = this.rows;
    this.rows = new Map();
    for (const group of frame.groups) {
      const { number = [], phase = "", tokens, computed, blocks } = group.requests ?? {};
      const facts = factsOf(group.address, number);
      number.forEach((one, at) => {
        const key = `${group.address} ${one}`, row = before.get(key) ?? new Row();
        row.show({ phase: phase[at], tokens: tokens[at], computed: computed[at], blocks: blocks[at], fact: facts.get(one), timeS: frame.time_s });
        this.rows.set(key, row);
        shown.push(row.root);
      });
    }
    const { children } = this.body;
    if (children.length !== shown.length || shown.some((row, at) => children[at] !== row)) this.body.replaceChildren(...shown);
    byId("no-rows").hidden = shown.length > 0;
    const total = frame.totals.num_running + frame.totals.num_waiting, hidden = total - shown.length;
    setText(byId("requests-text"), `${frame.totals.num_running} running, ${frame.totals.num_waiting} waiting${hidden > 0 ? `, ${hidden} of them not shown` : ""}`);
  }
}
