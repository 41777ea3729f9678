// Goodput, step rates and incidents as pictures, each with its words beside it.
import { byId, make, svg, setText, rate, span, clock, count } from "./dom.js";
import { plain } from "./ansi.js";

const CATEGORIES = {
  productive: "--g-productive",
  running: "--g-productive",
  recomputed: "--g-recomputed",
  starting: "--g-starting",
  recovering: "--g-recovering",
  hung: "--g-hung",
  checkpointing: "--g-checkpointing",
  nodes: "--g-nodes",
  slowest: "--g-slowest",
};
const NAMES = { running: "running, without heartbeats", nodes: "waiting for nodes", slowest: "waiting for the slowest" };
const STAGES = [
  ["detect", "detect"],
  ["reform", "stop and re-form"],
  ["start", "start"],
  ["first_line", "first line"],
  ["first_step", "first step"],
];

export function showGoodput(goodput) {
  setText("goodput-name", goodput.measure === "uptime" ? "Uptime" : "Goodput");
  setText("goodput", `${(100 * goodput.ratio).toFixed(1)} %`);
  const known = goodput.parts.filter(([, seconds]) => seconds > 0);
  const total = known.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bar = byId("goodput-bar");
  bar.replaceChildren(
    ...known.map(([name, seconds]) => {
      const share = (100 * seconds) / total;
      const part = make("span", { title: `${NAMES[name] ?? name}: ${share.toFixed(1)} %, ${span(seconds)} of all ranks` });
      part.style.flexGrow = String(seconds);
      part.style.background = `var(${CATEGORIES[name] ?? "--s-none"})`;
      return part;
    }),
  );
  bar.setAttribute("aria-label", known.map(([name, seconds]) => `${NAMES[name] ?? name} ${((100 * seconds) / total).toFixed(1)} %`).join(", ") || "nothing yet");
  const line = goodput.line.replace(/^\w+ [\d.]+ %:? ?/, "");
  setText("goodput-line", line || "no time lost so far");
}

// ---- step rates ----------------------------------------------------------------------------------

export function showRates(rates) {
  const slow = new Set(rates.slow);
  const box = byId("rates");
  const now = rates.middle.at(-1) ?? null;
  if (!rates.times.length) {
    setText("rates-note", "");
    box.replaceChildren(make("p", { class: "dim", text: "No steps yet. Call phalanx.worker.heartbeat(step) in the training loop." }));
    return;
  }
  const top = 1.15 * Math.max(...rates.high.filter((one) => one !== null), 1e-9);
  setText("rates-note", slow.size ? `${count(slow.size)} below 80 % of the median` : "all ranks close to the median");
  const rows = [row("all ranks", rates, rates.middle, top, false, now, `median of all ranks: ${rate(now)}`)];
  for (const one of rates.ranks) {
    const last = one.rates.at(-1) ?? null;
    rows.push(row(`rank ${one.rank}`, rates, one.rates, top, slow.has(one.rank), last, `rank ${one.rank}: ${rate(last)}`));
  }
  box.replaceChildren(...rows);
}

function row(name, rates, own, top, late, last, label) {
  const picture = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (name === "all ranks") picture.append(svg("path", { class: "band", d: band(rates, top) }));
  else picture.append(svg("path", { class: "middle", d: path(rates.times, rates.middle, top) }));
  picture.append(svg("path", { class: "own", d: path(rates.times, own, top) }));
  return make("div", { class: late ? "spark late" : "spark" }, make("b", { text: name }), picture, make("span", { class: "num", text: late ? `${rate(last)} slow` : rate(last) }));
}

function place(times, index, value, top) {
  const first = times[Math.min(1, times.length - 1)]; // a rate needs two looks
  const width = Math.max(times.at(-1) - first, 1);
  return `${((100 * (times[index] - first)) / width).toFixed(2)} ${(25 - (24 * value) / top).toFixed(2)}`;
}

function path(times, values, top) {
  let made = "";
  let down = false;
  values.forEach((value, index) => {
    if (value === null) { down = false; return; }
    const alone = !down && (values[index + 1] ?? null) === null;
    made += `${down ? "L" : "M"}${place(times, index, value, top)}${alone ? "h1" : ""}`;
    down = true;
  });
  return made;
}

function band(rates, top) {
  const known = rates.times.map((_, index) => index).filter((index) => rates.high[index] !== null);
  if (known.length < 2) return "";
  const up = known.map((index) => place(rates.times, index, rates.high[index], top));
  const back = known.reverse().map((index) => place(rates.times, index, rates.low[index], top));
  return `M${[...up, ...back].join("L")}Z`;
}

// ---- incidents -----------------------------------------------------------------------------------

export function showStages() {
  byId("stages").replaceChildren(...STAGES.map(([name, words]) => make("li", {}, make("i", { class: `st-${name}` }), words)));
}

export function showIncidents(incidents, job, now) {
  const list = byId("incidents");
  const axis = byId("axis");
  if (!incidents.length) {
    list.replaceChildren(make("li", { class: "dim", text: "None so far." }));
    axis.hidden = true;
    return;
  }
  axis.hidden = false;
  const since = job.since;
  const width = Math.max(now - since, 1);
  const marks = incidents.map((one) => {
    const mark = make("i", { class: one.trigger === "membership" ? "soft" : "", title: `${clock(one.at)} ${plain(one.reason)}` });
    mark.style.left = `${Math.min(99.5, Math.max(0.2, (100 * (one.at - since)) / width))}%`;
    return mark;
  });
  axis.replaceChildren(...marks, make("span", { text: clock(since) }), make("span", { text: "now" }));
  axis.setAttribute("aria-label", `${incidents.length} incidents since ${clock(since)}`);
  const longest = Math.max(...incidents.map(lasted), 1e-9);
  list.replaceChildren(...[...incidents].reverse().map((one) => entry(one, longest)));
}

const parts = (one) => STAGES.map(([name, words]) => {
  const { stop, reform } = one.stages;
  const seconds = name === "reform" ? Math.max(stop ?? 0, reform ?? 0) : (one.stages[name] ?? 0);
  return [name, words, seconds];
});
const lasted = (one) => parts(one).reduce((sum, [, , seconds]) => sum + seconds, 0);

function entry(one, longest) {
  const total = lasted(one);
  const bar = make("div", { class: "recovery", role: "img", "aria-label": `recovery in ${span(total)}` });
  bar.style.width = `${Math.max(6, (100 * total) / longest)}%`;
  for (const [name, words, seconds] of parts(one)) {
    if (!seconds) continue;
    const piece = make("span", { class: `st-${name}`, title: `${words}: ${span(seconds)}` });
    piece.style.flexGrow = String(seconds);
    bar.append(piece);
  }
  const how = one.recovery === "end" ? "the job ended" : one.over ? `${one.recovery} in ${span(total)}` : `${one.recovery}, under way`;
  const where = [clock(one.at), one.rank === null ? "" : `rank ${one.rank}`, one.node, how].filter(Boolean).join(" · ");
  return make(
    "li",
    {},
    make("div", { class: "line" }, make("span", { class: "why", text: plain(one.reason) }), make("span", { class: "tag", text: one.trigger })),
    bar,
    make("p", { class: "dim", text: where }),
  );
}
