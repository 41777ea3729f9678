// What asks before it acts, and the stacks of all ranks, grouped.
import { byId, make, setText } from "./dom.js";
import { plain } from "./ansi.js";

export function confirmed(title, text, verb) {
  setText("confirm-title", title);
  setText("confirm-text", text);
  setText("confirm-yes", verb);
  const dialog = byId("confirm");
  return new Promise((resolve) => {
    const answer = (yes) => { dialog.close(); resolve(yes); };
    byId("confirm-yes").onclick = () => answer(true);
    byId("confirm-no").onclick = () => answer(false);
    dialog.oncancel = () => resolve(false);
    dialog.showModal();
    byId("confirm-no").focus();
  });
}

export function showStacks(answer) {
  const found = [answer, ...(answer.peers ?? [])].flatMap((one) => one.stacks ?? []);
  const groups = new Map();
  for (const one of found) {
    const key = one.stopped ? "stopped" : one.stack.join("\n");
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  setText("sheet-title", `Stacks of ${found.length} rank${found.length === 1 ? "" : "s"}, ${groups.size} different`);
  const parts = [];
  // The smallest group first: the rank that differs is the one that the others wait for.
  for (const [, members] of [...groups].sort((a, b) => a[1].length - b[1].length)) {
    const first = members[0];
    parts.push(make("h3", { text: `${members.length === 1 ? "Rank" : "Ranks"} ${ranges(members.map((one) => one.rank))}` }));
    const text = first.stopped ? "stopped, by a signal or a debugger" : first.stack.map(plain).join("\n") || "no Python stack";
    parts.push(make("pre", { text, tabindex: "0", "aria-label": "Stack" }));
  }
  if (!parts.length) parts.push(make("p", { text: plain(answer.error ?? "No worker has answered.") }));
  byId("sheet-body").replaceChildren(...parts);
  const sheet = byId("sheet");
  byId("sheet-close").onclick = () => sheet.close();
  sheet.showModal();
}

function ranges(ranks) {
  const sorted = [...ranks].sort((a, b) => a - b);
  const parts = [];
  for (const rank of sorted) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}
