"""`phalanx logs [RUN]`: what the workers of a run wrote, running or finished, each line with its rank.

The files are those of `--redirects`, `--tee` or `--log-dir` (observe/run_registry.py knows where they are);
what goes to the console only is not kept. Of other nodes the end of each file is shown, fetched through the
job's store. Lines are escaped: a worker cannot control the terminal of who reads its log.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.cli.runs import (
    NoSuchRun,
    add_run,
    check_directory,
    is_alive,
    one_run,
    ranks_of,
    request,
    since_of,
)
from phalanx.cli.store import Parser
from phalanx.errors import UsageError
from phalanx.log import printable, write_stderr
from phalanx.logs.rotation import read_log
from phalanx.observe.snapshot import RunFile

_LINE = 1 << 16  # bytes after which a line without an end is shown
_POLL = 0.3
_LOOK = 2.0  # seconds between two looks for new starts, or the end of the run


class WrittenLog(NamedTuple):
    """A log file of this machine."""

    path: str
    attempt: int
    again: int
    rank: int
    stream: str


def main(argv: Sequence[str]) -> int:
    """Find the files, filter, print, and follow."""
    options = _parser().parse_args(argv)
    ranks, since = ranks_of(options.rank), since_of(options.since)
    try:
        wanted = re.compile(options.grep) if options.grep else None
    except re.error as error:
        raise UsageError(f"--grep {options.grep}: {error}") from None
    try:
        run, agent = one_run(options.run)
        if options.node:
            if agent is None:
                raise NoSuchRun("the logs of other nodes can be fetched only while the job runs")
            told = request(
                agent, {"ask": "logs", "all": True, **({} if ranks is None else {"ranks": sorted(ranks)})}
            )
            return _show_remote(told, options.node, wanted)
        check_directory(run)
    except NoSuchRun as error:
        write_stderr(f"phalanx logs: {error}\n")
        return 1
    return _show(run, ranks, options.attempt, since, wanted, options.follow and agent is not None)


def _parser() -> Parser:
    parser = Parser(prog="phalanx logs", description="What the workers of a run wrote.")
    add_run(parser)
    parser.add_argument("--rank", metavar="RANKS", default="", help="only these ranks, such as 0,3-7")
    parser.add_argument(
        "--node", metavar="NODE", default="", help="of this node (a name, or `all`), its last lines"
    )
    parser.add_argument("--attempt", metavar="K", type=int, help="only this start [the latest]")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until the run ends")
    parser.add_argument(
        "--since", metavar="T", default="", help="only files written to since then: 10m, 2h, 2026-11-16T05:00"
    )
    parser.add_argument(
        "--grep", metavar="RE", default="", help="only lines that this regular expression finds"
    )
    return parser


# ---- files of this machine ---------------------------------------------------------------------------


def files(run: RunFile) -> list[WrittenLog]:
    """The log files of a run, by start and rank; only regular files directly where they belong."""
    found = []
    for entry in _folders(run.logs):
        attempt = re.fullmatch(r"attempt_([0-9]{1,9})(?:\.([0-9]{1,9}))?", entry.name)
        if attempt is None:
            continue
        for rank in _folders(entry.path):
            if not re.fullmatch(r"[0-9]{1,9}", rank.name):
                continue
            local = int(rank.name)
            everywhere = run.ranks[local] if local < len(run.ranks) else local
            for stream in ("stdout", "stderr"):
                path = os.path.join(rank.path, f"{stream}.log")
                if os.path.isfile(path) and not os.path.islink(path):
                    found.append(WrittenLog(path, int(attempt[1]), int(attempt[2] or 0), everywhere, stream))
    return sorted(found, key=lambda one: (one.attempt, one.again, one.rank, one.stream))


def _folders(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def chosen(
    run: RunFile, ranks: set[int] | None, attempt: int | None, since: float | None = None
) -> list[WrittenLog]:
    """Those that were asked for; of the latest start unless one is named."""
    found = files(run)
    if attempt is None and found and since is None:
        latest = max((one.attempt, one.again) for one in found)
        found = [one for one in found if (one.attempt, one.again) == latest]
    elif attempt is not None:
        found = [one for one in found if one.attempt == attempt]
    if ranks is not None:
        found = [one for one in found if one.rank in ranks]
    return [one for one in found if since is None or _written(one.path) >= since]


def _written(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


class LogReader:
    """New whole lines of one file, from its begin on."""

    def __init__(self, log: WrittenLog) -> None:
        self.log = log
        self._at = 0
        self._rest = b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """Lines since the last call; `last`: what has no end is a line as well."""
        while True:
            self._at, data = read_log(self.log.path, self._at)
            if not data:
                break
            self._at += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LINE:
                whole, self._rest = [*whole, self._rest], b""
            for line in whole:
                yield line.decode("utf-8", "replace")
        if last and self._rest:
            rest, self._rest = self._rest, b""
            yield rest.decode("utf-8", "replace")


def _show(
    run: RunFile,
    ranks: set[int] | None,
    attempt: int | None,
    since: float | None,
    wanted: re.Pattern[str] | None,
    follow: bool,
) -> int:
    readers: dict[str, LogReader] = {}
    look_at, ended = 0.0, False
    while True:
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK
            for log in chosen(run, ranks, attempt, since if not readers else None):
                readers.setdefault(log.path, LogReader(log))
            ended = not follow or not is_alive(run)
        for reader in readers.values():
            for line in reader.lines(last=ended):
                _print(reader.log.rank, reader.log.stream, line, wanted)
        sys.stdout.flush()
        if ended:
            break
        if select.select([], [], [], _POLL)[0]:
            break
    if not readers:
        write_stderr(
            "phalanx logs: no such log: output that is not redirected (--tee, --redirects) is not kept\n"
        )
    return 0 if readers else 1


def _print(rank: int, stream: str, line: str, wanted: re.Pattern[str] | None, host: str = "") -> None:
    if wanted is None or wanted.search(line):
        mark = "!" if stream == "stderr" else " "
        where = f"{printable(host)} " if host else ""
        print(f"[{where}{rank}]{mark} {printable(line.replace(chr(13), chr(10))).replace(chr(10), ' ⏎ ')}")


def _show_remote(answer: dict[str, Any], node: str, wanted: re.Pattern[str] | None) -> int:
    """The ends of the logs that the nodes have sent."""
    told = [answer, *(one for one in answer.get("peers") or [] if isinstance(one, dict))]
    logs = [log for one in told for log in one.get("logs") or [] if isinstance(log, dict)]
    shown = 0
    for log in logs:
        host, rank, stream, text = (log.get(key) for key in ("host", "rank", "stream", "text"))
        if type(rank) is not int or not all(isinstance(one, str) for one in (host, stream, text)):
            continue
        if node not in ("all", host):
            continue
        shown += 1
        for line in str(text).splitlines():
            _print(rank, str(stream), line, wanted, str(host))
    if not shown:
        hosts = sorted({str(log.get("host")) for log in logs})
        write_stderr(
            f"phalanx logs: no logs of {printable(node)}; there are some of: {' '.join(hosts) or 'no node'}\n"
        )
    return 0 if shown else 1
