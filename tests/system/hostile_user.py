"""Another user of this machine, for tests that run as root."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


def unused_uid() -> int:
    """A user that nobody is: one that no process has, also not of a test that runs beside this one."""
    first, _, count = (int(word) for word in Path("/proc/self/uid_map").read_text().split()[:3])
    return random.randrange(first + min(100_000, count // 2), first + min(count, 1 << 31) - 1)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def doing(action: Callable[[], None]) -> Iterator[int]:
    """A process of another user that carries out `action`; killed at the end. What it needs is imported."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            action()
            code = 0
        finally:
            os._exit(code)
    try:
        yield child
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ChildProcessError, ProcessLookupError):
            pass


def do(action: Callable[[], None]) -> None:
    """Carry out `action` as another user, to its end."""
    with doing(action) as child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def shared_directory(mode: int = 0o777) -> Iterator[Path]:
    """A directory that all users can reach; the one of pytest is private."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(mode)
    try:
        yield made
    finally:
        shutil.rmtree(made)
