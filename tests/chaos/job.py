"""The processes of one episode: a store, agents with everything below them, and what they leave in files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx import kernel
from phalanx.helpers.keeper import KEEPER, ZYGOTE
from phalanx.job.environment import STORE_PORT, variables
from phalanx.python_command import python_command
from tests.chaos import chaos_worker
from tests.chaos.invariants import CpuSample, LifeSigns, ProcessSeen
from tests.chaos.private_network import PrivateNetwork, enter, mount_small_disk, unmount
from tests.chaos.schedule import FATAL_CODE, EpisodePlan

MARKER = (
    "CHAOS_NODE"  # in the environment of everything that an agent starts: <campaign>/<node>.<incarnation>
)
TTL = 3  # seconds of a node's lease
RUN_ID = "chaos"
UNKNOWN = "unknown"  # owner of a process that must be an agent's, but carries no marker
_TICK = os.sysconf("SC_CLK_TCK")
_ROUND = re.compile(r"starting workers of round (\d+)|workers are running \(pids ([\d, ]+)\)")


class ChaosAgent:
    """One incarnation of a node."""

    def __init__(self, node: str, owner: str, process: subprocess.Popen[bytes], console: Path) -> None:
        self.node, self.owner, self.process, self.console = node, owner, process, console
        self.started = time.time()
        self.ended = 0.0
        self.asked = 0.0  # when a fault asked it to end
        self.killed = False
        self.expected: tuple[int, ...] | None = None  # exit codes; None: nothing asked it to end, empty: any
        self.cause = ""

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        if self.process.poll() is None:
            return True
        self.ended = self.ended or time.time()
        return False

    @property
    def code(self) -> int | None:
        """As a shell shows it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code


class ChaosJob:
    """The job of one episode."""

    def __init__(
        self, plan: EpisodePlan, folder: Path, network: PrivateNetwork | None, isolated: bool
    ) -> None:
        self.plan, self.folder, self.network, self.isolated = plan, folder, network, isolated
        self.agents: list[ChaosAgent] = []
        self.store: subprocess.Popen[bytes] | None = None
        self.mark = f"{folder.name}-{os.getpid()}"
        self.names = [f"n{number}" for number in range(plan.nodes)]
        self._port = STORE_PORT if network else _free_port()
        self._etcd_peer = 2380 if network else _free_port()
        # Everything that exists already belongs to others; it is not looked at again.
        self._owners = {(pid, birth): "" for pid, (_, _, birth, _) in _stats()}
        self._own: set[int] = set()  # processes that are not an agent's
        self._records: dict[str, SignFile] = {}
        self._environ = {n: v for n, v in variables().items() if n in ("PATH", "HOME", "LANG")}
        self._environ |= {
            "PHALANX_TOKEN": os.urandom(16).hex(),
            "TMPDIR": str(folder / "tmp"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        for name in ("signs", "tmp", "cache", "consoles", *(f"logs/{node}" for node in self.names)):
            (folder / name).mkdir(parents=True)
        for number in plan.small_disks:
            mount_small_disk(self.logs(self.names[number]))

    def logs(self, node: str) -> Path:
        """The log directory of a node."""
        return self.folder / "logs" / node

    # -- starting --------------------------------------------------------------------------------------

    def start_store(self) -> None:
        """The store as a process of its own, with a journal; nothing where node 0 hosts it."""
        if self.plan.hosted:
            return
        address = self._address("store")
        if self.plan.backend == "etcd":
            url, peer = f"http://{address}:{self._port}", f"http://{address}:{self._etcd_peer}"
            words = ["etcd", "--data-dir", str(self.folder / "etcd"), "--log-level", "error"]
            words += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer]
            words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        else:
            words = python_command("phalanx", "store", "--listen", f"{address}:{self._port}")
            words += ["--journal", str(self.folder / "journal")]
        self.store = self._popen("store", words, self.folder / "store.log", self._environ)
        self._own.add(self.store.pid)

    def start_agent(self, number: int, clock: int = 0) -> ChaosAgent:
        """Another incarnation of a node."""
        plan, node = self.plan, self.names[number]
        owner = f"{node}.{sum(agent.node == node for agent in self.agents)}"
        words = python_command("phalanx", "run", "--verbose", "--tee", "3", "--grace", "5")
        words += ["--nproc-per-node", str(plan.workers), "--log-dir", str(self.logs(node))]
        words += ["--max-restarts", "1000", "--backoff", "0", "--rdzv-id", RUN_ID]
        # Failures are no node's own here, and a world is complete when all nodes are in it.
        words += ["--no-restart-on", str(FATAL_CODE), "--quarantine", "off"]
        words += ["--rdzv-backend", plan.backend]
        if plan.backend == "static":
            words += ["--nnodes", str(plan.nodes), "--node-rank", str(number)]
            words += ["--master-addr", self._address("n0"), "--master-port", str(self._port)]
        else:
            host = "n0" if plan.hosted else "store"
            conf = f"name={node},ttl={TTL},last_call_timeout=0.5,join_timeout=120"
            if plan.backend == "phalanx":
                conf += f",is_host={int(node == host)}"
            words += ["--nnodes", f"{plan.minimum}:{plan.maximum}", "--rdzv-conf", conf]
            words += ["--rdzv-endpoint", f"{self._address(host)}:{self._port}"]
        words += [str(Path(chaos_worker.__file__)), str(self.folder), str(plan.linger)]
        console = self.folder / "consoles" / owner
        environ = {**self._environ, MARKER: f"{self.mark}/{owner}"}
        agent = ChaosAgent(node, owner, self._popen(node, words, console, environ, clock), console)
        self.agents.append(agent)
        return agent

    def ask_status(self, node: str) -> subprocess.Popen[bytes]:
        """`phalanx status` on a node."""
        process = subprocess.Popen(
            python_command("phalanx", "status", "--json", RUN_ID),
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=enter(self.network.hosts[node] if self.network else None),
        )
        self._own.add(process.pid)
        return process

    def _popen(
        self, host: str, words: list[str], output: Path, environ: dict[str, str], clock: int = 0
    ) -> subprocess.Popen[bytes]:
        inside = self.network.hosts[host] if self.network else None
        with open(output, "ab") as file:
            return subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=enter(inside, clock),
            )

    def _address(self, host: str) -> str:
        return self.network.hosts[host].address if self.network else "127.0.0.1"

    # -- looking ---------------------------------------------------------------------------------------

    def agent(self, number: int) -> ChaosAgent | None:
        """The living agent of a node."""
        node = self.names[number]
        return next((a for a in reversed(self.agents) if a.node == node and a.alive), None)

    def processes(self) -> list[ProcessSeen]:
        """Every living process that an agent started, agents included."""
        found, stats = [], dict(_stats())
        signs = {sign.pid: sign.owner for sign in self.signs()}
        for pid, (state, _parent, birth, name) in stats.items():
            owner = self._owner(pid, birth, stats, signs)
            if owner and state not in "ZX":
                found.append(ProcessSeen(pid, owner, name))
        return found

    def _owner(
        self, pid: int, birth: str, stats: dict[int, tuple[str, int, str, str]], signs: dict[int, str]
    ) -> str:
        """The marker in its environment; a worker's title may overwrite that, then its parent's."""
        if (pid, birth) in self._owners:
            return self._owners[pid, birth]
        owner = ""
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            environ = b""
        for variable in environ.split(b"\0"):
            if variable.startswith(f"{MARKER}={self.mark}/".encode()):
                owner = variable.decode().rpartition("/")[2]
        owner = owner or signs.get(pid, "")
        parent = stats[pid][1]
        if not owner and parent in stats and parent != os.getpid():
            owner = self._owner(parent, stats[parent][2], stats, signs)
        if owner:
            self._owners[pid, birth] = owner
        elif self.isolated and pid not in self._own:
            owner = UNKNOWN
        return owner

    def helpers(self, agent: ChaosAgent) -> tuple[list[int], list[int]]:
        """The zygotes and keepers of an agent, the ones with workers first."""
        those = [p for p in self.processes() if p.owner == agent.owner]
        parents = [stat[1] for _, stat in _stats()]
        zygotes = [p.pid for p in those if p.what == ZYGOTE]
        zygotes.sort(key=parents.count, reverse=True)
        keepers = [p.pid for p in those if p.what == KEEPER]
        stats = dict(_stats())
        first = [stats[z][1] for z in zygotes if z in stats]
        return zygotes, sorted(keepers, key=lambda pid: first.index(pid) if pid in first else len(first))

    def cpu(self) -> list[CpuSample]:
        """What each living agent has used with its helpers."""
        now, used = time.time(), dict.fromkeys((a.owner for a in self.agents if a.alive), 0.0)
        agents = {a.process.pid for a in self.agents}
        for process in self.processes():
            if process.owner in used and (process.pid in agents or process.what in (KEEPER, ZYGOTE)):
                fields = kernel.stat_fields(process.pid)
                used[process.owner] += (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0
        return [CpuSample(owner, now, seconds) for owner, seconds in used.items()]

    def signs(self) -> list[LifeSigns]:
        """Everything recorded so far."""
        for entry in os.scandir(self.folder / "signs"):
            self._records.setdefault(entry.name, SignFile(Path(entry.path)))
        found = [sign for record in self._records.values() if (sign := record.read())]
        if self.plan.backend != "static":
            return found
        rounds: dict[int, str] = {}  # a static job keeps its port, so only the agents tell rounds apart
        for agent in self.agents:
            current = "?"
            for match in _ROUND.finditer(agent.console.read_text(errors="replace")):
                current = match[1] or current
                rounds |= dict.fromkeys(map(int, (match[2] or "").replace(",", " ").split()), current)
        return [s._replace(world=f"{s.world}/{rounds[s.pid]}") for s in found if s.pid in rounds]

    def workers(self, number: int, fresh: float = 0.5) -> list[LifeSigns]:
        """The workers that run on a node."""
        now, node = time.time(), self.names[number]
        alive = [s for s in self.signs() if s.node == node and s.beats and s.beats[-1] > now - fresh]
        return sorted(alive, key=lambda sign: sign.rank)

    # -- the end ---------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Kill everything and take the small disks away, their content kept."""
        if self.isolated:
            signal_process(-1, signal.SIGKILL)  # everything in this PID namespace but this process
        else:
            # The agents first: their helpers then end what workers left behind, which nothing else can find
            # once its parent is gone. What the helpers do not end in time is killed here.
            for seen in self.processes():
                signal_process(seen.pid, signal.SIGCONT)
            first = [agent.process.pid for agent in self.agents] + ([self.store.pid] if self.store else [])
            for turn in range(120):
                for pid in first if turn < 100 else [p.pid for p in self.processes()]:
                    signal_process(pid, signal.SIGKILL)
                if not self.processes():
                    break
                time.sleep(0.05)
        for process in (self.store, *(agent.process for agent in self.agents)):
            if process is not None:
                process.wait()
        if self.isolated:
            _reap()
        for number in self.plan.small_disks:
            folder = self.logs(self.names[number])
            shutil.copytree(folder, f"{folder}.copy", ignore=shutil.ignore_patterns("filler"))
            unmount(folder)


class SignFile:
    """The record of one worker, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._about: dict[str, str | int | float] = {}
        self._beats: list[float] = []
        self._lines = 0

    def read(self) -> LifeSigns | None:
        """What is there by now."""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            if line.startswith(b"{"):
                self._about = json.loads(line)
            else:
                at, _, count = line.partition(b" ")
                self._beats.append(float(at))
                self._lines = int(count)
        about = self._about
        if "pid" not in about:
            return None
        owner = str(about["owner"])
        return LifeSigns(
            owner.partition(".")[0],
            int(about["pid"]),
            str(about["world"]),
            int(about["rank"]),
            int(about["size"]),
            tuple(self._beats),
            self._lines,
            str(about["log"]),
            owner,
        )


def signal_process(pid: int, number: int) -> bool:
    """Whether it was there to be signalled."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _stats() -> Iterator[tuple[int, tuple[str, int, str, str]]]:
    """pid → state, parent, birth, name."""
    for entry in os.listdir("/proc"):
        fields = kernel.stat_fields(entry) if entry.isdigit() else None
        if fields:
            try:
                name = Path(f"/proc/{entry}/comm").read_text(errors="replace").strip()
            except OSError:
                continue
            yield int(entry), (fields[0], int(fields[1]), fields[19], name)


def _reap() -> None:
    """Process 1 inherits orphans."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
