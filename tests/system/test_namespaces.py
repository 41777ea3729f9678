"""Nodes on hosts of their own: partitions, one-way loss, agents that sleep, latency, a clock that jumps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phalanx.core.exit_codes import NO_MEETING
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import Host, Job, Network, free_port, possible, tell
from tests.support.run_helpers import all_gone, supervisors_of
from tests.system.test_cluster import everybody, starts, succeed

pytestmark = pytest.mark.thorough

hosts_possible = pytest.mark.skipif(not possible(), reason="network namespaces need root")


@contextmanager
def three_hosts(folder: Path, nodes: str, conf: str = "") -> Iterator[tuple[Network, Job]]:
    with (
        Network("a", "b", "c") as network,
        Job(folder, nodes, f"{network.hosts['a'].address}:29400", conf=conf) as job,
    ):
        yield network, job


@hosts_possible
def test_hosts_find_the_one_with_the_store_and_meet_at_an_address_that_all_reach(tmp_path: Path) -> None:
    with three_hosts(tmp_path, "3") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "cba"]
        workers = everybody(nodes, 3)
        assert {w.address for w in workers} == {network.hosts["a"].address}
        succeed(nodes, workers)


class Inside(NamedTuple):
    """A host on which /etc/hosts says what a test wants."""

    inside: tuple[str, ...]


def with_names(host: Host, file: Path, names: str) -> Any:
    file.write_text(f"127.0.0.1 localhost\n{names}\n")
    # `ip netns exec` gives the command a mount namespace of its own, so nobody else sees this file.
    mount = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(file))
    return Inside((*host.inside, *mount))


@hosts_possible
@pytest.mark.parametrize("backend", ["phalanx", "static"])
def test_a_host_that_knows_its_own_name_as_a_loopback_address_can_be_met_there(
    tmp_path: Path, backend: str
) -> None:
    """As Debian sets machines up; and there is no default route that could tell another address."""
    with (
        Network("a", "b") as network,
        Job(tmp_path, "2", "store-host:29400", "--rdzv-backend", backend) as job,
    ):
        job.script.write_text(
            "import os, socket\n"
            "where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
            "with socket.create_connection(where, 10) as sock:\n"
            "    print(f'reached {sock.getpeername()[0]}', flush=True)\n"
        )
        names = {"a": "127.0.1.1 store-host", "b": f"{network.hosts['a'].address} store-host"}
        nodes = [
            job.node(
                name, "--node-rank", rank, host=with_names(network.hosts[name], tmp_path / name, names[name])
            )
            for rank, name in (("0", "a"), ("1", "b"))
        ]
        for node in nodes:
            ended = node.end()
            assert ended.code == 0, ended
        assert f"reached {network.hosts['a'].address}" in nodes[1].text


@hosts_possible
@pytest.mark.parametrize(
    ("own_name", "given", "told"),
    [
        pytest.param("127.0.1.1 {host}", {}, "eth0 eth0", id="loopback"),
        pytest.param("", {}, "eth0 eth0", id="unknown"),
        pytest.param("{address} {host}", {}, "- -", id="known"),
        pytest.param("127.0.1.1 {host}", {"GLOO_SOCKET_IFNAME": "lo"}, "lo -", id="chosen"),
    ],
)
def test_gloo_is_told_the_interface_where_it_would_take_the_loopback(
    own_name: str, given: dict[str, str], told: str, tmp_path: Path
) -> None:
    with (
        Network("a", "b") as network,
        Job(tmp_path, "2", f"{network.hosts['a'].address}:29400") as job,
    ):
        job.environment |= given
        job.script.write_text(
            "import os\n"
            "told = [os.environ.get(name + '_SOCKET_IFNAME', '-') for name in ('GLOO', 'TP')]\n"
            "print(f'told {told[0]} {told[1]}', flush=True)\n"
        )
        for name, host in network.hosts.items():
            names = own_name.format(host=os.uname().nodename, address=host.address)
            job.node(name, host=with_names(host, tmp_path / name, names))
        for node in job._nodes:
            ended = node.end()
            assert ended.code == 0, ended
            assert f"told {told}\n" in ended.out + ended.err, ended


@hosts_possible
@pytest.mark.parametrize("stopped", ["", "zygote keeper"])
def test_a_partition_stops_the_minority_before_the_majority_goes_on(tmp_path: Path, stopped: str) -> None:
    """Also if the agent is the only one that is not stopped."""
    with three_hosts(tmp_path, "2:3") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "abc"]
        workers = everybody(nodes, 3)
        helpers = supervisors_of(workers[2].pid)
        for name in stopped.split():
            helpers[name].suspend()
        network.cut("c")
        nodes[0].up(2)
        assert gone(workers[2].pid), "two rounds at the same time"
        nodes[1].up(2)
        network.mend("c")
        again = everybody(nodes, 3)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)


@hosts_possible
def test_the_host_of_the_store_is_cut_off_and_all_stop_until_it_is_back(tmp_path: Path) -> None:
    with three_hosts(tmp_path, "2:3") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "abc"]
        workers = everybody(nodes, 3)
        before = starts(nodes)
        network.cut("a")
        wait_until(lambda: all_gone([w.pid for w in workers]), "the end of all workers: none has a quorum")
        assert starts(nodes) == before
        network.mend("a")
        again = everybody(nodes, 3)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)


@hosts_possible
@pytest.mark.parametrize("direction", ["to the store", "from the store"])
def test_loss_in_one_direction_fences_the_node(tmp_path: Path, direction: str) -> None:
    with three_hosts(tmp_path, "2:3") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "abc"]
        workers = everybody(nodes, 3)
        lost = ("c", "a") if direction == "to the store" else ("a", "c")
        network.silence(*lost)
        nodes[0].up(2)
        assert gone(workers[2].pid), "two rounds at the same time"
        nodes[1].up(2)
        network.unsilence(*lost)
        succeed(nodes, everybody(nodes, 3))


@hosts_possible
@pytest.mark.parametrize("when", ["in mid-run", "in the exit barrier"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_static_job_without_one_of_its_hosts_is_not_a_success(tmp_path: Path, rank: int, when: str) -> None:
    """Nothing tells the others but the lease; both sides of the cut end, and each names what it misses."""
    with three_hosts(tmp_path, "2") as (network, job):
        words = ["--rdzv-backend", "static", "--rdzv-conf", "join_timeout=8,ttl=2,store_grace=4"]
        nodes = [
            job.node(name, *words, "--node-rank", str(n), host=network.hosts[name])
            for n, name in enumerate("ab")
        ]
        workers = everybody(nodes, 2)
        other = 1 - rank
        if when == "in the exit barrier":
            os.kill(workers[other].pid, signal.SIGUSR1)
            wait_until(lambda: gone(workers[other].pid), "the end of the other worker")
        network.cut("ab"[rank])
        for number, node in enumerate(nodes):
            if (number, rank, when) == (0, 0, "in the exit barrier"):
                continue  # node 1 may have reported success before the cut, and then node 0 misses nothing
            ended = node.end()
            assert ended.code == NO_MEETING, ended
            missing = "lost node 1 (" if number == 0 else "node 0 at"
            assert missing in ended.said[-1], ended
            assert gone(workers[number].pid)


@hosts_possible
def test_an_agent_that_slept_past_its_lease_is_fenced_and_comes_back(tmp_path: Path) -> None:
    with three_hosts(tmp_path, "2:3") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "abc"]
        workers = everybody(nodes, 3)
        nodes[2].signal(signal.SIGSTOP)
        everybody(nodes[:2], 2)
        nodes[2].signal(signal.SIGCONT)
        again = everybody(nodes, 3)
        assert gone(workers[2].pid)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)


@hosts_possible
def test_an_agent_killed_on_its_host_is_noticed_without_waiting_for_its_lease(tmp_path: Path) -> None:
    with three_hosts(tmp_path, "2:3", conf="ttl=1000") as (network, job):
        nodes = [job.node(name, host=network.hosts[name]) for name in "abc"]
        workers = everybody(nodes, 3)
        nodes[2].signal(signal.SIGKILL)
        again = everybody(nodes[:2], 2)  # within HUNG, far below the lease
        wait_until(lambda: gone(workers[2].pid), "the end of the orphan")
        succeed(nodes[:2], again)


@hosts_possible
def test_a_host_whose_address_has_changed_serves_the_next_round_at_the_new_one(tmp_path: Path) -> None:
    """Rank 0 joined with an address that is gone; it need not leave, nor need the job end."""
    with three_hosts(tmp_path, "2", conf="ttl=6") as (network, job):
        here, old = network.hosts["b"], "10.77.0.99"
        inside = ("ip", "-n", here.namespace)
        for words in (
            f"addr add {old}/24 dev eth0",
            f"route add {network.hosts['a'].address} dev eth0 src {old}",
        ):
            subprocess.run([*inside, *words.split()], check=True)
        nodes = [job.node("last", "--max-restarts", "1", host=network.hosts["a"])]
        nodes.append(job.node("first", "--max-restarts", "1", host=here))
        workers = everybody(nodes, 2)
        assert {w.address for w in workers} == {old}
        subprocess.run([*inside, *f"addr del {old}/24 dev eth0".split()], check=True)
        tell(workers[1:], signal.SIGUSR2)
        again = everybody(nodes, 2)
        assert {w.address for w in again} == {here.address}
        succeed(nodes, again)


class SlowLine(threading.Thread):
    """A line to an address on which every byte takes its time, in both directions."""

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        super().__init__(name="slow line")
        self._target, self._delay = target, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(one, other))
                self._threads.append(thread)
                thread.start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        timers: list[threading.Timer] = []
        lock, late = threading.Lock(), [b""]

        def deliver() -> None:
            with lock:
                data, late[0] = late[0], b""
                try:
                    other.sendall(data)
                except OSError:
                    pass

        try:
            while data := one.recv(65536):
                with lock:
                    late[0] += data
                timers.append(threading.Timer(self._delay, deliver))
                timers[-1].start()
        except OSError:
            pass
        for timer in timers:
            timer.join()

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(HUNG)
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(HUNG)
        for sock in self._open:
            sock.close()

    def __enter__(self) -> SlowLine:
        self.start()
        return self


def test_200_ms_of_latency_only_take_time(tmp_path: Path) -> None:
    port = free_port()
    with (
        SlowLine(("127.0.0.1", port), 0.1) as line,
        Job(tmp_path, "2", f"127.0.0.1:{port}", "--max-restarts", "1") as job,
    ):
        near = job.node("a")
        near.read_until("1 of 2")
        job.endpoint = f"127.0.0.1:{line.port}"
        far = job.node("b")
        first = everybody([near, far], 2)
        os.kill(first[1].pid, signal.SIGUSR2)
        again = everybody([near, far], 2)
        assert {w.attempt for w in again} == {1}
        succeed([near, far], again)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """The agents' time.time is ours, which is the only way to the wall clock they have."""
    jump = tmp_path / "jump"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n_real = time.time\n"
        f"time.time = lambda: _real() + (86400.0 if os.path.exists({str(jump)!r}) else 0.0)\n"
    )
    with Job(tmp_path, "2", conf="ttl=20") as job:
        job.environment["PYTHONPATH"] = str(tmp_path)
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        before = starts(nodes)
        jump.touch()
        late = job.node("c")  # waits as a spare through the jump of more than a lease, and back
        late.read_until("1 spare")
        jump.unlink()
        late.signal(signal.SIGTERM)
        assert late.end().code == 143
        assert starts(nodes) == before
        succeed(nodes, workers)
