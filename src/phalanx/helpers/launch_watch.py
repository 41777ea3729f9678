"""Which launch the keeper serves. The zygote reports when it is kept beyond its launch, when the next one
adopts it (helpers/kept_zygote.py), and until when its workers may run (lease_timer.py).

An adopted keeper is not a child of its agent, so that no parent-death signal wakes it up, should it be
stopped when the agent dies. The *tether* does that: a pipe whose write end the agent holds. Its read end,
here, is set to send SIGCONT to keeper and zygote when the write end closes.
"""

from __future__ import annotations

import os

from phalanx.helpers.channel import Channel
from phalanx.helpers.messages import LeaseChanged, ZygoteAdopted, ZygoteKept
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

    from phalanx.core.record import Record


class LaunchWatch:
    """The keeper's end of the connection to its zygote, and the agent that it watches."""

    def __init__(self, sock: _socket.socket, agent: int | None) -> None:
        self._channel = Channel(sock)
        self.agent = agent  # a pidfd; None: there is none to watch
        self._tether = -1

    def fileno(self) -> int:
        return self._channel.fileno()

    def read(self) -> tuple[list[tuple[Record, list[int]]], bool]:
        """What the zygote reports, with the timer of a LeaseChanged; whether it is gone."""
        messages, gone = self._channel.pending()
        reports = []
        for message, fds in messages:
            if isinstance(message, ZygoteKept):
                from phalanx.helpers.kept_zygote import let_go

                self._release()
                let_go()
            elif isinstance(message, ZygoteAdopted):
                from phalanx.helpers.kept_zygote import take_hold

                self._release()
                self.agent, self._tether = fds
                import fcntl

                # The zygote is in the keeper's group, no worker is.
                fcntl.fcntl(self._tether, fcntl.F_SETOWN, -os.getpgrp())
                fcntl.fcntl(self._tether, fcntl.F_SETSIG, signal.SIGCONT)
                fcntl.fcntl(self._tether, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
                take_hold(message.nice)
            reports.append((message, fds if isinstance(message, LeaseChanged) else []))
        return reports, gone

    def _release(self) -> None:
        if self.agent is not None:
            os.close(self.agent)
            self.agent = None
        if self._tether >= 0:
            os.close(self._tether)
            self._tether = -1

    def close(self) -> None:
        self._channel.close()
        self._release()
