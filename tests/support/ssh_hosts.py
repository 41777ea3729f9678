"""A real sshd on loopback addresses or in network namespaces, with a throw-away key and configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.conftest import HUNG
from tests.support.netns import Host
from tests.support.run_helpers import plain_environment

ALIASES = ("node1", "node2", "node3")  # names that only the configuration of ssh knows

# Holds the ports, which the kernel chooses, and starts an sshd for each connection: no port is free for a
# moment only, and a connection is possible from the first line on.
LISTEN = """\
import os, select, signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listeners = [socket.create_server((address, 0), backlog=100) for address in sys.argv[1].split(",")]
print(*(one.getsockname()[1] for one in listeners), flush=True)
while True:
    for one in select.select(listeners, [], [])[0]:
        peer = one.accept()[0]
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(peer.fileno(), 0)
            os.dup2(peer.fileno(), 1)
            os.execv(sys.argv[2], sys.argv[2:])
        peer.close()
"""


def sshd_program() -> str:
    """The program; without it tests are skipped, except in CI."""
    found = shutil.which("sshd", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin")
    why = "" if found and shutil.which("ssh") else "no sshd or ssh (Debian: apt-get install openssh-server)"
    why = why or ("sshd needs root" if os.geteuid() else "")
    if why and os.environ.get("CI"):
        pytest.fail(why)
    if why:
        pytest.skip(why)
    assert found is not None
    return found


class SshHosts:
    """sshd on several addresses of this machine, which are hosts as far as ssh can tell; or in each of some
    namespaces. `server` and `client` are further lines of their configurations, set before it starts."""

    def __init__(self, count: int = 2, namespaces: Sequence[Host] = ()) -> None:
        mine = ".".join(str(byte % 250 + 1) for byte in os.urandom(2))  # addresses of this test alone
        names = [f"127.{mine}.{number}" for number in range(1, 1 + count)]
        self.places: list[tuple[tuple[str, ...], list[str]]] = [((), names)]
        if namespaces:
            self.places = [(host.inside, [host.address]) for host in namespaces]
        self.names = [name for _, addresses in self.places for name in addresses]
        self.program = sshd_program()
        self.server: list[str] = []
        self.client: list[str] = []

    def __enter__(self) -> SshHosts:
        # sshd trusts keys only in directories that nobody else can write to.
        self.directory = Path(mkdtemp(prefix="sshd", dir="/tmp"))
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name)]
            subprocess.run(key, check=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        server = [
            f"HostKey {self.directory}/host", f"PidFile {self.directory}/pid",
            f"AuthorizedKeysFile {self.directory}/user.pub", "UsePAM no", "PasswordAuthentication no",
            "PermitRootLogin yes", "StrictModes no", "MaxSessions 50", "UseDNS no", *self.server,
        ]  # fmt: skip
        (self.directory / "sshd_config").write_text("\n".join(server) + "\n")
        command = [self.program, "-i", "-e", "-f", str(self.directory / "sshd_config")]
        self.daemons: list[subprocess.Popen[str]] = []
        ports = []
        for place, addresses in self.places:
            with open(self.directory / "log", "ab") as log:
                daemon = subprocess.Popen(
                    [*place, sys.executable, "-I", "-c", LISTEN, ",".join(addresses), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self.directory,  # not among the processes of a test's own directory
                    env=plain_environment(),
                    text=True,
                )
            self.daemons.append(daemon)
            assert daemon.stdout is not None
            ports += daemon.stdout.readline().split()
            daemon.stdout.close()
        assert len(ports) == len(self.names), self.log()
        hosts = list(zip(ALIASES, self.names, ports, strict=False))
        client = [
            *(f"Host {alias} {name}\n  HostName {name}\n  Port {port}" for alias, name, port in hosts),
            "Host *",
            *(f"  {line}" for line in self.client),
            f"  IdentityFile {self.directory}/user",
            f"  UserKnownHostsFile {self.directory}/known",
            *("  IdentitiesOnly yes", "  StrictHostKeyChecking no", "  LogLevel ERROR", "  BatchMode yes"),
        ]
        (self.directory / "config").write_text("\n".join(client) + "\n")
        return self

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def ssh(self) -> str:
        """The ssh command that reaches the hosts."""
        return f"ssh -F {self.directory}/config"

    def cut(self) -> None:
        """All connections are gone; new ones are possible."""
        for daemon in self.daemons:
            for one in psutil.Process(daemon.pid).children(recursive=True):
                try:
                    if one.name() == "sshd":
                        one.kill()
                except psutil.NoSuchProcess:
                    pass

    def __exit__(self, *_: object) -> None:
        self.cut()
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait(HUNG)
        shutil.rmtree(self.directory)
