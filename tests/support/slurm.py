"""A real Slurm for tests: munged, slurmctld and several slurmds on this machine, in a directory of the test.

Each slurmd is a node with a loopback address of its own as its name, so that agents can meet there. Nothing
of the system's own Slurm is touched: configuration, key, spool and ports are the test's.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.support.netns import free_port
from tests.support.run_helpers import kill_at_once, plain_environment

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SLOW = 90.0  # seconds; Slurm itself looks at things once a second, and a requeue takes it some


def settle(condition: Callable[[], object], what: str, timeout: float = SLOW) -> None:
    """As `wait_until`, for what only a command of Slurm can tell: not two hundred processes a second."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:.0f} s: {what}"
        select.select([], [], [], 0.1)


def slurm_programs() -> None:
    """Skip where there is no Slurm, or not the right to run one; a failure in CI."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    why = f"not installed: {' '.join(missing)} (Debian: apt-get install slurm-wlm munge)" if missing else ""
    why = why or ("slurmd needs root" if os.geteuid() else "")
    if why and os.environ.get("CI"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


class SlurmCluster:
    """The daemons of one cluster."""

    def __init__(
        self,
        nodes: int = 2,
        proctrack: str = "proctrack/linuxproc",
        *,
        home: Path,
        preempts_after: int | None = None,
    ) -> None:
        """`preempts_after`: jobs of the partition `urgent` preempt others, with this GraceTime."""
        # Not in the folder of the test: the sockets of a node have long names, and room for 108 bytes.
        self.directory = Path(mkdtemp(prefix="slurm", dir="/tmp"))
        self.proctrack, self.home, self.preempts_after = proctrack, home, preempts_after
        mine = ".".join(str(byte % 250 + 1) for byte in os.urandom(2))  # addresses of this test alone
        self.nodes = [f"127.{mine}.{number}" for number in range(1, 1 + nodes)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = self.directory / "slurm.conf"

    # -- life ------------------------------------------------------------------------------------------

    def __enter__(self) -> SlurmCluster:
        slurm_programs()
        try:
            self._write()
            self._start_munge()
            self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
            for node in self.nodes:
                self.start_node(node)
            settle(self._idle, "all nodes to be idle", SLOW)
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        if error is not None:
            self._tell()
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()
        for one in self.processes():  # the daemons of steps leave their slurmd
            self._kill(one)
        settle(lambda: not self.processes(), "the end of all steps")
        self.daemons.clear()
        for one in self.orphans():
            self._kill(one)
        for node in self.nodes:  # proctrack/cgroup leaves its empty groups
            for group in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
                for folder, *_ in os.walk(group, topdown=False):
                    os.rmdir(folder)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tell(self) -> None:
        for log in sorted(self.directory.glob("*.log")):
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def lose_tasks(self, node: str) -> None:
        """What runs on a node is gone; the node itself, and the daemons of its steps, are not."""
        for one in self.processes(node):
            try:
                if one.name() != "slurmstepd":
                    one.kill()
            except psutil.NoSuchProcess:
                pass

    @staticmethod
    def _kill(one: psutil.Process) -> None:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            pass

    def processes(self, node: str = "") -> list[psutil.Process]:
        """What runs in this cluster's jobs, on one node or on all, with the daemon of each step.

        Daemons of steps leave their slurmd; each listens at a socket in the spool of its node."""
        found: list[psutil.Process] = []
        spool = f"{self.directory}/spool.{node}"
        for one in psutil.process_iter(["name"]):
            try:
                if not one.info["name"].startswith("slurmstepd"):
                    continue
                if any(str(line.laddr).startswith(spool) for line in one.net_connections("unix")):
                    found += [one, *one.children(recursive=True)]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                pass
        return found

    def orphans(self) -> list[psutil.Process]:
        """What is left of any job, wherever it has gone: the environment tells."""
        found = []
        mark = f"SLURM_CONF={self.conf}".encode()
        for pid in psutil.pids():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
                one = psutil.Process(pid)
                if one.name() not in ("munged", "slurmctld", "slurmscriptd", "slurmd"):
                    found.append(one)
            except (OSError, psutil.NoSuchProcess):
                pass
        return found

    def nothing_left(self) -> None:
        """Wait until nothing of any job runs."""
        try:
            settle(lambda: not self.processes() and not self.orphans(), "the end of everything")
        except AssertionError as error:
            left = [(one.pid, one.name(), one.cmdline()) for one in self.processes() + self.orphans()]
            raise AssertionError(f"{error}: {left}") from None

    def node_of(self, pid: int) -> str:
        """The node that a process runs on."""
        return next(n for n in self.nodes if pid in [one.pid for one in self.processes(n)])

    def _write(self) -> None:
        ctld, *ports = [free_port() for _ in range(1 + len(self.nodes))]
        (self.directory / "state").mkdir()
        (self.directory / "munge").mkdir(mode=0o755)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"ClusterName=test{os.getpid()}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ctld}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.directory}/munge/socket",
            f"StateSaveLocation={self.directory}/state",
            f"SlurmdSpoolDir={self.directory}/spool.%n",
            f"SlurmctldPidFile={self.directory}/ctld.pid",
            f"SlurmdPidFile={self.directory}/slurmd.%n.pid",
            f"SlurmctldLogFile={self.directory}/ctld.log",
            f"SlurmdLogFile={self.directory}/slurmd.%n.log",
            f"ProctrackType={self.proctrack}",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "JobRequeue=1",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1",
            "MinJobAge=60",
            "KillWait=5",
            "SlurmdTimeout=6",
            "InactiveLimit=0",
            "SlurmdParameters=config_overrides",  # the nodes have more processors than this machine
            "MaxJobCount=1000",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            )
            (self.directory / f"spool.{node}").mkdir()
        partition = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        lines.append(f"PartitionName=main Default=YES {partition}")
        if self.preempts_after is not None:
            lines[-1] += f" PriorityTier=1 PreemptMode=REQUEUE GraceTime={self.preempts_after}"
            lines.append(f"PartitionName=urgent {partition} PriorityTier=10 PreemptMode=OFF")
            lines += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
        self.conf.write_text("\n".join(lines) + "\n")
        (self.directory / "cgroup.conf").write_text("CgroupAutomount=yes\n")

    def _start_munge(self) -> None:
        place = self.directory / "munge"
        key = place / "key"
        subprocess.run([_which("mungekey"), "--create", f"--keyfile={key}"], check=True)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={place}/socket",
            f"--pid-file={place}/pid", f"--log-file={place}/log", f"--seed-file={place}/seed",
        )  # fmt: skip
        settle(lambda: (place / "socket").exists(), "munged to listen")

    def _start(self, name: str, *words: str, key: str = "") -> None:
        environ = {**plain_environment(), "PATH": _path(), "SLURM_CONF": str(self.conf)}
        with open(self.directory / f"{key or name}.out.log", "ab") as log:
            self.daemons[key or name] = subprocess.Popen(
                [_which(name), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start("slurmd", "-D", "-N", node, "-f", str(self.conf), key=node)

    def lose_node(self, node: str) -> float:
        """The node is gone, with everything that ran on it; returns when that was, by the wall clock."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        at = time.time()
        # All at once, children first: one of srun that is left alone is woken, and has the step killed on all
        # nodes before it is killed itself.
        kill_at_once([one.pid for one in reversed(self.processes(node))])
        # As slurmctld finds out by itself, some seconds later.
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        return at

    def _idle(self) -> bool:
        if any(daemon.poll() is not None for daemon in self.daemons.values()):
            raise RuntimeError("a daemon of Slurm has ended")
        done = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        return done.split() == ["idle"] * len(self.nodes)

    # -- use -------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """For the commands of a user."""
        own = {"PATH": f"{Path(sys.executable).parent}:{_path()}", "SLURM_CONF": str(self.conf)}
        home = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache")}
        return {**plain_environment(), **own, **home}

    def command(self, *words: str, check: bool = True, cwd: Path | None = None, **more: str) -> str:
        """The output of a command of Slurm, or of ours."""
        done = subprocess.run(
            words, env={**self.environment, **more}, cwd=cwd, capture_output=True, text=True, timeout=SLOW
        )
        if check and done.returncode:
            raise AssertionError(f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job as Slurm has it."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        text = self.command("scontrol", "show", "job", "-o", job, check=False)
        words = [word.partition("=")[2] for word in text.split() if word.startswith(f"{name}=")]
        return words[0] if words else ""

    def start_now(self, job: str) -> None:
        """Do not wait for the two minutes after which Slurm starts a requeued job.

        Not in the same second: nodes refuse a job whose credential they have just revoked."""
        settle(lambda: self.state(job) == "PENDING", f"job {job} to be in the queue")
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def wait_state(self, job: str, *states: str) -> None:
        """Until the job is in one of these states."""
        settle(lambda: self.state(job) in states, f"job {job} to be {states}", SLOW)


def _which(name: str) -> str:
    found = shutil.which(name, path=_path())
    assert found is not None
    return found


def read_until(path: Path, what: str, times: int = 1) -> str:
    """The content of a file, once it has `what` that often."""

    def there() -> bool:
        return path.exists() and path.read_text(errors="replace").count(what) >= times

    try:
        settle(there, f"{what!r} in {path.name}", SLOW)
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{path.read_text(errors='replace') if path.exists() else ''}"
        ) from None
    return path.read_text(errors="replace")
