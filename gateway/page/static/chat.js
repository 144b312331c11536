// The chat: sends, streams, stops, and keeps its history.

import { ApiError, call, events } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { MessageView } from "./message.js";
import { contentOf, Pictures } from "./pictures.js";
import { Settings } from "./settings.js";
import { curl, python, showCode } from "./snippets.js";
import { Chats } from "./store.js";

const MAX_TITLE = 60;

export class Chat {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.chats = new Chats();
    this.settings = new Settings();
    this.model = "";
    this.chat = this.chats.create();
    this.stopper = null; // while an answer comes
    this.log = byId("messages");
    this.prompt = byId("prompt");
    this.pictures = new Pictures();
    this.#listen();
    this.#showChats();
    this.#showMessages();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("input", () => this.#grow());
    byId("stop").addEventListener("click", () => this.stop());
    byId("view-chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("new-chat").addEventListener("click", () => this.open(this.chats.create()));
    byId("clear-chats").addEventListener("click", () => {
      if (!confirm("Delete all chats of this browser?")) return;
      this.chats.clear();
      this.open(this.chats.create());
    });
  }

  #grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }

  /** Takes what the server says of its models. */
  use(models) {
    const [model] = models;
    this.model = model?.id ?? "";
    setText(byId("model-name"), model ? `${model.id} · ${model.max_model_len} tokens` : "no model yet");
    this.settings.show(model?.sampling_defaults ?? {});
  }

  /** Shows another chat. */
  open(chat) {
    this.stop();
    this.chat = chat;
    this.#showChats();
    this.#showMessages();
    byId("side").classList.remove("open");
    byId("open-side").setAttribute("aria-expanded", "false");
    this.prompt.focus();
  }

  #showChats() {
    byId("clear-chats").hidden = !this.chats.all.length;
    byId("chats").replaceChildren(...this.chats.all.map((chat) => {
      const isCurrent = chat.id === this.chat.id;
      const name = chat.title || "New chat";
      return el("li", { class: isCurrent ? "current" : "" },
        el("button", { class: "title", title: name, "aria-current": isCurrent && "true", onclick: () => this.open(chat) }, name),
        el("button", { class: "remove", "aria-label": `Delete ${name}`, onclick: () => this.#remove(chat) }, "×"));
    }));
  }

  #remove(chat) {
    this.chats.remove(chat.id);
    if (chat.id === this.chat.id) this.open(this.chats.create());
    else this.#showChats();
  }

  #showMessages() {
    const views = this.chat.messages.map((message) => this.#view(message).root);
    const hint = el("div", { class: "hint" }, el("strong", {}, "Ask the model"), "Enter sends, Shift+Enter begins a line, Escape stops.");
    this.log.replaceChildren(...(views.length ? views : [hint]));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #view(message) {
    if (message.role === "user") return new MessageView(message);
    return new MessageView(message, [
      ["Again", () => this.#again(message)],
      ["curl", () => showCode("This call with curl", curl(this.#bodyBefore(message)))],
      ["Python", () => showCode("This call with Python", python(this.#bodyBefore(message)))],
    ]);
  }

  #bodyBefore(message) {
    return message.call ?? this.#body(this.chat.messages.indexOf(message));
  }

  #body(end) {
    const said = this.chat.messages.slice(0, end).filter((one) => one.role === "user" || one.content);
    return this.settings.body(this.model, said.map((one) => ({ role: one.role, content: contentOf(one) })));
  }

  #again(message) {
    if (this.stopper) return;
    this.chat.messages.length = this.chat.messages.indexOf(message);
    this.#showMessages();
    this.#answer();
  }

  /** Sends what is in the field. */
  send() {
    const content = this.prompt.value;
    if (!(content.trim() || this.pictures.all.length) || this.stopper) return;
    const pictures = this.pictures.take();
    this.prompt.value = "";
    this.#grow();
    if (!this.chat.messages.length) this.log.replaceChildren();
    this.chat.title ||= (content.trim() || pictures[0].name).slice(0, MAX_TITLE);
    const message = { role: "user", content, pictures };
    this.chat.messages.push(message);
    this.log.append(this.#view(message).root);
    this.#answer();
  }

  /** Ends the answer that comes, if one does. */
  stop() {
    this.stopper?.abort();
  }

  async #answer() {
    const chat = this.chat, message = { role: "assistant", content: "", call: this.#body(chat.messages.length) };
    chat.messages.push(message);
    const view = this.#view(message);
    this.log.append(view.root);
    this.chats.keep(chat);
    this.#showChats();
    this.stopper = new AbortController();
    byId("send").hidden = true;
    byId("stop").hidden = false;
    try {
      await this.#stream(message, view, this.stopper.signal);
    } catch (error) {
      if (error.name === "AbortError") message.stats = { ...message.stats, end: "you" };
      else message.problem = error instanceof ApiError ? error.message : `The answer broke off: ${error.message}`;
      if (error.status === 401) this.askForKey();
    } finally {
      this.stopper = null;
      byId("send").hidden = false;
      byId("stop").hidden = true;
      view.refresh();
      this.#follow();
      if (this.chats.find(chat.id)) this.chats.keep(chat);
      this.#showChats();
    }
  }

  async #stream(message, view, signal) {
    const began = performance.now();
    const answer = await call("v1/chat/completions", {
      body: { ...message.call, stream: true, stream_options: { include_usage: true } }, signal,
    });
    const meter = new Meter(began);
    let isDue = false;
    const show = () => {
      isDue = false;
      if (signal.aborted || !this.stopper) return;
      message.stats = meter.stats();
      view.refresh(true);
      this.#follow();
    };
    show();
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") break;
      take(JSON.parse(data), message, meter);
      if (isDue) continue;
      isDue = true;
      requestAnimationFrame(show); // a screen shows no more than one text at a time
    }
    message.stats = meter.stats();
  }

  /** Scrolls with the answer, unless the reader has scrolled away. */
  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 160) this.log.scrollTop = scrollHeight;
  }
}

function take(chunk, message, meter) {
  if (chunk.error) throw new ApiError(0, chunk.error.message, chunk.error.code);
  if (chunk.usage) meter.usage = chunk.usage;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls) meter.token();
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const called of calls ?? []) message.content += called.function?.name ?? called.function?.arguments ?? "";
  if (choice.finish_reason) meter.end = choice.finish_reason;
}

/** Times one answer. */
class Meter {
  constructor(began) {
    this.began = began;
    this.count = 0; // of messages with tokens, until the server says how many tokens there are
  }

  token() {
    this.last = performance.now();
    this.first ??= this.last;
    this.count += 1;
  }

  stats() {
    const tokens = this.usage?.completion_tokens ?? this.count;
    const seconds = (this.last - this.first) / 1e3;
    return {
      ttft_ms: this.first == null ? null : this.first - this.began,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0,
      tokens,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      end: this.end,
    };
  }
}
