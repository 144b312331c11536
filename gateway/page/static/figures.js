// Numbers over time: what happened between two frames, and how long things took.

const KEPT_S = 90;

/** Rates of counters that only grow; a counter that falls begins anew. */
export class Rates {
  constructor(windowS = 1) {
    this.windowS = windowS;
    this.past = [];
  }

  /** Adds the counters at a time; returns each one's growth per second over the window. */
  add(timeS, counters) {
    const last = this.past.at(-1);
    if (last && (timeS < last.timeS || counters.num_steps < last.counters.num_steps)) this.past = [];
    this.past.push({ timeS, counters });
    while (this.past.length > 2 && this.past[1].timeS <= timeS - this.windowS) this.past.shift();
    const [first] = this.past, seconds = timeS - first.timeS;
    return Object.fromEntries(Object.entries(counters).map(([name, value]) =>
      [name, seconds > 0 ? (value - first.counters[name]) / seconds : 0]));
  }
}

/** Quantiles of a histogram's last seconds, from its counts since the start. */
export class Quantiles {
  constructor(windowS = 10) {
    this.windowS = windowS;
    this.past = [];
  }

  /** Adds the counts at a time; returns a function from a share to seconds, or null without any. */
  add(timeS, counts, bounds) {
    const last = this.past.at(-1);
    if (last && (timeS < last.timeS || counts.some((count, at) => count < last.counts[at]))) this.past = [];
    this.past.push({ timeS, counts });
    while (this.past.length > 2 && this.past[1].timeS <= timeS - this.windowS) this.past.shift();
    const first = this.past[0].counts;
    const grown = counts.map((count, at) => count - first[at]);
    const total = grown.reduce((sum, count) => sum + count, 0);
    return total ? (share) => quantile(grown, bounds, share * total) : null;
  }
}

function quantile(counts, bounds, rank) {
  let before = 0;
  for (const [at, count] of counts.entries()) {
    if (count && before + count >= rank) {
      const low = at ? bounds[at - 1] : 0, high = bounds[at] ?? bounds.at(-1);
      return low + (high - low) * ((rank - before) / count);
    }
    before += count;
  }
  return bounds.at(-1);
}

/** A number's course: one point per step of time, as long as the page keeps it. */
export class Course {
  constructor(stepS) {
    this.stepS = stepS;
    this.most = Math.round(KEPT_S / stepS);
    this.values = [];
    this.at = -Infinity;
  }

  /** Adds a value, unless the last point is younger than a step; null is a gap. */
  add(timeS, value) {
    if (timeS < this.at) this.values = [];
    if (timeS >= this.at && timeS < this.at + this.stepS) return;
    this.at = timeS;
    this.values.push(value);
    if (this.values.length > this.most) this.values.shift();
  }
}

/** 0.0123 as "12.3 ms". */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 10) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = seconds * 1e3;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

/** 12345.6 as "12,346", small numbers with a digit. */
export function count(value) {
  if (value == null) return "–";
  return value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
