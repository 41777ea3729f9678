"""Asks the agent over its private socket (agent/status.py), and checks that it is the same user's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import Any

from phalanx.job.time_budgets import PAGE
from phalanx.kernel import user_of

_LONGEST = 64 << 20  # bytes of an answer: a job of many thousand ranks


class AgentGone(Exception):
    """There is no agent at the socket, or it gave no answer."""


class AgentLink:
    """The socket of one agent; a connection for every question."""

    def __init__(self, name: str, pid: int) -> None:
        self._name, self._pid = name, pid

    async def ask(self, request: dict[str, Any]) -> bytes:
        """The answer as it came; AgentGone without one."""
        try:
            return await asyncio.wait_for(self._ask(json.dumps(request).encode() + b"\n"), PAGE)
        except (OSError, asyncio.TimeoutError) as error:
            raise AgentGone(str(error) or "no answer") from None

    async def _ask(self, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
            await loop.sock_connect(peer, self._name)
            if user_of(peer) != os.geteuid():
                raise OSError("the socket belongs to another user")
            await loop.sock_sendall(peer, question)
            data = bytearray()
            while more := await loop.sock_recv(peer, 1 << 18):
                data += more
                if len(data) > _LONGEST:
                    raise OSError("the answer is too long")
            return bytes(data)

    def time_used(self) -> float:
        """Seconds of processor time that the agent has used so far; 0 where that is not known."""
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # Linux: the clock of another process
        except OSError:
            return 0.0
