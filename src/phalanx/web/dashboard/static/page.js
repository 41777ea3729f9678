// The page: takes the sections of the job as they change, and hands each to what shows it.
import { byId, make, setText, count, rate, bytes, span, clock } from "./dom.js";
import { plain } from "./ansi.js";
import { RankGrid } from "./grid.js";
import { showGoodput, showRates, showIncidents, showStages } from "./charts.js";
import { LogView } from "./logs.js";
import { confirmed, showStacks } from "./dialogs.js";

const told = {};
const logs = new LogView();
const grid = new RankGrid((rank) => logs.only(rank));
let ahead = 0; // this clock against the agent's, in seconds
let stream = null;

// ---- the stream of events ------------------------------------------------------------------------

function open() {
  if (stream || told.end) return;
  stream = new EventSource("/api/events");
  stream.addEventListener("state", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("error", () => {
    if (told.end) { close(); return; }
    notice("The page has lost its connection to the job; it tries again.");
  });
  logs.open();
}

function close() {
  stream?.close();
  stream = null;
  logs.close();
}

// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

function take(sections) {
  Object.assign(told, sections);
  if (sections.clock) ahead = Date.now() / 1000 - sections.clock.now;
  if (sections.job || sections.end || sections.link) showJob();
  if (sections.ranks || sections.rates) showRanks();
  if (sections.rates) showRates(told.rates);
  if (sections.goodput) showGoodput(told.goodput);
  if (sections.incidents || sections.clock) showIncidents(told.incidents ?? [], told.job, now());
  if (sections.nodes) showNodes();
  if (sections.quarantine) showQuarantine();
  if ("cause" in sections || sections.end) showCause();
  if (!document.body.dataset.ready) {
    document.body.dataset.ready = "yes";
    performance.mark("ready");
  }
}

const now = () => Date.now() / 1000 - ahead;

// ---- header and figures --------------------------------------------------------------------------

const WORDS = {
  running: ["running", "good"],
  finished: ["finished here, waiting for the others", "good"],
  starting: ["starting", "busy"],
  forming: ["re-forming", "busy"],
  waiting: ["waiting for nodes", "busy"],
  spare: ["spare", "busy"],
  ending: ["ending", "busy"],
};
const ENDS = { SUCCEEDED: ["succeeded", "good"], FAILED: ["failed", "bad"], STOPPED: ["stopped", "busy"], LEFT: ["drained", "good"] };

function showJob() {
  const { job, end, link } = told;
  if (!job) return;
  const name = plain(job.name);
  setText("name", name);
  document.title = `${name} · ${end ? (ENDS[end.outcome] ?? ["ended"])[0] : job.state}`;
  setText("subtitle", `run ${plain(job.run)} · ${job.nodes === 1 ? plain(job.host) : `${count(job.nodes)} nodes`} · round ${job.round}`);
  let [words, kind] = WORDS[job.state] ?? [job.state, "busy"];
  if (end) [words, kind] = ENDS[end.outcome] ?? ["ended", "bad"];
  else if (link?.lost) [words, kind] = ["no answer", "bad"];
  setText("state", words);
  byId("badge").className = `badge ${kind}`;
  setText("restarts", count(job.restarts));
  setText("restarts-note", `of ${count(job.max_restarts)} allowed · ${count(job.incidents)} incident${job.incidents === 1 ? "" : "s"}`);
  const waiting = job.state === "running" ? "" : plain(job.waiting_for);
  const lines = [...job.hangs.slice(-1), ...job.slow.slice(-1)].map(plain);
  if (end) notice(end.exit_code === 0 ? plain(end.why) : `The job has ended: ${plain(firstLine(end.why))}`, end.exit_code === 0);
  else if (link?.lost) notice("The agent does not answer; the page tries again.");
  else if (job.silent) notice(`${count(job.silent)} node${job.silent === 1 ? "" : "s"} did not answer in time; what is shown of the job is not complete.`, true);
  else if (waiting) notice(`Waiting: ${waiting}`, true);
  else if (lines.length) notice(lines.join(" · "), true);
  else notice("");
  byId("stacks").disabled = Boolean(end);
  tick();
}

const firstLine = (text) => text.split("\n").find((line) => /[^=\-\s]/.test(line)) ?? "";

function notice(text, calm = false) {
  const box = byId("notice");
  box.hidden = !text;
  box.className = calm ? "notice calm" : "notice";
  if (box.textContent !== text) box.textContent = text;
}

function showRanks() {
  const { ranks, rates } = told;
  if (!ranks) return;
  grid.show(ranks);
  const alive = [...ranks.states].filter((letter) => "trscp".includes(letter)).length;
  const value = byId("running");
  value.replaceChildren(count(alive), make("small", { text: ` / ${count(ranks.states.length)}` }));
  setText("running-note", ranks.slow.length ? `${count(ranks.slow.length)} slow` : alive === ranks.states.length ? "all alive" : `${count(ranks.states.length - alive)} not running`);
  const steps = ranks.steps.filter((step) => step !== null);
  const last = steps.length ? steps.reduce((a, b) => Math.max(a, b)) : null;
  setText("step", count(last));
  setText("step-note", steps.length ? `median ${rate(rates?.middle?.at(-1))}` : "no heartbeats");
}

function tick() {
  if (!told.job || told.end) return;
  setText("uptime", span(Math.max(0, now() - told.job.since)));
  setText("uptime-note", `since ${clock(told.job.since)}`);
}
setInterval(() => document.hidden || tick(), 1000);

// ---- root cause and nodes ------------------------------------------------------------------------

function showCause() {
  const { cause, end } = told;
  const panel = byId("cause-panel");
  const failed = end && end.outcome === "FAILED";
  const full = byId("cause");
  if (!cause && !failed) {
    setText("cause-headline", "No incident so far.");
    full.hidden = true;
    return;
  }
  panel.classList.toggle("hot", Boolean(failed || (cause && !cause.over)));
  setText("cause-headline", plain(cause?.headline ?? firstLine(end.why)));
  setText("cause-when", cause ? `${clock(cause.at)}${cause.host ? ` on ${plain(cause.host)}` : ""}` : "");
  const report = (failed ? end.why : cause.text).replace(/^[=\s]*\S+ FAILED[^\n]*\n/, ""); // it may have recovered
  const text = report.split("\n").filter((line) => !/^([=-]{20,}|\s*[~^]+)$/.test(line)).map(plain).join("\n").replace(/\n\n+/g, "\n\n").trim();
  full.hidden = !text || text === cause?.headline;
  if (full.textContent !== text) full.textContent = text;
}

const NODE_STATES = { running: "--s-train", finished: "--s-train", starting: "--s-start", forming: "--s-start", waiting: "--s-start", spare: "--s-run", ending: "--s-end" };

function showNodes() {
  const nodes = told.nodes;
  setText("nodes-note", nodes.length > 1 ? `${count(nodes.length)} nodes` : "");
  byId("nodes").replaceChildren(...nodes.slice(0, 1024).map(nodeRow));
}

function showQuarantine() {
  const list = byId("quarantine");
  list.hidden = !told.quarantine.length;
  list.replaceChildren(...told.quarantine.map((line) => make("li", {}, make("b", { text: "quarantined: " }), plain(line))));
}

function nodeRow(node) {
  const dot = make("span", { class: "dot" });
  dot.style.background = `var(${NODE_STATES[node.state] ?? "--s-end"})`;
  const number = (text) => make("td", { class: "num", text });
  const name = node.rank >= 0 ? String(node.rank) : "spare";
  const button = make("button", { type: "button", class: "small", text: "Drain", "aria-label": `Drain node ${name} on ${plain(node.host)}`, onclick: () => drain(node, name) });
  button.disabled = Boolean(told.end);
  return make(
    "tr",
    {},
    make("td", { text: name }),
    make("td", { text: plain(node.host) + (node.address ? ` (${plain(node.address)})` : "") }),
    make("td", {}, make("span", { class: "state" }, dot, node.state)),
    number(`${count(node.running)} / ${count(node.workers)}`),
    number(node.cpu === null ? "–" : `${Math.round(100 * node.cpu)} %`),
    number(bytes(node.memory)),
    number(bytes(node.gpu)),
    number(count(node.standbys)),
    number(node.lease === null ? "–" : `${node.lease.toFixed(1)} s`),
    make("td", {}, button),
  );
}

async function drain(node, name) {
  const alone = told.nodes.length === 1;
  const what = alone
    ? "It is the only node: its workers are stopped, and the job ends."
    : "Its workers are stopped, and the others re-form without it. A spare takes its place, if there is one.";
  if (!(await confirmed(`Drain node ${name} on ${plain(node.host)}?`, what, "Drain"))) return;
  const answer = await post("/api/drain", { node: node.id, confirm: true });
  const answers = [answer, ...(answer.peers ?? [])];
  const done = answers.find((one) => one.done)?.done ?? answers.find((one) => one.error)?.error;
  notice(plain(done ?? "The node did not answer."), true);
}

async function post(path, body) {
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    return await answer.json();
  } catch {
    return { error: "The page has lost its connection to the job." };
  }
}

byId("stacks").addEventListener("click", async () => {
  const sure = await confirmed("Take the stacks of all ranks now?", "Every Python worker writes down where it is. That takes a moment and does not stop it.", "Take stacks");
  if (sure) showStacks(await post("/api/stacks", {}));
});

// ---- light and dark ------------------------------------------------------------------------------

const dark = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem("theme"); } catch { /* storage is off */ }

function dress() {
  document.documentElement.classList.toggle("dark", chosen ? chosen === "dark" : dark.matches);
  if (told.ranks) grid.draw();
}
dark.addEventListener("change", dress);
byId("theme").addEventListener("click", () => {
  chosen = document.documentElement.classList.contains("dark") ? "light" : "dark";
  try { localStorage.setItem("theme", chosen); } catch { /* not kept */ }
  dress();
});

dress();
showStages();
if (!document.hidden) open();
