"""The starter's tie to one host: an ssh process, what comes out of it, and a new one if it is lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess

from phalanx.integrations.ssh.frames import GreetingReader, LinkFrameReader, frame
from phalanx.kernel import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx.integrations.ssh.host_names import HostSlots

_BLOCK = 1 << 16
_STEWARD = "phalanx.integrations.ssh.steward"
_RETRY = 1.0  # seconds between two attempts to connect again


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
    """One host: `code` is the agent's exit code once that is known; `lost` once the host is given up."""

    def __init__(
        self,
        host: HostSlots,
        ssh: Sequence[str],
        python: str,
        job: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        out: Callable[[bytes], None],
        err: Callable[[bytes], None],
    ) -> None:
        self.host = host
        self._ssh, self._python, self._job = [*ssh, host.target], python, job
        self._say = say
        prefix = f"[{host.name}] ".encode()
        self._lines = {b"o": Lines(prefix, out), b"e": Lines(prefix, err)}
        self._errors = Lines(prefix, err)  # of ssh itself, and of a login shell
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        self._seen = 0
        self._greeting = GreetingReader()
        self._frames = LinkFrameReader()
        self._signals: list[int] = []  # before there is a connection to send them over
        self._lost_at: float | None = None
        self._again_at = 0.0
        self.begun = False  # the agent was started
        self.code: int | None = None
        self.lost = False
        self._connect([], frame(b"J", json.dumps(job).encode()))

    @property
    def open(self) -> bool:
        """Whether something is still to come from this host."""
        return self.code is None and not self.lost

    @property
    def leaving(self) -> bool:
        """Whether the agent has ended, and the steward is about to."""
        return self.code is not None and self._process is not None

    def _connect(self, words: Sequence[str], first: bytes = b"") -> None:
        command = "exec " + shlex.join([self._python, "-m", _STEWARD, *words])
        self._greeting = GreetingReader()
        self._unsent = first
        self._process = subprocess.Popen(
            [*self._ssh, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_settle,
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
        return self._again_at if self._process is None and self.open else None

    def look(self, ready: set[int], now: float) -> None:
        """Read, write, notice the end, and connect again."""
        if self._process is None:
            if self.open and now >= self._again_at:
                self._connect([str(self._job["key"]), str(self._seen)])
            return
        stdin, stdout, stderr = self._pipes()
        if stdin in ready:
            self._write(stdin)
        if stderr in ready and not self._read(stderr, self._errors.feed):
            ready = ready | {stdout}
        if stdout in ready and not self._read(stdout, self._take):
            self._ended(now)

    def _write(self, fd: int) -> None:
        try:
            self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # the end of its output says why

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
            elif kind == b"x" and body:
                self.code = body[0]
                self._send(frame(b"D"))

    def _greeted(self, begin: int) -> None:
        if self._lost_at is not None:
            missed = "" if begin == self._seen else "; some of its output was lost"
            self._say(f"{self.host.name}: connected again{missed}")
        if begin != self._seen:
            self._frames = LinkFrameReader()
            self._seen = begin
        self.begun, self._lost_at = True, None
        for number in self._signals:
            self._send(frame(b"S", bytes([number])))
        self._signals = []

    def _ended(self, now: float) -> None:
        """ssh has ended: the agent has too, or the connection is lost, or there never was one."""
        assert self._process is not None
        self._read(self._pipes()[2], self._errors.feed)
        status = self._close()
        for lines in (*self._lines.values(), self._errors):
            lines.end()
        if self.code is not None:
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
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        code = process.wait()
        return 128 - code if code < 0 else code

    # -- what the starter asks for ---------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        self._unsent += data
        if self._process is not None:
            self._write(self._pipes()[0])

    def pass_on(self, number: int) -> None:
        """A signal for the agent."""
        if self._process is not None and self._greeting.offset is not None:
            self._send(frame(b"S", bytes([number])))
        else:
            self._signals.append(number)

    def give_up(self) -> None:
        """End the connection; a steward that is left without one ends its agent in time."""
        self.lost = True
        if self._process is not None:
            self._process.kill()
            self._close()


def _settle() -> None:
    """In the ssh process: Ctrl-C is the starter's to pass on, and ssh ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    die_with_parent()
