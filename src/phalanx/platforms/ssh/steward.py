"""The steward: what ssh starts on a host. It is the parent of the host's agent, and its tie to the starter.

This module as a program reads the job from stdin: directory, environment, command and token never appear in
the arguments of a process. With the words KEY SEEN it is a second session for the same job, after the first
connection was lost: it hands its own stdin and stdout to the steward, which goes on with byte SEEN.

A connection that is gone does not say whether the starter is dead. So a steward without one waits for the
starter to come back, for the time that the job names; after that it stops the agent. A connection without a
message for that time is as good as gone: sshd does not notice for hours that a machine was switched off. The
steward does not wait for a starter that has never answered the greeting: that one has given this host up. If
the steward itself is killed, the kernel kills the agent, and the agent's helpers end everything else.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

from phalanx.job.environment import OUTCOMES, TOKEN, own_environment
from phalanx.job.time_budgets import STEWARD_KILL
from phalanx.kernel import die_with_parent, pidfd, user_of
from phalanx.platforms.outcomes import AgentOutcome, read_outcomes
from phalanx.platforms.ssh.frames import GREETING, VERSION, LinkFrameReader, SentFrames, silence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PREFIX = "phalanx-steward/"
_BLOCK = 1 << 16
_KEPT = 4 << 20  # bytes of output that a new connection can still get
_AHEAD = 1 << 20  # unsent bytes at which the agent's console has to wait


class Steward:
    """One agent, and the connection to its starter, while there is one."""

    def __init__(self, job: dict[str, Any], folder: str) -> None:
        """`folder`: where the agent leaves its outcome. OSError: the agent cannot be started."""
        self._grace = float(job["grace"])
        self._patience = float(job["patience"])
        self._frames = SentFrames(_KEPT)
        self._in, self._out = 0, 1
        self._reader = LinkFrameReader()
        self._pending = b""  # of the stream, for the current connection
        self._heard_at = 0.0  # the last message of the starter
        self._alone_since: float | None = None
        self._kill_at: float | None = None
        self._acknowledged = self._done = False
        self._passed = 0  # signals of the starter that the agent has got
        self._session: socket.socket | None = None  # of the process whose stdin and stdout these are
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{_PREFIX}{os.geteuid()}/{job['key']}")
        self._socket.listen(4)
        self._folder = folder
        more = {TOKEN: job["token"], OUTCOMES: folder}
        self.agent = subprocess.Popen(
            job["argv"],
            cwd=job["directory"],
            env={**own_environment(), **job["environment"], **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_settle,
        )
        assert self.agent.stdout is not None
        assert self.agent.stderr is not None
        self._outputs = {self.agent.stdout.fileno(): b"o", self.agent.stderr.fileno(): b"e"}
        self._greet(0)

    # -- the connection --------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether there is a connection."""
        return self._out >= 0

    def _greet(self, seen: int) -> None:
        os.set_blocking(self._out, False)
        begin, data = self._frames.since(seen)
        self._pending = b"%b%b %d\n%b" % (GREETING, VERSION, begin, data)
        self._reader = LinkFrameReader()
        self._heard_at, self._alone_since = time.monotonic(), None

    def _detach(self) -> None:
        """The connection is gone; wait for another one."""
        for fd in {self._in, self._out} - {-1}:
            os.close(fd)
        self._in = self._out = -1
        if self._session is not None:
            self._session.close()
            self._session = None
        self._pending = b""
        self._alone_since = time.monotonic() - (0.0 if self._acknowledged else self._patience)

    def _accept(self) -> None:
        session, _ = self._socket.accept()
        try:
            if user_of(session) not in (0, os.geteuid()):
                raise OSError("another user")
            session.settimeout(5)
            data, ancillary, _, _ = session.recvmsg(64, socket.CMSG_LEN(8))
            fds = array.array("i", ancillary[0][2][:8]) if ancillary else array.array("i")
            seen = int(data)
            if len(fds) != 2:
                raise ValueError("two descriptors are needed")
        except (OSError, ValueError):
            session.close()
            return
        if self.attached:
            self._detach()  # the starter knows better that the old one is dead
        self._in, self._out, self._session = fds[0], fds[1], session
        self._greet(seen)

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the agent has ended and the starter knows, or nobody comes back to hear it."""
        ended = pidfd(self.agent.pid)
        assert ended is not None
        code: int | None = None
        while not (code is not None and (self._done or self._is_over())):
            ready = self._poll(ended if code is None else -1)
            if self._socket.fileno() in ready:
                self._accept()
            elif self.attached and self._in in ready:
                self._hear()
            for fd in [fd for fd in self._outputs if fd in ready]:
                self._relay(fd)
            if self.attached and self._pending:
                self._send()
            self._judge()
            if code is None and not self._outputs and self.agent.poll() is not None:
                status = self.agent.returncode
                code = 128 - status if status < 0 else status
                self._say(b"x", json.dumps(self._outcome(code).as_dict()).encode())
        return code if code is not None else 1

    def _outcome(self, code: int) -> AgentOutcome:
        """The file that the agent left; an agent that was killed leaves none."""
        left = read_outcomes(self._folder)
        return (left[0] if left else AgentOutcome("", "", code)).replace(code=code)

    def _poll(self, ended: int) -> set[int]:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if ended >= 0 and not self._outputs:
            poll.register(ended, select.POLLIN)
        if self.attached:
            poll.register(self._in, select.POLLIN)
            if self._pending:
                poll.register(self._out, select.POLLOUT)
            else:
                poll.register(self._out, 0)  # an error of it is reported in any case
        if not self.attached or len(self._pending) < _AHEAD:
            for fd in self._outputs:
                poll.register(fd, select.POLLIN)
        deadline = self._kill_at
        if deadline is None and self._alone_since is not None:
            deadline = self._alone_since + self._patience
        elif deadline is None:
            deadline = self._heard_at + silence(self._patience)
        left = max(0.0, deadline - time.monotonic()) * 1000 + 1
        found = dict(poll.poll(left))
        if self.attached and found.get(self._out, 0) & (select.POLLERR | select.POLLHUP):
            self._detach()
        return set(found)

    def _hear(self) -> None:
        try:
            data = os.read(self._in, _BLOCK)
            messages = self._reader.feed(data)
        except (OSError, ValueError):
            data, messages = b"", []
        if not data:
            self._detach()
            return
        self._acknowledged, self._heard_at = True, time.monotonic()
        for kind, body in messages:
            if kind == b"S" and len(body) == 5 and int.from_bytes(body[:4], "big") == self._passed:
                self._passed += 1
                if self.agent.returncode is None:
                    self.agent.send_signal(body[4])
            elif kind == b"D":
                self._done = True

    def _relay(self, fd: int) -> None:
        data = os.read(fd, _BLOCK)
        if data:
            self._say(self._outputs[fd], data)
        else:
            del self._outputs[fd]

    def _say(self, kind: bytes, data: bytes) -> None:
        before = self._frames.end
        self._frames.add(kind, data)
        if self.attached:
            self._pending += self._frames.since(before)[1]

    def _send(self) -> None:
        try:
            self._pending = self._pending[os.write(self._out, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._detach()

    def _is_over(self) -> bool:
        """Without a connection, whether nobody comes back."""
        return self._alone_since is not None and time.monotonic() >= self._alone_since + self._patience

    def _judge(self) -> None:
        """Stop an agent whose starter did not come back, or whose machine is gone without a last packet."""
        now = time.monotonic()
        if self.attached and now >= self._heard_at + silence(self._patience):
            self._detach()
            self._alone_since = self._heard_at
        if self._kill_at is None and self._is_over() and self.agent.returncode is None:
            self.agent.terminate()
            self._kill_at = now + self._grace + STEWARD_KILL
        elif self._kill_at is not None and now >= self._kill_at and self.agent.returncode is None:
            self.agent.kill()
            self._kill_at = now + STEWARD_KILL


def main(argv: list[str]) -> int:
    """The first session of a job, or a later one."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if argv:
        return attach(argv[0], argv[1])
    job = _read_job()
    if job is None:
        return 1
    with tempfile.TemporaryDirectory(prefix="phalanx-steward-", ignore_cleanup_errors=True) as folder:
        try:
            steward = Steward(job, folder)
        except OSError as error:
            absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
            hint = "; directory and Python must be there on every host" if absent else ""
            where = error.filename or job["argv"][0]
            sys.stderr.write(f"phalanx: {where}: {error.strerror}{hint}\n")
            return 95
        return steward.run()


def _settle() -> None:
    """In the agent: a SIGHUP that the starter passes on is a reason to stop."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    die_with_parent()


def _read_job() -> dict[str, Any] | None:
    reader = LinkFrameReader()
    while True:
        data = os.read(0, _BLOCK)
        if not data:
            return None  # the starter is gone before it has said what to do
        for kind, body in reader.feed(data):
            if kind == b"J":
                found: dict[str, Any] = json.loads(body)
                return found


def attach(key: str, seen: str) -> int:
    """Hand this session's stdin and stdout to the steward of a job, and stay until it lets go of them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(f"\0{_PREFIX}{os.geteuid()}/{key}")
            if user_of(peer) not in (0, os.geteuid()):
                raise OSError("another user")
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))
            peer.sendmsg([str(int(seen)).encode()], [rights])
        except OSError:
            return 3  # there is no steward any more
        os.close(0)
        os.close(1)
        peer.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
