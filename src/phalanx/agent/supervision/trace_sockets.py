"""Where the debug servers of torch workers listen: one socket per local rank, in a private directory.

    <temporary directory>/phalanx_<pid of the launcher>_<unique>/<local rank>

The agent chooses the names; the first worker that opens a server makes the directory, so that jobs without
torch have none. The agent removes it at its end, however the workers ended. What a killed agent leaves
behind has the name of a temporary log directory and is removed with those (agent/logs/temporary_logs.py).
"""

from __future__ import annotations

import os

from phalanx.job.environment import temporary_directory

_MAX_PATH = 107  # bytes in the address of a Unix socket
_LONGEST_RANK = "/99999"


class TraceSockets:
    """The sockets of one agent's workers, over all its starts."""

    def __init__(self) -> None:
        self._directory: str | None = None  # empty: no usable one

    @property
    def directory(self) -> str:
        """The directory, which may not exist; empty if a socket in it would have too long a name."""
        if self._directory is None:
            self._directory = _choose()
        return self._directory

    def path(self, rank: int) -> str:
        """The socket of a local rank; empty: it has none."""
        return os.path.join(self.directory, str(rank)) if self.directory else ""

    def close(self) -> None:
        """Remove the directory; idempotent."""
        if self._directory and os.path.isdir(self._directory):
            from phalanx.agent.logs.temporary_logs import remove

            remove(self._directory)


def _choose() -> str:
    name = f"phalanx_{os.getpid()}_{os.urandom(8).hex()}"
    try:
        parents = [temporary_directory(), "/tmp"]
    except OSError:
        return ""
    for parent in parents:
        path = os.path.join(parent, name)
        if len(os.fsencode(path + _LONGEST_RANK)) <= _MAX_PATH and os.access(parent, os.W_OK | os.X_OK):
            return path
    return ""
