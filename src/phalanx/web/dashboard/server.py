"""The HTTP server: uvicorn with limits, so that clients that send nothing, or slowly, do no harm.

A connection has ten seconds to complete its request. When too many are open, the oldest one without a request
is closed. Everything else (size of headers, pipelining, keep-alive) is uvicorn's.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_ASKING = 10.0  # seconds to complete a request
_KEEP_ALIVE = 20
_MOST = 256  # connections
_LONGEST_HEADERS = 16384


class BoundedProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]  # optional: not typed here
    """A connection with a deadline for its first request."""

    _idle: dict[BoundedProtocol, None] = {}  # without a request so far, the oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        idle = BoundedProtocol._idle
        idle[self] = None
        if len(self.connections) > _MOST:
            oldest = next(iter(idle))
            idle.pop(oldest)
            oldest.transport.abort()
        self._late = asyncio.get_running_loop().call_later(_ASKING, self._too_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            BoundedProtocol._idle.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        BoundedProtocol._idle.pop(self, None)
        super().connection_lost(exc)

    def _too_late(self) -> None:
        if self in BoundedProtocol._idle:
            self.transport.abort()


class PageServer:
    """Serves an application on an open socket until its process ends."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,  # the link's token is in the first request
                log_config=None,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=_LONGEST_HEADERS,
                timeout_keep_alive=_KEEP_ALIVE,
                backlog=128,
            )
        )

    async def serve(self) -> None:
        """Serve; returns after SIGTERM or SIGINT."""
        await self._server.serve(sockets=[self._listener])
