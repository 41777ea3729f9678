"""A short campaign passes, a violation is reported, and no process outlives the campaign."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import possible
from tests.support.run_helpers import plain_environment

pytestmark = pytest.mark.thorough

CHAOS = [sys.executable, "-m", "tests.chaos"]
LONGEST = 3 * HUNG
namespaces = pytest.mark.skipif(not possible(), reason="namespaces need root")


def environment(tmp_path: Path, isolated: bool) -> dict[str, str]:
    """Without the program `ip`, a campaign uses loopback, for root as well."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    return plain_environment() | ({} if isolated else {"PATH": str(tmp_path / "bin")})


@contextmanager
def campaign(tmp_path: Path, *words: str, isolated: bool) -> Iterator[subprocess.Popen[str]]:
    command = [*CHAOS, "--episodes", "1", "--keep", str(tmp_path), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        env=environment(tmp_path, isolated),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes(tmp_path: Path) -> list[psutil.Process]:
    """Everything that works in the campaign's directory, as seen from here."""
    return list(working(tmp_path))


def working(tmp_path: Path) -> dict[psutil.Process, str]:
    """The same, each with its marker."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue
        if str(tmp_path) in environ.get("TMPDIR", "") and "CHAOS_NODE" in environ:
            found[process] = environ["CHAOS_NODE"]
    return found


@namespaces
def test_a_short_campaign_in_namespaces(tmp_path: Path) -> None:
    faults = "worker-exit,agent-kill,agent-stop,zygote-kill,cut,store-kill"
    words = ("--seed", "3", "--agents", "3", "--faults", faults, "--json")
    with campaign(tmp_path, *words, isolated=True) as process:
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, out + err
    assert "agents in namespaces of their own" in err
    (episode,) = json.loads(out)["episodes"]
    assert episode["violations"] == []
    assert episode["rounds"] >= 2
    applied = json.loads(out)["faults"]
    assert sum(applied.values()) >= 3
    assert "zygote-kill" in applied, "the helpers were found"


def test_a_stray_process_is_found_and_reported_on_loopback(tmp_path: Path) -> None:
    words = ("--seed", "1", "--agents", "2", "--faults", "worker-kill,cut")
    with campaign(tmp_path, *words, isolated=False) as process:
        wait_until(lambda: working(tmp_path), "an agent")
        marker = next(iter(working(tmp_path).values()))
        stray = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"],
            env={**os.environ, "CHAOS_NODE": marker},
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LONGEST)
            assert process.returncode == 1, out + err
            assert "agents in loopback" in out
            assert "left out, for lack of network namespaces (root and the program ip): cut" in out
            assert "VIOLATION left behind" in out
            assert f"{stray.pid} (python" in out
            assert "python -m tests.chaos --episodes 1 --backend phalanx --agents 2" in out
            assert stray.wait(HUNG) == -signal.SIGKILL
        finally:
            stray.kill()
            stray.wait()
    (kept,) = tmp_path.glob("phalanx-chaos-*/seed-1/episode.json")
    assert json.loads(kept.read_text())["violations"]


@pytest.mark.parametrize("isolated", [pytest.param(True, marks=namespaces), False])
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_campaign(tmp_path: Path, sig: signal.Signals, isolated: bool) -> None:
    with campaign(tmp_path, "--seed", "2", "--agents", "2", isolated=isolated) as process:
        wait_until(lambda: list(tmp_path.glob("phalanx-chaos-*/seed-2/signs/*")), "a worker")
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) > 4
        if sig is signal.SIGINT:
            os.killpg(process.pid, sig)  # as a terminal does
        else:
            process.send_signal(sig)
        out, err = process.communicate(timeout=HUNG)
        assert process.returncode == (-9 if sig is signal.SIGKILL else 130), out + err
        wait_until(lambda: all(gone(one.pid) for one in below), "the end of all processes")
        wait_until(lambda: not processes(tmp_path), "the end of all agents")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        pytest.param(["--faults", "flood"], "--faults flood: not a fault", id="fault"),
        pytest.param(["--agents", "1"], "--agents 1: use a number", id="agents"),
        pytest.param(["--backend", "zookeeper"], "--backend", id="backend"),
        pytest.param(["--keep", "/does/not/exist"], "not a directory", id="keep"),
    ],
)
def test_bad_usage(words: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*CHAOS, *words], env=plain_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
