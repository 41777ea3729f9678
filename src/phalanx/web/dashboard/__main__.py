"""The process of the page: its task comes on stdin, the listening socket as the descriptor in argv.

The end of stdin is the end of the agent, and of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from typing import Any

from phalanx.job.time_budgets import PAGE_PARTING
from phalanx.kernel import die_with_parent, set_name

_FLUSH = 0.05
_DESCRIPTORS = 4096


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent()  # also while this process is stopped, or busy
    set_name("phalanx-page")
    # If the agent has gone before the line above, stdin ends now.
    task = json.loads(_first_line() or "null")
    if not isinstance(task, dict):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    asyncio.run(_serve(listener, task))


def _first_line() -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return b""
        data += more
    return data


async def _serve(listener: socket.socket, task: dict[str, Any]) -> None:
    from phalanx.web.dashboard.agent_link import AgentLink
    from phalanx.web.dashboard.job_feed import JobFeed
    from phalanx.web.dashboard.pages import make_app
    from phalanx.web.dashboard.server import PageServer

    feed = JobFeed(AgentLink(str(task["socket"]), int(task["agent"])))
    app = make_app(feed, token=str(task["token"]), host=str(task["host"]))
    server = PageServer(app, listener)
    serving = asyncio.create_task(server.serve())
    listening = asyncio.create_task(_listen(feed))
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    if listening.done() and feed.viewers:
        await feed.part(PAGE_PARTING)
        await asyncio.sleep(_FLUSH)
    os._exit(0)  # connections that are still open end with it


async def _listen(feed: Any) -> None:
    """What the agent has to say; returns at its end."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
    said = False
    while line := await reader.readline():
        ending = json.loads(line)
        said = True
        await feed.end(str(ending["outcome"]), int(ending["exit_code"]), str(ending["why"]))
    if not said:
        await feed.end("", 1, "the agent of node 0 has ended")


main()
