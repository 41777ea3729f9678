"""A real sshd on loopback addresses or in network namespaces, with a throw-away key and configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.conftest import HUNG, wait_until
from tests.support.netns import Host, free_port
from tests.support.run_helpers import plain_environment

ALIASES = ("node1", "node2", "node3")  # names that only the configuration of ssh knows


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
    """One sshd for several addresses of this machine, which are hosts as far as ssh can tell; or one in each
    of some namespaces."""

    def __init__(self, count: int = 2, namespaces: Sequence[Host] = ()) -> None:
        self.names = [f"127.0.0.{number}" for number in range(31, 31 + count)]
        self.places: list[tuple[str, ...]] = [()]
        if namespaces:
            self.names = [host.address for host in namespaces]
            self.places = [host.inside for host in namespaces]
        self.program = sshd_program()

    def __enter__(self) -> SshHosts:
        # sshd trusts keys only in directories that nobody else can write to.
        self.directory = Path(mkdtemp(prefix="sshd", dir="/tmp"))
        self.port = free_port()
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name)]
            subprocess.run(key, check=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        server = [
            f"Port {self.port}", f"HostKey {self.directory}/host", f"PidFile {self.directory}/pid",
            f"AuthorizedKeysFile {self.directory}/user.pub", "UsePAM no", "PasswordAuthentication no",
            "PermitRootLogin yes", "StrictModes no", "MaxStartups 100", "MaxSessions 50",
        ]  # fmt: skip
        if self.places == [()]:
            server += [f"ListenAddress {name}" for name in self.names]
        (self.directory / "sshd_config").write_text("\n".join(server) + "\n")
        names = zip(ALIASES, self.names, strict=False)
        client = [
            *(f"Host {alias}\n  HostName {name}" for alias, name in names),
            "Host *",
            f"  Port {self.port}",
            f"  IdentityFile {self.directory}/user",
            f"  UserKnownHostsFile {self.directory}/known",
            *("  IdentitiesOnly yes", "  StrictHostKeyChecking no", "  LogLevel ERROR", "  BatchMode yes"),
        ]
        (self.directory / "config").write_text("\n".join(client) + "\n")
        command = [self.program, "-D", "-e", "-f", str(self.directory / "sshd_config")]
        with open(self.directory / "log", "ab") as log:
            self.daemons = [
                subprocess.Popen([*place, *command], stderr=log, env=plain_environment())
                for place in self.places
            ]
        wait_until(lambda: self.log().count("Server listening") >= len(self.daemons), "sshd to listen")
        return self

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def ssh(self) -> str:
        """The ssh command that reaches the hosts."""
        return f"ssh -F {self.directory}/config"

    def sessions(self) -> list[psutil.Process]:
        """The processes of sshd that serve a connection."""
        return [one for daemon in self.daemons for one in psutil.Process(daemon.pid).children()]

    def cut(self) -> None:
        """All connections are gone; new ones are possible."""
        for session in self.sessions():
            for one in (*session.children(recursive=True), session):
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
