"""Why a worker exited, as seen from outside; the OOM cases make the kernel kill a real process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.agent.workers import exit_evidence
from phalanx.agent.workers.exit_evidence import (
    Snapshot,
    explain,
    snapshot,
)
from phalanx.core.diagnosis.exit_status import code_in_words, next_step, signal_label

LIMIT = 48 << 20
EATER = "import sys\nsys.stdin.readline()\nkept = []\nwhile True: kept.append(b'x' * (1 << 20))"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (126, "exit code 126 (found but not executable)"),
        (127, "exit code 127 (command or shared library not found)"),
        (137, "exit code 137 (a shell or wrapper reports SIGKILL: killed by the kernel or another process)"),
        (143, "exit code 143 (a shell or wrapper reports SIGTERM: asked to terminate)"),
        (255, "exit code 255 (exit(-1), or ssh could not connect)"),
        (-9, "SIGKILL (signal 9): killed by the kernel or another process"),
        (-11, "SIGSEGV (signal 11): invalid memory access in native code"),
        (-36, "SIGRTMIN+2 (signal 36)"),
        (-99, "signal 99"),
    ],
)
def test_codes_in_words(code: int, words: str) -> None:
    assert code_in_words(code) == words


def test_every_code_has_words() -> None:
    for code in range(-70, 256):
        assert code_in_words(code)
        next_step(code)
    assert "chmod" in next_step(126)
    assert next_step(137) == next_step(-9) != ""
    assert signal_label(15) == "SIGTERM"


def test_a_snapshot_needs_nothing() -> None:
    assert snapshot(pid=2**22 + 1).cgroups == {}
    before = len(os.listdir("/proc/self/fd"))
    snapshot()
    assert len(os.listdir("/proc/self/fd")) == before


def test_plain_kill_shows_no_sign_of_memory() -> None:
    before = snapshot()
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as child:
        child.kill()
        code = child.wait()
        text = explain(code, child.pid, before)
    if before.machine is None:
        pytest.skip("this kernel counts no OOM kills")
    assert text.startswith(("SIGKILL from outside Phalanx; no sign of an OOM kill", "possibly"))


def test_without_counters_it_claims_nothing() -> None:
    text = explain(-9, 2**22 + 1, Snapshot(monotonic_us=2**60))
    assert text == "SIGKILL from outside Phalanx; cannot check for an OOM kill here"
    assert explain(1, 1) == explain(-15, 1) == ""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with a small limit, below this process's own."""
    mount, kind = next(
        ((m, k) for k in ("v1", "v2") if (m := exit_evidence._cgroup_mounts().get(k))), (None, "")
    )
    own = next(iter(exit_evidence._counter_files("self")), None)
    if mount is None or own is None:
        pytest.skip("no memory cgroup is mounted")
    group = Path(own).parent / f"phalanx-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        names = ("memory.max",) if kind == "v2" else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        for name in names:
            if (group / name).exists():
                (group / name).write_text(str(LIMIT))
        if not (group / names[0]).exists():
            raise OSError(f"no {names[0]}")
    except OSError as exc:
        if group.exists():
            group.rmdir()
        pytest.skip(f"cannot create a memory cgroup: {exc}")
    yield group
    group.rmdir()


def machine_only(before: Snapshot) -> Snapshot:
    return Snapshot({}, before.machine, before.monotonic_us)


def eat(group: Path) -> tuple[int, int, Snapshot]:
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as child:
        try:
            (group / "cgroup.procs").write_text(str(child.pid))
            before = snapshot(child.pid)
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.close()
            return child.wait(60), child.pid, before
        finally:
            child.kill()


def test_real_oom_kill_is_told_as_surely_as_it_is_known(
    limited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, pid, before = eat(limited)
    assert code == -9
    assert str(limited) in next(iter(before.cgroups))
    text = explain(code, pid, before)
    log = exit_evidence.oom_lines(before.monotonic_us)
    if log and any(f"Killed process {pid} " in line for line in log):
        assert "out of memory" in text
        assert f"pid {pid}" in text
        assert re.search(r"its cgroup's memory limit of \d+ MiB, using", text)
    # From here on as if the kernel log could not be read: the counters alone.
    monkeypatch.setattr(exit_evidence, "oom_lines", lambda _since: None)
    text = explain(code, pid, before)
    assert text.startswith("probably out of memory: the kernel's count")
    assert str(limited) in text
    # And when only the machine-wide counter is known.
    text = explain(code, pid, machine_only(before))
    assert text.startswith("possibly out of memory")
    # A snapshot from after the kill sees nothing new.
    assert "(the kernel log is not readable)" in explain(code, pid, Snapshot({}, 2**40))


def test_oom_of_another_process_is_not_ours(limited: Path) -> None:
    _, pid, before = eat(limited)
    text = explain(-9, pid + 100_000, machine_only(before))
    assert text.startswith("possibly out of memory")


def test_unreadable_log_and_odd_records(tmp_path: Path) -> None:
    assert exit_evidence.oom_lines(0, str(tmp_path / "none")) is None
    log = tmp_path / "kmsg"
    log.write_text("6,1,5000000,-;Memory cgroup out of memory: Killed process 12 (python) anon-rss:2048kB\n")
    assert exit_evidence.oom_lines(0, str(log)) == [
        "Memory cgroup out of memory: Killed process 12 (python) anon-rss:2048kB"
    ]
    assert exit_evidence.oom_lines(10_000_000, str(log)) == [], "from before the snapshot"
    log.write_bytes(b"\xff\x00garbage;Killed process")
    assert exit_evidence.oom_lines(0, str(log)) == ["Killed process"]


def test_a_bus_error_looks_at_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_blocks, f_frsize, f_bavail = 16384, 4096, 0

    monkeypatch.setattr(os, "statvfs", lambda _path: Full)
    assert explain(-7, 1) == "/dev/shm is full (64 MiB, 0 KiB free): a common cause of SIGBUS"


def test_the_smallest_limit_of_the_groups_is_named(tmp_path: Path) -> None:
    inner, outer = tmp_path / "outer" / "inner", tmp_path / "outer"
    inner.mkdir(parents=True)
    (outer / "memory.max").write_text(f"{64 << 20}\n")
    (inner / "memory.max").write_text("max\n")
    counters = [str(inner / "memory.events"), str(outer / "memory.events")]
    assert exit_evidence.memory_limit(counters) == " of 64 MiB"
    (inner / "memory.limit_in_bytes").write_text(str(9223372036854771712))  # version 1: none
    assert exit_evidence.memory_limit(counters[:1]) == ""
