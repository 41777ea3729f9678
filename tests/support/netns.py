"""Nodes of a job, each an agent of its own: all on loopback, or each on a host of its own.

A host is a network namespace with one interface; a switch is another one with a bridge, so that nothing
outside is touched. Links can be cut (a partition) or made deaf in one direction while everything runs.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.conftest import HUNG
from tests.support.run_helpers import Ended, Running, plain_environment

TOKEN = "a token for tests"
# Says who it is, then stays until SIGUSR1 (success) or SIGUSR2 (failure); waited for, so that none gets lost.
WORKER = """\
import os, signal
told = {signal.SIGUSR1: 0, signal.SIGUSR2: 9}
signal.pthread_sigmask(signal.SIG_BLOCK, told)
e = os.environ
print("ready", e["RANK"], e["WORLD_SIZE"], os.getpid(), e["TORCHELASTIC_RESTART_COUNT"], e["GROUP_RANK"],
      e["MASTER_ADDR"], e["MASTER_PORT"], e.get("PHALANX_TOKEN") or "-", e["ROLE_RANK"], flush=True)
os._exit(told[signal.sigwait(told)])
"""


class Worker(NamedTuple):
    """What a worker said about itself."""

    rank: int
    world: int
    pid: int
    attempt: int
    node: int
    address: str
    port: int
    token: str
    role_rank: int


class Node(Running):
    """An agent with its workers."""

    def __init__(self, name: str, words: Sequence[str], nproc: int = 1, **more: object) -> None:
        self.name, self.nproc, self._taken = name, nproc, 0
        super().__init__(words, **{"env": plain_environment(PHALANX_TOKEN=TOKEN), **more})  # type: ignore[arg-type]

    def up(self, world: int) -> list[Worker]:
        """Wait until all workers here run in a world of this size; rounds before that are passed over."""
        end = time.monotonic() + HUNG
        while True:
            found = [Worker(*map(_number, line)) for line in re.findall(_READY, self.text)][self._taken :]  # type: ignore[arg-type]
            sized = [worker for worker in found if worker.world == world]
            if len(sized) >= self.nproc:
                latest = sized[: self.nproc]
                self._taken += found.index(latest[-1]) + 1
                return sorted(latest)
            if not self._read(end):
                raise AssertionError(f"{self.name}: no world of {world}; there was:\n{self.text}")

    def latest(self) -> Worker | None:
        """The worker that was ready last, as far as can be told now."""
        while select.select([self._out], [], [], 0)[0] and self._read(time.monotonic() + HUNG):
            pass
        found = re.findall(_READY, self.text)
        return Worker(*map(_number, found[-1])) if found else None  # type: ignore[arg-type]

    def end(self) -> Ended:
        try:
            return super().end()
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from None


_READY = r"ready (\d+) (\d+) (\d+) (\d+) (\d+) (\S+) (\d+) (.+) (\d+)\r?\n"


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def tell(workers: Sequence[Worker], sig: int = signal.SIGUSR1) -> None:
    """Send a signal to workers."""
    for worker in workers:
        os.kill(worker.pid, sig)


# Below the ports that the kernel hands out; each process has a part of them.
_FIRST_PORT, _PARTS, _PORTS = 16_000, 160, 100
_turn = itertools.count(random.randrange(_PORTS))


def free_port() -> int:
    """A port that nobody listens on, nor will by chance: agents of one job must all know it beforehand."""
    for _ in range(_PORTS):
        port = _FIRST_PORT + os.getpid() % _PARTS * _PORTS + next(_turn) % _PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


class Job:
    """The nodes of one job; whatever is left of them is ended with the `with` block."""

    def __init__(self, folder: Path, nodes: str, endpoint: str = "", *words: str, conf: str = "") -> None:
        self.first_hosts = "is_host" not in conf  # the store; otherwise whoever is first to bind its address
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.run_id = "job"
        # A lease that a busy machine keeps; who is killed hangs up, and is noticed long before its end.
        self._conf = "ttl=5,last_call_timeout=0.3,join_timeout=100" + (f",{conf}" if conf else "")
        self._words = ["--nnodes", nodes, "--rdzv-backend", "phalanx", "--rdzv-id", self.run_id, *words]
        self.script = folder / "train.py"
        self.script.write_text(WORKER)
        self._nodes: list[Node] = []
        self.environment = plain_environment(PHALANX_TOKEN=TOKEN)

    def node(
        self,
        name: str,
        *words: str,
        nproc: int = 1,
        conf: str = "",
        host: Host | None = None,
        terminal: bool = False,
        before: Sequence[str] = (),
    ) -> Node:
        """Start an agent."""
        settings = f"name={name},{self._conf}" + (f",{conf}" if conf else "")
        if self.first_hosts and host is None:
            settings += f",is_host={int(not self._nodes)}"
        command = [*self._words, "--rdzv-endpoint", self.endpoint, "--rdzv-conf", settings]
        command += ["--nproc-per-node", str(nproc), *words, str(self.script)]
        node = Node(
            name,
            command,
            nproc,
            before=host.inside if host else before,
            terminal=terminal,
            env=self.environment,
        )
        self._nodes.append(node)
        return node

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self._nodes:
            if kind is not None:
                node.read_rest()
                print(f"---- {node.name}\n{node.text}")
            node.__exit__(kind, error, trace)


# ---- hosts -----------------------------------------------------------------------------------------


def possible() -> bool:
    """Whether this machine lets us make hosts."""
    if os.geteuid():
        return False
    try:
        name = f"px{os.getpid()}-try"
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Host(NamedTuple):
    """A namespace with an address."""

    name: str
    namespace: str
    address: str
    port: str  # of the switch

    @property
    def inside(self) -> tuple[str, ...]:
        """Words before a command that is to run there."""
        return ("ip", "netns", "exec", self.namespace)


class Network:
    """Hosts around one switch."""

    def __init__(self, *names: str) -> None:
        self._tag = f"px{os.getpid()}"
        self.switch = self._switch = f"{self._tag}-sw"
        self._names = names
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Network:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "sw0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "sw0", "up")
            for number, name in enumerate(self._names, 1):
                self._add(name, number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*(host.namespace for host in self.hosts.values()), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    def _add(self, name: str, number: int) -> None:
        host = Host(name, f"{self._tag}-{name}", f"10.77.0.{number}", f"p{number}")
        inside = host.namespace
        _ip("netns", "add", inside)
        self.hosts[name] = host
        _ip(
            "-n",
            inside,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            host.port,
            "netns",
            self._switch,
        )
        _ip("-n", inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", inside, "link", "set", device, "up")
        _ip("-n", self._switch, "link", "set", host.port, "master", "sw0", "up")

    def cut(self, name: str) -> None:
        """Nothing reaches this host, and nothing it sends reaches anybody; no error tells."""
        _ip("-n", self._switch, "link", "set", self.hosts[name].port, "nomaster")

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        _ip("-n", self._switch, "link", "set", self.hosts[name].port, "master", "sw0")

    def shape(self, name: str, rate: str) -> None:
        """Limit what a host sends and receives, as in `20mbit`."""
        host = self.hosts[name]
        for namespace, device in ((host.namespace, "eth0"), (self._switch, host.port)):
            words = (
                f"-n {namespace} qdisc replace dev {device} root tbf rate {rate} burst 256kb latency 100ms"
            )
            subprocess.run(["tc", *words.split()], check=True, capture_output=True)

    def silence(self, name: str, towards: str) -> None:
        """What one host sends to another is lost; the other direction still works."""
        nobody = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.hosts[name].namespace, "neigh", "replace", self.hosts[towards].address, *nobody)

    def unsilence(self, name: str, towards: str) -> None:
        """Undo `silence`."""
        _ip("-n", self.hosts[name].namespace, "neigh", "del", self.hosts[towards].address, "dev", "eth0")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
