"""The HTTP server: uvicorn with limits, so that clients that send nothing, or slowly, do no harm.

A connection has ten seconds to bring a request that the guard lets in. When too many are open, the oldest one
that the guard has not let in is closed: a client without the token cannot keep out the one with it.
Everything else (size of headers, pipelining, keep-alive) is uvicorn's.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.web.dashboard.guard import LET_IN

_ASKING = 10.0  # seconds to be let in
_KEEP_ALIVE = 20
_MOST = 256  # connections
_LONGEST_HEADERS = 16384


class BoundedProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]  # optional: not typed here
    """A connection with a deadline for its first request that is let in."""

    _open: dict[BoundedProtocol, None] = {}  # the oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        BoundedProtocol._open[self] = None
        if len(BoundedProtocol._open) > _MOST:
            next(one for one in BoundedProtocol._open if one is self or not one._is_let_in)._end()
        self._late = asyncio.get_running_loop().call_later(_ASKING, self._end_if_kept_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        BoundedProtocol._open.pop(self, None)
        super().connection_lost(exc)

    @property
    def _is_let_in(self) -> bool:
        return self.scope is not None and LET_IN in self.scope

    def _end_if_kept_out(self) -> None:
        if not self._is_let_in:
            self._end()

    def _end(self) -> None:
        BoundedProtocol._open.pop(self, None)
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
