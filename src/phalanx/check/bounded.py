"""Runs checks side by side, each in a fork of its own: one that hangs or crashes costs a finding.

A check may touch a dead file server or a broken driver. A thread that waits in the kernel cannot be
abandoned, because the process could then not exit either; a child can. What it finds comes back through a
pipe. A child that does not even die of SIGKILL is left to the kernel, and named.

The caller must have no other threads: forks of the moment would inherit their locks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from phalanx.core.diagnosis.fitness import UNKNOWN, CheckFinding
from phalanx.kernel import describe, die_with_parent

LIMIT = 5.0
_LAST_CHANCE = 0.5  # for a killed child to go
_LONGEST = 1 << 20
REPORT = "report this"
"""The advice where a check has raised an exception: a mistake of the check, not of the machine."""


class Check(NamedTuple):
    """A check by its name: what it does, and for how long it may."""

    name: str
    look: Callable[[], Iterable[CheckFinding]]
    limit: float = LIMIT


class _Running:
    def __init__(self, check: Check) -> None:
        self.check = check
        self.data = b""
        self.until = time.monotonic() + check.limit
        self.fd, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _examine(check, write)
        os.close(write)


def _examine(check: Check, pipe: int) -> None:
    """In the child: never returns."""
    code = 1
    try:
        os.setsid()  # a process group of its own, so that programs it starts are killed with it
        die_with_parent()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        try:
            found = list(check.look())
        except Exception as error:  # noqa: BLE001 - whatever a check raises becomes its finding
            found = [CheckFinding(check.name, f"{type(error).__name__}: {error}", UNKNOWN, REPORT)]
        data = json.dumps([one.as_dict() for one in found]).encode()
        while data:
            data = data[os.write(pipe, data) :]
        code = 0
    finally:
        os._exit(code)


def run_checks(checks: Sequence[Check]) -> list[CheckFinding]:
    """All of them at once; the findings in the order of the checks."""
    running = [_Running(check) for check in checks]
    waiting = {one.fd: one for one in running}
    found: dict[int, list[CheckFinding]] = {}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    try:
        while waiting:
            _look(waiting, poll, found)
    finally:
        for one in waiting.values():  # after an interrupt
            _kill(one.pid)
    return [finding for one in running for finding in found[one.pid]]


def _look(waiting: dict[int, _Running], poll: select.poll, found: dict[int, list[CheckFinding]]) -> None:
    """Wait for the next piece of what the children write, or the next deadline."""
    left = min(one.until for one in waiting.values()) - time.monotonic()
    ready = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
    for fd, one in list(waiting.items()):
        data = os.read(fd, 65536) if fd in ready else b""
        one.data += data
        over = time.monotonic() >= one.until or len(one.data) > _LONGEST
        if (fd in ready and not data) or over:
            del waiting[fd]
            poll.unregister(fd)
            os.close(fd)
            found[one.pid] = _conclude(one, over and not (fd in ready and not data))


def _conclude(one: _Running, late: bool) -> list[CheckFinding]:
    name = one.check.name
    if late:
        left = _kill(one.pid)
        state = f"; {left} cannot be killed" if left else ""
        return [
            CheckFinding(name, f"no answer within {one.check.limit:g} s{state}", UNKNOWN, "try it by hand")
        ]
    _, status = os.waitpid(one.pid, 0)  # its end of the pipe is closed: it has exited, or is about to
    try:
        return [CheckFinding(**found) for found in json.loads(one.data)]
    except (ValueError, TypeError):
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return [CheckFinding(name, f"the check was {how}" if code < 0 else f"the check {how}", UNKNOWN)]


def _kill(pid: int) -> str:
    """Kill a child and what it has started; a description of it if it survives."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has not made its group yet
    end = time.monotonic() + _LAST_CHANCE
    while True:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return ""
        if time.monotonic() >= end:
            return describe(pid)
        time.sleep(0.005)
