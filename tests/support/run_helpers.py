"""Starts `phalanx run` as a person would, in a process, a terminal or a namespace of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from tests.conftest import HUNG, gone, wait_until

PHALANX = [str(Path(sys.executable).with_name("phalanx")), "run"]
_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "XDG_STATE_HOME",
    "PHALANX_NAMESPACE",
    "COVERAGE_PROCESS_CONFIG",
)

# The beginning of a worker that says who it is and then waits for the end of the world.
READY = "import os, sys, time; print('ready', os.environ['RANK'], os.getpid(), flush=True)\n"
FOREVER = READY + "time.sleep(1000)\n"


def script(directory: Path, text: str, name: str = "train.py") -> str:
    """Write a worker's script; its path."""
    path = directory / name
    path.write_text(text)
    return str(path)


def plain_environment(**more: str) -> dict[str, str]:
    """What a worker may inherit, without what a test runner or a CI machine adds."""
    return {**{name: os.environ[name] for name in _PASSED_ON if name in os.environ}, **more}


def run(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    timeout: float = HUNG,
) -> Ended:
    """Run to the end."""
    return ended([*PHALANX, *words], plain_environment() if env is None else env, cwd, stdin, timeout)


def ended(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: str = "",
    timeout: float = HUNG,
) -> Ended:
    """Any command, run to the end."""
    done = subprocess.run(
        command,
        env=dict(env),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


class Ended:
    """How a run ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def said(self) -> list[str]:
        """The lines of the launcher itself, without the figure with which only jobs of some length end."""
        said = (
            line.removeprefix("phalanx: ") for line in self.err.splitlines() if line.startswith("phalanx: ")
        )
        return [line for line in said if not line.startswith(("goodput ", "uptime "))]

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Running:
    """A run that goes on while the test looks at it; ended at the end of the `with`, whatever happens."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        terminal: bool = False,
        launcher: Sequence[str] = PHALANX,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.seen = b""
        self.agent = 0
        self._terminal = -1
        command = [*before, *launcher, *words]
        environ = plain_environment() if env is None else dict(env)
        if terminal:
            self._terminal, slave = pty.openpty()
            self._out = self._terminal
            self.process = subprocess.Popen(
                command,
                env={"TERM": "xterm", **environ},
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
            os.close(slave)
        else:
            self._out, out = os.pipe()
            self.process = subprocess.Popen(
                command, env=environ, stdin=stdin, stdout=out, stderr=out, start_new_session=True
            )
            os.close(out)
        self.agent = self.process.pid

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            left = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            left = []
        self.process.kill()
        self.process.wait()
        for one in left:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        if self._out >= 0:
            os.close(self._out)

    @property
    def terminal(self) -> int:
        """Our side of its terminal."""
        return self._terminal

    @property
    def text(self) -> str:
        """What it wrote so far, as far as it was read."""
        return self.seen.decode(errors="replace")

    def read_until(self, what: str, times: int = 1) -> str:
        """Read its output until `what` was in it that often."""
        end = time.monotonic() + HUNG
        while self.text.count(what) < times:
            if not self._read(end):
                raise AssertionError(f"{what!r} did not come {times} times; there was:\n{self.text}")
        return self.text

    def read_on(self) -> None:
        """Read what comes next; returns at the end of its output too."""
        self._read(time.monotonic() + HUNG)

    def workers(self, count: int) -> dict[int, int]:
        """Rank → pid, once that many have said that they are ready."""
        self.read_until("ready ", count)
        while self.text.rfind("ready ") > self.text.rfind("\n"):  # the last line is not whole yet
            self._read(time.monotonic() + HUNG)
        lines = [line.split() for line in self.text.splitlines()]
        found = [words[words.index("ready") :] for words in lines if "ready" in words]
        return {int(words[1]): int(words[2]) for words in found[-count:]}

    def type(self, keys: bytes) -> None:
        """Type into its terminal."""
        os.write(self._terminal, keys)

    def hang_up(self) -> None:
        """Close its terminal."""
        os.close(self._terminal)
        self._out = self._terminal = -1

    def signal(self, sig: int) -> None:
        """To the agent alone."""
        os.kill(self.agent, sig)

    def end(self) -> Ended:
        """Wait for its end; the exit code as a shell shows it."""
        end = time.monotonic() + HUNG
        while self._out >= 0 and self._read(end):
            pass
        code = self.process.wait(max(1.0, end - time.monotonic()))
        return Ended(128 - code if code < 0 else code, self.text, self.text)

    def read_rest(self) -> None:
        """What it has written by now, without waiting; for the report of a failed test."""
        while self._out >= 0 and select.select([self._out], [], [], 0)[0]:
            if not self._read(time.monotonic() + HUNG):
                return

    def _read(self, end: float) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            raise AssertionError(f"no end within {HUNG:.0f} s; there was:\n{self.text}")
        if not select.select([self._out], [], [], left)[0]:
            return self._read(end)
        try:
            data = os.read(self._out, 65536)
        except OSError:  # the other side of a terminal is closed
            data = b""
        self.seen += data
        return bool(data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def named(processes: Iterable[psutil.Process], names: Iterable[str]) -> list[psutil.Process]:
    """Those with one of these names; one that ends meanwhile (what forked a helper does at once) has none."""
    found = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            if one.name() in names:
                found.append(one)
    return found


def helpers_of(agent: int) -> list[int]:
    """Keeper and zygote."""
    below = psutil.Process(agent).children(recursive=True)
    return [one.pid for one in named(below, ("worker-keeper", "worker-zygote"))]


def zygote_below(keeper: int) -> psutil.Process:
    """The zygote of a keeper, once it has its name."""
    above = psutil.Process(keeper)
    wait_until(lambda: named(above.children(), ("worker-zygote",)), "the zygote")
    return named(above.children(), ("worker-zygote",))[0]


def kill_at_once(pids: Iterable[int]) -> None:
    """SIGKILL to several processes of ours, of which none can act on the end of another."""
    victims = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            with suppress(ProcessLookupError):  # the kernel has killed it at the death of its parent
                os.kill(pid, number)


def supervisors_of(worker: int) -> dict[str, psutil.Process]:
    """The zygote that forked a worker, and its keeper."""
    zygote = psutil.Process(worker).parent()
    keeper = None if zygote is None else zygote.parent()
    found = {one.name().removeprefix("worker-"): one for one in (zygote, keeper) if one is not None}
    assert found.keys() == {"zygote", "keeper"}
    return found


def all_gone(pids: Sequence[int] | Mapping[int, int]) -> bool:
    """Whether none of them is alive."""
    return all(gone(pid) for pid in (pids.values() if isinstance(pids, Mapping) else pids))


def unshare() -> list[str]:
    """Words that make what follows process 1 of a namespace of its own; none where that is not allowed."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid():
        words += ["--user", "--map-root-user"]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, timeout=HUNG, check=False)
    except FileNotFoundError:
        return []
    return words if allowed.returncode == 0 else []


FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
