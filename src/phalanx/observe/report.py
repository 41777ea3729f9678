"""The failure report: what a person sees last on the screen, and the same as JSON.

It answers, in this order: what failed, where, when, why we think that this is the cause, what it said itself,
what else fell, what was stopped because of it, and what to look at next. Nothing is shown twice: ranks that
failed alike share one traceback, and stderr is not repeated where it only prints that traceback again.

The frame is plain ASCII; only what the workers wrote can hold other characters. Control characters and colour
codes in their text are taken out, so that a report never upsets a terminal.
"""

from __future__ import annotations

import os
import re

from phalanx.core.failures import diagnose, echo_of, last_line, moment, ranks_text, root_of
from phalanx.observe.duration import duration
from phalanx.workers.exit_evidence import code_in_words, next_step, signal_label

TYPE_CHECKING = False  # a restart waits for `summary`: nothing is imported or compiled that it does not need
if TYPE_CHECKING:
    from typing import Any

    from phalanx.core.failures import Diagnosis, Group, WorkerExit
    from phalanx.workers.failure import ProcessFailure

Failures = dict[int, "ProcessFailure"]
WIDTH = 100
LABEL = 10
TRACEBACK_LINES = 40
OTHER_LINES = 12
LINE_CAP = 500


def root_cause(failures: Failures) -> tuple[int, ProcessFailure]:
    """The rank and the failure that all of this began with."""
    rank = root_of(failure.ending(rank) for rank, failure in failures.items()).rank
    return rank, failures[rank]


def diagnosis_of(failures: Failures, started_at: float | None = None) -> Diagnosis:
    """The core's verdict on these failures."""
    return diagnose((failure.ending(rank) for rank, failure in failures.items()), started_at)


def summary(rank: int, failure: ProcessFailure) -> str:
    """One line for an incident: who, and what in the fewest words."""
    what = _said(failure) or _short_status(failure.reported_exitcode)
    return f"rank {rank}: {what}"


# ---------------------------------------------------------------- the text


def format_report(
    name: str,
    failures: Failures,
    *,
    border: str = "=",
    section: str = "-",
    started_at: float | None = None,
    colour: bool = False,
    width: int | None = None,
) -> str:
    """The whole report, without a newline at the end."""
    columns = max(40, terminal_width() if width is None else width)
    found = diagnosis_of(failures, started_at)
    failure = failures[found.root.rank]
    paint = _paint if colour else _plain
    rule = (section or "-") * columns
    title = paint(f"{plain_text(name)} FAILED", "1;31") + _counts(found)
    lines = [(border or "=") * columns, title, rule[:columns]]
    lines += _root_lines(found, failure, columns, started_at, paint)
    others = _other_lines(found, failures, columns, started_at)
    if others:
        lines += [rule[:columns], *others]
    lines.append(rule[:columns])
    lines += _wrapped("Look next", hint(found, failure), columns, paint)
    lines.append(lines[0])
    lines[0] = lines[-1] = lines[0][:columns]
    return "\n".join(lines)


def terminal_width() -> int:
    """The columns to write for: those of the terminal on stderr, never more than a page."""
    try:
        return min(os.get_terminal_size(2).columns, WIDTH)
    except OSError:
        return WIDTH


def for_stream(text: str, encoding: str | None) -> str:
    """Text with what this encoding cannot write turned into escapes."""
    try:
        return text.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    except (LookupError, UnicodeError):
        return text.encode("ascii", "backslashreplace").decode("ascii")


def _counts(found: Diagnosis) -> str:
    parts = [
        (len(found.failed), "failed"),
        (len(found.echoes), "lost a peer"),
        (len(found.victims), "stopped"),
    ]
    told = [f"{count} {what}" for count, what in parts if count]
    return f": {', '.join(told)}" if len(told) > 1 or sum(count for count, _ in parts) > 1 else ""


def _root_lines(
    found: Diagnosis, failure: ProcessFailure, columns: int, started_at: float | None, paint: Any
) -> list[str]:
    root = found.root
    title = (
        "Root cause" if root in found.failed else "First to notice" if root in found.echoes else "First end"
    )
    lines = _plain_wrap(f"{title}: {_place(root, failure)}", columns, "  ")
    lines[0] = paint(lines[0], "1")
    when = _when(moment(root, started_at), started_at)
    rows = [
        ("what", _said(failure) or _status(failure)),
        ("how", _status(failure) if _said(failure) else ""),
        ("when", when),
        ("why", found.reason if len(found.failed + found.echoes + found.victims) > 1 else ""),
        ("evidence", failure.evidence),
        ("same on", _same_on(found)),
    ]
    for label, value in rows:
        if value:
            lines += _wrapped(label, value, columns, paint, indent="  ")
    traceback = plain_lines(failure.traceback)
    tail = _own_tail(plain_lines(failure.tail), traceback)
    if traceback:
        lines += ["", *("  " + line for line in _cut_middle(traceback, failure.error_file))]
    if tail:
        lines += ["", "  last lines of stderr", *(f"  | {line}".rstrip() for line in tail)]
    # Never written is the normal case and says nothing; there but unreadable is worth a line.
    if not traceback and failure.no_error_reason and _is_path(failure.error_file):
        lines += ["", *_wrapped("note", failure.no_error_reason, columns, paint, indent="  ")]
    logs = [path for path in (failure.stderr_path, failure.stdout_path, failure.error_file) if _is_path(path)]
    if logs:
        lines.append("")
        lines += [f"  {'logs' if i == 0 else '':<{LABEL}}{plain_text(p)}" for i, p in enumerate(logs)]
    return lines


def _other_lines(found: Diagnosis, failures: Failures, columns: int, started_at: float | None) -> list[str]:
    zero = moment(found.root, started_at)
    rest = [group for group in found.groups if found.root.rank not in group.ranks]
    real = [group for group in rest if not group.echo]
    echoes = [group for group in rest if group.echo]
    lines: list[str] = []
    for title, groups in (("Also failed", real), ("Only noticed a lost peer", echoes)):
        if groups:
            lines.append(title)
            shown = groups[:OTHER_LINES]
            lines += [_one_line(g, failures[g.first.rank], zero, columns, started_at) for g in shown]
            left = sorted(rank for g in groups[OTHER_LINES:] for rank in g.ranks)
            if left:
                lines.append(f"  ... and {len(groups) - OTHER_LINES} more kinds, on {ranks_text(left)}")
    victims = [e for e in found.victims if e is not found.root]
    if victims:
        forced = [e.rank for e in victims if e.code == -9]
        how = ""
        if forced:
            how = " (by SIGKILL)" if len(forced) == len(victims) else f" ({ranks_text(forced)} by SIGKILL)"
        title = "Stopped because of this" if found.root not in found.victims else "Stopped as well"
        lines += _plain_wrap(f"{title}: {ranks_text(e.rank for e in victims)}{how}", columns, "  ")
    return lines


def _one_line(
    group: Group, failure: ProcessFailure, zero: float, columns: int, started_at: float | None
) -> str:
    gap = moment(group.first, started_at) - zero
    where = f" on {failure.host}" if failure.host and len(group.ranks) == 1 else ""
    said = _said(failure) or failure.evidence or last_line(failure.tail)
    if group.echo:
        said = f"{echo_of(group.first)}: {said}"
    status = _short_status(failure.reported_exitcode)
    text = f"  {ranks_text(group.ranks)}{where}  {gap:+.3f} s  {status}" + (f"  {said}" if said else "")
    text = plain_text(text)
    return text if len(text) <= columns else text[: columns - 3] + "..."


def _place(root: WorkerExit, failure: ProcessFailure) -> str:
    details = []
    if failure.local_rank != root.rank:
        details.append(f"local rank {failure.local_rank}")
    if failure.role:
        details.append(f"role {failure.role}")
    inside = f" ({', '.join(details)})" if details else ""
    host = f" on {failure.host}" if failure.host else ""
    return plain_text(f"rank {root.rank}{inside}{host}, pid {root.pid}")


def _status(failure: ProcessFailure) -> str:
    text = code_in_words(failure.exitcode) + (
        "" if failure.error or failure.exitcode < 0 or _said(failure) else ", no traceback"
    )
    if failure.reported_exitcode != failure.exitcode:
        return f"error code {failure.reported_exitcode} by its error file (the process: {text})"
    return text


def _short_status(code: int) -> str:
    return signal_label(-code) if code < 0 else f"exit code {code}"


def _same_on(found: Diagnosis) -> str:
    ranks = next((g.ranks for g in found.groups if found.root.rank in g.ranks), ())
    others = [rank for rank in ranks if rank != found.root.rank]
    return f"{ranks_text(others)}: identical but for rank, pid and address" if others else ""


def iso_time(seconds: float) -> str:
    """Local time to the millisecond, with the offset from UTC."""
    import datetime

    try:
        return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.3f}"


def _when(at: float, started_at: float | None) -> str:
    if started_at is None or at < started_at:
        return iso_time(at)
    return f"{iso_time(at)}, {duration(at - started_at)} after the start"


# ---------------------------------------------------------------- what to look at next


_FRAME = r'^\s*(?:\| )?File "(.+)", line (\d+)(?:, in (.+))?$'  # a SyntaxError's has no function
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen ")


def hint(found: Diagnosis, failure: ProcessFailure) -> str:
    """One thing to look at, as near to the cause as can be told."""
    root = found.root
    if root in found.victims:
        return "whatever told this group to stop: the lines above this report, the scheduler, a signal"
    if root in found.echoes:
        return "the reports of the other nodes; the rank that was lost is not among these"
    if "out of memory" in failure.evidence:
        return "this rank's memory: smaller batches, fewer data-loading processes, or a higher memory limit"
    place = _own_frame(failure.traceback or ("" if failure.error else failure.tail))
    if re.search(r"(CUDA|HIP|XPU).{0,20}out of memory|OutOfMemoryError", failure.message):
        return f"GPU memory (`nvidia-smi`: is another process on it?), then {place or 'the batch size'}"
    if "ModuleNotFoundError" in failure.message:
        return f"the environment this worker runs in, then {place}" if place else "the worker's environment"
    if failure.message.startswith("BrokenPipeError"):
        return f"whoever read from this worker (its output in `... | head`?): gone before {place or 'it'}"
    step = next_step(failure.exitcode)
    if place:
        return f"{place}; {step}" if root.code < 0 and step else place
    if step:
        return step
    if failure.tail.strip():
        return "the last lines of stderr above" + (", the rest is in the log" if failure.stderr_path else "")
    if _is_path(failure.stderr_path):
        return f"{failure.stderr_path} (it is empty or has no last lines)"
    return (
        "the worker's own output (-r 3 keeps it with the report); no exception was recorded: it called "
        "exit() itself, or its program did not get as far"
    )


def _own_frame(traceback: str) -> str:
    frames = [m.groups() for line in traceback.splitlines() if (m := re.match(_FRAME, line))]
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY)] or frames
    if not own:
        return ""
    path, line, function = own[-1]
    return plain_text(f"{path}:{line}" + (f", in {function}" if function else ""))


# ---------------------------------------------------------------- text of workers


_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
_UNDECODED = r"[\ud800-\udfff]"  # a byte of a file name, say, that is no UTF-8


def plain_text(text: str) -> str:
    """One piece of a worker's text that is safe on any terminal."""
    if text.isascii() and text.isprintable():
        return text
    text = re.sub(_ESCAPES, "", text).replace("\t", "    ")
    text = re.sub(_UNDECODED, "\ufffd", text)
    return re.sub(_CONTROL, lambda m: f"\\x{ord(m[0]):02x}", text)


def plain_lines(text: str) -> list[str]:
    """A worker's text in lines; of a progress bar only its last state."""
    lines = []
    for raw in text.rstrip("\n").split("\n") if text.strip() else []:
        last = next((part for part in reversed(raw.split("\r")) if part), "")
        line = plain_text(last)
        lines.append(line if len(line) <= LINE_CAP else f"{line[:LINE_CAP]} ... {len(line) - LINE_CAP} more")
    return lines


def _headline(message: str) -> str:
    lines = [line.strip() for line in plain_lines(str(message)) if line.strip()]
    more = " ..." if len(lines) > 1 else ""
    return (lines[0][:300] + more) if lines else ""


def _said(failure: ProcessFailure) -> str:
    """The exception in one line: as recorded, else as the interpreter itself printed it before it gave up."""
    if failure.error:
        return _headline(failure.message)
    if failure.exitcode <= 0:
        return ""
    said = ""
    inside = False  # below a place in the source, until the line that says what happened there
    for line in plain_lines(failure.tail):
        line = line.partition("]: ")[2] if line.startswith("[rank") else line
        if line.startswith('  File "'):
            inside = True
        elif line.startswith("Fatal Python error: "):
            said = line
        elif inside and line and not line.startswith((" ", "Traceback (")):
            said, inside = line, False
    return said[:300]


_RANK_PREFIX = r"^\[rank\d+\]:\s?"
_CHAIN_LINES = ("Traceback (most recent call last)", "The above exception", "During handling of the above")


def _own_tail(tail: list[str], traceback: list[str]) -> list[str]:
    """The last lines of stderr without the traceback that is shown anyway."""
    if not traceback or not tail:
        return [line for line in tail if line] and tail
    known = {line.strip() for line in traceback}
    final = next((line.strip() for line in reversed(traceback) if line.strip()), "")
    bare = [re.sub(_RANK_PREFIX, "", line) for line in tail]
    end = max((i for i, line in enumerate(bare) if line.strip() == final), default=-1)
    start = end
    while start > 0 and _of_traceback(bare[start - 1], known):
        start -= 1
    kept = tail[: max(start, 0)] + tail[end + 1 :] if end >= 0 else tail
    while kept and not kept[-1].strip():
        kept = kept[:-1]
    return kept


def _of_traceback(line: str, known: set[str]) -> bool:
    return not line.strip() or line.strip() in known or line.startswith(("  ", *_CHAIN_LINES))


def _cut_middle(lines: list[str], where: str) -> list[str]:
    if len(lines) <= TRACEBACK_LINES:
        return lines
    head, tail = TRACEBACK_LINES // 4, len(lines) - TRACEBACK_LINES * 3 // 4
    # Both cuts fall between frames, so that no source line stands without its place.
    while head > 1 and not lines[head].startswith("  File "):
        head -= 1
    while tail < len(lines) - 4 and not lines[tail].startswith("  File "):
        tail += 1
    whole = f", all of it is in {where}" if _is_path(where) else ""
    note = f"  ... {tail - head} lines left out{whole} ..."
    return [*lines[:head], note, *lines[tail:]]


# ---------------------------------------------------------------- layout


def _plain(text: str, _code: str) -> str:
    return text


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _plain_wrap(text: str, columns: int, later: str) -> list[str]:
    import textwrap

    return textwrap.wrap(
        text, columns, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _wrapped(label: str, value: str, columns: int, paint: Any, indent: str = "") -> list[str]:
    gap = " " * (len(indent) + max(LABEL, len(label) + 2))
    lines = _plain_wrap(f"{indent}{label:<{len(gap) - len(indent)}}{plain_text(value)}", columns, gap)
    lines[0] = lines[0].replace(label, paint(label, "1"), 1)
    return lines


def _is_path(path: str) -> bool:
    return bool(path) and not path.startswith("<")


# ---------------------------------------------------------------- JSON


def report_json(name: str, failures: Failures, *, started_at: float | None = None) -> dict[str, Any]:
    """The report as plain data: one entry per rank, a traceback only for the first that has it."""
    found = diagnosis_of(failures, started_at)
    kinds = {e.rank: "failed" for e in found.failed} | {e.rank: "echo" for e in found.echoes}
    kinds |= {e.rank: "stopped" for e in found.victims}
    leader = {rank: group.first.rank for group in found.groups for rank in group.ranks}
    root = found.root.rank
    return {
        "name": name,
        "exit_code": found.exit_code,
        "started_at": started_at,
        "reason": found.reason,
        "look_next": hint(found, failures[root]),
        "root_rank": root,
        "failed": [e.rank for e in found.failed],
        "echoes": [e.rank for e in found.echoes],
        "stopped": [e.rank for e in found.victims],
        "ranks": [
            _rank_json(rank, failure, kinds.get(rank, "ended"), leader.get(rank, rank), started_at)
            for rank, failure in sorted(failures.items())
        ],
    }


def _rank_json(
    rank: int, failure: ProcessFailure, kind: str, leader: int, started_at: float | None
) -> dict[str, Any]:
    at = moment(failure.ending(rank), started_at)
    told: dict[str, Any] = {
        "rank": rank,
        "local_rank": failure.local_rank,
        "role": failure.role,
        "host": failure.host,
        "pid": failure.pid,
        "kind": kind,
        "exit_code": failure.reported_exitcode,
        "status": code_in_words(failure.exitcode),
        "time": iso_time(at),
        "timestamp": round(at, 6),
        "since_start": None if started_at is None else round(at - started_at, 6),
        "message": failure.message,
        "evidence": failure.evidence,
        "stderr": failure.stderr_path,
        "stdout": failure.stdout_path,
        "error_file": failure.error_file if _is_path(failure.error_file) else "",
    }
    if leader != rank:
        return told | {"same_as": leader}
    return told | {"traceback": failure.traceback, "stderr_tail": plain_lines(failure.tail)}
