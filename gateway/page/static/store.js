// Chats and settings, in this browser alone.

const CHATS = "pagewire.chats", SETTINGS = "pagewire.settings", THEME = "pagewire.theme";
const MAX_CHATS = 100;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // written by something else, or storage is closed to us
  }
}

function write(name, value) {
  try {
    // Pictures would take all the room: a chat that is opened again goes on without them.
    const without = (_, one) => (typeof one === "string" && one.startsWith("data:image/") ? "" : one);
    localStorage.setItem(name, JSON.stringify(value, without));
    return true;
  } catch {
    return false; // full: what is on the page stays on the page
  }
}

const isChat = (chat) =>
  typeof chat?.id === "string" && typeof chat.title === "string" && Array.isArray(chat.messages);

/** The chats, newest first. */
export class Chats {
  constructor() {
    const kept = read(CHATS, []);
    this.all = Array.isArray(kept) ? kept.filter(isChat) : [];
  }

  /** A new chat; it is kept with its first message. */
  create() {
    return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] };
  }

  find(id) {
    return this.all.find((chat) => chat.id === id);
  }

  /** Keeps a chat as the newest. */
  keep(chat) {
    this.all = [chat, ...this.all.filter((other) => other.id !== chat.id)].slice(0, MAX_CHATS);
    // The oldest go first where there is too little room.
    while (!write(CHATS, this.all) && this.all.length > 1) this.all.pop();
  }

  remove(id) {
    this.all = this.all.filter((chat) => chat.id !== id);
    write(CHATS, this.all);
  }

  clear() {
    this.all = [];
    localStorage.removeItem(CHATS);
  }
}

export const settings = {
  get: () => {
    const kept = read(SETTINGS, {});
    return kept && typeof kept === "object" ? kept : {};
  },
  set: (value) => write(SETTINGS, value),
};

export const theme = {
  get: () => read(THEME, "auto"),
  set: (value) => write(THEME, value),
};
