// Agents' sessions: their turns, what the cache holds of them, and how much of their prompts it found.

import { byId, el, setText } from "./dom.js";
import { count, duration } from "./figures.js";

const CLASSES = ["state", "id", "tenant", "", "num", "num", "num", "num"];

/** The table; out of sight where no session is known. */
export class Sessions {
  constructor() {
    this.rows = [];
  }

  /** Shows a frame's sessions, in its order; most frames say nothing of them. */
  show(frame) {
    const { sessions } = frame;
    if (!sessions) return;
    byId("sessions").hidden = !sessions.length;
    while (this.rows.length < sessions.length) {
      const cells = CLASSES.map((name) => el("td", name ? { class: name } : {}));
      this.rows.push({ cells, root: el("tr", {}, ...cells) });
    }
    sessions.forEach((session, at) => this.#fill(this.rows[at].cells, session));
    const shown = this.rows.slice(0, sessions.length).map((row) => row.root), { children } = byId("session-rows");
    if (children.length !== shown.length) byId("session-rows").replaceChildren(...shown);
    const [prompts, found] = [7, 8].map((at) => sessions.reduce((sum, session) => sum + session[at], 0));
    const share = prompts ? `, ${Math.round((100 * found) / prompts)} % of their prompts found` : "";
    setText(byId("sessions-text"), `${sessions.length} with the latest turns${share}`);
  }

  #fill(cells, [address, id, tenant, state, turns, held, idleS, prompts, found]) {
    const share = prompts ? `${Math.round((100 * found) / prompts)} %` : "–";
    const texts = [state, id || "without a name", tenant || "–", address, `${turns}`, `${count(held)} tokens`, share, idleS ? duration(idleS) : "–"];
    texts.forEach((text, at) => setText(cells[at], text));
    if (cells[1].title !== id) cells[1].title = id;
  }
}
