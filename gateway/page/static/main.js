// Starts the page: views, theme, key, and what stands at the top.

import { ApiError, call, key } from "./api.js";
import { readColours } from "./canvas.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { count } from "./figures.js";
import { Live } from "./live.js";
import { theme } from "./store.js";
import { System } from "./system.js";

const VIEWS = ["chat", "system"], THEMES = ["auto", "light", "dark"], MODEL_RETRY_MS = 2000;

// --- views -----------------------------------------------------------------------------------------

const system = new System();

function show(view, isFocused = false) {
  for (const name of VIEWS) {
    const isShown = name === view;
    byId(`view-${name}`).hidden = !isShown;
    byId(`tab-${name}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${name}`).tabIndex = isShown ? 0 : -1;
  }
  if (isFocused) byId(`tab-${view}`).focus();
  if (location.hash !== `#${view}`) history.replaceState(null, "", `#${view}`);
  if (view === "system") system.draw();
}

for (const [at, view] of VIEWS.entries()) {
  byId(`tab-${view}`).addEventListener("click", () => show(view));
  byId(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) show(VIEWS[(at + step + VIEWS.length) % VIEWS.length], true);
  });
}

const viewOfPlace = () => VIEWS.find((view) => location.hash === `#${view}`) ?? VIEWS[0];
addEventListener("hashchange", () => show(viewOfPlace()));

// --- theme -----------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const chosen = THEMES.includes(theme.get()) ? theme.get() : "auto";
  const shown = chosen === "auto" ? (prefersDark.matches ? "dark" : "light") : chosen;
  document.documentElement.dataset.theme = shown;
  setText(byId("theme"), chosen[0].toUpperCase() + chosen.slice(1));
  byId("theme").setAttribute("aria-label", `Theme: ${{ auto: "automatic" }[chosen] ?? chosen}`);
  readColours();
  system.draw();
}

byId("theme").addEventListener("click", () => {
  theme.set(THEMES[(THEMES.indexOf(theme.get()) + 1) % THEMES.length]);
  applyTheme();
});
prefersDark.addEventListener("change", applyTheme);
applyTheme();

// --- key -------------------------------------------------------------------------------------------

function askForKey(why) {
  if (why) setText(byId("key-why"), why);
  byId("key").value = key.get();
  byId("forget-key").hidden = !key.get();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("open-key").addEventListener("click", () => askForKey());
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // else the form's first button counts as pressed
  byId("key-dialog").close("save");
});
byId("key-dialog").addEventListener("close", () => {
  const { returnValue: answer } = byId("key-dialog");
  if (answer === "save") key.set(byId("key").value.trim());
  if (answer === "forget") key.set("");
  byId("key").value = "";
  if (answer !== "save" && answer !== "forget") return;
  start();
});

// --- chat ------------------------------------------------------------------------------------------

const chat = new Chat(() => askForKey("This server asks for a key."));

function toggle(button, isOpen, apply) {
  byId(button).setAttribute("aria-expanded", String(isOpen));
  apply(isOpen);
}

const showSettings = (isOpen) => byId("view-chat").classList.toggle("no-settings", !isOpen);
const isOpenNow = (button) => byId(button).getAttribute("aria-expanded") === "true";
byId("open-settings").addEventListener("click", () => toggle("open-settings", !isOpenNow("open-settings"), showSettings));
byId("open-side").addEventListener("click", () => toggle("open-side", !isOpenNow("open-side"), (isOpen) => byId("side").classList.toggle("open", isOpen)));
if (innerWidth <= 1080) toggle("open-settings", false, showSettings);

let asking = 0;

async function loadModel() {
  const mine = ++asking;
  for (;;) {
    try {
      const { data } = await (await call("v1/models")).json();
      if (mine !== asking) return;
      chat.use(data);
      if (data.length) return;
    } catch (error) {
      if (mine !== asking) return;
      if (error.status === 401) return askForKey(key.get() ? "This server does not know the key." : "This server asks for a key.");
      if (!(error instanceof ApiError)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, MODEL_RETRY_MS));
  }
}

// --- live ------------------------------------------------------------------------------------------

function strip(state, text) {
  byId("lamp").className = `lamp ${state}`;
  setText(byId("strip-text"), text);
}

function explain(text) {
  byId("no-live").hidden = !text;
  setText(byId("no-live"), text);
}

const live = new Live({
  hello: (body) => system.hello(body),
  frame: (body) => {
    explain("");
    system.take(body, (address, numbers) => live.factsOf(address, numbers));
    const { rates, totals, used, numBlocks } = system.now;
    const shares = `${count(rates.num_output_tokens)} tokens/s · ${totals.num_running} running · ${totals.num_waiting} waiting · KV ${numBlocks ? Math.round((100 * used) / numBlocks) : 0} %`;
    if (body.ready) strip("good", shares);
    else strip("bad", "worker away: requests wait and go on");
  },
  away: ({ reason }) => {
    strip("bad", reason);
    explain(`No live view: ${reason}.`);
  },
  lost: (error) => {
    const why = { 403: "the live view needs a key with the role operator", 401: "the live view needs a key" }[error.status];
    strip(why ? "" : "bad", why ? "" : error.message);
    explain(`No live view: ${why ?? error.message}`);
  },
});

function start() {
  loadModel();
  live.restart();
}

show(viewOfPlace());
start();
