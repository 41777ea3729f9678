// Elements are made from text, never from markup: everything that a worker printed stays text.

export const byId = (id) => document.getElementById(id);

export function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- words and numbers ---------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? `${whole.format(Math.round(value))}/s` : value >= 1 || value === 0 ? `${value.toFixed(1)}/s` : `${(60 * value).toFixed(1)}/min`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
