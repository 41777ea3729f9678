"""`phalanx logs [RUN]`: what the workers of a run wrote, running or finished, each line with its rank.

With --events, what happened to the run instead (events.py).

The files are those of `--redirects`, `--tee` or `--log-dir` (observe/run_registry.py knows where they are);
what goes to the console only is not kept. Files of this machine are read whole. Those of other nodes are
fetched through the job's store while it runs: the end of each file and, with `-f`, everything that is added;
with --rdzv-endpoint, those of all nodes, from any machine. After its end, those of other nodes are read where
they are in the same directory, and else a line says where they are.
Lines are escaped: a worker cannot control the terminal of who reads its log.
"""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.cli.parser import Parser
from phalanx.cli.remote_job import RemoteJob, add_endpoint, remote_job
from phalanx.cli.runs import (
    add_run,
    check_directory,
    local_agents,
    one_run,
    run_of,
    since_of,
)
from phalanx.errors import UsageError
from phalanx.log import printable, write_stderr
from phalanx.observe.local_agents import LocalAgent, put, states
from phalanx.observe.log_layout import WholeLog, list_logs
from phalanx.observe.sibling_logs import elsewhere, siblings
from phalanx.observe.snapshot import RunFile

_LINE = 1 << 16  # bytes after which a line without an end is shown
_POLL = 0.3
_ASK = 1.0  # seconds between two questions to the other nodes
_MANY = 1000  # lines after which there may be more
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
    options = make_parser().parse_args(argv)
    if options.events or options.json:
        _check_events(options)
        from phalanx.cli.events import show_events

        return show_events(
            *one_run(local_agents("logs", options.all_users), options.run), options.follow, options.json
        )
    ranks, since = options.rank, since_of(options.since)
    try:
        wanted = re.compile(options.grep) if options.grep else None
    except re.error as error:
        raise UsageError(f"--grep {options.grep}: {error}") from None
    if options.rdzv_endpoint:
        return _at_store(options, ranks, wanted)
    run, agents = one_run(local_agents("logs", options.all_users), options.run)
    runs = [run_of(one) for one in agents] or [run, *siblings(run)]  # once for each node of it
    if not agents:
        check_directory(runs[0])
    reader = RunReader(runs, agents, ranks, options.attempt, since, options.node)
    # An earlier start is known only where its files are.
    others = RemoteLogs(agents, ranks, options.node) if agents and options.attempt is None else None
    shown = _show(reader, others, wanted, options.follow and bool(agents))
    if not agents and (words := elsewhere(runs, options.node)):
        write_stderr(printable(f"phalanx logs: {words}") + "\n")
    if shown:
        return 0
    hosts = sorted({one.host for one in runs} | (others.hosts if others is not None else set()))
    return _no_log(f" of {options.node} (there are nodes: {' '.join(hosts)})" if options.node else "")


def _check_events(options: Namespace) -> None:
    """UsageError where the other options choose lines of the workers."""
    if not options.events:
        raise UsageError("--json prints events; add --events")
    for name in ("rank", "node", "attempt", "since", "grep", "rdzv_endpoint"):
        if getattr(options, name) not in ("", None):
            raise UsageError(
                f"--events shows all events of a run of this machine; leave out --{name.replace('_', '-')}"
            )


def _no_log(what: str) -> int:
    why = "output that is not redirected (--tee, --redirects) is not kept"
    write_stderr(printable(f"phalanx logs: no such log{what}: {why}") + "\n")
    return 1


def _at_store(options: Namespace, ranks: set[int] | None, wanted: re.Pattern[str] | None) -> int:
    if options.attempt is not None or options.since:
        raise UsageError("--attempt and --since choose files of this machine; leave out --rdzv-endpoint")
    with remote_job(options) as job:
        if not options.node and ranks is None:
            job.check_amount()
        others = RemoteLogs([], ranks, options.node, job)
        return 0 if _show(None, others, wanted, options.follow) else _no_log("")


def make_parser() -> Parser:
    """The options."""
    parser = Parser("logs", "What the workers of a run wrote, or what happened to it.")
    add_run(parser)
    parser.add_value("--rank", "ranks", "only these ranks, such as 0,3-7")
    parser.add_argument(
        "--node", metavar="NODE", default="", help="only of this node, by its name [all nodes of the job]"
    )
    parser.add_argument("--attempt", metavar="K", type=int, help="only this start [the latest]")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until the run ends")
    parser.add_argument(
        "--since", metavar="T", default="", help="only files written to since then: 10m, 2h, 2026-11-16T05:00"
    )
    parser.add_argument(
        "--grep", metavar="RE", default="", help="only lines that this regular expression finds"
    )
    parser.add_flag("--events", "what happened to the run instead: notes and incidents")
    parser.add_flag("--json", "with --events: one JSON object per line, with all fields")
    add_endpoint(parser)
    return parser


# ---- files of this machine ---------------------------------------------------------------------------


def files(run: RunFile) -> list[WrittenLog]:
    """The log files of a run, by start and rank."""
    return [
        WrittenLog(
            os.path.join(run.logs, log.name),
            log.attempt,
            log.again,
            run.ranks[log.local_rank] if log.local_rank < len(run.ranks) else log.local_rank,
            log.stream,
        )
        for log in list_logs(run.logs)
    ]


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


class ShownLine(NamedTuple):
    """A line of a worker; `host`: in a job of several nodes."""

    host: str
    rank: int
    stream: str
    text: str


class LogReader:
    """New whole lines of one file, from its begin on."""

    def __init__(self, log: WrittenLog) -> None:
        self.log, self._whole = log, WholeLog(log.path)
        self._at = 0
        self._rest = b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """Lines since the last call; `last`: what has no end is a line as well."""
        while True:
            self._at, data = self._whole.read(self._at)
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


class RunReader:
    """The files of this machine: of the latest start of each node, and of every start that comes."""

    def __init__(
        self,
        runs: Sequence[RunFile],
        agents: Sequence[LocalAgent],
        ranks: set[int] | None,
        attempt: int | None,
        since: float | None,
        node: str,
    ) -> None:
        self._runs, self._ranks, self._attempt, self._since = runs, ranks, attempt, since
        self._node, self._agents = node, agents
        self._readers: dict[str, tuple[str, LogReader]] = {}  # with the node, where there are several
        self.several = len(runs) > 1

    def look(self) -> bool:
        """Find new files; whether a node of this machine still runs."""
        here = states(self._agents, {"ask": "status"})
        running = {(one.job.pid, one.job.run): run_of(one) for one in here}
        self.several |= any(len(one.job.nodes) > 1 for one in here)
        for run in self._runs:
            if self._node in ("", "all", run.host):
                now = running.get((run.pid, run.run), run)  # ranks may change with every round
                for log in chosen(now, self._ranks, self._attempt, None if self._readers else self._since):
                    self._readers.setdefault(log.path, (run.host, LogReader(log)))
        return any(agent.runs for agent in self._agents)

    def lines(self, last: bool) -> Iterator[ShownLine]:
        """What is new."""
        for host, reader in self._readers.values():
            for line in reader.lines(last):
                yield ShownLine(host * self.several, reader.log.rank, reader.log.stream, line)

    def __bool__(self) -> bool:
        return bool(self._readers)


class RemoteLogs:
    """The logs of the nodes on other machines, through the agent of this one or, with `job`, the store."""

    def __init__(
        self, here: Sequence[LocalAgent], ranks: set[int] | None, node: str, job: RemoteJob | None = None
    ) -> None:
        self._here, self._node, self._job = here, node, job
        self._request: dict[str, Any] = {"ask": "read_logs", "all": True, "whole": True}
        if job is None:
            self._request["not"] = [one.job.id for one in here if one.job.id]
        elif (chosen := job.node_id(node)) is not None:
            self._request["node"] = chosen
        if ranks is not None:
            self._request["ranks"] = sorted(ranks)
        self._places: dict[str, list[Any]] = {}
        self.hosts: set[str] = set()
        """The nodes that have sent something."""
        self.over = False
        """No node is left."""

    def lines(self) -> list[ShownLine]:
        """What is new; empty without an answer."""
        request = {**self._request, "places": self._places}
        answer = put(self._here[0], request) if self._job is None else self._job.ask(request)
        self.over = answer.get("over") is True
        found = []
        for told in answer.get("peers") or []:
            for log in told.get("logs") or [] if isinstance(told, dict) else []:
                match log:
                    case {
                        "host": str(host),
                        "rank": int(rank),
                        "stream": str(stream),
                        "file": str(file),
                        "next": int(place),
                        "text": str(text),
                    }:
                        self.hosts.add(host)
                        self._places[f"{rank}/{stream}"] = [file, place]
                        if self._node in ("", "all", host):
                            lines = text.split("\n")
                            whole = lines[:-1] if not lines[-1] else lines
                            found += [ShownLine(host, rank, stream, one) for one in whole]
        return found


def _show(
    reader: RunReader | None, others: RemoteLogs | None, wanted: re.Pattern[str] | None, follow: bool
) -> bool:
    """Print what there is, and with `follow` what comes, until the job has ended; whether there was a log.

    `reader`: None where no file is on this machine."""
    look_at, ask_at, ended, shown = 0.0, 0.0, False, False
    while True:
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK
            over = not reader.look() if reader is not None else others is not None and others.over
            ended = over or not follow
        lines = list(reader.lines(ended)) if reader is not None else []
        if others is not None and (now >= ask_at or ended):
            new = others.lines()
            # Nothing new is asked for less often; what is long comes at once.
            ask_at = 0.0 if len(new) > _MANY and not ended else time.monotonic() + _ASK
            lines += new
        for line in lines:
            _print(line, wanted)
        shown = shown or bool(lines)
        sys.stdout.flush()
        if ended:
            return shown or bool(reader)
        time.sleep(0.0 if not ask_at else _POLL)


def _print(shown: ShownLine, wanted: re.Pattern[str] | None) -> None:
    host, rank, stream, line = shown
    if wanted is None or wanted.search(line):
        mark = "!" if stream == "stderr" else " "
        where = f"{printable(host)} " if host else ""
        print(f"[{where}{rank}]{mark} {printable(line.replace(chr(13), chr(10))).replace(chr(10), ' ⏎ ')}")
