"""Real etcd servers for tests: one or a cluster, on free ports, in a directory of the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.store.etcd.http import CONNECTION_ERRORS, Address, EtcdConnection, EtcdError, Members
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port


def etcd_program() -> str:
    """The program; without it tests are skipped, except in CI."""
    found = shutil.which("etcd")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("etcd is not installed: apt-get install etcd-server")
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    return found


class Member:
    """One etcd process, which can be killed, stopped and restarted with the same data."""

    def __init__(self, name: str, directory: Path, client: int, peer: int, extra: Sequence[str] = ()) -> None:
        self.name, self.directory, self.extra = name, directory, list(extra)
        self.address, self.peer = Address("127.0.0.1", client), peer
        self.cluster = ""
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        scheme = "https" if "--cert-file" in self.extra else "http"
        url, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{self.peer}"
        words = [
            *(etcd_program(), "--name", self.name, "--data-dir", str(self.directory / self.name)),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self.cluster or f"{self.name}={peer}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error"),
            *self.extra,
        ]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        with open(self.directory / f"{self.name}.log", "ab") as log:
            self.popen = subprocess.Popen(words, stdout=log, stderr=log, env=environ)

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(HUNG)
            self.popen = None

    def ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        """A request to this member."""
        line = EtcdConnection(Members([self.address], None, "", ""))
        try:
            return line.call(path, body or {}, HUNG)
        finally:
            line.close()

    def ready(self) -> bool:
        assert self.popen is not None
        if self.popen.poll() is not None:
            raise RuntimeError((self.directory / f"{self.name}.log").read_text()[-2000:])
        try:
            status = self.ask("/v3/maintenance/status")
        except (EtcdError, *CONNECTION_ERRORS):
            return False
        return bool(status.get("leader"))

    def alarm(self, action: str) -> None:
        """Raise (ACTIVATE) or clear (DEACTIVATE) the alarm that the quota raises."""
        status = self.ask("/v3/maintenance/status")
        header = status["header"]
        assert isinstance(header, dict)
        body = {"action": action, "memberID": header["member_id"], "alarm": "NOSPACE"}
        self.ask("/v3/maintenance/alarm", body)

    def leads(self) -> bool:
        status = self.ask("/v3/maintenance/status")
        header = status["header"]
        assert isinstance(header, dict)
        return header["member_id"] == status["leader"]


class Cluster:
    """The members of one cluster."""

    def __init__(self, directory: Path, count: int = 1, extra: Sequence[str] = ()) -> None:
        self.directory, self.count, self.extra = directory, count, extra
        self.members: list[Member] = []

    def __enter__(self) -> Cluster:
        for attempt in range(5):
            self._start(self.directory / f"try{attempt}")
            try:
                if "--cert-file" not in self.extra:
                    for member in self.members:
                        wait_until(member.ready, f"etcd {member.name} to be ready")
                return self
            except RuntimeError as error:
                self.kill()
                if "address already in use" not in str(error):
                    raise
        raise RuntimeError("no free ports for etcd")

    def _start(self, directory: Path) -> None:
        directory.mkdir()
        ports = [free_port() for _ in range(2 * self.count)]  # free again after a kill, for the next start
        self.members = [
            Member(f"m{n}", directory, ports[2 * n], ports[2 * n + 1], self.extra) for n in range(self.count)
        ]
        together = ",".join(f"{m.name}=http://127.0.0.1:{m.peer}" for m in self.members)
        for member in self.members:
            member.cluster = together
            member.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        for member in self.members:
            if member.popen is not None:
                member.signal(signal.SIGCONT)
            member.kill()

    @property
    def addresses(self) -> list[Address]:
        return [member.address for member in self.members]
