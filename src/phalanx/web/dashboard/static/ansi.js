// Terminal sequences of workers: colours become classes, everything else is dropped.

const SEQUENCE = /\x1b(?:\[([0-?]*)[ -\/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-~])?/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const NAMES = { 1: "a-bold", 2: "a-dim", 4: "a-underline" };

const clean = (text) => text.replace(CONTROL, "\ufffd");

export const plain = (text) => clean(text.replace(SEQUENCE, ""));

// The text as spans, with `search` marked.
export function styled(text, search) {
  const parts = [];
  let classes = new Set();
  let from = 0;
  for (const found of text.matchAll(SEQUENCE)) {
    push(parts, text.slice(from, found.index), classes, search);
    from = found.index + found[0].length;
    if (found[2] === "m") classes = apply(found[1], classes);
  }
  push(parts, text.slice(from), classes, search);
  return parts;
}

function apply(codes, before) {
  const classes = new Set(before);
  for (const code of (codes || "0").split(";").map(Number)) {
    if (code === 0) classes.clear();
    else if (code in NAMES) classes.add(NAMES[code]);
    else if ((code >= 31 && code <= 36) || (code >= 91 && code <= 96)) {
      for (const one of [...classes]) if (/^a-\d/.test(one)) classes.delete(one);
      classes.add(`a-${code}`);
    } else if (code === 39) for (const one of [...classes]) if (/^a-\d/.test(one)) classes.delete(one);
  }
  return classes;
}

function push(parts, raw, classes, search) {
  const text = clean(raw);
  if (!text) return;
  const pieces = search ? split(text, search) : [[text, false]];
  for (const [piece, hit] of pieces) {
    const node = document.createElement(hit ? "mark" : "span");
    if (classes.size) node.className = [...classes].join(" ");
    node.textContent = piece;
    parts.push(node);
  }
}

function split(text, search) {
  const low = text.toLowerCase();
  const pieces = [];
  let from = 0;
  for (let at = low.indexOf(search); at >= 0 && pieces.length < 200; at = low.indexOf(search, from)) {
    if (at > from) pieces.push([text.slice(from, at), false]);
    pieces.push([text.slice(at, at + search.length), true]);
    from = at + search.length;
  }
  if (from < text.length) pieces.push([text.slice(from), false]);
  return pieces;
}
