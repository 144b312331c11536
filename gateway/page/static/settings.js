// The settings of a call: fields that are empty are not sent.

import { byId, el } from "./dom.js";
import { settings as kept } from "./store.js";

// A step of 1 is a number without a fraction; all others take any.
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.05, max: 2 },
];

/** The settings and their fields on the page. */
export class Settings {
  constructor() {
    this.values = kept.get();
    this.defaults = {};
    byId("reset-settings").addEventListener("click", () => {
      this.values = {};
      kept.set({});
      this.show(this.defaults);
    });
    this.show({});
  }

  /** Builds the fields; `defaults` are those of the server, for models that have some. */
  show(defaults) {
    this.defaults = defaults;
    const numbers = NUMBERS.map((one) => this.#number(one, defaults[one.name]));
    const pairs = [];
    for (let at = 0; at < numbers.length; at += 2) {
      pairs.push(el("div", { class: "pair" }, ...numbers.slice(at, at + 2)));
    }
    byId("setting-fields").replaceChildren(this.#text("system", "System prompt"), ...pairs, this.#text("stop", "Stop strings, one a line", 2));
  }

  #number({ name, label, step = "any", ...bounds }, byDefault) {
    const input = el("input", {
      type: "number", id: `set-${name}`, placeholder: byDefault ?? "default", ...bounds, step,
      oninput: () => this.#keep(name, input.value === "" || !input.checkValidity() ? undefined : Number(input.value), input),
    });
    input.value = this.values[name] ?? "";
    return el("label", { for: `set-${name}` }, label, input);
  }

  #text(name, label, rows = 4) {
    const area = el("textarea", { id: `set-${name}`, rows, oninput: () => this.#keep(name, area.value || undefined, area) });
    area.value = this.values[name] ?? "";
    return el("label", { for: `set-${name}` }, label, area);
  }

  #keep(name, value, input) {
    input.setAttribute("aria-invalid", String(!input.checkValidity()));
    if (value === undefined) delete this.values[name];
    else this.values[name] = value;
    kept.set(this.values);
  }

  /** The body of a call with these messages. */
  body(model, messages) {
    const { system, stop, ...sampling } = this.values;
    const known = Object.fromEntries(NUMBERS.filter(({ name }) => name in sampling).map(({ name }) => [name, sampling[name]]));
    const strings = (stop ?? "").split("\n").filter(Boolean);
    return {
      ...(model ? { model } : {}),
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      ...known,
      ...(strings.length ? { stop: strings } : {}),
    };
  }
}
