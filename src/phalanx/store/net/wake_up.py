"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import socket


class WakeUp:
    """Readable once another thread has rung."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._in.fileno()

    def ring(self) -> None:
        """Wake the thread; from any thread."""
        try:
            self._out.send(b"x")
        except OSError:
            pass  # full: a wake-up is pending; closed: the thread has ended

    def take(self) -> None:
        """Wait for the next ring."""
        try:
            while self._in.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends; idempotent."""
        self._in.close()
        self._out.close()
