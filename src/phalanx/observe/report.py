"""The failure report: the last text on the screen, and the same as JSON.

It shows, in this order: what failed, where, when, why this is the root cause, the worker's own traceback and
output, which other ranks failed, which were stopped, and what to check next. Nothing is shown twice: ranks
with the same failure share one traceback, and stderr is omitted where it repeats that traceback.

The frame is plain ASCII; only the workers' own text can contain other characters. Control characters and
colour codes are removed from it, so that a report is safe on any terminal.
"""

from __future__ import annotations

import os
import re
import sys

from phalanx.core.diagnosis.exit_status import code_in_words, next_step, signal_label
from phalanx.core.diagnosis.failures import (
    diagnose,
    echo_of,
    exception_kinds,
    last_line,
    moment,
    own_frame,
    ranks_text,
    root_of,
    tells_of_lost_device,
)
from phalanx.job.environment import OWN_WORKER_STORE
from phalanx.observe.duration import duration

TYPE_CHECKING = False  # a restart waits for `summary`: nothing is imported or compiled that it does not need
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.core.diagnosis.failures import Diagnosis, Group, WorkerExit

Failures = dict[int, "ProcessFailure"]
WIDTH = 100
LABEL = 10
TRACEBACK_LINES = 40
OTHER_LINES = 12
LINE_CAP = 500


def root_cause(failures: Failures) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and its failure."""
    rank = root_of(failure.ending(rank) for rank, failure in failures.items()).rank
    return rank, failures[rank]


def diagnosis_of(failures: Failures, started_at: float | None = None) -> Diagnosis:
    """The core's diagnosis of these failures."""
    return diagnose((failure.ending(rank) for rank, failure in failures.items()), started_at)


def summary(rank: int, failure: ProcessFailure) -> str:
    """One line for an incident: the rank and its error."""
    return f"rank {rank}: {_error_line(failure) or _short_status(failure.reported_exitcode)}"


def exception_names(failure: ProcessFailure) -> tuple[str, ...]:
    """The class of the exception that ended a worker, and its base classes as far as they are known."""
    if failure.error is not None and failure.error.kinds:
        return failure.error.kinds
    return exception_kinds(_error_line(failure))


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
    root = _root_lines(found, failure, columns, started_at, paint)
    lines += _enriched(root, failure) if failure.exitcode < 0 else root
    others = _other_lines(found, failures, columns, started_at)
    if others:
        lines += [rule[:columns], *others]
    lines.append(rule[:columns])
    lines += _wrapped("Next step", hint(found, failure), columns, paint)
    lines.append(lines[0])
    lines[0] = lines[-1] = lines[0][:columns]
    return "\n".join(lines)


def terminal_width() -> int:
    """The width of the terminal on stderr, at most `WIDTH`."""
    try:
        return min(os.get_terminal_size(2).columns or WIDTH, WIDTH)
    except OSError:
        return WIDTH


def for_stream(text: str, encoding: str | None) -> str:
    """The text with escapes for characters that this encoding does not have."""
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
    shown = [f"{count} {what}" for count, what in parts if count]
    return f": {', '.join(shown)}" if len(shown) > 1 or sum(count for count, _ in parts) > 1 else ""


def _root_lines(
    found: Diagnosis, failure: ProcessFailure, columns: int, started_at: float | None, paint: Any
) -> list[str]:
    root = found.root
    title = "First exit"
    if root in found.failed or root in found.echoes:
        title = "Root cause" if root in found.failed else "First to lose a peer"
    lines = _plain_wrap(f"{title}: {_place(root, failure)}", columns, "  ")
    lines[0] = paint(lines[0], "1")
    error = _error_line(failure)
    rows = [
        ("error", error or _status(failure)),
        ("status", _status(failure) if error else ""),
        ("time", _when(moment(root, started_at), started_at)),
        ("reason", found.reason if len(found.failed + found.echoes + found.victims) > 1 else ""),
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
    # A missing error file is normal; an unreadable one deserves a line.
    if not traceback and failure.no_error_reason and _is_path(failure.error_file):
        lines += ["", *_wrapped("note", failure.no_error_reason, columns, paint, indent="  ")]
    logs = [path for path in (failure.stderr_path, failure.stdout_path, failure.error_file) if _is_path(path)]
    if logs:
        lines.append("")
        lines += [f"  {'logs' if i == 0 else '':<{LABEL}}{plain_text(p)}" for i, p in enumerate(logs)]
    return lines


def _enriched(lines: list[str], failure: ProcessFailure) -> list[str]:
    """What the program's own error handler makes of a death by signal (torch's hook)."""
    record = sys.modules.get("phalanx.worker.recorder")
    if record is None:  # nothing here can have defined or replaced a handler
        return lines
    enrich = getattr(record.current_handler(), "maybe_enrich_signal_failure_message", None)
    try:
        text = enrich("\n".join(lines), failure.error_file) if enrich is not None else ""
    except Exception:  # noqa: BLE001 - code of the user; the report is more important
        return lines
    return text.split("\n") if isinstance(text, str) and text else lines


def _other_lines(found: Diagnosis, failures: Failures, columns: int, started_at: float | None) -> list[str]:
    zero = moment(found.root, started_at)
    rest = [group for group in found.groups if found.root.rank not in group.ranks]
    real = [group for group in rest if not group.echo]
    echoes = [group for group in rest if group.echo]
    lines: list[str] = []
    for title, groups in (("Also failed", real), ("Lost a peer", echoes)):
        if groups:
            lines.append(title)
            shown = groups[:OTHER_LINES]
            lines += [_one_line(g, failures[g.first.rank], zero, columns, started_at) for g in shown]
            left = sorted(rank for g in groups[OTHER_LINES:] for rank in g.ranks)
            if left:
                lines.append(f"  ... and {len(groups) - OTHER_LINES} more failures, on {ranks_text(left)}")
    victims = [e for e in found.victims if e is not found.root]
    if victims:
        forced = [e.rank for e in victims if e.code == -9]
        how = ""
        if forced:
            how = " (by SIGKILL)" if len(forced) == len(victims) else f" ({ranks_text(forced)} by SIGKILL)"
        title = "Also stopped" if found.root in found.victims else "Stopped as a result"
        lines += _plain_wrap(f"{title}: {ranks_text(e.rank for e in victims)}{how}", columns, "  ")
    return lines


def _one_line(
    group: Group, failure: ProcessFailure, zero: float, columns: int, started_at: float | None
) -> str:
    gap = round(moment(group.first, started_at) - zero, 3) + 0.0  # never -0.000
    where = f" on {failure.host}" if failure.host and len(group.ranks) == 1 else ""
    error = _error_line(failure) or failure.evidence or last_line(failure.tail)
    if group.echo:
        error = f"{echo_of(group.first)}: {error}"
    status = _short_status(failure.reported_exitcode)
    text = f"  {ranks_text(group.ranks)}{where}  {gap:+.3f} s  {status}" + (f"  {error}" if error else "")
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
    text = code_in_words(failure.exitcode, failure.pid) + (
        "" if failure.error or failure.exitcode < 0 or _error_line(failure) else ", no traceback"
    )
    if failure.reported_exitcode != failure.exitcode:
        return f"error code {failure.reported_exitcode} from its error file (the process: {text})"
    return text


def _short_status(code: int) -> str:
    return signal_label(-code) if code < 0 else f"exit code {code}"


def _same_on(found: Diagnosis) -> str:
    ranks = next((g.ranks for g in found.groups if found.root.rank in g.ranks), ())
    others = [rank for rank in ranks if rank != found.root.rank]
    return f"{ranks_text(others)} (identical except for rank, pid and address)" if others else ""


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


# ---------------------------------------------------------------- the next step


def hint(found: Diagnosis, failure: ProcessFailure) -> str:
    """One thing to check, as near to the cause as the failure shows."""
    root = found.root
    if root in found.victims:
        return "find what stopped this group: the lines above this report, the scheduler, a signal"
    if root in found.echoes:
        return "see the reports of the other nodes: the rank that failed is on one of them"
    if "out of memory" in failure.evidence:
        return "use smaller batches or fewer data-loading processes on this rank, or raise its memory limit"
    place = plain_text(own_frame(failure.traceback or ("" if failure.error else failure.tail)))
    if tells_of_lost_device(failure.message):
        on = f" on {failure.host}" if failure.host else ""
        return f"a GPU{on} has failed, not the program: run `phalanx check` there, and keep the host out"
    if re.search(r"(CUDA|HIP|XPU).{0,20}out of memory|OutOfMemoryError", failure.message):
        return f"check GPU memory (`nvidia-smi`: other processes?), then {place or 'the batch size'}"
    if "ModuleNotFoundError" in failure.message:
        if not failure.traceback:  # of -m
            return "check the name of the module, and the worker's Python environment"
        return "check the worker's Python environment" + (f", then {place}" if place else "")
    if failure.message.startswith("usage error: "):
        return "check the arguments after the script's name on the command line"
    if failure.message.startswith("BrokenPipeError"):
        return f"check the pipe's reader (`... | head`?): it exited before {place or 'the worker did'}"
    if re.search("EADDRINUSE|address already in use", failure.message, re.IGNORECASE):
        return (
            "if the port is MASTER_PORT, the agent serves torch's store there: connect to it at MASTER_ADDR, "
            f"or set {OWN_WORKER_STORE}=1 to bind the port" + (f"; otherwise {place}" if place else "")
        )
    step = next_step(failure.exitcode)
    if place:
        return f"{place}; {step}" if root.code < 0 and step else place
    if step:
        return step
    if failure.error is not None and failure.message:
        return "see the error above: it was recorded without a place in the program"
    if failure.tail.strip():
        more = "; the log has the rest" if failure.stderr_path else ""
        return f"see the last lines of stderr above{more}"
    if _is_path(failure.stderr_path):
        return f"see {failure.stderr_path} (it has no text at its end)"
    return (
        "see the worker's own output (-r 3 includes it in the report); it recorded no exception: it called "
        "exit() itself, or failed before its program started"
    )


# ---------------------------------------------------------------- text of workers


_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
_UNDECODED = r"[\ud800-\udfff]"  # for example a byte of a file name that is not UTF-8


def plain_text(text: str) -> str:
    """A worker's text, made safe for any terminal."""
    if text.isascii() and text.isprintable():
        return text
    text = re.sub(_ESCAPES, "", text).replace("\t", "    ")
    text = re.sub(_UNDECODED, "\ufffd", text)
    return re.sub(_CONTROL, lambda m: f"\\x{ord(m[0]):02x}", text)


def plain_lines(text: str) -> list[str]:
    """The lines of a worker's text; of a progress bar, only the last state."""
    lines = []
    for raw in text.rstrip("\n").split("\n") if text.strip() else []:
        last = next((part for part in reversed(raw.split("\r")) if part), "")
        line = plain_text(last)
        lines.append(line if len(line) <= LINE_CAP else f"{line[:LINE_CAP]} ... {len(line) - LINE_CAP} more")
    return lines


def _headline(message: str) -> str:
    lines = [line.strip() for line in plain_lines(str(message)) if line.strip()]
    if not lines:
        return ""
    more = " ..." if len(lines) > 1 else ""
    if more and re.fullmatch(r"[\w.]+:", lines[0]):  # a report as the text of an exception: its essence
        inner = [line for line in lines[1:] if line.strip("=-")]
        error = next((line.partition(" ")[2].strip() for line in inner if line.startswith("error ")), "")
        lines[0] = " ".join([lines[0], *inner[:1], *([f"({error})"] if error else [])])
    elif "NCCL error" in lines[0] and "Last error:" in lines[1:-1]:  # before it: torch's file, NCCL's version
        cause = lines[lines.index("Last error:") + 1]
        lines[0] = f"{lines[0].partition(': ')[0]}: NCCL: {cause}"
    return lines[0][:300] + more


def _error_line(failure: ProcessFailure) -> str:
    """The exception in one line: as recorded, else as the interpreter printed it."""
    if failure.error:
        said = failure.error.message or failure.message
        return "; ".join([_headline(said), *map(_headline, failure.error.members)])
    if failure.exitcode <= 0:
        return ""
    found = ""
    inside = False  # between a frame and the line of the exception
    for line in plain_lines(failure.tail):
        line = line.partition("]: ")[2] if line.startswith("[rank") else line
        if line.startswith('  File "'):
            inside = True
        elif line.startswith("Fatal Python error: "):
            found = line
        elif inside and line and not line.startswith((" ", "Traceback (")):
            found, inside = line, False
    return found[:300]


_RANK_PREFIX = r"^\[rank\d+\]:\s?"
_CHAIN_LINES = ("Traceback (most recent call last)", "The above exception", "During handling of the above")


def _own_tail(tail: list[str], traceback: list[str]) -> list[str]:
    """The last lines of stderr, without the traceback that the report already shows."""
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
    # Cut between frames, so that every source line keeps its location.
    while head > 1 and not lines[head].startswith("  File "):
        head -= 1
    while tail < len(lines) - 4 and not lines[tail].startswith("  File "):
        tail += 1
    whole = f" (complete in {where})" if _is_path(where) else ""
    note = f"  ... {tail - head} lines omitted{whole} ..."
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
    """The report as plain data: one entry per rank, each traceback only once."""
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
    entry: dict[str, Any] = {
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
        return entry | {"same_as": leader}
    return entry | {"traceback": failure.traceback, "stderr_tail": plain_lines(failure.tail)}
