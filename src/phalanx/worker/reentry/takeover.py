"""How a parked worker takes its next place: streams, descriptors and variables, as a standby does.

A worker that parks writes what it prints into memory; the next place has log files of its own, and gets that
first: no byte is lost, and the logs of an attempt hold the output of that attempt. The launcher's
descriptors (board, bell, kept state, tally) are replaced under the numbers that they have, so that whatever
knows a number stays right.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx import kernel
from phalanx.worker.board import BEGUN_AT, PID_AT, STACKS_AT, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.helpers.messages import Handover

REENTRY = "PHALANX_REENTRY"
STATE = "PHALANX_STATE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OF_A_ROUND = ("MASTER_", "TORCHELASTIC_", "PHALANX_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE")


class ReentryPlace:
    """What the variable tells: the channel, the launcher's descriptors, and the round."""

    def __init__(self, text: str) -> None:
        link, device, inode, known, timeout, number, cause = text.split(",", 6)
        self.fd = int(link)
        self.file = int(device), int(inode)
        self.known: dict[str, int] = {}
        for one in known.split(";"):
            name, _, what = one.partition("=")
            fd, file = (int(part) for part in what.split(":"))
            if _inode(fd) == file:
                self.known[name] = fd
        self.timeout = float(timeout)
        self.number = int(number)
        self.cause = cause
        link_file = os.fstat(self.fd)
        if (link_file.st_dev, link_file.st_ino) != self.file:
            raise ValueError("a child of a worker, where the descriptor is another file")

    def text(self, terms: str) -> str:
        """The variable of the next place."""
        known = ";".join(f"{name}={fd}:{_inode(fd)}" for name, fd in self.known.items())
        return f"{self.fd},{self.file[0]},{self.file[1]},{known},{terms}"


def _inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return -1


def read_place() -> ReentryPlace | None:
    """The place of this process, if it is a worker that can re-enter."""
    try:
        return ReentryPlace(os.environ.get(REENTRY, ""))
    except (ValueError, OSError):
        return None


class ParkedStreams:
    """What this process prints between two places."""

    def __init__(self) -> None:
        flush()
        self._kept = [kernel.anonymous_file("phalanx-printed") for _ in (1, 2)]
        for number, fd in zip((1, 2), self._kept, strict=True):
            os.dup2(fd, number)

    def move(self, files: list[int]) -> None:
        """Go on with these files, after what was printed meanwhile."""
        flush()
        for number, fd in zip((1, 2), files, strict=True):
            os.dup2(fd, number)
        kept, self._kept = self._kept, []
        kernel.replay(kept)


def flush() -> None:
    """Write out what is buffered, by Python or by C."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # replaced or closed by the program
    try:
        import ctypes

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, AttributeError):
        pass


class Takeover:
    """One hand-over, from the message of the zygote to the call."""

    def __init__(self, order: Handover, fds: list[int]) -> None:
        self._order, self._worker = order, order.worker
        *self._fds, self._gate, self._status = fds

    def run(self, place: ReentryPlace, streams: ParkedStreams, given: dict[str, str]) -> dict[str, str]:
        """Become the worker of the new place; returns what it is given (`given`: what the last one was)."""
        try:
            self._move(place, streams)
        except OSError as error:
            os.write(self._status, str(error.strerror or error).encode(errors="replace"))
            os._exit(127)
        os.write(self._status, b"ready")
        if os.read(self._gate, 1) != b"g":
            os._exit(127)
        for fd in (self._gate, self._status, *self._fds):
            os.close(fd)
        return self._set_variables(place, given)

    def _move(self, place: ReentryPlace, streams: ParkedStreams) -> None:
        worker, opened = self._worker, []
        files = []
        for number, path in ((1, worker.stdout), (2, worker.stderr)):
            if path:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                opened.append(os.open(path, flags, 0o600))
                files.append(opened[-1])
            else:
                files.append(self._fds[self._order.group.std[number]])
        for name, index, _ in worker.fds:
            if name in place.known:
                os.dup2(self._fds[index], place.known[name], inheritable=False)
        error_file = worker.env.get(ERROR_FILE)
        if error_file and "stack" in place.known:
            stack = os.open(
                f"{error_file}.stack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            os.dup2(stack, place.known["stack"], inheritable=False)
            os.close(stack)
        board = place.known.get("board")
        if board is not None:
            os.pwrite(board, os.getpid().to_bytes(8, sys.byteorder), PID_AT)
            os.pwrite(board, time.monotonic_ns().to_bytes(8, sys.byteorder), BEGUN_AT)
            os.lseek(board, STACKS_AT, os.SEEK_SET)
        streams.move(files)
        for fd in opened:
            os.close(fd)

    def _set_variables(self, place: ReentryPlace, given: dict[str, str]) -> dict[str, str]:
        """Those of a round, always; others only if they changed, because the program may have set them."""
        new = dict(self._worker.env)
        new[REENTRY] = place.text(self._worker.reentry)
        for name, first in ((VARIABLE, ("board", "bell")), (STATE, ("state", "state-bell"))):
            if name in new and first[0] in place.known:
                rest = new[name].split(",")[2:]
                new[name] = ",".join([*(str(place.known.get(one, -1)) for one in first), *rest])
        for name, value in new.items():
            changed = given.get(name) != value if given else name not in os.environ
            if name.startswith(_OF_A_ROUND) or changed:
                os.environ[name] = value
        for name in given.keys() - new.keys():
            if os.environ.get(name) == given[name]:
                del os.environ[name]
        return new
