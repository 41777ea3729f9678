"""The board: a page of memory that a worker shares with its agent, and the agent's side of it.

    worker  writes its step and the time, its deadline, its section, and that it is ready; rings the bell
    agent   writes that the worker is preempted, and at which step all ranks save; reads the rest when a
            deadline or the bell wakes it

For the goodput ledger (`core.ledger.goodput`) the worker keeps what the agent would otherwise have to watch:
its first heartbeat, the one that reached the step of its predecessor, and the time spent on checkpoints.

Each worker has one anonymous memory file. Its first page is the board; after it, faulthandler writes the
stacks that the agent requests by signal. A write is a copy into memory: no system call, no lock, and no
dependence on an agent that is busy, stopped or dead.

Invariants
- A board belongs to the first process that claims it. Other processes see the claim and do not write.
- Fields of eight bytes are written and read atomically. A reader that sees a group of fields change reads
  again.
- The bell is a pipe that wakes the agent and carries no data. Only changes that the agent could not expect
  ring it: the first heartbeat does, later ones do not.
- Times are CLOCK_MONOTONIC, which is the same for agent and workers on one kernel.
"""

from __future__ import annotations

import os
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.checkpoint_step import RankPace
    from phalanx.core.ledger.goodput import RankProgress
    from phalanx.helpers.messages import Place

VARIABLE = "PHALANX_WORKER"
"""The descriptors of board and bell, and the board's device and inode: in a child of the worker the same
descriptor number may be another file."""

BOARD_FD = 13  # in an executed worker; a forked one has them at any number
BELL_FD = 14

STACK_SIGNAL: int = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else 0
"""Requests stacks. A real-time signal in the middle of the range: schedulers and libraries use the ends."""

MAGIC = b"phalanx1"
PID_AT = 8
BEAT_AT = 16
READY_AT = 40
DEADLINE_AT = 48
LISTENS_AT = 56  # 1: the program learns of a preemption; 2: when the signal has called its callbacks
PREEMPTED_AT = 57
SIGNAL_AT = 58
SECTION_AT = 64
SECTION_BYTES = 128  # the first byte is the length
BEGUN_AT = 192  # nanoseconds; written by bootstrap.py just before the program's first line
WAITS_AT = 200  # the program calls wait_for_rank()
MARK_AT = 1024  # written by the agent: the step reached before this start, plus one; 0: none
FIRST_AT = 1032  # the first heartbeat
PASSED_AT = 1056  # the first one at or beyond the mark
SAVED_AT = 1080  # the time in checkpoint sections
ASKED_AT = 1112  # the last should_checkpoint(step)
CHECKPOINT_AT = 1128  # written by the agent: the step at which all ranks save, plus one; 0: not agreed
SIZE = 4096
STACKS_AT = 4096  # repeated in bootstrap.py, which imports nothing of the package

BEAT = struct.Struct("@qdq")  # step, time, count; native alignment makes each write atomic
TIME = struct.Struct("@d")
PID = struct.Struct("@q")
MOMENT = struct.Struct("@qdd")  # of a heartbeat: step, time, seconds in checkpoint sections by then
SAVED = struct.Struct("@ddqd")  # seconds: all, since heartbeat number ...; when the current one began, or 0
ASKED = struct.Struct("@qd")  # the step plus one, 0: never; seconds per step
_LARGEST = 1 << 62  # step
_ALL = struct.Struct(f"@8sqqdqddBBB5x{SECTION_BYTES}s")


class BoardSnapshot:
    """A board at one moment; times are 0.0 if never written."""

    __slots__ = (
        "awaits_signal",
        "beat_at",
        "count",
        "deadline",
        "listens",
        "pid",
        "preempted",
        "ready_at",
        "section",
        "step",
    )

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
            preempted,
            _,
            section,
        ) = _ALL.unpack(data)
        self.step: int | None = step if self.count and step >= 0 else None
        self.listens, self.awaits_signal = bool(listens), listens == 2
        self.preempted = bool(preempted)
        self.section: str = section[1 : 1 + section[0]].decode("utf-8", "replace")


class Boards:
    """The boards of one group of workers, by local rank."""

    def __init__(self, count: int, preempt_signal: int = 0) -> None:
        from phalanx.kernel import anonymous_file

        self._fds: list[int] = []
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)  # a worker never waits for a full pipe
        first = MAGIC + bytes(SIGNAL_AT - len(MAGIC)) + bytes([preempt_signal & 0xFF])
        for _ in range(count):
            fd = anonymous_file("phalanx-board")
            self._fds.append(fd)
            os.pwrite(fd, first, 0)
            os.ftruncate(fd, SIZE)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._fds)

    def places(self, rank: int, executed: bool) -> list[Place]:
        """The descriptors that the worker inherits."""
        board, bell = (BOARD_FD, BELL_FD) if executed else (-1, -1)
        return [("board", self._fds[rank], board), ("bell", self._write_end, bell)]

    def variable(self, rank: int) -> str:
        """The value of PHALANX_WORKER for this rank."""
        file = os.fstat(self._fds[rank])
        return f"{BOARD_FD},{BELL_FD},{file.st_dev},{file.st_ino},{STACK_SIGNAL}"

    def fileno(self) -> int:
        """Readable when a worker has rung the bell."""
        return self._read_end

    def clear_bell(self) -> bool:
        """Empty the bell's pipe; returns whether it rang."""
        try:
            return bool(os.read(self._read_end, 4096))
        except BlockingIOError:
            return False

    def read(self, rank: int) -> BoardSnapshot:
        """The board now; read until two reads agree, at most five times."""
        fd = self._fds[rank]
        data = os.pread(fd, _ALL.size, 0)
        for _ in range(4):
            again = os.pread(fd, _ALL.size, 0)
            if again == data:
                break
            data = again
        return BoardSnapshot(data)

    def begun(self) -> float | None:
        """When the last worker reached its program's first line; None until all have."""
        times = [int.from_bytes(os.pread(fd, 8, BEGUN_AT), sys.byteorder) for fd in self._fds]
        return max(times) / 1e9 if times and all(times) else None

    def progress(self, rank: int) -> RankProgress:
        """What the ledger wants to know of a rank."""
        from phalanx.core.ledger.goodput import RankProgress

        board, fd = self.read(rank), self._fds[rank]
        data = os.pread(fd, SAVED_AT + SAVED.size - FIRST_AT, FIRST_AT)
        first_step, first_at, saved_by_first = MOMENT.unpack_from(data)
        passed_step, passed_at, saved_by_passed = MOMENT.unpack_from(data, PASSED_AT - FIRST_AT)
        saved, tail, counted, saving_since = SAVED.unpack_from(data, SAVED_AT - FIRST_AT)
        return RankProgress(
            begun_at=int.from_bytes(os.pread(fd, 8, BEGUN_AT), sys.byteorder) / 1e9,
            ready_at=board.ready_at,
            first_at=first_at,
            first_step=first_step if first_step >= 0 else None,
            beat_at=board.beat_at,
            step=board.step,
            count=board.count if first_at else 0,
            passed_at=passed_at,
            passed_step=passed_step if passed_at else None,
            saved=saved,
            saved_by_first=saved_by_first,
            saved_by_passed=saved_by_passed,
            saved_since_beat=tail if counted == board.count else 0.0,
            saving_since=saving_since,
        )

    def set_mark(self, rank: int, step: int) -> None:
        """The step that this rank's predecessor had reached; before the worker starts."""
        os.pwrite(self._fds[rank], PID.pack(min(step, _LARGEST) + 1), MARK_AT)

    def calls_wait_for_rank(self, rank: int) -> bool:
        """Whether the worker has called it: its next incarnation can be prepared up to there."""
        return os.pread(self._fds[rank], 1, WAITS_AT) == b"\1"

    def asked(self, rank: int) -> RankPace | None:
        """The last step for which this rank called should_checkpoint, and its pace; None: it has not."""
        from phalanx.core.checkpoint_step import RankPace

        step, pace = ASKED.unpack(os.pread(self._fds[rank], ASKED.size, ASKED_AT))
        return RankPace(step - 1, pace) if step > 0 else None

    def set_checkpoint_step(self, rank: int, step: int) -> None:
        """The step from which on should_checkpoint(step) is true."""
        os.pwrite(self._fds[rank], PID.pack(min(step, _LARGEST) + 1), CHECKPOINT_AT)

    def set_preempted(self, rank: int) -> None:
        """Make the worker save a checkpoint and exit."""
        os.pwrite(self._fds[rank], b"\1", PREEMPTED_AT)

    def stacks_size(self, rank: int) -> int:
        """Bytes of stacks written so far."""
        return max(0, os.fstat(self._fds[rank]).st_size - STACKS_AT)

    def stacks(self, rank: int, start: int = 0) -> str:
        """The stacks that the worker has written, from byte `start` on."""
        size = min(self.stacks_size(rank) - start, 1 << 20)
        if size <= 0:
            return ""
        return os.pread(self._fds[rank], size, STACKS_AT + start).decode("utf-8", "replace")

    def close(self) -> None:
        """Close all descriptors; idempotent."""
        fds, self._fds = self._fds, []
        for fd in (*fds, *((self._read_end, self._write_end) if self._read_end >= 0 else ())):
            os.close(fd)
        self._read_end = self._write_end = -1
