"""Health over HTTP: `/healthz` (alive and making progress) and `/readyz` (workers have started).

Answers are 200 or 503 and carry nothing else: no version, no name, no reason. Probes are asked by whoever can
reach the port, and what is wrong is for the log.

Invariants
- Nothing wakes up while nobody asks: the server sleeps in `accept`, and the agent's loop is asked only then.
- A client that says nothing costs one of a few threads for two seconds, and no other client anything.
- Loopback, unless an address is named.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phalanx.errors import PhalanxError

LOOPBACK = "127.0.0.1"
_CLIENT_PATIENCE = 2.0
_MOST_CLIENTS = 32
_STALLED = 10.0
"""Seconds without an answer of the loop after which it counts as stalled: a loaded machine needs one."""
_STARTING = 300.0
"""The same while workers are started: that waits for helpers, imports and other nodes."""
_MOMENT = 0.05
"""Seconds that a probe waits for the loop before it judges by how long the loop has owed an answer."""


class HealthServer:
    """Serves from `start` to `stop`, in threads of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        live: Callable[[], bool],
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self._address = (host or LOOPBACK, port)
        self._answers = {"/healthz": live, "/": live, "/readyz": ready or live}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def port(self) -> int:
        """The port it listens on; the one that was chosen when 0 was asked for."""
        return int(self._server.server_address[1]) if self._server is not None else self._address[1]

    def start(self) -> None:
        """Bind and serve; PhalanxError when the address cannot be had."""
        host, port = self._address
        try:
            self._server = _Server(self._address, self._answers)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise PhalanxError(
                f"health: cannot listen on {where}: {error.strerror or error}; "
                "choose another address with --health-port"
            ) from None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="phalanx-health", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever: it wakes up again and again to see whether it should stop.
        assert self._server is not None
        while not self._closing:
            self._server.handle_request()

    def stop(self) -> None:
        """Stop serving; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._closing = True
        host = server.server_address[0]
        _knock(
            (LOOPBACK if host in ("0.0.0.0", "") else "::1" if host == "::" else host, self._port_of(server))
        )
        if self._thread is not None:
            self._thread.join()
        server.server_close()

    @staticmethod
    def _port_of(server: ThreadingHTTPServer) -> int:
        return int(server.server_address[1])


def _knock(address: tuple[Any, int]) -> None:
    """Wake a server that waits for somebody to ask."""
    import socket

    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], answers: dict[str, Callable[[], bool]]) -> None:
        import socket

        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answers = answers
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        import socketserver

        socketserver.TCPServer.server_bind(self)  # HTTPServer's own looks the name up, which may take seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's trouble is its own."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_PATIENCE
    server: _Server

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        try:
            code = 404 if answer is None else 200 if answer() else 503
        except Exception:  # noqa: BLE001 - a callback of the user's that fails is no sign of health
            code = 503
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "phalanx"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As short as every other answer: the standard one repeats the client's words."""
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are not news."""


class Pulse:
    """Whether an agent's loop turns: it is asked, and has to answer.

    `knock` hands the loop an event to set and wakes it. `busy` is true while the loop may take long.
    """

    def __init__(
        self,
        knock: Callable[[threading.Event], None],
        busy: Callable[[], bool] = lambda: False,
        fed: Callable[[], float] | None = None,
        stalled_after: float = _STALLED,
    ) -> None:
        self._knock = knock
        self._busy = busy
        self._fed = fed
        self._stalled_after = stalled_after
        self._owed: deque[tuple[threading.Event, float]] = deque()
        self._lock = threading.Lock()

    def live(self) -> bool:
        """Ask, give the loop a moment, and judge by the oldest question that it has not answered."""
        if self._fed is not None and time.time() - self._fed() > self._stalled_after + 1:
            return False
        answer = threading.Event()
        with self._lock:
            self._owed.append((answer, time.monotonic()))
        self._knock(answer)
        if answer.wait(_MOMENT):
            with self._lock:
                self._owed.clear()
            return True
        with self._lock:
            while self._owed and (self._owed[0][0].is_set() or len(self._owed) > 1024):
                self._owed.popleft()
            since = self._owed[0][1] if self._owed else time.monotonic()
        return time.monotonic() - since < (_STARTING if self._busy() else self._stalled_after)


class HealthCheckServer:
    """torch's name: 200 while the callback's wall time is no older than `timeout` seconds, else 503."""

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._timeout = timeout
        self._server = HealthServer(LOOPBACK, port, self._is_alive)

    def start(self) -> None:
        """Start serving."""
        self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def _is_alive(self) -> bool:
        return time.time() - self._alive_callback() <= self._timeout


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """The server; `start` it."""
    return HealthCheckServer(alive_callback, port, timeout)
