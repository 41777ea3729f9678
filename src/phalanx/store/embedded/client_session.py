"""The client's side of a conversation with the store, without the socket.

A session outlives its connections. Requests are numbered; what has no answer yet is asked again,
under its old number, on the next connection, and the store answers a repeated number without doing
it twice. Watches resume after the last revision they reported; where the store has dropped the
history since, or has lost changes that it had answered, the watch starts again with everything that is
there (`Notice.reset`).

Invariants: a number is answered to the caller at most once; changes of a watch come in order of
revision, none twice; between two resets none is missing. The connection must keep order (TCP does).
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.rounds.store_commands import Change, Command, Notice, Reply, Unwatch, Watch


class Request(NamedTuple):
    """A numbered command; all answers below `done` have been seen."""

    number: int
    done: int
    command: Command


class Session:
    """What is asked and not yet answered, and how far each watch has come."""

    def __init__(self) -> None:
        self.revision = 0  # the highest that the store has told on this connection
        self._number = 0
        self._outstanding: dict[int, Command] = {}
        self._resuming: dict[int, tuple[int, int]] = {}  # number of a resumed Watch -> (watch, start)
        self._watches: dict[int, Watch] = {}
        self._told: dict[int, int] = {}  # watch -> revision up to which it has been told

    def ask(self, command: Command) -> Request:
        """Number a command; send it if there is a connection, else `resume` will."""
        self._number += 1
        self._outstanding[self._number] = command
        if isinstance(command, Watch):
            self._watches[command.watch] = command
            self._told.pop(command.watch, None)
        elif isinstance(command, Unwatch):
            self._watches.pop(command.watch, None)
            self._told.pop(command.watch, None)
        return Request(self._number, self._done(), command)

    def resume(self, *, reset: bool = False) -> list[Request]:
        """Everything to send on a new connection, oldest first; `reset`: with watches from the beginning."""
        self._resuming.clear()
        requests = [Request(n, self._done(), c) for n, c in sorted(self._outstanding.items())]
        for watch, told in self._told.items():
            requests.append(self._take_up(watch, 0 if reset else told + 1))
        return requests

    def answered(self, number: int, reply: Reply) -> tuple[list[Request], Reply | Notice | None]:
        """Take in a reply: what to send because of it, and what the caller gets."""
        self.revision = max(self.revision, reply.revision)
        if (resuming := self._resuming.pop(number, None)) is not None:
            return self._resumed(*resuming, reply)
        command = self._outstanding.pop(number, None)
        if isinstance(command, Watch) and reply.ok and self._watches.get(command.watch) == command:
            self._told[command.watch] = command.start - 1 if command.start else reply.revision
        return [], reply if command is not None else None

    def noticed(self, notice: Notice) -> Notice | None:
        """Take in a notice, without the changes that are known already."""
        self.revision = max(self.revision, notice.revision)
        told = self._told.get(notice.watch)
        if told is None:
            return None
        self._told[notice.watch] = max(told, notice.revision)
        fresh = tuple(change for change in notice.changes if change.entry.mod > told)
        return notice._replace(changes=fresh) if fresh else None

    def drop(self, number: int) -> None:
        """Drop a request that no caller waits for."""
        self._outstanding.pop(number, None)

    def _done(self) -> int:
        return min(self._outstanding, default=self._number + 1)

    def _take_up(self, watch: int, start: int) -> Request:
        self._number += 1
        self._resuming[self._number] = (watch, start)
        return Request(self._number, self._done(), self._watches[watch]._replace(start=start))

    def _resumed(self, watch: int, start: int, reply: Reply) -> tuple[list[Request], Notice | None]:
        if watch not in self._told:
            return [], None  # unwatched, or watched again, in the meantime
        if not reply.ok:
            return [self._take_up(watch, 0)], None
        if start:
            return [], None  # what was missed follows as notices
        self._told[watch] = reply.revision
        return [], Notice(watch, tuple(map(Change, reply.entries)), reply.revision, reset=True)
