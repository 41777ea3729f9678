"""`phalanx run --hosts` over a real sshd: one command starts all agents, and none outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import HUNG, wait_until
from tests.support.netns import Network, possible
from tests.support.run_helpers import PHALANX, Running, all_gone, plain_environment, run, supervisors_of
from tests.support.ssh_hosts import SshHosts
from tests.system.test_foreign_directory import caught, plant

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


def start(
    hosts: SshHosts, *words: str, terminal: bool = False, launcher: Sequence[str] = PHALANX, **more: str
) -> Running:
    """The command of the documentation."""
    command = "phalanx run --hosts node1,node2:2 train.py"
    assert f"    {command}\n" in PAGE.read_text()
    script = command.split()[2:]
    environ = plain_environment(CARRIED="yes", PHALANX_SSH=hosts.ssh, **more)
    return Running([*words, *script], env=environ, terminal=terminal, launcher=launcher)


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
    with start(hosts, "--store-grace", "5") as job:
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
            words = ["--store-grace", "5", "--hosts", "node1,node2:2", "--ssh", hosts.ssh, "train.py"]
            with Running(words, before=network.hosts["starter"].inside) as job:
                workers = job.workers(3)
                assert "[node1] ready 0 " in job.text
                network.cut("starter")  # the hosts' own ends of the connections stay open
                job.signal(signal.SIGKILL)
                wait_until(lambda: all_gone(workers), "the end of the workers")
            wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")


def test_a_host_that_cannot_be_reached(hosts: SshHosts) -> None:
    words = ["--hosts", f"{hosts.names[0]},127.0.0.99", "--ssh", hosts.ssh, "train.py"]
    with Running(words) as job:
        ended = job.end()
    assert ended.code == 94, ended
    assert "127.0.0.99: no agent could be started (ssh: exit code 255)" in ended.err
    assert "the job cannot go on without 127.0.0.99 (not reached): it needs 2 hosts" in ended.err


def test_a_terminal_that_is_closed_ends_the_job(hosts: SshHosts) -> None:
    with start(hosts, terminal=True) as job:
        workers = job.workers(3)
        job.hang_up()
        assert job.end().code == 128 + signal.SIGHUP
        assert all_gone(workers)


def test_nohup_outlives_its_terminal(hosts: SshHosts) -> None:
    out = Path("out")
    nohup = ["sh", "-c", 'nohup "$@" > out 2>&1; echo $? > code', "sh", *PHALANX]
    with start(hosts, terminal=True, launcher=nohup) as job:
        wait_until(lambda: out.exists() and out.read_text().count("] ready ") == 3, "the workers")
        os.killpg(job.process.pid, signal.SIGHUP)
        Path("end").touch()
        wait_until(lambda: out.read_text().count("] done ") == 3, "the end of the workers")
        wait_until(lambda: not stewards(Path.cwd()), "the end of the starter")
    assert "connection is lost" not in out.read_text()
    assert "SIGHUP" not in out.read_text()


def test_a_signal_to_the_group_reaches_every_agent(hosts: SshHosts) -> None:
    """As `kill -- -PID` and many process managers send it: to the starter and to each ssh."""
    with start(hosts) as job:
        workers = job.workers(3)
        os.killpg(job.process.pid, signal.SIGTERM)
        ended = job.end()
    assert ended.code == 128 + signal.SIGTERM, ended
    assert ended.out.count("SIGTERM: stopping") == 2, ended
    assert "connection is lost" not in ended.out
    assert all_gone(workers)


def test_a_signal_is_not_lost_with_a_connection(hosts: SshHosts) -> None:
    """Every ssh has died when the starter handles the signal, and the starter does not know that yet."""
    with start(hosts) as job:
        workers = job.workers(3)
        starter = psutil.Process(job.agent)
        starter.suspend()
        for one in starter.children():
            one.kill()
        job.signal(signal.SIGTERM)
        starter.resume()
        ended = job.end()
    assert ended.code == 128 + signal.SIGTERM, ended
    assert ended.out.count("SIGTERM: stopping") == 2, f"each agent gets it once: {ended}"
    assert all_gone(workers)


def test_a_starter_that_is_stopped_while_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that starts meanwhile ends at once, not after the time for a new connection."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    wait = f"touch {tmp_path}/connecting; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    Path("login").write_text(f"{wait}; eval $SSH_ORIGINAL_COMMAND\n")
    hosts = SshHosts(2)
    hosts.server = [f"ForceCommand sh {tmp_path}/login"]
    with hosts:
        with start(hosts) as job:
            wait_until(Path("connecting").exists, "a login shell")
            job.signal(signal.SIGINT)
            ended = job.end()
        Path("go").touch()
        wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")
    assert ended.code == 128 + signal.SIGINT, ended
    assert "ready" not in ended.out


@pytest.mark.skipif(not possible(), reason="a host with files of its own needs root")
@pytest.mark.parametrize("without", [1, 2])
def test_a_job_ends_when_a_host_cannot_run_it(
    without: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is missing there; the other host would wait for it until join_timeout."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "code"):
        Path(name).mkdir()
    Path("code/train.py").write_text(TRAIN)
    mount = f"mount --bind {tmp_path}/empty {tmp_path}/code"
    Path("login").write_text(f"exec unshare -m sh -c '{mount}; eval $SSH_ORIGINAL_COMMAND'\n")
    hosts = SshHosts(2)
    hosts.server = [f"Match LocalAddress {hosts.names[without - 1]}", f"ForceCommand sh {tmp_path}/login"]
    with hosts:
        ended = run("--hosts", "node1,node2", "--ssh", hosts.ssh, "code/train.py", timeout=2 * HUNG)
        wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")
    assert ended.code == 94, ended
    assert (
        f"the job cannot go on without node{without} (exit code 2): it needs 2 hosts, node1 among them"
        in ended.err
    )
    assert f"[node{without}] phalanx run: code/train.py: no such script" in ended.err


def test_an_agent_that_is_killed_ends_a_job_of_that_size(hosts: SshHosts, tmp_path: Path) -> None:
    """No other node can come: the one that is left must not wait for it until join_timeout."""
    with start(hosts) as job:
        workers = job.workers(3)
        agent = supervisors_of(workers[2])["keeper"].parent()
        assert agent is not None
        agent.kill()
        ended = job.end()
    assert ended.code == 94, ended
    assert "without node2 (exit code 137)" in ended.err
    assert all_gone(workers)


def test_the_failure_of_a_worker_is_the_jobs_own(hosts: SshHosts) -> None:
    """One agent ends before the other: that is not a host which is missing."""
    Path("train.py").write_text("import os, sys; sys.exit(3 * (os.environ['RANK'] == '2'))\n")
    with start(hosts, "--max-restarts", "0") as job:
        ended = job.end()
    assert ended.code == 3, ended
    assert "cannot go on" not in ended.out


def test_nothing_is_imported_from_the_directories_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from that of the job, which may be shared, nor from the one where a session begins."""
    monkeypatch.chdir(tmp_path)
    for name in ("login", "job"):
        plant(tmp_path / name)
    Path("code").mkdir()
    Path("code/train.py").write_text("print('done')\n")
    hosts = SshHosts(1)
    hosts.server = [f'ForceCommand cd {tmp_path}/login && eval "$SSH_ORIGINAL_COMMAND"']
    monkeypatch.chdir("job")
    with hosts:
        ended = run("--hosts", "node1", "--ssh", hosts.ssh, "../code/train.py", timeout=2 * HUNG)
        wait_until(lambda: not stewards(tmp_path / "job"), "the end of the steward")
    assert ended.code == 0, ended
    assert ended.out == "[node1] done\n"
    assert not caught(tmp_path / "login")
    assert not caught(tmp_path / "job")


def test_an_environment_of_megabytes(hosts: SshHosts) -> None:
    Path("end").touch()
    variables = {f"MANY_{number}": "ä\x01" * 20_000 for number in range(20)}
    with start(hosts, **variables) as job:
        ended = job.end()
    assert ended.code == 0, ended
    assert ended.out.count("] done ") == 3, ended


@pytest.mark.long
@pytest.mark.skipif(not possible(), reason="network namespaces need root")
def test_a_host_that_drops_packets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    with Network("starter", "b", "c") as network:
        network.silence("starter", towards="c")
        with SshHosts(namespaces=[network.hosts[name] for name in "bc"]) as hosts:
            words = ["--hosts", "node1,node2", "--ssh", hosts.ssh, "train.py"]
            with Running(words, before=network.hosts["starter"].inside) as job:
                ended = job.end()
            wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")
    assert ended.code == 94, ended
    assert "Connection timed out" in ended.err
    assert "node2: no agent could be started (ssh: exit code 255)" in ended.err


def test_questions_come_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts whose keys are not known yet, one terminal."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    Path("end").touch()
    hosts = SshHosts(2)
    hosts.client = ["StrictHostKeyChecking ask", "BatchMode no"]
    question = "continue connecting (yes/no/[fingerprint])? "
    with hosts, start(hosts, terminal=True) as job:
        job.read_until(question)
        # The other ssh waits for its turn: it has started the program that asks.
        wait_until(lambda: len(asking(job)) == 2, "both questions")
        job.read_rest()
        assert job.text.count(question) == 1
        job.type(b"yes\n")
        job.read_until(question, 2)
        assert job.text.count("yes\r\n") == 1, "the answer is shown"
        job.type(b"yes\n")
        ended = job.end()
        wait_until(lambda: not stewards(tmp_path), "the end of all stewards and agents")
    assert ended.code == 0, ended
    assert ended.out.count("] done ") == 3, ended


def test_ctrl_c_at_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    hosts = SshHosts(2)
    hosts.client = ["StrictHostKeyChecking ask", "BatchMode no"]
    with hosts, start(hosts, terminal=True) as job:
        job.read_until("continue connecting (yes/no/[fingerprint])? ")
        job.type(b"\x03")
        ended = job.end()
        assert ended.code == 128 + signal.SIGINT, ended


def asking(job: Running) -> list[int]:
    """The processes that ask, or wait for their turn to."""
    found = []
    for one in psutil.Process(job.agent).children(recursive=True):
        try:
            if any("ssh.questions" in word for word in one.cmdline()):
                found.append(one.pid)
        except psutil.NoSuchProcess:
            pass
    return found
