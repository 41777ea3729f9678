"""A local etcd for test suites: torch's `EtcdServer` over the `etcd` program of this machine.

    server = EtcdServer()
    server.start()
    ...                       # --rdzv-backend etcd --rdzv-endpoint server.get_endpoint()
    server.stop()

The program is that of TORCHELASTIC_ETCD_BINARY_PATH, else `etcd` in PATH. Data is in a private temporary
directory, unless one is given, which is kept. etcd listens on loopback only, ends with the process that
started it, and is stopped at its exit at the latest.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import TextIO

from phalanx.errors import StoreError
from phalanx.job.environment import variables
from phalanx.kernel import die_with_parent
from phalanx.store.etcd.client import EtcdClient
from phalanx.store.etcd.http import CONNECTION_ERRORS, Address, EtcdConnection, EtcdError, Members

BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"
_HOST, _ADDRESS = "localhost", "127.0.0.1"
_STOP_TIMEOUT = 10.0


class EtcdServer:
    """One etcd process on a free port."""

    def __init__(self, data_dir: str | None = None) -> None:
        self._given = data_dir
        self._directory = ""
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    def get_host(self) -> str:
        """The host to reach it by."""
        return _HOST

    def get_port(self) -> int:
        """Its port; -1 before it was started."""
        return self._port

    def get_endpoint(self) -> str:
        """What --rdzv-endpoint takes."""
        return f"{_HOST}:{self._port}"

    def get_client(self) -> EtcdClient:
        """A connected client of it, to be closed by the caller: ours, for etcd's v3 API."""
        client = EtcdClient([Address(_ADDRESS, self._port)])
        client.connect(_STOP_TIMEOUT)
        return client

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | TextIO | None = None) -> None:
        """Start etcd and wait until it answers, at most `timeout` seconds for each of the tries."""
        if self._process is not None:
            raise RuntimeError(f"etcd runs already, at {self.get_endpoint()}; stop it first")
        program = variables().get(BINARY) or shutil.which("etcd")
        if not program or not os.access(program, os.X_OK):
            what = f"{program} cannot be executed" if program else "no such program in PATH"
            raise RuntimeError(
                f"etcd: {what}; install etcd (Debian: apt-get install etcd-server), or name the program "
                f"in {BINARY}"
            )
        self._directory = self._given or tempfile.mkdtemp(prefix="phalanx-etcd-")
        atexit.register(self.stop)
        for attempt in range(num_retries + 1):
            self._launch(program, stderr)
            try:
                self._wait_until_ready(timeout)
                return
            except StoreError as error:
                self._kill()
                # The port may have been taken between the choice and the start: another try has another one.
                if attempt == num_retries:
                    self.stop()
                    raise RuntimeError(f"etcd ({program}) did not start: {error}") from error

    def stop(self) -> None:
        """Stop etcd and remove its data, unless the directory was given; idempotent."""
        self._kill()
        atexit.unregister(self.stop)
        if self._directory and not self._given:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = ""

    def _launch(self, program: str, stderr: int | TextIO | None) -> None:
        self._port, peer = _free_ports(2)
        here, peers = f"http://{_ADDRESS}:{self._port}", f"http://{_ADDRESS}:{peer}"
        words = [
            *(program, "--data-dir", self._directory, "--log-level", "error"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        ]
        environ = {name: value for name, value in variables().items() if not name.startswith("ETCD_")}
        # The signal at the parent's death is that of the thread which forked: only the main one stays.
        in_main = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environ,
            preexec_fn=die_with_parent if in_main else None,
        )

    def _wait_until_ready(self, timeout: float) -> None:
        assert self._process is not None
        end = time.monotonic() + timeout
        line = EtcdConnection(Members([Address(_ADDRESS, self._port)], None, "", ""))
        try:
            while True:
                if (code := self._process.poll()) is not None:
                    raise StoreError(f"it exited with code {code}")
                try:
                    if line.call("/v3/maintenance/status", {}, min(timeout, 1.0)).get("leader"):
                        return
                except (EtcdError, *CONNECTION_ERRORS):
                    pass
                if time.monotonic() >= end:
                    raise StoreError(f"it did not answer within {timeout:g} s")
                time.sleep(0.02)  # there is no event for a port that another process opens
        finally:
            line.close()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_ADDRESS, 0)) for _ in range(count)]
    try:
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
