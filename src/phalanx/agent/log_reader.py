"""New output of workers, for a client that follows it: `{"ask": "read_logs", "ranks": [...], "places": …}`.

`places` says how far the client has read: `{"3/stdout": ["attempt_0/3/stdout.log", 1024]}`. A file that is
not the current one of that rank means nothing: then the end of the current one is sent. No path comes from a
client, and everything is bounded.

With `"whole": true` nothing is left out, as `phalanx logs -f` wants it: a client that has fallen behind gets
the next lines, not the last ones, and after a restart first the rest of the file that it was reading. File
names then begin with the directory of the node's run, because the nodes of a job name their files alike.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.local_agent import LocalElasticAgent

_MOST_BYTES = 1 << 18  # in an answer
_FIRST = 1 << 14  # of a file that the client has not seen
_STARTS = 4  # the last ones, whose files may be read to their ends
_KIND, _REGULAR = 0o170000, 0o100000


def read_logs(agent: LocalElasticAgent, request: dict[str, Any]) -> list[dict[str, Any]]:
    """What is new in the logs of these ranks, of the current start."""
    context, ranks, places = agent._pcontext, request.get("ranks"), request.get("places")
    if context is None or not isinstance(ranks, list):
        return []
    places = places if isinstance(places, dict) else {}
    wanted = {rank for rank in ranks if type(rank) is int}
    workers = [worker for worker in agent.get_worker_group().workers if worker.global_rank in wanted]
    each = _MOST_BYTES // max(1, 2 * len(workers))
    found = []
    for worker in workers:
        for stream, paths in (("stdout", context.stdouts), ("stderr", context.stderrs)):
            path = paths.get(worker.local_rank, "")
            name = "/".join(path.split(os.sep)[-3:])
            new = read_on(path, _place(places.get(f"{worker.global_rank}/{stream}"), name), each)
            if new is not None:
                text, end = new
                found.append(
                    {"rank": worker.global_rank, "stream": stream, "file": name, "next": end, "text": text}
                )
    return found


def read_on_logs(
    agent: LocalElasticAgent, request: dict[str, Any], known: dict[str, str]
) -> list[dict[str, Any]]:
    """The same with nothing left out; `known`: the files that were read, kept between the calls."""
    context, ranks, places = agent._pcontext, request.get("ranks"), request.get("places")
    if context is None:
        return []
    places = places if isinstance(places, dict) else {}
    wanted = {rank for rank in ranks if type(rank) is int} if isinstance(ranks, list) else None
    workers = [w for w in agent.get_worker_group().workers if wanted is None or w.global_rank in wanted]
    each = _MOST_BYTES // max(1, 2 * len(workers))
    found = []
    for worker in workers:
        for stream, paths in (("stdout", context.stdouts), ("stderr", context.stderrs)):
            path = paths.get(worker.local_rank, "")
            if not path or path == os.devnull:
                continue
            name = "/".join(path.split(os.sep)[-4:])
            known.pop(name, None)
            known[name] = path
            new = _next_lines(places.get(f"{worker.global_rank}/{stream}"), name, known, each)
            if new is not None:
                found.append({"rank": worker.global_rank, "host": agent.host, "stream": stream, **new})
    while len(known) > _STARTS * 2 * max(1, len(agent.get_worker_group().workers)):
        del known[next(iter(known))]
    return found


def _next_lines(seen: object, name: str, known: dict[str, str], most: int) -> dict[str, Any] | None:
    """The next lines after what a client has seen of a stream whose file is now `name`."""
    from phalanx.logs.rotation import end_of_log, read_log

    file, at = name, 0
    match seen:
        case [str(file), int(at)] if file in known and at >= 0:
            pass
        case [*_]:
            file, at = name, 0  # of another node, or too old: the new one from its begin on
        case _:
            at = max(0, end_of_log(known[name]) - min(most, _FIRST))
    skips = seen is None and at > 0
    at, data = read_log(known[file], at)
    if file != name and not data:
        file, (at, data) = name, read_log(known[name], 0)
    data = data[:most]
    if skips:
        skipped = data.find(b"\n") + 1
        at, data = at + skipped, data[skipped:]
    whole = data.rfind(b"\n") + 1
    if file == name and not whole and len(data) < most:
        return None  # a line that is not complete yet
    if file == name or len(data) == most:
        data = data[: whole or len(data)]
    return {"file": file, "next": at + len(data), "text": data.lstrip(b"\0").decode("utf-8", "replace")}


def _place(seen: object, name: str) -> int | None:
    """How far the client has read this file; None: it has not."""
    match seen:
        case [str(file), int(place)] if file == name:
            return place
        case _:
            return None


def read_on(path: str, start: int | None, most: int) -> tuple[str, int] | None:
    """Whole lines from `start` on (None: the last ones), and where to go on; None if nothing is new."""
    if not path or path == os.devnull:
        return None
    try:
        # A worker may have replaced its log by a link or a named pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        size = status.st_size
        if status.st_mode & _KIND != _REGULAR:
            return None
        begin = max(0, size - min(most, _FIRST)) if start is None else start
        if not 0 <= begin <= size:
            begin = 0  # truncated
        if size - begin > most:  # too much since the last time: its end
            begin, start = size - most, None
        data = os.pread(fd, most, begin)
    except OSError:
        return None
    finally:
        os.close(fd)
    if start is None and begin:
        skipped = data.find(b"\n") + 1
        begin, data = begin + skipped, data[skipped:]
    whole = data.rfind(b"\n") + 1
    if not whole and len(data) < most:
        return None  # a line that is not complete yet
    data = data[: whole or len(data)]
    return data.decode("utf-8", "replace"), begin + len(data)
