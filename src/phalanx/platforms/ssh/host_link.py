"""The starter's tie to one host: an ssh process, what comes out of it, and a new one if it is lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time

from phalanx.kernel import die_with_parent
from phalanx.platforms.outcomes import AgentOutcome, decoded
from phalanx.platforms.ssh.frames import GreetingReader, LinkFrameReader, frame
from phalanx.python_command import python_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from phalanx.job.host_names import HostSlots

_BLOCK = 1 << 16
_STEWARD = "phalanx.platforms.ssh.steward"
_RETRY = 1.0  # seconds between two attempts to connect again
_SLOW = 30.0  # seconds without an answer, after which a line names the host


class Lines:
    """Whole lines of one stream, with the host in front."""

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]) -> None:
        self._prefix, self._write, self._rest = prefix, write, b""

    def feed(self, data: bytes) -> None:
        """Write the lines that are complete by now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if whole:
            self._write(b"".join(self._prefix + line + b"\n" for line in whole))

    def end(self) -> None:
        """Write what is left."""
        if self._rest:
            self._write(self._prefix + self._rest + b"\n")
            self._rest = b""


class HostLink:
    """One host: `outcome` is the end of its agent once that is known; `lost` once the host is given up."""

    def __init__(
        self,
        host: HostSlots,
        ssh: Sequence[str],
        job: Mapping[str, Any],
        *,
        environ: Mapping[str, str],
        handled: Iterable[int],
        say: Callable[[str], None],
        out: Callable[[bytes], None],
        err: Callable[[bytes], None],
    ) -> None:
        """`environ`: of ssh; `handled`: signals of the starter, which reach ssh too on a terminal."""
        self.host = host
        self._ssh, self._job = [*ssh, "--", host.target], job
        self._environ, self._handled = environ, tuple(handled)
        self._say = say
        prefix = f"[{host.name}] ".encode()
        self._lines = {b"o": Lines(prefix, out), b"e": Lines(prefix, err)}
        self._errors = Lines(prefix, err)  # of ssh itself, and of a login shell
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = bytearray()
        self._lock = threading.Lock()  # over ssh's stdin, where `beat` writes too
        self._seen = 0
        self._greeting = GreetingReader()
        self._frames = LinkFrameReader()
        self._signals: list[int] = []  # all of them: a connection that ends may not have delivered the last
        self._lost_at: float | None = None
        self._again_at = 0.0
        self._slow_at: float | None = None
        self.begun = False  # the agent was started
        self.outcome: AgentOutcome | None = None
        self.lost = False
        self._connect([], frame(b"J", json.dumps(job).encode()))

    @property
    def open(self) -> bool:
        """Whether something is still to come from this host."""
        return self.outcome is None and not self.lost

    @property
    def gone(self) -> bool:
        """Whether this host has left a job that goes on without it."""
        return self.lost or (self.outcome is not None and not self.outcome.ends_job)

    @property
    def end(self) -> str:
        """How it left, in words."""
        return "not reached" if self.outcome is None else f"exit code {self.outcome.code}"

    @property
    def leaving(self) -> bool:
        """Whether the agent has ended, and the steward is about to."""
        return self.outcome is not None and self._process is not None

    def _connect(self, words: Sequence[str], first: bytes = b"") -> None:
        command = "exec " + shlex.join(python_command(_STEWARD, *words))
        self._greeting = GreetingReader()
        self._unsent = bytearray(first)
        self._slow_at = time.monotonic() + _SLOW if first else None
        self._process = subprocess.Popen(
            [*self._ssh, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environ,
            preexec_fn=self._settle,
        )
        for pipe in self._pipes():
            os.set_blocking(pipe, False)

    def _pipes(self) -> tuple[int, int, int]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()

    # -- for the starter's loop ------------------------------------------------------------------------

    def fds(self) -> tuple[list[int], list[int]]:
        """Descriptors to read, and to write."""
        if self._process is None:
            return [], []
        stdin, stdout, stderr = self._pipes()
        return [stdout, stderr], [stdin] if self._unsent else []

    def deadline(self) -> float | None:
        """When `look` is due."""
        if self._process is not None:
            return self._slow_at
        return self._again_at if self.open else None

    def look(self, ready: set[int], now: float) -> None:
        """Read, write, notice the end, and connect again."""
        if self._process is None:
            if self.open and now >= self._again_at:
                self._connect([str(self._job["key"]), str(self._seen)])
            return
        if self._slow_at is not None and now >= self._slow_at:
            self._slow_at = None
            self._say(f"{self.host.name}: no answer for {_SLOW:g} s from ssh or the login shell there")
        stdin, stdout, stderr = self._pipes()
        if stdin in ready:
            self._write()
        if stderr in ready and not self._read(stderr, self._errors.feed):
            ready = ready | {stdout}
        try:
            if stdout in ready and not self._read(stdout, self._take):
                self._ended(now)
        except ValueError as error:
            self._say(f"{self.host.name}: {error}")
            self.give_up()

    def _write(self, data: bytes = b"") -> None:
        with self._lock:
            self._unsent += data
            if self._process is not None:
                self._write_some(self._pipes()[0])

    def beat(self) -> None:
        """A sign of life; called in a thread, because the main one may have to wait for the terminal."""
        if self._greeting.offset is not None and not self._unsent:
            self._write(frame(b"A"))

    def _write_some(self, fd: int) -> None:
        try:
            del self._unsent[: os.write(fd, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the end of its output says why

    def _read(self, fd: int, take: Callable[[bytes], None]) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(fd, _BLOCK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if data:
            take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        before = self._greeting.offset
        data = self._greeting.feed(data)
        begin = self._greeting.offset
        if begin is None:
            return
        if before is None:
            self._greeted(begin)
        self._seen += len(data)
        for kind, body in self._frames.feed(data):
            if kind in self._lines:
                self._lines[kind].feed(body)
            elif kind == b"x":
                self.outcome = decoded(json.loads(body))
                self._write(frame(b"D"))

    def _greeted(self, begin: int) -> None:
        if self._lost_at is not None:
            missed = "" if begin == self._seen else "; some of its output was lost"
            self._say(f"{self.host.name}: connected again{missed}")
        if begin != self._seen:
            self._frames = LinkFrameReader()
            self._seen = begin
        self.begun, self._lost_at, self._slow_at = True, None, None
        self._write(frame(b"A"))
        for place in range(len(self._signals)):
            self._send_signal(place)

    def _ended(self, now: float) -> None:
        """ssh has ended: the agent has too, or the connection is lost, or there never was one."""
        assert self._process is not None
        self._read(self._pipes()[2], self._errors.feed)
        status = self._close()
        if self.outcome is not None:
            return
        name = self.host.name
        if not self.begun:
            self.lost = True
            self._say(f"{name}: no agent could be started (ssh: exit code {status})")
            return
        if self._lost_at is None:
            self._lost_at = now
            left = self._job["patience"]
            self._say(
                f"{name}: the ssh connection is lost; the job goes on, and ends on {name} if there is no "
                f"new one within {left:g} s"
            )
        elif status == 3 or now >= self._lost_at + float(self._job["patience"]):
            self.lost = True
            self._say(f"{name}: given up; what ran there ends by itself")
            return
        self._again_at = now + (_RETRY if self._lost_at != now else 0.0)

    def _close(self) -> int:
        with self._lock:
            process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        for lines in (*self._lines.values(), self._errors):
            lines.end()
        code = process.wait()
        return 128 - code if code < 0 else code

    # -- what the starter asks for ---------------------------------------------------------------------

    def pass_on(self, number: int) -> None:
        """Send a signal to the agent; a host that has not answered yet is given up instead."""
        if not self.begun:
            self.give_up()
            return
        self._signals.append(number)
        if self._process is not None and self._greeting.offset is not None:
            self._send_signal(len(self._signals) - 1)

    def _send_signal(self, place: int) -> None:
        self._write(frame(b"S", place.to_bytes(4, "big") + bytes([self._signals[place]])))

    def give_up(self) -> None:
        """End the connection; a steward that is left without one ends its agent in time."""
        self.lost = True
        if self._process is not None:
            self._process.kill()
            self._close()

    def _settle(self) -> None:
        """In the ssh process: the starter passes these signals on, and ssh must outlive them for that."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()
