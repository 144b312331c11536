// Pictures for the next message: chosen, dropped or pasted, and sent as data: URLs.

import { byId, el } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve({ name: file.name || "picture", url: reader.result }));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

export class Pictures {
  constructor() {
    this.all = [];
    this.list = byId("pictures");
    const composer = byId("composer"), chooser = byId("picture-file");
    byId("picture").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.#add(chooser.files);
      chooser.value = "";
    });
    composer.addEventListener("dragover", (event) => event.preventDefault());
    composer.addEventListener("drop", (event) => {
      event.preventDefault();
      this.#add(event.dataTransfer?.files);
    });
    composer.addEventListener("paste", (event) => this.#add(event.clipboardData?.files));
  }

  async #add(files) {
    const pictures = [...(files ?? [])].filter((file) => TYPES.includes(file.type));
    this.all.push(...await Promise.all(pictures.map(read)));
    this.#show();
  }

  #show() {
    this.list.hidden = !this.all.length;
    this.list.replaceChildren(...this.all.map((picture) => el("li", {}, picture.name,
      el("button", { type: "button", class: "quiet", "aria-label": `Leave out ${picture.name}`, onclick: () => this.#remove(picture) }, "×"))));
  }

  #remove(picture) {
    this.all = this.all.filter((other) => other !== picture);
    this.#show();
  }

  /** The pictures, which are no longer kept for the next message. */
  take() {
    const taken = this.all;
    this.all = [];
    this.#show();
    return taken;
  }
}

/** The content of a turn in OpenAI's form: its pictures, then its text. */
export function contentOf({ content, pictures }) {
  if (!pictures?.length) return content;
  const shown = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return [...shown, { type: "text", text: content }];
}
