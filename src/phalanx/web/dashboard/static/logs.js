// The output of workers: followed live, or a file of an earlier start. A bounded window over it.
import { byId, make, setText, bytes } from "./dom.js";
import { plain, styled } from "./ansi.js";

const KEPT = 4000;
const SHOWN = 1500;

export class LogView {
  constructor() {
    this.box = byId("log");
    this.ranks = byId("log-ranks");
    this.search = byId("log-search");
    this.follow = byId("log-follow");
    this.file = byId("log-file");
    this.lines = [];
    this.stream = null;
    let waiting = 0;
    const later = (call) => () => { clearTimeout(waiting); waiting = setTimeout(call, 250); };
    this.ranks.addEventListener("input", later(() => this.open()));
    this.search.addEventListener("input", later(() => this.render()));
    this.file.addEventListener("change", () => (this.file.value ? this.read(this.file.value) : this.open()));
    this.file.addEventListener("focus", () => this.list());
    this.follow.addEventListener("change", () => this.follow.checked && this.toEnd());
    this.box.addEventListener("scroll", () => {
      const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
      if (!atEnd && this.follow.checked && this.settled) this.follow.checked = false;
    });
  }

  // Follow; from the begin, because the ranks may be others.
  open() {
    this.close();
    this.file.value = "";
    this.lines = [];
    this.box.replaceChildren();
    setText("log-note", "");
    const stream = new EventSource(`/api/logs?ranks=${encodeURIComponent(this.ranks.value.trim())}`);
    this.stream = stream;
    stream.addEventListener("lines", (event) => this.add(JSON.parse(event.data)));
    stream.addEventListener("error", () => {
      if (stream.readyState === EventSource.CLOSED) setText("log-note", "Write ranks as in 0,3-7; at most 32 are followed.");
    });
  }

  close() {
    this.stream?.close();
    this.stream = null;
  }

  only(rank) {
    this.ranks.value = String(rank);
    this.open();
    this.box.scrollIntoView({ block: "nearest" });
  }

  add(lines) {
    for (const line of lines) this.lines.push(line);
    const over = this.lines.length - KEPT;
    if (over > 0) this.lines.splice(0, over);
    const search = this.search.value.toLowerCase();
    const fresh = lines.slice(-SHOWN).filter((line) => this.matches(line, search));
    this.box.append(...fresh.map((line) => this.element(line, search)));
    while (this.box.childElementCount > SHOWN) this.box.firstElementChild.remove();
    this.note(search);
    this.toEnd();
  }

  render() {
    const search = this.search.value.toLowerCase();
    const found = this.lines.filter((line) => this.matches(line, search)).slice(-SHOWN);
    this.box.replaceChildren(...found.map((line) => this.element(line, search)));
    this.note(search);
    this.toEnd();
  }

  matches(line, search) {
    return !search || plain(line[2]).toLowerCase().includes(search);
  }

  element([rank, stream, text], search) {
    const row = make("div", stream === "stderr" ? { class: "err", title: "stderr" } : {});
    row.append(make("b", { text: rank === null ? "" : String(rank) }), make("span", {}, ...styled(text, search)));
    return row;
  }

  note(search) {
    if (search) setText("log-note", `${this.box.childElementCount} of ${this.lines.length} lines`);
    else setText("log-note", this.lines.length >= KEPT ? `the last ${KEPT} lines; files have all` : "");
  }

  toEnd() {
    if (!this.follow.checked) return;
    this.settled = false;
    this.box.scrollTop = this.box.scrollHeight;
    requestAnimationFrame(() => { this.settled = true; });
  }

  // Files of this node, of all starts.
  async list() {
    try {
      const { files } = await (await fetch("/api/files")).json();
      const before = this.file.value;
      const options = files.map(({ name, size }) => make("option", { value: name, text: `${name} (${bytes(size)})` }));
      this.file.replaceChildren(make("option", { value: "", text: "live" }), ...options);
      this.file.value = before;
    } catch { /* as before */ }
  }

  async read(name) {
    this.close();
    const answer = await fetch(`/api/file?name=${encodeURIComponent(name)}`);
    const text = answer.ok ? await answer.text() : "";
    const stream = name.includes("stderr") ? "stderr" : "stdout";
    const rank = Number(name.split("/")[1]);
    const lines = text.split("\n");
    if (lines.at(-1) === "") lines.pop();
    this.lines = lines.slice(-KEPT).map((line) => [rank, stream, line]);
    this.render();
    if (!answer.ok) setText("log-note", "This file is not there any more.");
  }
}
