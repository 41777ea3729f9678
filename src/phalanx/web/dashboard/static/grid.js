// The ranks: one canvas, so that thousands of them cost one drawing. Shape and colour both tell the state.
import { byId, make, colour, count, rate, bytes, span } from "./dom.js";
import { plain } from "./ansi.js";

export const STATES = {
  t: ["training", "--s-train"],
  r: ["running", "--s-run"],
  s: ["starting", "--s-start"],
  c: ["checkpointing", "--s-save"],
  p: ["stopped", "--s-stop"],
  f: ["failed", "--s-fail"],
  e: ["ended", "--s-end"],
  ".": ["not known", "--s-none"],
};
const SIZES = [46, 38, 32, 26, 22, 18, 15, 13, 11, 9, 8, 7, 6, 5];
const TALLEST = 400;

export class RankGrid {
  constructor(choose) {
    this.canvas = byId("grid");
    this.detail = byId("detail");
    this.choose = choose;
    this.ranks = { states: "", steps: [], slow: [], failed: [] };
    this.selected = -1;
    this.cell = 0;
    this.canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && this.select(this.at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.select(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.selected < 0 && this.select(0));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  show(ranks) {
    const same = ranks.states === this.ranks.states && String(ranks.slow) === String(this.ranks.slow) && String(ranks.failed) === String(this.ranks.failed);
    this.ranks = ranks;
    if (!same || !this.cell) this.draw();
    if (this.selected >= 0) this.load();
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth - 32;
    const total = this.ranks.states.length;
    const fits = (size) => Math.ceil(total / Math.max(1, Math.floor(width / size))) * size <= TALLEST;
    this.cell = SIZES.find(fits) ?? SIZES.at(-1);
    this.columns = Math.max(1, Math.floor(width / this.cell));
    this.rows = Math.max(1, Math.ceil(total / this.columns));
    return width;
  }

  draw() {
    const width = this.layout();
    const ratio = window.devicePixelRatio || 1;
    const height = this.rows * this.cell;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const shades = Object.fromEntries(Object.entries(STATES).map(([letter, [, name]]) => [letter, colour(name)]));
    const ink = colour("--on-cell");
    const slow = new Set(this.ranks.slow);
    const failed = new Set(this.ranks.failed);
    const gap = this.cell > 20 ? 3 : this.cell > 8 ? 2 : 1;
    const inner = this.cell - gap;
    const round = this.cell > 20 ? 5 : this.cell > 10 ? 2 : 0;
    pen.font = `${Math.min(12, Math.floor(this.cell / 3))}px ${colour("--sans")}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let rank = 0; rank < this.ranks.states.length; rank += 1) {
      const letter = this.ranks.states[rank];
      const x = (rank % this.columns) * this.cell;
      const y = Math.floor(rank / this.columns) * this.cell;
      pen.fillStyle = shades[letter] ?? shades["."];
      if (round) { pen.beginPath(); pen.roundRect(x, y, inner, inner, round); pen.fill(); } else pen.fillRect(x, y, inner, inner);
      if (letter === "f" || letter === "p") {
        pen.strokeStyle = ink;
        pen.lineWidth = this.cell > 20 ? 2 : 1;
        pen.beginPath();
        pen.moveTo(x + inner * 0.2, y + inner * 0.8);
        pen.lineTo(x + inner * 0.8, y + inner * 0.2);
        if (letter === "f") { pen.moveTo(x + inner * 0.2, y + inner * 0.2); pen.lineTo(x + inner * 0.8, y + inner * 0.8); }
        pen.stroke();
      } else if (this.cell >= 26) {
        pen.fillStyle = letter === "." ? colour("--dim") : ink;
        pen.fillText(String(rank), x + inner / 2, y + inner / 2 + 1);
      }
      if (slow.has(rank)) {
        const part = Math.max(3, inner * 0.36);
        pen.fillStyle = colour("--s-slow");
        pen.beginPath();
        pen.moveTo(x + inner - part, y);
        pen.lineTo(x + inner, y);
        pen.lineTo(x + inner, y + part);
        pen.fill();
      }
      if (failed.has(rank)) this.ring(pen, x, y, inner, colour("--s-fail"), round);
      if (rank === this.selected) this.ring(pen, x, y, inner, colour("--text"), round);
    }
    this.describe();
  }

  ring(pen, x, y, inner, shade, round) {
    pen.strokeStyle = shade;
    pen.lineWidth = this.cell > 12 ? 2.5 : 1.5;
    pen.beginPath();
    pen.roundRect(x + 1, y + 1, inner - 2, inner - 2, round);
    pen.stroke();
  }

  describe() {
    const totals = {};
    for (const letter of this.ranks.states) totals[letter] = (totals[letter] ?? 0) + 1;
    const legend = byId("legend");
    const words = [];
    const items = [];
    for (const [letter, [name, shade]] of Object.entries(STATES)) {
      if (!totals[letter]) continue;
      words.push(`${totals[letter]} ${name}`);
      const swatch = make("i");
      swatch.style.background = `var(${shade})`;
      items.push(make("li", {}, swatch, `${name} ${count(totals[letter])}`));
    }
    if (this.ranks.slow.length) {
      const swatch = make("i");
      swatch.style.background = "var(--s-slow)";
      words.push(`${this.ranks.slow.length} slow`);
      items.push(make("li", {}, swatch, `slow ${count(this.ranks.slow.length)}`));
    }
    const label = `${this.ranks.states.length} ranks: ${words.join(", ")}`;
    if (this.label === label) return;
    this.label = label;
    this.canvas.setAttribute("aria-label", label);
    legend.replaceChildren(...items);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const rank = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column;
    return column < this.columns && rank >= 0 && rank < this.ranks.states.length ? rank : this.selected;
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key === "Enter" && this.selected >= 0) this.choose(this.selected);
    else if (event.key === "Home") this.select(0);
    else if (event.key === "End") this.select(this.ranks.states.length - 1);
    else if (event.key in steps) this.select(Math.min(this.ranks.states.length - 1, Math.max(0, this.selected + steps[event.key])));
    else return;
    event.preventDefault();
  }

  select(rank) {
    if (rank < 0 || rank === this.selected) return;
    this.selected = rank;
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 60); // a pointer on its way crosses many
  }

  async load() {
    const rank = this.selected;
    let known = null;
    try {
      const answer = await fetch(`/api/rank/${rank}`);
      if (answer.ok) known = await answer.json();
    } catch { /* the agent is away; the page says so */ }
    if (rank !== this.selected) return;
    const title = make("strong", { text: `Rank ${rank}` });
    const output = make("button", { type: "button", class: "small", text: "Output of this rank", onclick: () => this.choose(rank) });
    const row = make("div", { class: "row" }, title, output);
    if (!known) {
      this.detail.replaceChildren(row, make("p", { class: "dim", text: "Nothing is known of it now." }));
      return;
    }
    const facts = [
      ["state", (STATES[{ ready: "t" }[known.state]] ?? [known.state])[0]],
      ["host", known.node >= 0 ? `${known.host} (node ${known.node})` : known.host],
      ["pid", known.pid === null ? "–" : String(known.pid)],
      ["up", span(known.uptime)],
      ["step", count(known.step)],
      ["rate", rate(known.rate)],
      ["last heartbeat", known.quiet === null ? "–" : `${span(known.quiet)} ago`],
      ["CPU", known.cpu === null ? "–" : `${Math.round(100 * known.cpu)} %`],
      ["memory", bytes(known.memory)],
    ];
    for (const [index, used, , busy] of known.gpus) facts.push([`GPU ${index}`, `${bytes(used)}${busy === null ? "" : `, ${busy} %`}`]);
    if (known.section) facts.push(["section", known.section]);
    const list = make("dl", {}, ...facts.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
    const parts = [row, list];
    if (known.last_line) parts.push(make("p", { class: "last", text: plain(known.last_line), title: plain(known.last_line) }));
    this.detail.replaceChildren(...parts);
  }
}
