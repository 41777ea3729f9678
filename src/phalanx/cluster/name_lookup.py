"""Looks a host name up in a thread, again and again until it has an address.

The names of pods come into DNS some seconds after the pods, and a question that is not answered takes the
resolver up to a minute, so that neither may hold up a thread that has something else to do.
"""

from __future__ import annotations

import socket
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


def needs_lookup(host: str) -> bool:
    """Whether this is a name that something else than this machine may have to be asked for."""
    if host in ("", "localhost"):
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return False
    return True


def is_known(host: str) -> bool:
    """Whether the name has an address; may take long."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


class NameLookup:
    """`tell` gets the first answer, from the thread, and another one once there is an address."""

    def __init__(self, host: str, tell: Callable[[bool], None]) -> None:
        self._host, self._tell = host, tell
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="phalanx-name-lookup", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; does not wait for a question that is under way."""
        self._stopped.set()

    def _run(self) -> None:
        known, first, pause = is_known(self._host), True, _FIRST_PAUSE
        while not self._stopped.is_set():
            if known or first:
                self._tell(known)
                first = False
            if known or self._stopped.wait(pause):
                return
            pause = min(pause * 2, _LONGEST_PAUSE)
            known = is_known(self._host)
