"""New output of workers, for a client that follows it: `{"ask": "read_logs", "ranks": [...], "places": …}`.

`places` says how far the client has read: `{"3/stdout": ["attempt_0/3/stdout.log", 1024]}`. A file that is
not the current one of that rank means nothing: then the end of the current one is sent. No path comes from a
client, and everything is bounded.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.torch_agent import LocalElasticAgent

_MOST_BYTES = 1 << 18  # in an answer
_FIRST = 1 << 14  # of a file that the client has not seen
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
