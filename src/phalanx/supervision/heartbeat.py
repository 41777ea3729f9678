"""The board: a page of memory that a worker shares with its agent, and the agent's side of it.

    worker  writes: its step and when, that it is ready, its deadline, the section it is in; rings the bell
    agent   writes: that the worker is to be preempted; reads the rest when it has a reason to look

Each worker has one anonymous memory file. Its first page is the board; behind it faulthandler leaves the
stacks that the agent asks for by signal. A write is a copy into memory: no system call, no lock, and nothing
that an agent which is busy, stopped or gone could hold up.

Invariants
- A board belongs to one process: the first that claims it. Others see the claim and stay away.
- Fields of eight bytes are written and read whole. Who reads while a group of fields changes reads again.
- The bell only wakes; it carries nothing. It is rung when the agent could not know that it has to look:
  never for a heartbeat, but for the first one.
- Times are CLOCK_MONOTONIC, which agent and workers share because they share a kernel.
"""

from __future__ import annotations

import os
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.zygote.spawner import Place

VARIABLE = "PHALANX_WORKER"
"""Board, bell, and what identifies the board's file: a number alone may be any file of a child's."""

BOARD_FD = 13  # where a worker that is executed finds them; a fork finds them at any number
BELL_FD = 14

STACK_SIGNAL: int = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else 0
"""Asks for stacks. A real-time signal in the middle of the range: schedulers and libraries use the ends."""

MAGIC = b"phalanx1"
PID_AT = 8
BEAT_AT = 16
READY_AT = 40
DEADLINE_AT = 48
LISTENS_AT = 56
TOLD_AT = 57
SIGNAL_AT = 58
SECTION_AT = 64
SECTION_BYTES = 128  # the first one is the length
BEGUN_AT = 192  # nanoseconds; written by bootstrap.py just before the program's first line
SIZE = 4096
STACKS_AT = 4096  # the same number stands in bootstrap.py, which imports nothing of ours

BEAT = struct.Struct("@qdq")  # step, time, count; native, so that each is written in one piece
TIME = struct.Struct("@d")
PID = struct.Struct("@q")
_ALL = struct.Struct(f"@8sqqdqddBBB5x{SECTION_BYTES}s")


class Slot:
    """What a board said at one moment; times are 0.0 where nothing was said."""

    __slots__ = ("beat_at", "count", "deadline", "listens", "pid", "ready_at", "section", "step", "told")

    def __init__(self, data: bytes) -> None:
        (
            _,
            self.pid,
            step,
            self.beat_at,
            self.count,
            self.ready_at,
            self.deadline,
            listens,
            told,
            _,
            section,
        ) = _ALL.unpack(data)
        self.step: int | None = step if self.count and step >= 0 else None
        self.listens = bool(listens)
        self.told = bool(told)
        self.section: str = section[1 : 1 + section[0]].decode("utf-8", "replace")


class Boards:
    """The boards of one group of workers, by local rank."""

    def __init__(self, count: int, preempt_signal: int = 0) -> None:
        from phalanx.kernel import anonymous_file

        self._fds: list[int] = []
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)  # a worker never waits for a full bell
        first = MAGIC + bytes(SIGNAL_AT - len(MAGIC)) + bytes([preempt_signal & 0xFF])
        for _ in range(count):
            fd = anonymous_file("phalanx-board")
            self._fds.append(fd)
            os.pwrite(fd, first, 0)
            os.ftruncate(fd, SIZE)

    def places(self, rank: int, executed: bool) -> list[Place]:
        """What the worker gets among its descriptors."""
        board, bell = (BOARD_FD, BELL_FD) if executed else (-1, -1)
        return [("board", self._fds[rank], board), ("bell", self._write_end, bell)]

    def variable(self, rank: int) -> str:
        """The value of PHALANX_WORKER for this rank."""
        file = os.fstat(self._fds[rank])
        return f"{BOARD_FD},{BELL_FD},{file.st_dev},{file.st_ino},{STACK_SIGNAL}"

    def fileno(self) -> int:
        """Readable when a worker has rung the bell."""
        return self._read_end

    def heard(self) -> bool:
        """Silence the bell; whether it rang."""
        try:
            return bool(os.read(self._read_end, 4096))
        except BlockingIOError:
            return False

    def read(self, rank: int) -> Slot:
        """The board now; read until two looks agree, or a worker writes faster than we read."""
        fd = self._fds[rank]
        data = os.pread(fd, _ALL.size, 0)
        for _ in range(4):
            again = os.pread(fd, _ALL.size, 0)
            if again == data:
                break
            data = again
        return Slot(data)

    def begun(self) -> float | None:
        """When the last of the workers was about to run its first line; None while one has not said so."""
        times = [int.from_bytes(os.pread(fd, 8, BEGUN_AT), sys.byteorder) for fd in self._fds]
        return max(times) / 1e9 if times and all(times) else None

    def tell(self, rank: int) -> None:
        """The worker is to checkpoint and leave."""
        os.pwrite(self._fds[rank], b"\1", TOLD_AT)

    def stacks_size(self, rank: int) -> int:
        """Bytes of stacks so far."""
        return max(0, os.fstat(self._fds[rank]).st_size - STACKS_AT)

    def stacks(self, rank: int, start: int = 0) -> str:
        """The stacks that the worker has left, from byte `start` on."""
        size = min(self.stacks_size(rank) - start, 1 << 20)
        if size <= 0:
            return ""
        return os.pread(self._fds[rank], size, STACKS_AT + start).decode("utf-8", "replace")

    def close(self) -> None:
        """Give everything back; idempotent."""
        fds, self._fds = self._fds, []
        for fd in (*fds, *((self._read_end, self._write_end) if self._read_end >= 0 else ())):
            os.close(fd)
        self._read_end = self._write_end = -1
