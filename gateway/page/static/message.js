// One message on the page.

import { el, setText, showText } from "./dom.js";

/** A message and, of an answer, what is known of its making. */
export class MessageView {
  constructor(message, acts = []) {
    this.message = message;
    this.text = el("div", { class: "text" });
    this.thoughts = el("div", { class: "text" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), this.thoughts);
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.numbers = el("span");
    const buttons = acts.map(([name, act]) => el("button", { type: "button", class: "quiet", onclick: () => act(message) }, name));
    this.meta = el("div", { class: "meta", hidden: true }, el("span", { class: "acts" }, ...buttons), this.numbers);
    const names = message.pictures?.map(({ name }) => name).join(", ");
    const shown = names ? el("p", { class: "shown" }, names) : null;
    const who = message.role === "user" ? "You" : "Model";
    this.root = el("article", { class: `message ${message.role}`, "aria-label": who }, el("p", { class: "who" }, who), shown, this.thinking, this.text, this.problem, this.meta);
    this.refresh();
  }

  /** Shows the message as it is now; `isOpen` while more is to come. */
  refresh(isOpen = false) {
    const { content, reasoning, problem, stats } = this.message;
    showText(this.text, content);
    this.text.classList.toggle("cursor", isOpen && !content);
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      showText(this.thoughts, reasoning);
      this.thinking.open = isOpen ? !content : this.thinking.open && !content;
    }
    this.problem.hidden = !problem;
    setText(this.problem, problem ?? "");
    this.meta.hidden = isOpen ? !stats : this.message.role === "user";
    setText(this.numbers, stats ? describe(stats) : "");
  }
}

function describe({ ttft_ms, rate, tokens, cached, end }) {
  return [
    ttft_ms == null ? null : `first token ${ttft_ms < 100 ? ttft_ms.toFixed(1) : Math.round(ttft_ms)} ms`,
    rate ? `${rate < 100 ? rate.toFixed(1) : Math.round(rate)} tokens/s` : null,
    tokens == null ? null : `${tokens} token${tokens === 1 ? "" : "s"}`,
    cached ? `${cached} of the prompt cached` : null,
    end && end !== "stop" ? `ended by ${end}` : null,
  ].filter(Boolean).join(" · ");
}
