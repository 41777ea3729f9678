"""`phalanx run --hosts` over a real sshd: one command starts all agents, and none outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.support.netns import Network, possible
from tests.support.run_helpers import Running, all_gone, plain_environment
from tests.support.ssh_hosts import SshHosts

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
TRAIN = """\
import os, select
e = os.environ
about = e["WORLD_SIZE"], e.get("CARRIED"), os.path.basename(os.getcwd()), e.get("PHALANX_TOKEN") or "-"
print("ready", e["RANK"], os.getpid(), *about, flush=True)
while not os.path.exists("end"):
    select.select([], [], [], 0.05)
print("done", e["RANK"], flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHosts]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    with SshHosts(2) as found:
        yield found
        wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")


def stewards(folder: Path) -> list[int]:
    """Processes of this test's jobs on the hosts."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        try:
            if any("phalanx" in word for word in words) and one.cwd() == str(folder):
                found.append(one.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return [pid for pid in found if pid != os.getpid()]


def start(hosts: SshHosts, *words: str, terminal: bool = False) -> Running:
    """The command of the documentation."""
    command = "phalanx run --hosts node1,node2:2 train.py"
    assert f"    {command}\n" in PAGE.read_text()
    script = command.split()[2:]
    environ = plain_environment(CARRIED="yes", PHALANX_SSH=hosts.ssh)
    return Running([*words, *script], env=environ, terminal=terminal)


def test_a_job_on_two_hosts_outlives_its_connections(hosts: SshHosts, tmp_path: Path) -> None:
    with start(hosts) as job:
        workers = job.workers(3)
        assert f"ready 0 {workers[0]} 3 yes {tmp_path.name} -" in job.text
        assert "[node1] ready 0 " in job.text
        assert "[node2] ready 2 " in job.text
        hosts.cut()
        job.read_until("the ssh connection is lost; the job goes on", 2)
        job.read_until("connected again", 2)
        assert "some of its output was lost" not in job.text
        Path("end").touch()
        ended = job.end()
    assert ended.code == 0, ended
    assert ended.out.count("] done ") == 3, ended
    assert ended.out.count("] ready ") == 3, "no line comes twice"
    assert all_gone(workers)


def test_ctrl_c_stops_all_hosts(hosts: SshHosts) -> None:
    with start(hosts, terminal=True) as job:
        workers = job.workers(3)
        job.type(b"\x03")
        ended = job.end()
    assert ended.code == 128 + signal.SIGINT, ended
    assert ended.out.count("SIGINT: stopping") == 2, ended
    assert all_gone(workers)


def test_nothing_outlives_a_starter_that_dies(hosts: SshHosts) -> None:
    with start(hosts, "--store-grace", "1") as job:
        workers = job.workers(3)
        job.signal(signal.SIGKILL)
        wait_until(lambda: all_gone(workers), "the end of the workers")


@pytest.mark.skipif(not possible(), reason="network namespaces need root")
def test_nothing_outlives_a_starter_whose_machine_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts in a network of their own; no packet tells them that the starter's machine was switched off."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    with Network("starter", "b", "c") as network:
        away = [network.hosts[name] for name in "bc"]
        with SshHosts(namespaces=away) as hosts:
            words = ["--store-grace", "1", "--hosts", "node1,node2:2", "--ssh", hosts.ssh, "train.py"]
            with Running(words, before=network.hosts["starter"].inside) as job:
                workers = job.workers(3)
                assert "[node1] ready 0 " in job.text
                network.cut("starter")
                job.signal(signal.SIGKILL)
                wait_until(lambda: all_gone(workers), "the end of the workers")
            wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")


def test_a_host_that_cannot_be_reached(hosts: SshHosts) -> None:
    words = ["--hosts", f"{hosts.names[0]},127.0.0.99", "--ssh", hosts.ssh, "train.py"]
    with Running(words) as job:
        ended = job.end()
    assert ended.code == 94, ended
    assert "127.0.0.99: no agent could be started (ssh: exit code 255)" in ended.err
