// Drawings: courses, steps and the block map. Colours come from the style sheet.

let colours = {};

/** Reads the colours of the theme that is shown. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "soft", "line", "sunk", "accent", "prefill", "decode", "free", "cached", "shared", "owned"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** A canvas's context in CSS pixels, cleared; null while it is not in sight. */
function cleared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** A line over time with its area, newest at the right. */
export function drawCourse(canvas, { values, most }, colour = "accent") {
  const drawn = cleared(canvas);
  if (!drawn) return;
  const { pen, width, height } = drawn, top = Math.max(...values.filter((value) => value != null), 0) * 1.15 || 1;
  const x = (at) => width - ((values.length - 1 - at) * width) / (most - 1);
  const y = (value) => height - 1 - (value / top) * (height - 3);
  let run = [];
  const flush = () => {
    if (run.length > 1) {
      pen.beginPath();
      run.forEach((at) => pen.lineTo(x(at), y(values[at])));
      pen.strokeStyle = colours[colour];
      pen.lineWidth = 1.5;
      pen.stroke();
      pen.lineTo(x(run.at(-1)), height);
      pen.lineTo(x(run[0]), height);
      pen.globalAlpha = 0.12;
      pen.fillStyle = colours[colour];
      pen.fill();
      pen.globalAlpha = 1;
    }
    run = [];
  };
  values.forEach((value, at) => (value == null ? flush() : run.push(at)));
  flush();
}

const BAR = 7, AXIS = 46, MOST_OF_MEDIAN = 5;

/** The last steps, newest at the right: height is time, colours are the shares of tokens. */
export function drawSteps(canvas, steps, label) {
  const drawn = cleared(canvas);
  if (!drawn) return;
  const { pen, width, height } = drawn;
  const shown = steps.slice(-Math.floor((width - AXIS) / BAR));
  const sorted = shown.map((step) => step.us).sort((one, other) => one - other);
  // A few long steps would make all others invisible: they are cut, and marked.
  const most = Math.min(sorted.at(-1) ?? 1, MOST_OF_MEDIAN * (sorted[sorted.length >> 1] ?? 1));
  const top = Math.max(most, 1) * 1.08;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(8 + (height - 16) * (1 - share)) + 0.5;
    pen.fillStyle = colours.line;
    pen.fillRect(AXIS, y, width - AXIS, 1);
    pen.fillStyle = colours.soft;
    pen.textAlign = "right";
    if (share) pen.fillText(label((share * top) / 1e6), AXIS - 6, y);
  }
  shown.forEach((step, at) => {
    const isCut = step.us > most, high = (Math.min(step.us, top) / top) * (height - 16), x = width - (shown.length - at) * BAR;
    const tokens = step.prefill + step.decode, prefill = tokens ? (high * step.prefill) / tokens : 0;
    pen.fillStyle = colours.decode;
    pen.fillRect(x, height - 8 - high + prefill, BAR - 1, high - prefill);
    pen.fillStyle = colours.prefill;
    pen.fillRect(x, height - 8 - high, BAR - 1, prefill);
    if (isCut) pen.clearRect(x, 14, BAR - 1, 3);
  });
}

function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** How many cells stand in a row of a width, so that the map is a few rows of squares. */
function columnsOf(numCells, width) {
  for (const size of [16, 14, 12, 10, 9, 8, 7, 6, 5, 4]) {
    const columns = Math.floor(width / size);
    if (Math.ceil(numCells / columns) * size <= 220 || size === 4) return { columns, size };
  }
}

/** The blocks: each cell has the mixture of the colours of what its blocks are. */
export function drawBlocks(canvas, cells) {
  const numCells = cells.length / 3, width = canvas.clientWidth;
  if (!width) return;
  const { columns, size } = columnsOf(numCells, width);
  const height = `${Math.ceil(numCells / columns) * size}px`;
  if (canvas.style.height !== height) canvas.style.height = height;
  const drawn = cleared(canvas);
  if (!drawn) return;
  const parts = ["owned", "shared", "cached", "free"].map((name) => rgb(colours[name]));
  for (let cell = 0; cell < numCells; cell++) {
    const shares = [cells[3 * cell], cells[3 * cell + 1], cells[3 * cell + 2]];
    shares.push(255 - Math.min(255, shares[0] + shares[1] + shares[2]));
    const total = shares.reduce((sum, share) => sum + share, 0);
    const mixed = [0, 1, 2].map((part) => Math.round(shares.reduce((sum, share, at) => sum + share * parts[at][part], 0) / total));
    drawn.pen.fillStyle = `rgb(${mixed.join()})`;
    drawn.pen.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
  }
}
