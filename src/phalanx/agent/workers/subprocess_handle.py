"""One program under the same guarantees as a group: its own helpers, its own session, no orphans.

`SubprocessHandler` is the handle that torch's users know; `Process` has the part of Popen they use.
`WorkerHandler` is the same view of one worker of a group, which stays the group's: it ends as a whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from phalanx.agent.warm.spawner import HelpersLost, Spawner
from phalanx.agent.workers.worker_kinds import program_for
from phalanx.core.group.stop import ANSWER
from phalanx.helpers.messages import Exit, GroupStopped, WorkerLaunch

if TYPE_CHECKING:
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.job.numa import NumaOptions

_LOOK = 1.0  # bounds one sleep; nothing is polled at that rate


class Process:
    """A running program: pid, poll, wait, signals."""

    def __init__(self, job: WorkerLaunch, env: dict[str, str]) -> None:
        self.args = job.argv
        self.returncode: int | None = None
        self._done = False
        self._spawner = Spawner("exec")
        try:
            self.pid = self._spawner.spawn([job], env)[job.rank]
        except BaseException:
            self._spawner.close()
            raise

    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while it runs."""
        self._take_in(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired when it does not come in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0 and self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take_in(left)
        return self.returncode

    def _take_in(self, patience: float | None) -> None:
        if self._done:
            return
        for event in self._spawner.events(patience):
            if isinstance(event, Exit):
                self.returncode = event.code
            elif isinstance(event, GroupStopped):
                self._done = True
            elif isinstance(event, HelpersLost):
                self._done = True
                self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode

    def send_signal(self, sig: int) -> None:
        """To the program and everything in its process group, while it runs."""
        if self.poll() is None:
            self._spawner.signal(sig, {0})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self, sig: int, grace: float) -> None:
        """End it and all it started; idempotent."""
        if not self._done:
            self._spawner.stop(sig, grace)
            end = time.monotonic() + grace + ANSWER
            while not self._done and time.monotonic() < end:
                self._take_in(end - time.monotonic())
            self._done = True
        self._spawner.close()


class SubprocessHandler:
    """Starts one program on construction; `close` ends it."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None = None,
    ) -> None:
        self.local_rank_id = local_rank_id
        path = program_for(entrypoint, {**os.environ, **env})
        for log in (stdout, stderr):
            if log:
                # Empty a log file that is there already, as torch does; a group's own never are.
                try:
                    os.close(os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC))
                except OSError:
                    pass  # missing; or not writable, which the start reports
        argv = [entrypoint, *(str(arg) for arg in args)]
        job = WorkerLaunch(0, argv=argv, path=path)
        job.env, job.stdout, job.stderr = env, stdout or "", stderr or ""
        if numa_options is not None:
            from phalanx.job.numa import cpus_for

            job.cpus = sorted(cpus_for(local_rank_id, local_rank_id + 1, numa_options) or ())
        self.proc = Process(job, dict(os.environ))

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """`death_sig` (SIGTERM) to the program and what it started; SIGKILL to what is left of it."""
        self.proc.close(death_sig or signal.SIGTERM, grace=30.0)


class WorkerProcess:
    """A worker of a group: pid, poll, wait, signals."""

    def __init__(self, group: PContext, rank: int) -> None:
        self._group = group
        self._rank = rank
        self.pid = group.pids()[rank]

    @property
    def returncode(self) -> int | None:
        """The exit code as far as it is known; it changes by `poll` and `wait`, of the group as well."""
        return self._group.exit_code(self._rank)

    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while it runs."""
        self._group.advance()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired when it does not come in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = _LOOK if end is None else end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout or 0.0)
            self._group.advance(min(left, _LOOK))
        return code

    def send_signal(self, sig: int) -> None:
        """To the worker and everything in its process group, while it runs."""
        if self.poll() is None:
            self._group.send_signal(sig, {self._rank})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WorkerHandler:
    """What `SubprocessContext.subprocess_handlers` holds."""

    def __init__(self, group: PContext, rank: int) -> None:
        self.local_rank_id = rank
        self.proc = WorkerProcess(group, rank)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """`death_sig` (SIGTERM) to the worker and its process group; the group's `close` ends the rest."""
        self.proc.send_signal(death_sig or signal.SIGTERM)


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """A handler of the kind this platform needs; there is one kind."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
