// Frequencies and scores of encodings that rotate pairs of channels, as torchrope computes them, and their figures.
"use strict";

const range = (count) => Array.from({ length: count }, (_, i) => i);
const sum = (values) => values.reduce((total, value) => total + value, 0);

// ---------------------------------------------------------------------------------------------------- Encodings
// Frequencies are arrays [axis][head][pair], in radians per unit of position, with one head if heads are equal.

function require(condition, message) {
  if (!condition) throw new RangeError(message);
}

function requireDivisible(pairs, divisor, rule) {
  require(pairs % divisor === 0, `head_dim must be divisible by ${rule} = ${2 * divisor}, got ${2 * pairs}`);
}

const geometric = (count, base) => range(count).map((t) => base ** (-t / count));

// Pair j belongs to axis j mod N, or to axis j div n if grouped.
function alongAxes(theta, axes, grouped) {
  const n = theta.length;
  return range(axes).map((axis) => [range(n * axes).map((j) =>
    (grouped ? Math.floor(j / n) : j % axes) === axis ? theta[grouped ? j % n : Math.floor(j / axes)] : 0)]);
}

function axial({ axes, pairs }, theta, grouped = false) {
  requireDivisible(pairs, axes, "2·num_axes");
  return alongAxes(theta(pairs / axes), axes, grouped);
}

// Uniform random rotations [head][axis][axis]: an angle for two axes, a unit quaternion for three.
function randomRotations(heads, axes, seed) {
  let state = Math.imul(seed, 0x9e3779b9);  // distant states for consecutive seeds
  const uniform = () => {  // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  return range(heads).map(() => {
    const [u, v, w] = [uniform(), 2 * Math.PI * uniform(), 2 * Math.PI * uniform()];
    if (axes === 1) return [[1]];
    if (axes === 2) return [[Math.cos(v), -Math.sin(v)], [Math.sin(v), Math.cos(v)]];
    const [a, b] = [Math.sin(v), Math.cos(v)].map((value) => value * Math.sqrt(1 - u));
    const [c, d] = [Math.sin(w), Math.cos(w)].map((value) => value * Math.sqrt(u));
    return [
      [1 - 2 * (b * b + c * c), 2 * (a * b - c * d), 2 * (a * c + b * d)],
      [2 * (a * b + c * d), 1 - 2 * (a * a + c * c), 2 * (b * c - a * d)],
      [2 * (a * c - b * d), 2 * (b * c + a * d), 1 - 2 * (a * a + b * b)],
    ];
  });
}

function mixed({ axes, heads, pairs, base, seed }) {
  const theta = (j) => base ** ((-Math.floor(j / axes) * axes) / pairs);  // of pair j, along axis j mod N
  const rotations = randomRotations(heads, axes, seed);
  return range(axes).map((axis) =>
    rotations.map((rotation) => range(pairs).map((j) => rotation[axis][j % axes] * theta(j))));
}

function golden({ axes, heads, pairs, min_frequency: low, max_frequency: high }) {
  require(0 < low && low <= high, `min_frequency must be above 0 and at most max_frequency = ${high}, got ${low}`);
  const omega = range(pairs).map((j) => low * (high / low) ** (pairs > 1 ? j / (pairs - 1) : 0));
  const spread = goldenDirections(heads * pairs, axes);
  return range(axes).map((axis) =>
    range(heads).map((head) => omega.map((value, j) => value * spread[head * pairs + j][axis])));
}

// Unit vectors [index][axis]: multiples of an angle for two axes, else a sequence in the cube, mapped to a Gaussian.
function goldenDirections(count, axes) {
  if (axes === 2) {
    const step = (2 * Math.PI) / (1 + Math.sqrt(5));  // π divided by the golden ratio
    return range(count).map((index) => [Math.cos(index * step), Math.sin(index * step)]);
  }
  let root = 2;  // of x^(N + 1) = x + 1
  for (let i = 0; i < 64; i++) root = (1 + root) ** (1 / (axes + 1));
  return range(count).map((index) => {
    const vector = range(axes).map((axis) => inverseErf(2 * (((index + 1) * root ** -(axis + 1)) % 1) - 1));
    return vector.map((value) => value / Math.hypot(...vector));
  });
}

// Newton's method from 0, which converges from one side: erf is concave above 0.
function inverseErf(y) {
  let x = 0;
  for (let i = 0; i < 40; i++) x -= ((erf(x) - y) * Math.sqrt(Math.PI) * Math.exp(x * x)) / 2;
  return x;
}

function erf(x) {
  let term = x, total = x;
  for (let n = 1; n < 200; n++) {
    term *= (-x * x) / n;
    total += term / (2 * n + 1);
  }
  return (2 * total) / Math.sqrt(Math.PI);
}

function spiral({ axes, pairs, base, num_directions: directions }) {
  require(axes === 2, `num_axes of SpiralRoPE must be 2, got ${axes}`);
  require(directions >= 2 && directions % 2 === 0, `num_directions must be even and 2 or more, got ${directions}`);
  requireDivisible(pairs, directions, "2·num_directions");
  const n = Math.max(Math.floor(pairs / 2), 1), theta = geometric(n, base), group = pairs / directions;
  return [Math.cos, Math.sin].map((along) => [range(pairs).map((j) => {
    const k = Math.floor(j / group), r = j % group;
    const t = 2 * (k % (directions / 2)) + directions * Math.floor(r / 2) + (r % 2);
    return along((k * Math.PI) / directions) * theta[Math.min(t, n - 1)];
  })]);
}

// Vertices of a regular simplex by number of axes, unit vectors with sum 0; one direction for one axis.
const SIMPLEX = {
  1: [[1]],
  2: [[1, 0], [-1 / 2, Math.sqrt(3) / 2], [-1 / 2, -Math.sqrt(3) / 2]],
  3: [[1, 0, 0], [-1 / 3, Math.sqrt(8) / 3, 0],
    [-1 / 3, -Math.sqrt(2) / 3, Math.sqrt(6) / 3], [-1 / 3, -Math.sqrt(2) / 3, -Math.sqrt(6) / 3]],
};

function nd({ axes, heads, pairs, base, seed }) {
  const vertices = SIMPLEX[axes], count = vertices.length;
  requireDivisible(pairs, count, axes > 1 ? "2·(num_axes + 1)" : "2");
  const theta = geometric(pairs / count, base), rotations = randomRotations(heads, axes, seed);
  return range(axes).map((axis) => rotations.map((rotation) => range(pairs).map((j) =>
    theta[Math.floor(j / count)] * sum(vertices[j % count].map((value, i) => value * rotation[axis][i])))));
}

// One sequence of frequencies for all axes; the order says which axis a pair belongs to.
function mrope({ axes, pairs, base }, order) {
  const fewest = Math.floor(pairs / axes), rest = pairs % axes;
  const section = (axis) => fewest + (axis < rest ? 1 : 0);
  const axisOfPair = {
    chunked: (j) => (j < rest * (fewest + 1) ? Math.floor(j / (fewest + 1)) : Math.floor((j - rest) / fewest)),
    interleaved: (j) => (j < axes * section(j % axes) ? j % axes : 0),
    video: (j) => (j < fewest * (axes - 1) ? 1 + (j % (axes - 1)) : 0),
  }[order];
  const theta = geometric(pairs, base);
  return range(axes).map((axis) => [theta.map((value, j) => (axisOfPair(j) === axis ? value : 0))]);
}

// Parameters have defaults by number of axes; extent is the length of the training input in units of position, as of
// `Encoding.lattice`, if these are not tokens.
const thousands = { base: () => 10_000 };
const ENCODINGS = {
  axial: { title: "RoPE-Axial (on one axis, RoPE)", parameters: { base: (axes) => 10_000 ** (1 / axes) },
    frequencies: (shape) => axial(shape, (n) => geometric(n, shape.base)) },
  mixed: { title: "RoPE-Mixed, at initialisation", parameters: { base: () => 10 }, random: true, frequencies: mixed },
  golden: { title: "Golden-gate RoPE", parameters: { min_frequency: () => 0.2, max_frequency: () => 20 }, extent: 2,
    frequencies: golden },
  dinov3: { title: "DINOv3", parameters: { base: () => 100 }, extent: 2,
    frequencies: (shape) => axial(shape, (n) => geometric(n, shape.base).map((f) => 2 * Math.PI * f), true) },
  spiral: { title: "Spiral RoPE", parameters: { num_directions: () => 4, base: () => 100 }, frequencies: spiral },
  nd: { title: "nD-RoPE", parameters: thousands, random: true, frequencies: nd },
  mrope: { title: "M-RoPE", parameters: thousands, frequencies: (shape) => mrope(shape, "chunked") },
  "mrope-interleaved": { title: "M-RoPE, interleaved", parameters: thousands,
    frequencies: (shape) => mrope(shape, "interleaved") },
  videorope: { title: "VideoRoPE", parameters: thousands, frequencies: (shape) => mrope(shape, "video") },
};

// Frequencies by name, in radians per token of a training input of `size` tokens per axis. The shape has axes, heads,
// pairs, size, seed, and the parameters that differ from their defaults.
function frequencies(name, shape) {
  const { parameters, extent } = ENCODINGS[name], full = { ...shape };
  for (const parameter of Object.keys(parameters)) full[parameter] ??= parameters[parameter](shape.axes);
  require(!("base" in parameters) || full.base > 1, `base must be a number above 1, got ${full.base}`);
  const spacing = extent ? extent / shape.size : 1;
  return ENCODINGS[name].frequencies(full).map((heads) => heads.map((f) => f.map((value) => value * spacing)));
}

// ------------------------------------------------------------------------------------------------------- Scores

// The score of a query and a key with equal channels at an offset in tokens, the mean over pairs of cos(Σ_a f_a Δ_a).
function score(f, heads, offset) {
  return scores(f, heads, offset.map((value) => [value]))[0];
}

// Scores at all combinations of offsets[axis], the last axis fastest: cos(a + b) from a table per axis.
function scores(f, heads, offsets) {
  const columns = offsets[offsets.length - 1], leading = offsets.slice(0, -1);
  const rows = leading.reduce((known, values) => known.flatMap((row) => values.map((value) => [...row, value])), [[]]);
  const total = new Float64Array(rows.length * columns.length), pairs = f[0][0].length;
  for (const head of heads) {
    for (let j = 0; j < pairs; j++) {
      const angles = columns.map((value) => value * f[offsets.length - 1][head][j]);
      const cos = angles.map(Math.cos), sin = angles.map(Math.sin);
      rows.forEach((row, r) => {
        const angle = sum(row.map((value, axis) => value * f[axis][head][j]));
        const c = Math.cos(angle), s = Math.sin(angle);
        for (let k = 0; k < cos.length; k++) total[r * cos.length + k] += c * cos[k] - s * sin[k];
      });
    }
  }
  return total.map((value) => value / (pairs * heads.length));
}

// Local maxima of scores [rows][columns] around offset 0, highest first, as { row, column, score }. Of the two maxima
// at ±Δ, which are equal, one; of a ridge, whose offsets are all equal, every offset.
function maxima(values, rows, columns) {
  const found = [], across = (columns - 1) / 2, down = (rows - 1) / 2;
  const around = rows > 1 ? [-1, 0, 1].flatMap((row) => [-1, 0, 1].map((k) => row * columns + k)) : [-1, 0, 1];
  const isMaximum = (at) => around.every((step) => values[at + step] < values[at] + 1e-9) &&
    around.some((step) => values[at + step] < values[at] - 1e-9);
  for (let row = 0; row < Math.max(down, 1); row++) {
    for (let column = row ? 1 - across : 1; column < across; column++) {
      const at = (row + down) * columns + column + across;
      if (isMaximum(at)) found.push({ row, column, score: values[at] });
    }
  }
  return found.sort((a, b) => b.score - a.score);
}

// ----------------------------------------------------------------------------------------------------- Settings

const cursor = { row: 0, column: 1 };  // the offset whose score is printed, in both panels

function buildPanel(name, encoding) {
  const panel = document.querySelector("template").content.firstElementChild.cloneNode(true);
  const select = panel.querySelector("select");
  panel.querySelector("h2").textContent = `Encoding ${name.toUpperCase()}`;
  select.append(...Object.entries(ENCODINGS).map(([key, { title }]) => new Option(`${key}: ${title}`, key)));
  select.value = encoding;
  panel.querySelectorAll("select, input").forEach((control) => { control.name = `${name}.${control.name}`; });
  panel.querySelector(".map").addEventListener("pointermove", followPointer);
  panel.querySelector(".map").addEventListener("pointerdown", followPointer);
  panel.querySelector(".map").addEventListener("keydown", followKeys);
  document.querySelector(".panels").append(panel);
}

// Settings of the input and heads; of a panel, the parameters that are not empty, which have their defaults.
function settings() {
  const whole = Object.fromEntries([...document.querySelector("fieldset").elements].map((control) => {
    const { name, value, validity, labels, min, max, step } = control;
    const rule = `${labels[0].textContent.trim()} must be ${step > 1 ? "even and " : ""}${min} to ${max}`;
    require(validity.valid && value !== "", `${rule}, got ${value || "no whole number"}`);
    return [name, Number(value)];
  }));
  require(whole.head <= whole.heads, `head shown must be 0 to ${whole.heads}, got ${whole.head}`);
  require(whole.axes === 1 || whole.size <= 64, `tokens per axis must be 64 or less for a map, got ${whole.size}`);
  return { ...whole, pairs: whole.head_dim / 2 };
}

function parametersOf(panel, name, axes) {
  const given = {};
  for (const input of panel.querySelectorAll(".parameters input")) {
    const parameter = input.name.slice(2), standard = ENCODINGS[name].parameters[parameter];
    input.closest("label").hidden = !standard;
    if (!standard) continue;
    input.placeholder = `${+standard(axes).toPrecision(6)}`;
    require(input.validity.valid, `${parameter} must be a number`);
    if (input.value) given[parameter] = input.valueAsNumber;
  }
  return given;
}

// ------------------------------------------------------------------------------------------------------ Figures

const MARKS = ["first", "second", "third"];
const number = (value, digits = 3) => value.toFixed(digits).replace("-", "−");
const offsetText = (offset) => `(${offset.join(", ")})`.replaceAll("-", "−");
const text = (x, y, words, look = "") => `<text class="${look}" x="${x}" y="${y}">${words}</text>`;
const line = (x1, y1, x2, y2, look) => `<line class="${look}" x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}"/>`;
const WIDTH = 380;

function draw(svg, height, title, parts) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.innerHTML = `<title>${title}</title>${parts.join("")}`;
}

// A mark per axis: ring, square, triangle, so that equal values can be told apart.
function mark(x, y, axis) {
  if (axis === 0) return `<circle class="first" cx="${x}" cy="${y}" r="3.4"/>`;
  if (axis === 1) return `<rect class="second-fill" x="${x - 1.9}" y="${y - 1.9}" width="3.8" height="3.8"/>`;
  return `<path class="third-fill" d="M${x - 3} ${y + 2.6}h6l-3-5.4z"/>`;
}

function legend(words, y, shape) {
  return words.map((word, axis) => shape(60 + 105 * axis, y - 4, axis) + text(74 + 105 * axis, y, word));
}

function colours() {
  const probe = document.querySelector(".probe");
  return ["--first", "--second"].map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
  });
}

// Positive scores are blue, negative ones orange; opacity is |score|^0.6, so that small scores can be seen.
function image(values, columns) {
  const canvas = document.createElement("canvas"), rows = values.length / columns, [positive, negative] = colours();
  Object.assign(canvas, { width: columns, height: rows });
  const pixels = new ImageData(columns, rows);
  values.forEach((value, i) => {
    pixels.data.set([...(value > 0 ? positive : negative), 255 * Math.min(Math.abs(value), 1) ** 0.6], 4 * i);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas.toDataURL();
}

// The map's geometry: of one axis a strip; offsets from -reach to reach.
function mapFrame({ axes, size, factor }) {
  const reach = factor * size - 1, left = 52, top = 8, width = 308, cell = width / (2 * reach + 1);
  const rows = axes > 1 ? 2 * reach + 1 : 1, height = axes > 1 ? width : 28;
  return { reach, left, top, width, height, rows, columns: 2 * reach + 1, cell, cellDown: height / rows };
}

function drawMap(panel, whole, values, rings) {
  const { reach, left, top, width, height, columns, rows, cell, cellDown } = mapFrame(whole), edge = whole.size - 1;
  const x = (offset) => left + (offset + reach + 0.5) * cell;
  const y = (offset) => top + (offset + (rows - 1) / 2 + 0.5) * cellDown;
  const ticks = [-reach, -edge, 0, edge, reach], across = whole.axes > 2 ? "; 0 along axis 0" : "";
  const parts = [
    `<image x="${left}" y="${top}" width="${width}" height="${height}" preserveAspectRatio="none"
      href="${image(values, columns)}"/>`,
    `<rect class="frame" x="${left}" y="${top}" width="${width}" height="${height}"/>`,
    `<rect class="trained" x="${x(-edge - 0.5)}" y="${rows > 1 ? y(-edge - 0.5) : top}"
      width="${(2 * edge + 1) * cell}" height="${rows > 1 ? (2 * edge + 1) * cell : height}"/>`,
    ...rings.map(({ row, column }) => `<circle class="ring" cx="${x(column)}" cy="${y(row)}" r="5"/>`),
    `<circle class="cursor" cx="${x(0)}" cy="${y(0)}" r="3"/>`,
    ...ticks.map((tick) => text(x(tick), top + height + 14, number(tick, 0), "middle")),
    text(left + width / 2, top + height + 30, `offset along axis ${whole.axes - 1}, in tokens${across}`, "middle"),
  ];
  if (rows > 1) {
    parts.push(...ticks.map((tick) => text(left - 5, y(tick) + 4, number(tick, 0), "end")));
    parts.push(`<g transform="translate(12 ${top + height / 2}) rotate(-90)">` +
      text(0, 0, `offset along axis ${whole.axes - 2}`, "middle") + "</g>");
  }
  draw(panel.querySelector(".map"), top + height + 36, "Score over offset, a map; arrow keys move the offset", parts);
}

const offsetOf = ({ axes }, row, column) => [0, row, column].slice(-axes);
const seen = ({ size }, offset) => offset.every((value) => Math.abs(value) < size);

// Scores over fractional offsets along each axis; with two axes along the diagonal, too.
function drawCurves(panel, whole, f, heads) {
  const { reach } = mapFrame(whole), left = 52, top = 10, width = 308, height = 120, steps = Math.max(480, reach);
  const units = range(whole.axes).map((axis) => range(whole.axes).map((other) => (axis === other ? 1 : 0)));
  if (whole.axes === 2) units.push([1, 1]);
  const x = (offset) => left + (width * offset) / reach, y = (value) => top + (height * (1 - value)) / 2;
  const edge = x(whole.size - 1);
  const curves = units.map((unit, index) => {
    const points = range(steps + 1).map((i) => {
      const offset = (reach * i) / steps;
      return `${x(offset).toFixed(1)},${y(score(f, heads, unit.map((value) => value * offset))).toFixed(1)}`;
    });
    return `<polyline class="line ${MARKS[index]}" points="${points.join(" ")}"/>`;
  });
  const names = units.map((unit, index) => (index < whole.axes ? `along axis ${index}` : "diagonally"));
  const shape = (at, middle, index) => line(at - 10, middle, at + 10, middle, `line ${MARKS[index]}`);
  draw(panel.querySelector(".curves"), 190, `Score over offset ${names.join(", ")}`, [
    `<rect class="beyond" x="${edge}" y="${top}" width="${left + width - edge}" height="${height}"/>`,
    ...[-1, 0, 1].flatMap((value) => [line(left, y(value), left + width, y(value), "frame"),
      text(left - 6, y(value) + 4, number(value, 0), "end")]),
    ...[0, whole.size - 1, reach].map((offset) => text(x(offset), top + height + 14, offset, "middle")),
    text(left + width / 2, top + height + 30, "offset in tokens; shaded: beyond training", "middle"),
    ...curves, ...legend(names, 184, shape),
  ]);
}

const turnsOf = ({ size }, f) => ((size - 1) * sum(f.map(Math.abs))) / (2 * Math.PI);

// Turns of every pair over the largest offset of training, a mark per axis.
function drawTurns(panel, whole, f, heads) {
  const left = 52, top = 10, width = 308, height = 130, low = -4, high = 3, pairs = f[0][0].length;
  const y = (turns) => top + (height * (high - Math.min(Math.max(Math.log10(turns), low), high))) / (high - low);
  const x = (j) => left + (width * (j + 0.5)) / pairs;
  const marks = f.flatMap((of, axis) => heads.flatMap((head) => of[head].flatMap((value, j) => {
    return Math.abs(value) > 1e-9 ? [mark(x(j), y(turnsOf(whole, [value])), axis)] : [];
  })));
  draw(panel.querySelector(".turns"), 200, "Turns of every pair of channels over the largest offset of training", [
    ...[0.0001, 0.01, 1, 100].flatMap((turns) => [line(left, y(turns), left + width, y(turns), "frame"),
      text(left - 6, y(turns) + 4, turns, "end")]),
    line(left, y(0.5), left + width, y(0.5), "half"),
    ...[0, pairs - 1].map((j) => text(x(j), top + height + 14, j, "middle")),
    text(left + width / 2, top + height + 30, "pair of channels", "middle"),
    ...marks, ...legend(range(whole.axes).map((axis) => `along axis ${axis}`), 194, mark),
  ]);
}

function fillTables(panel, whole, f, heads, rings) {
  const cells = (values) => `<tr>${values.map((value) => `<td>${value}</td>`).join("")}</tr>`;
  const rows = rings.map(({ row, column, score: value }) =>
    cells([offsetText(offsetOf(whole, row, column)), number(value)]));
  panel.querySelector(".maxima tbody").innerHTML = rows.join("") || `<tr><td colspan="2">none in this range</td></tr>`;
  const pairs = range(f[0][0].length), head = heads[0];
  const turns = (j) => turnsOf(whole, f.map((of) => of[head][j]));
  const slow = pairs.filter((j) => turns(j) < 0.5).length;
  panel.querySelector(".slow").textContent = `${slow} of ${pairs.length} pairs make less than half a turn, along all ` +
    `axes together${heads.length > 1 ? ", in head 1" : ""}: larger offsets have angles that training did not have.`;
  panel.querySelector(".numbers thead").innerHTML =
    cells(["pair", ...range(whole.axes).map((axis) => `f along axis ${axis}`), "turns"]).replaceAll("td>", "th>");
  panel.querySelector(".numbers tbody").innerHTML = pairs.map((j) =>
    cells([j, ...f.map((of) => +of[head][j].toPrecision(5)), +turns(j).toPrecision(3)])).join("").replaceAll("-", "−");
}

// ------------------------------------------------------------------------------------------------------- Events

function update() {
  for (const panel of document.querySelectorAll(".panel")) {
    const problem = panel.querySelector(".problem");
    try {
      updatePanel(panel, settings());
      problem.textContent = "";
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      problem.textContent = error.message;
    }
    panel.classList.toggle("refused", problem.textContent !== "");
  }
  moveCursor(cursor.row, cursor.column);
}

function updatePanel(panel, whole) {
  const name = panel.querySelector("select").value, given = parametersOf(panel, name, whole.axes);
  const changed = Object.entries(given).map(([parameter, value]) => `, ${parameter}=${value}`).join("");
  panel.querySelector(".python").textContent = `tr.encodings.parse_encoding("${name}").rotary(num_axes=${whole.axes}, ` +
    `num_heads=${whole.heads}, head_dim=${whole.head_dim}${changed})`;
  panel.querySelector(".drawn").hidden = !ENCODINGS[name].random;
  const f = frequencies(name, { ...whole, ...given }), count = f[0].length;
  const chosen = whole.head ? [Math.min(whole.head, count) - 1] : range(count);
  const frame = mapFrame(whole), along = range(frame.columns).map((i) => i - frame.reach);
  const values = scores(f, chosen, [[0], along, along].slice(-whole.axes));
  const beyond = maxima(values, frame.rows, frame.columns).filter(({ row, column }) =>
    !seen(whole, offsetOf(whole, row, column)));
  panel.shown = { whole, f, heads: chosen };
  drawMap(panel, whole, values, beyond.slice(0, 5));
  drawCurves(panel, whole, f, chosen);
  drawTurns(panel, whole, f, chosen);
  fillTables(panel, whole, f, chosen, beyond.slice(0, 5));
}

function moveCursor(row, column) {
  for (const panel of document.querySelectorAll(".panel:not(.refused)")) {
    const { whole, f, heads } = panel.shown, { reach, rows, cell, cellDown } = mapFrame(whole);
    cursor.row = rows > 1 ? Math.max(-reach, Math.min(row, reach)) : 0;
    cursor.column = Math.max(-reach, Math.min(column, reach));
    const offset = offsetOf(whole, cursor.row, cursor.column), value = number(score(f, heads, offset), 4);
    panel.querySelector(".cursor").setAttribute("transform",
      `translate(${cursor.column * cell} ${cursor.row * cellDown})`);
    panel.querySelector("output").textContent =
      `offset ${offsetText(offset)}: score ${value}${seen(whole, offset) ? "" : ", beyond training"}`;
  }
}

function followPointer(event) {
  const svg = event.currentTarget, { whole } = svg.closest(".panel").shown, frame = mapFrame(whole);
  const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
  const column = Math.floor(((event.clientX - box.left) * scale - frame.left) / frame.cell) - frame.reach;
  const row = Math.floor(((event.clientY - box.top) * scale - frame.top) / frame.cellDown) - (frame.rows - 1) / 2;
  moveCursor(row, column);
}

function followKeys(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  moveCursor(cursor.row + step[0], cursor.column + step[1]);
}

buildPanel("a", "axial");
buildPanel("b", "mixed");
update();
document.querySelector("main").addEventListener("input", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
