"""New output of workers, for a client that follows it: `{"ask": "read_logs", "ranks": [...], "places": …}`.

`places` says how far the client has read: `{"3/stdout": ["job7_ab12/attempt_0/3/stdout.log", 1024]}`. Names
begin with the directory of the node's run, because the nodes of a job name their files alike. A file that the
agent does not know means nothing: then the end of the current one is sent. No path comes from a client, and
everything is bounded.

A client that has fallen behind gets the last lines, and after a restart those of the new file. With
`"whole": true` nothing is left out, as `phalanx logs -f` wants it: then it gets the next lines, and after a
restart first the rest of the file that it was reading.
"""

from __future__ import annotations

import os

from phalanx.observe.log_layout import STREAMS, WholeLog, name_in_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.agent import Agent

_MOST_BYTES = 1 << 18  # in an answer
_FIRST = 1 << 14  # of a file that the client has not seen
_STARTS = 4  # the last ones, whose files may be read to their ends


def read_logs(agent: Agent, request: dict[str, Any], known: dict[str, WholeLog]) -> list[dict[str, Any]]:
    """What is new in the logs of these ranks (None: of all); `known`: the logs, kept between the calls."""
    context, ranks, places = agent.context, request.get("ranks"), request.get("places")
    if context is None:
        return []
    places = places if isinstance(places, dict) else {}
    wanted = {rank for rank in ranks if type(rank) is int} if isinstance(ranks, list) else None
    workers = [w for w in agent.get_worker_group().workers if wanted is None or w.global_rank in wanted]
    each = _MOST_BYTES // max(1, 2 * len(workers))
    found = []
    for worker in workers:
        for stream, paths in zip(STREAMS, (context.stdouts, context.stderrs), strict=True):
            path = paths.get(worker.local_rank, "")
            if not path or path == os.devnull:
                continue
            name = name_in_job(path)
            known[name] = known.pop(name) if name in known else WholeLog(path)
            seen = places.get(f"{worker.global_rank}/{stream}")
            new = next_lines(seen, name, known, each, request.get("whole") is True)
            if new is not None:
                found.append({"rank": worker.global_rank, "host": agent.host, "stream": stream, **new})
    while len(known) > _STARTS * 2 * max(1, len(agent.get_worker_group().workers)):
        del known[next(iter(known))]
    return found


def next_lines(
    seen: object, name: str, known: dict[str, WholeLog], most: int, whole: bool
) -> dict[str, Any] | None:
    """The next lines after what a client has seen of a stream whose file is now `name`."""
    file, at = name, 0
    end = known[name].end()
    match seen:
        case [str(file), int(at)] if at >= 0 and (file == name or (whole and file in known)):
            pass
        case [*_] if whole:
            file, at = name, 0  # of another node, or too old: the new one from its begin on
        case _:
            file, at = name, max(0, end - min(most, _FIRST))
    skips = at > 0 and not isinstance(seen, list)
    if file == name and at > end:
        at = 0  # its worker has emptied it
    if not whole and end - at > most:
        at, skips = end - most, True
    at, data = known[file].read(at)
    if file != name and not data:
        file, (at, data) = name, known[name].read(0)
    data = data[:most]
    if skips:
        skipped = data.find(b"\n") + 1
        at, data = at + skipped, data[skipped:]
    lines = data.rfind(b"\n") + 1
    if file == name and not lines and len(data) < most:
        return None  # a line that is not complete yet
    if file == name or len(data) == most:
        data = data[: lines or len(data)]
    return {"file": file, "next": at + len(data), "text": data.decode("utf-8", "replace")}
