"""`phalanx run --hosts …`: starts an agent on every host over ssh, relays output, and stops them all."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from phalanx.core.exit_codes import NO_MEETING, SIGNALED, SUCCESS
from phalanx.job.command_line import scan, usage_error
from phalanx.job.environment import carried_variables, own_environment
from phalanx.job.options import BY_DEST
from phalanx.job.time_budgets import OTHER_HOSTS, STORE_GRACE
from phalanx.platforms.outcomes import job_code
from phalanx.platforms.ssh.frames import silence
from phalanx.platforms.ssh.host_link import HostLink
from phalanx.platforms.ssh.questions import one_question_at_a_time
from phalanx.python_command import python_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.job.host_names import HostSlots
    from phalanx.job.options import JobSpec

_LOCAL = ("hosts", "hostfile", "ssh", "dry_run")
_OURS = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "nproc_per_node")
_LONGEST = 85  # bytes of a control socket's path, of the 107 that the system allows
_DRAIN = 5.0  # seconds for the stewards to end, once their agents have
_CONNECT = 20  # seconds for a connection, where the configuration of ssh does not set a time


def start(job: JobSpec, argv: Sequence[str], say: Callable[[str], None]) -> int:
    """Run the job on its hosts; the exit code of the job."""
    ssh = job.cluster.ssh.split()
    if shutil.which(ssh[0]) is None:
        raise usage_error(f"--ssh {job.cluster.ssh}: no such program; --hosts needs an ssh client")
    directory = tempfile.mkdtemp(prefix="phalanx-ssh-")  # for the control sockets: for this user only
    try:
        return _Starter(job, argv, ssh, directory, say).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Starter:
    def __init__(
        self, job: JobSpec, argv: Sequence[str], ssh: list[str], directory: str, say: Callable[[str], None]
    ) -> None:
        self._job, self._say = job, say
        self._got: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._links: list[HostLink] = []
        self._signalled = 0  # the last signal of the user
        self._hopeless_until: float | None = None  # too few hosts are left: when the others are given up
        self._handled = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
        self._handled += [signal.Signals(job.watching.preempt_signal)] if job.watching.preempt_signal else []
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup wants that
            self._handled.append(signal.SIGHUP)
        self._patience = float(job.cluster.rdzv_conf.get("store_grace", STORE_GRACE))
        self._over = threading.Event()
        endpoint = ""
        token = secrets.token_hex(32)
        environ = {**own_environment(), **one_question_at_a_time(directory)}
        for rank, host in enumerate(job.cluster.hosts):
            settings = _settings_of(ssh, host)
            endpoint = endpoint or _endpoint(job, settings)
            described = {
                "argv": python_command("phalanx", "run", *_words(job, argv, rank, host, endpoint)),
                "directory": os.getcwd(),
                "environment": carried_variables(),
                "token": token,
                "key": secrets.token_hex(8),
                "patience": self._patience,
                "grace": job.restarts.shutdown_timeout,
            }
            self._links.append(
                HostLink(
                    host,
                    [*ssh, *_options(settings, f"{directory}/{rank}")],
                    described,
                    environ=environ,
                    handled=self._handled,
                    say=say,
                    out=_writer(1),
                    err=_writer(2),
                )
            )

    def run(self) -> int:
        """Until all hosts have ended or are given up."""
        before = {
            number: signal.signal(number, lambda got, _: self._got.append(got)) for number in self._handled
        }
        wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        heart = threading.Thread(target=self._beat, name="phalanx-heartbeat", daemon=True)
        heart.start()
        try:
            while any(link.open for link in self._links):
                self._turn(self._hopeless_until)
                self._judge()
            until = time.monotonic() + _DRAIN
            while any(link.leaving for link in self._links) and time.monotonic() < until:
                self._turn(until)
            return self._code()
        finally:
            self._over.set()
            heart.join()
            for link in self._links:
                link.give_up()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _beat(self) -> None:
        while not self._over.wait(silence(self._patience) / 4):
            for link in self._links:
                link.beat()

    def _turn(self, until: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        times = [] if until is None else [until]
        for link in self._links:
            read, write = link.fds()
            for fd in read:
                poll.register(fd, select.POLLIN)
            for fd in write:
                poll.register(fd, select.POLLOUT)
            due = link.deadline()
            if due is not None:
                times.append(due)
        left = max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None
        ready = {fd for fd, _ in poll.poll(left)}
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        now = time.monotonic()
        for link in self._links:
            link.look(ready, now)

    def _judge(self) -> None:
        """Pass signals on, and end what cannot go on."""
        while self._got:
            self._signalled = self._got.pop(0)
            self._stop(self._signalled)
        gone = [link for link in self._links if link.gone]
        rest = [link for link in self._links if link.open]
        over = self._signalled or len(gone) + len(rest) < len(self._links)  # an agent knows the job's end
        few = (
            len(rest) < self._job.cluster.min_nodes or self._links[0] in gone
        )  # the store is on the first host
        if gone and rest and few and not over and self._hopeless_until is None:
            ends = ", ".join(f"{link.host.name} ({link.end})" for link in gone)
            self._say(
                f"the job cannot go on without {ends}: it needs {self._job.cluster.min_nodes} hosts, "
                f"{self._links[0].host.name} among them, and has {len(rest)} left; stopping"
            )
            self._hopeless_until = time.monotonic() + self._job.restarts.shutdown_timeout + OTHER_HOSTS
            self._stop(signal.SIGTERM)
        if self._hopeless_until is not None and time.monotonic() >= self._hopeless_until:
            for link in self._links:
                if link.open:
                    self._say(f"{link.host.name}: did not end; given up")
                    link.give_up()

    def _stop(self, number: int) -> None:
        for link in self._links:
            if link.open:
                link.pass_on(number)

    def _code(self) -> int:
        outcomes = [link.outcome for link in self._links if link.outcome is not None]
        if any(one.succeeded for one in outcomes):
            return SUCCESS
        if self._signalled:
            return SIGNALED + self._signalled
        if self._hopeless_until is not None:
            return NO_MEETING
        return job_code(outcomes, 0 if outcomes else NO_MEETING, self._job.watching.preempt_signal or 0)


def _settings_of(ssh: Sequence[str], host: HostSlots) -> Mapping[str, str]:
    """What the user's configuration says about a host (`ssh -G`); empty where ssh cannot tell."""
    try:
        done = subprocess.run(
            [*ssh, "-G", "--", host.target], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.partition(" ") for line in done.stdout.splitlines()]
    return {key: value for key, _, value in rows}


def _options(settings: Mapping[str, str], control: str) -> list[str]:
    """One connection for all sessions with a host; no agent and nothing else is forwarded."""
    words = ["-T", "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes"]
    words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    if settings.get("connecttimeout", "none") == "none":
        words += ["-o", f"ConnectTimeout={_CONNECT}"]
    # Else the user has set it up, or the name is too long for a socket while ssh makes it.
    if settings.get("controlpath", "none") == "none" and len(os.fsencode(control)) < _LONGEST:
        words += ["-o", "ControlMaster=auto", "-o", f"ControlPath={control}", "-o", "ControlPersist=no"]
    return words


def _endpoint(job: JobSpec, settings: Mapping[str, str]) -> str:
    """Where the store is: on the first host, under the name that its ssh connection goes to."""
    if job.cluster.hosts_endpoint:
        return job.cluster.hosts_endpoint
    name = settings.get("hostname") or job.cluster.hosts[0].name
    port = job.cluster.rdzv_endpoint.rpartition(":")[2]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _words(job: JobSpec, argv: Sequence[str], rank: int, host: HostSlots, endpoint: str) -> list[str]:
    """The words of `phalanx run` on one host: the user's own, less those that are ours."""
    found = scan(argv)
    words = []
    for dest, value in found.values.items():
        option = BY_DEST[dest]
        if dest in _LOCAL or dest in _OURS:
            continue
        words += [option.name] if option.kind == "flag" else [f"{option.name}={value}"]
    conf = f"is_host={int(rank == 0)},name={host.name}"
    given = found.values.get("rdzv_conf", "")
    ours = {
        "nnodes": f"{job.cluster.min_nodes}:{job.cluster.max_nodes}",
        "node_rank": str(rank),
        "rdzv_backend": "phalanx",
        "rdzv_endpoint": endpoint,
        "rdzv_id": job.cluster.run_id,
        "rdzv_conf": f"{conf},{given}" if given else conf,
    }
    workers = str(host.slots) if host.slots else found.values.get("nproc_per_node", "")
    if workers:
        ours["nproc_per_node"] = workers
    words += [f"{BY_DEST[dest].name}={value}" for dest, value in ours.items()]
    assert found.script is not None
    return [*words, "--", found.script, *found.script_args]


def _writer(fd: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            pass  # nobody reads it any more

    return write
