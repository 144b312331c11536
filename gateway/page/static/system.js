// The running system: tiles, steps, requests, sessions, blocks and workers of each frame.

import { drawBlocks, drawCourse, drawSteps } from "./canvas.js";
import { byId, el, setText } from "./dom.js";
import { Course, Quantiles, Rates, count, duration } from "./figures.js";
import { Requests } from "./requests.js";
import { Sessions } from "./sessions.js";
import { Workers } from "./workers.js";

const KEPT_STEPS = 400, SAY_EVERY_MS = 5000;
const TILES = ["Output", "Requests", "Time to first token", "Between tokens", "Prefix hits", "KV blocks"];

export class System {
  constructor() {
    this.requests = new Requests();
    this.sessions = new Sessions();
    this.workers = new Workers();
    this.maps = new Map();
    this.saidAt = 0;
    this.tiles = TILES.map((title) => {
      const parts = { value: el("p", { class: "value" }), sub: el("p", { class: "sub" }), canvas: el("canvas", { "aria-hidden": "true" }) };
      byId("tiles").append(el("div", { class: "tile" }, el("h2", {}, title), parts.value, parts.sub, parts.canvas));
      return parts;
    });
    this.forget();
  }

  /** Begins anew: another scheduler counts from 0. */
  forget() {
    this.steps = [];
    this.rates = new Rates();
    this.hits = new Rates(30);
    this.ttft = new Quantiles();
    this.itl = new Quantiles();
    this.courses = TILES.map((_, at) => new Course(at === 2 || at === 3 ? 1 : 0.5));
    this.latency = {};
  }

  /** What is said once. */
  hello({ is_demo: isDemo, bounds_s: bounds }) {
    byId("demo").hidden = !isDemo;
    this.bounds = bounds;
    this.forget();
  }

  /** Takes in a frame; draws it if the view is in sight. */
  take(frame, factsOf) {
    this.#count(frame);
    this.workers.show(frame.groups);
    this.sessions.show(frame);
    for (const group of frame.groups) {
      for (const [id, num, prefill, decode, rows, us] of group.steps ?? []) this.steps.push({ id, num, prefill, decode, rows, us: us / num });
    }
    this.steps.splice(0, this.steps.length - KEPT_STEPS);
    this.frame = frame;
    this.factsOf = factsOf;
    if (!byId("view-system").hidden) this.draw();
  }

  #count({ time_s: timeS, totals, groups, ttft, itl }) {
    const rates = this.rates.add(timeS, totals), slow = this.hits.add(timeS, totals);
    if (ttft) this.latency = { ttft: this.ttft.add(timeS, ttft, this.bounds), itl: this.itl.add(timeS, itl, this.bounds) };
    const sum = (name) => groups.reduce((total, group) => total + group[name], 0);
    const numBlocks = sum("num_blocks"), used = numBlocks - sum("num_free_blocks");
    const lookedUp = slow.prefix_query_tokens;
    this.now = {
      rates, totals, numBlocks, used, losses: sum("num_losses"),
      hitShare: lookedUp ? slow.prefix_hit_tokens / lookedUp : null,
    };
    const points = [
      rates.num_output_tokens, totals.num_running + totals.num_waiting, this.latency.ttft?.(0.5) ?? null,
      this.latency.itl?.(0.5) ?? null, this.now.hitShare, used,
    ];
    points.forEach((point, at) => this.courses[at].add(timeS, point));
  }

  /** Draws what is known. */
  draw() {
    if (!this.frame) return;
    this.#drawTiles();
    this.requests.show(this.frame, this.factsOf);
    drawSteps(byId("steps"), this.steps, duration);
    const last = this.steps.at(-1);
    setText(byId("steps-text"), last ? `step ${count(last.id)}: ${last.rows} rows, ${last.prefill} prefill and ${last.decode} decode tokens, ${duration(last.us / 1e6)}` : "no step yet");
    this.#drawMaps();
    if (performance.now() > this.saidAt + SAY_EVERY_MS) this.#describe();
  }

  #drawTiles() {
    const { rates, totals, numBlocks, used, losses, hitShare } = this.now;
    const { ttft, itl } = this.latency, tail = (of) => (of ? `p95 ${duration(of(0.95))}, last 10 s` : "none in the last 10 s");
    const share = (value) => (value == null ? "–" : `${Math.round(100 * value)} %`);
    const texts = [
      [count(rates.num_output_tokens), "tokens/s", `${count(rates.num_prefill_tokens)} prompt tokens/s`],
      [count(totals.num_running), `of ${this.frame.max_num_seqs}`, `${count(totals.num_waiting)} waiting, ${count(totals.num_finished)} ended`],
      [duration(ttft?.(0.5)), "p50", tail(ttft)],
      [duration(itl?.(0.5)), "p50", tail(itl)],
      [share(hitShare), "of prompts", `${count(totals.prefix_hit_tokens)} tokens since the start`],
      [share(numBlocks ? used / numBlocks : null), `of ${count(numBlocks)}`, `${count(totals.num_preemptions)} preemptions, ${count(losses)} ${losses === 1 ? "recovery" : "recoveries"}`],
    ];
    this.tiles.forEach(({ value, sub, canvas }, at) => {
      const [main, unit, more] = texts[at];
      if (!value.firstChild) value.append(el("span"), " ", el("small"));
      setText(value.firstChild, main);
      setText(value.lastChild, unit);
      setText(sub, more);
      drawCourse(canvas, this.courses[at]);
    });
  }

  #drawMaps() {
    let used = 0, total = 0;
    for (const { address, blocks, num_free_blocks: free } of this.frame.groups) {
      if (!blocks) continue;
      let map = this.maps.get(address);
      if (!map) {
        map = { canvas: el("canvas", { role: "img", class: "block-map", "aria-label": `KV blocks of ${address}` }), text: el("p") };
        byId("maps").append(el("div", { class: "map" }, map.text, map.canvas));
        this.maps.set(address, map);
      }
      setText(map.text, `${this.frame.groups.length > 1 ? `${address}: ` : ""}a cell is ${blocks.blocks_per_cell === 1 ? "a block" : `${blocks.blocks_per_cell} blocks`} of ${this.frame.block_size} tokens`);
      drawBlocks(map.canvas, Uint8Array.from(atob(blocks.cells), (char) => char.charCodeAt(0)));
      used += blocks.num_blocks - free;
      total += blocks.num_blocks;
      map.label = `${blocks.num_blocks - free} of ${blocks.num_blocks} KV blocks of ${address} are in use`;
    }
    setText(byId("blocks-text"), `${count(used)} of ${count(total)}`);
  }

  /** Says in words what the drawings show: now and then, so that it can be read. */
  #describe() {
    this.saidAt = performance.now();
    const last = this.steps.at(-1);
    byId("steps").setAttribute("aria-label", last ? `The last ${this.steps.length} steps; the newest took ${duration(last.us / 1e6)}` : "No steps yet");
    for (const { canvas, label } of this.maps.values()) canvas.setAttribute("aria-label", label);
  }
}
