"""Finds the rank that failed first, and the ranks that failed only because of it.

Pure: the exits of all workers go in, a `Diagnosis` comes out. No clock, no files, no processes.

Rules, in the order in which they are applied:

1. **Moment.** The error record gives the time of a failure. A record with a fraction of a second is used as
   it is; one with whole seconds limits the exit time; an impossible one (after the exit, before the start)
   is ignored in favour of the exit time.
2. **Victims.** A worker that exited after the launcher had signalled it, whatever its code, is a victim of
   the stop and not a failure, unless its error record shows that it failed before the signal. In that case
   it keeps the code it would have exited with, not that of the signal.
3. **Echoes.** A failure that only reports a lost peer (see `ECHOES`), in a job with peers, ranks below every
   real failure, whatever the times: a socket often closes before the dying peer has recorded its own error.
4. **Root cause** is the earliest real failure; without one, the earliest echo; else the earliest victim. Ties
   go to the lower rank, so that the result does not depend on the order of the input.

Invariant: `failed`, `echoes` and `victims` are disjoint, sorted by moment, and contain every exit with a
nonzero code. `reason` explains the choice of the root cause in one sentence.
"""

from __future__ import annotations

import re

from phalanx.core.record import Record

TYPE_CHECKING = False  # importing typing and collections.abc costs a restart, which waits for this module
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# Two processes read the clock, so a record may be stamped slightly after the exit.
CLOCK_SLACK = 0.05


class ErrorRecord(Record):
    """A worker's own record of its failure."""

    message: str
    traceback: str = ""
    at: float | None = None
    precise: bool = False  # False: `at` is in whole seconds
    code: int | None = None  # replaces the exit code in reports
    members: tuple[str, ...] = ()  # the first exceptions of a group
    kinds: tuple[str, ...] = ()  # the exception's class and its base classes, by name
    data: dict[str, Any] | None = None  # the whole content of the error file


class WorkerExit(Record):
    """How one worker exited; `code` is negative for a signal, times are wall-clock seconds."""

    rank: int
    pid: int
    code: int
    at: float
    error: ErrorRecord | None = None
    stopped_at: float | None = None
    tail: str = ""
    host: str = ""
    evidence: str = ""
    alone: bool = False  # the only worker of its job: it has no peer to lose


class Group(Record):
    """Failures that are the same except for rank, pid, port and address."""

    ranks: tuple[int, ...]
    first: WorkerExit
    echo: bool = False


class Diagnosis(Record):
    """The root cause, the other failures, the lost peers, the stopped workers, and why."""

    root: WorkerExit
    failed: list[WorkerExit]
    echoes: list[WorkerExit]
    victims: list[WorkerExit]
    reason: str
    groups: list[Group]

    @property
    def exit_code(self) -> int:
        """The exit code for the whole job: the root cause's status as a shell shows it."""
        return shell_status(self.root.code) or 1


_BROKEN_PIPE = "broken pipe to a peer"
# How a healthy worker reports a lost peer. Matched, ignoring case, against the first exception of a chain;
# against the last lines of stderr only if there is no error record.
ECHOES: tuple[tuple[str, str], ...] = (
    (r"connection reset by peer|ConnectionResetError", "connection reset by a peer"),
    (
        r"connection (was )?closed by (remote )?peer|remote end closed|peer closed",
        "connection closed by a peer",
    ),
    (r"connection (was )?aborted|ConnectionAbortedError", "connection aborted by a peer"),
    (r"broken pipe|BrokenPipeError", _BROKEN_PIPE),
    # A bare EOFError is a closed connection; one with a message is a truncated pickle or a closed stdin.
    (r"^EOFError:?\s*$|EOF (read )?from (remote|peer)|IncompleteReadError", "end of stream from a peer"),
    (r"failed to recv, got 0 bytes|recvValue failed|sendBytes failed", "store connection lost"),
    (r"socket (was )?closed unexpectedly|ncclSocket\w*.*(closed|failed)", "connection closed by a peer"),
    (r"ncclRemoteError|nccl.*remote (process|error)|remote process exited", "NCCL lost a remote process"),
    (r"ncclSystemError.*(socket|connection|peer)", "NCCL lost a connection"),
    (r"NCCL communicator was aborted|communicator.{0,40}aborted", "NCCL communicator aborted"),
    (r"gloo.*(connection|timed out waiting|read error|write error)", "gloo lost a peer"),
    (r"process group (has been |was )?(destroyed|aborted)", "process group destroyed"),
    (
        r"watchdog.*(timeout|timed out)|collective operation timeout",
        "collective timed out waiting for a peer",
    ),
    (r"timed out waiting for .*(rank|peer|recv|send)", "timed out waiting for a peer"),
    (r"waiting for clients\. \d+/\d+|wait timeout after \d+ ?ms, keys", "timed out waiting for a peer"),
    (r"(MPI_ABORT|ORTE|PMIX).*(peer|remote|abort)", "MPI lost a peer"),
    (
        r"GRPC.*unavailable|StatusCode\.UNAVAILABLE|coordination service.*(unavailable|shut)",
        "coordinator unavailable",
    ),
)
# How CUDA, HIP and their management library name a device that has failed; no program can cause these.
_LOST_DEVICE = (
    r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_(ECC|NVLINK)_UNCORRECTABLE|hipErrorECCNotCorrectable"
    r"|\bGPU is lost\b|fallen off the bus"
)
_SIGABRT = 6
# How a crash stack begins, and the signal that caused it.
_FATAL = (
    ("Fatal Python error: Segmentation fault", -11),
    ("Fatal Python error: Bus error", -7),
    ("Fatal Python error: Floating", -8),
    ("Fatal Python error: Illegal instruction", -4),
    ("Fatal Python error", -_SIGABRT),
)
# CPython prints one of these between the links of an exception chain, oldest first.
_CHAIN = (
    r"\n(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)\n"
)


def echo_of(ending: WorkerExit) -> str:
    """The kind of lost-peer echo, or an empty string for a real failure."""
    if ending.alone:
        return ""
    if ending.error is not None and not ending.error.message.startswith("Fatal Python error"):
        text = _first_in_chain(ending.error)
    elif ending.code > 0 or ending.code == -_SIGABRT:
        # Watchdog threads abort the process. No other signal can be an echo of a lost connection.
        text = ending.tail
    else:
        return ""
    meaning = echo_in(text)
    return "" if meaning == _BROKEN_PIPE and _was_printing(ending) else meaning


def echo_in(text: str) -> str:
    """How this text reports a lost peer; empty: it does not."""
    # Compiled on first use: the import of this module delays the first worker.
    for pattern, meaning in ECHOES:
        if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            return meaning
    return ""


def tells_of_lost_device(text: str) -> bool:
    """Whether a failure is that of a device, not of the program."""
    return re.search(_LOST_DEVICE, text, re.IGNORECASE) is not None


def _was_printing(ending: WorkerExit) -> bool:
    """Whether the broken pipe was the worker's own output: `phalanx run ... | head` is not a lost peer."""
    text = ending.error.traceback if ending.error is not None else ending.tail
    lines = [line.strip() for line in text.splitlines()]
    places = [number for number, line in enumerate(lines) if line.startswith('File "')]
    source = lines[places[-1] + 1] if places and places[-1] + 1 < len(lines) else ""
    return re.search(r"\bprint\(|\bstd(out|err)\b", source) is not None


def _first_in_chain(error: ErrorRecord) -> str:
    # The first exception of a chain decides: a real error followed by a failing clean-up ends in "connection
    # closed", and a lost peer wrapped in the user's own exception does not.
    links = re.split(_CHAIN, error.traceback)
    if len(links) < 2:
        return error.message
    lines = links[0].rstrip().splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("  File ")), -1)
    text = [line for line in lines[start + 1 :] if not line.startswith("    ")]
    return "\n".join(text) or error.message


def moment(ending: WorkerExit, started_at: float | None = None) -> float:
    """The wall-clock time at which this worker failed, as exactly as known."""
    error = ending.error
    if error is None or error.at is None or error.at <= 0 or error.at > ending.at + CLOCK_SLACK:
        return ending.at
    if started_at is not None and error.at + (0.0 if error.precise else 1.0) < started_at - CLOCK_SLACK:
        return ending.at
    if error.precise:
        return min(error.at, ending.at)
    return min(ending.at, error.at + 0.999)


def is_victim(ending: WorkerExit, started_at: float | None = None) -> bool:
    """Whether this worker exited because the launcher stopped it."""
    if ending.stopped_at is None or ending.at < ending.stopped_at:
        return False
    if ending.error is None:
        return True
    return moment(ending, started_at) >= ending.stopped_at


def own_code(ending: WorkerExit, started_at: float | None = None) -> int:
    """The worker's own code: the launcher's signal may hit a worker that has already failed."""
    error, stop = ending.error, ending.stopped_at
    signalled = stop is not None and ending.at >= stop and ending.code < 0
    if error is None or not signalled or is_victim(ending, started_at):
        return ending.code
    if error.code is not None:
        return error.code
    return next((code for words, code in _FATAL if error.message.startswith(words)), 1)


def diagnose(endings: Iterable[WorkerExit], started_at: float | None = None) -> Diagnosis:
    """Find the root cause among the exits of one group of workers."""
    everyone = _in_order(endings, started_at)
    bad = [e for e in everyone if e.code != 0]
    victims = [e for e in bad if is_victim(e, started_at)]
    own = [e for e in bad if not is_victim(e, started_at)]
    echoes = [e for e in own if echo_of(e)]
    failed = [e for e in own if not echo_of(e)]
    root = (failed or echoes or victims or everyone)[0]
    reason = _reason(root, failed, echoes, victims, started_at)
    groups = _groups(failed, echo=False) + _groups(echoes, echo=True)
    return Diagnosis(root, failed, echoes, victims, reason, groups)


def root_of(endings: Iterable[WorkerExit]) -> WorkerExit:
    """Only the root cause, the same that `diagnose` finds: a restart does not wait for the rest."""
    everyone = _in_order(endings, None)
    bad = [e for e in everyone if e.code != 0]
    own = [e for e in bad if not is_victim(e)]
    if len(own) > 1:  # otherwise the patterns need not be compiled
        own = [e for e in own if not echo_of(e)] or own
    return (own or bad or everyone)[0]


def _in_order(endings: Iterable[WorkerExit], started_at: float | None) -> list[WorkerExit]:
    """Sorted by the moment of failure, each with its own code."""

    def order(ending: WorkerExit) -> tuple[int, int]:
        # Whole milliseconds: smaller differences are noise.
        return (int(moment(ending, started_at) * 1000 + 0.5), ending.rank)

    everyone = sorted((e.replace(code=own_code(e, started_at)) for e in endings), key=order)
    if not everyone:
        raise ValueError("diagnose: no exits given; at least one worker must have exited")
    return everyone


def _reason(
    root: WorkerExit,
    failed: list[WorkerExit],
    echoes: list[WorkerExit],
    victims: list[WorkerExit],
    started_at: float | None,
) -> str:
    who = f"rank {root.rank}"
    if failed:
        when = moment(root, started_at)
        early = [e for e in echoes if moment(e, started_at) < when]
        if early:
            names = ranks_text(e.rank for e in early)
            return f"{who} failed on its own; {names} exited earlier, but only lost a peer"
        others = failed[1:] + echoes
        if others:
            second = min(others, key=lambda e: moment(e, started_at))
            gap = (moment(second, started_at) - when) * 1000
            lead = f"{gap:.0f} ms before" if gap >= 0.5 else "in the same millisecond as"
            return f"{who} failed first, {lead} rank {second.rank}"
        return f"only {who} failed on its own" if victims else f"{who} failed"
    if echoes:
        return (
            f"every failure here is a lost peer; {who} was first ({echo_of(root)}); "
            "the cause is probably on another node"
        )
    if victims:
        return "no rank failed on its own: all exited after they were asked to stop"
    return "no rank failed"


def _groups(endings: list[WorkerExit], *, echo: bool) -> list[Group]:
    found: dict[str, list[WorkerExit]] = {}
    for ending in endings:
        found.setdefault(fingerprint(ending), []).append(ending)
    return [Group(tuple(sorted(e.rank for e in same)), same[0], echo) for same in found.values()]


_VARYING: tuple[tuple[str, str], ...] = (
    (r"0x[0-9a-fA-F]+", "0x*"),
    (r"\b((?:global|local|role|group)?[ _-]?rank)(\s*[=:]?\s*)\d+", r"\1\2*"),
    (r"\b((?:p|t)id|process|thread)(\s*[=:]?\s*)\d+", r"\1\2*"),
    (r"\b(cuda|xpu|hpu|npu|gpu|device)([ :=]\s*)\d+", r"\1\2*"),
    (r"(\d{1,3}(?:\.\d{1,3}){3}\]?|localhost|\]):\d+", r"\1:*"),
)


def normalise(text: str) -> str:
    """Text without what differs between ranks: addresses, rank numbers, pids, devices, ports."""
    for pattern, plain in _VARYING:
        text = re.sub(pattern, plain, text, flags=re.IGNORECASE)
    return text.strip()


def fingerprint(ending: WorkerExit) -> str:
    """Equal for two exits that a person would call the same failure."""
    error = ending.error
    if error is not None:
        return f"{ending.code}\n{normalise(error.traceback or error.message)}"
    return f"{ending.code}\n{normalise(ending.evidence)}\n{normalise(last_line(ending.tail))}"


# ---------------------------------------------------------------- the same failure again


_FRAME = r'^\s*(?:\| )?File "(.+)", line (\d+)(?:, in (.+))?$'  # that of a SyntaxError has no function
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen ")
_CRASHES = {4: "SIGILL", 5: "SIGTRAP", _SIGABRT: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
"""Signals that a program causes itself; any other may come from outside."""
_SIGKILL = 9
_MAY_PASS = (
    r"\bOSError\b|\bDist\w*Error\b|connect|network|time[ -]?out|timed out|unavailable|http|deadline|\brpc"
    r"|in use|temporar|too many requests|busy|killed by signal|exited unexpectedly|terminated abruptly"
    r"|\bKeyboardInterrupt\b|\bSystemExit\b|Signal\w*Exception"
)
"""Exceptions and words of causes that may be gone at the next attempt: files, networks, programs, people."""


def signature(ending: WorkerExit) -> str:
    """What identifies this failure; empty: nothing does, or its cause may pass by itself.

    Of an exception: its class and the innermost frame of the user's own code; of a crash: the signal and that
    frame. A lost device has none: it is the host's failure, which another host does not repeat.
    """
    error = ending.error
    if is_victim(ending) or echo_of(ending):
        return ""
    crashed = error is None or error.message.startswith("Fatal Python error")
    place = own_frame(error.traceback) if error is not None else ""
    if crashed and ending.code == -_SIGKILL:
        # "possibly" is the evidence of another process, too.
        return "SIGKILL, out of memory" if re.match("(probably )?out of memory", ending.evidence) else ""
    if crashed:
        name = _CRASHES.get(-ending.code, "")
        return f"{name} at {place}" if name and place else name
    assert error is not None
    kinds = error.kinds or exception_kinds(error.message)
    first = _first_in_chain(error)
    words = [*kinds, error.message[:2000], *exception_kinds(first), first[:2000]]
    for member in error.members:
        words += [*exception_kinds(member), member]
    text = "\n".join(words)
    if not kinds or not place or tells_of_lost_device(text) or re.search(_MAY_PASS, text, re.IGNORECASE):
        return ""
    return f"{kinds[0]} at {place}"


def exception_kinds(line: str) -> tuple[str, ...]:
    """The class of the exception that this line reports, and its base classes as far as they are known."""
    name = line.partition(":")[0].rpartition(".")[2].strip()
    if not name.isidentifier():
        return ()
    import builtins

    kind = getattr(builtins, name, None)
    return tuple(one.__name__ for one in kind.__mro__[:-1]) if isinstance(kind, type) else (name,)


def own_frame(traceback: str) -> str:
    """The innermost frame of the user's own code; of a library's where there is none."""
    frames = [m.groups() for line in traceback.splitlines() if (m := re.match(_FRAME, line))]
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY)] or frames
    if not own:
        return ""
    path, line, function = own[-1]
    return f"{path}:{line}" + (f", in {function}" if function else "")


# ---------------------------------------------------------------- text


def last_line(text: str) -> str:
    """The last line that is not blank; of a progress bar, its last state."""
    return text.rstrip().rpartition("\n")[2].rpartition("\r")[2]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    # "4, 5" is easier to read than "4-5"; a dash is shorter from three on.
    parts = (", ".join(map(str, s)) if s[-1] - s[0] < 2 else f"{s[0]}-{s[-1]}" for s in spans)
    return "ranks " + ", ".join(parts)


def shell_status(code: int) -> int:
    """An exit code as a shell shows it: 128+n for signal n."""
    return 128 - code if code < 0 else code
