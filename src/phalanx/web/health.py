"""Health over HTTP: `/healthz` (alive and making progress) and `/readyz` (workers have started).

Answers are 200 or 503 and nothing else: any client that reaches the port may ask, so versions, names and
reasons go to the log only. A page that tells more (`/metrics`) is there only if it was asked for.

Invariants
- No wake-ups without requests: the server sleeps in `accept`, and probes the agent's loop only on request.
- A client that sends nothing, or little at a time, occupies one of 32 threads and delays no other client:
  when all are occupied, the oldest connection is closed.
- The server listens on loopback unless an address is given.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.job.time_budgets import HTTP_TOTAL

if TYPE_CHECKING:
    from phalanx.web.metrics import Page

LOOPBACK = "127.0.0.1"
_CLIENT_TIMEOUT = 2.0  # for each piece of a request
_MAX_CLIENTS = 32
_STALLED = 10.0  # seconds without a response of the loop; a loaded machine needs one
_PROBE_WAIT = 0.05  # seconds that a probe waits for the loop, before it looks at the oldest unanswered one


class HealthServer:
    """Serves from `start` to `stop`, in its own threads."""

    def __init__(
        self,
        host: str,
        port: int,
        live: Callable[[], bool],
        ready: Callable[[], bool] | None = None,
        pages: Mapping[str, Callable[[str], Page]] | None = None,
    ) -> None:
        """`pages` make a text of what the client says it can read; they are asked for, unlike the others."""
        self.host = host or LOOPBACK
        self._address = (self.host, port)
        self._pages = pages or {}
        self._answers = {"/healthz": live, "/": live, "/readyz": ready or live}
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def port(self) -> int:
        """The port it listens on, also if 0 was given."""
        return int(self._server.server_address[1]) if self._server is not None else self._address[1]

    def start(self) -> None:
        """Bind and serve; PhalanxError if the address cannot be bound."""
        host, port = self._address
        try:
            self._server = _Server(self._address, self._answers, self._pages)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise PhalanxError(
                f"health: cannot listen on {where}: {error.strerror or error}; "
                "choose another address with --health-listen"
            ) from None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="phalanx-health", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever, which polls for its stop flag.
        server = self._server
        assert server is not None
        while not self._closing:
            server.timeout = server.patience()
            server.handle_request()
            server.close_overdue()

    def stop(self) -> None:
        """Stop serving; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._closing = True
        host, port = str(server.server_address[0]), int(server.server_address[1])
        wake = LOOPBACK if host in ("0.0.0.0", "") else "::1" if host == "::" else host
        import socket

        try:
            socket.create_connection((wake, port), timeout=1.0).close()  # ends the wait in `accept`
        except OSError:
            pass
        if self._thread is not None:
            self._thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        answers: dict[str, Callable[[], bool]],
        pages: Mapping[str, Callable[[str], Page]],
    ) -> None:
        import socket

        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answers, self.pages = answers, pages
        self._free_threads = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._lock = threading.Lock()
        self._clients: dict[
            Any, float
        ] = {}  # their sockets, the oldest first, and until when they are served
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        import socketserver

        socketserver.TCPServer.server_bind(self)  # HTTPServer's resolves the name, which may take seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_threads.acquire(blocking=False):
            self._close_oldest()
            if not self._free_threads.acquire(timeout=_CLIENT_TIMEOUT):
                self.shutdown_request(request)
                return
        with self._lock:
            self._clients[request] = time.monotonic() + HTTP_TOTAL
        super().process_request(request, client_address)

    def patience(self) -> float | None:
        """How long the oldest client may take; None without clients."""
        with self._lock:
            until = next(iter(self._clients.values()), None)
        return None if until is None else max(0.0, until - time.monotonic())

    def close_overdue(self) -> None:
        """Close the clients that have taken too long."""
        while self.patience() == 0.0:
            self._close_oldest()

    def _close_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._clients), None)
            if oldest is not None:
                del self._clients[oldest]
                try:
                    oldest.shutdown(2)  # its thread ends, and closes it
                except OSError:
                    pass  # it has gone

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before its descriptor can be another connection's
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of a client."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is not None:
            self._show(page)
            return
        answer = self.server.answers.get(path)
        try:
            code = 404 if answer is None else 200 if answer() else 503
        except Exception:  # noqa: BLE001 - a user's callback that fails counts as unhealthy
            code = 503
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _show(self, page: Callable[[str], Page]) -> None:
        code, kind, body = page(self.headers.get("Accept", ""))
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "phalanx"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Without a body: the standard one repeats the client's request."""
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log probes."""


class LoopProbe:
    """Checks that the agent's loop responds.

    `probe` gives the loop an event to set. `watchdog_progress` is the wall time of the timer watchdog's last
    progress.
    """

    def __init__(
        self,
        probe: Callable[[threading.Event], None],
        watchdog_progress: Callable[[], float] | None = None,
        stalled_after: float = _STALLED,
    ) -> None:
        self._probe = probe
        self._watchdog_progress = watchdog_progress
        self._stalled_after = stalled_after
        self._pending: deque[tuple[threading.Event, float]] = deque()
        self._lock = threading.Lock()

    def live(self) -> bool:
        """Probe the loop, wait briefly, and decide by the oldest probe without a response."""
        progress = self._watchdog_progress
        if progress is not None and time.time() - progress() > self._stalled_after + 1:
            return False
        response = threading.Event()
        with self._lock:
            self._pending.append((response, time.monotonic()))
        self._probe(response)
        if response.wait(_PROBE_WAIT):
            with self._lock:
                self._pending.clear()
            return True
        with self._lock:
            while self._pending and (self._pending[0][0].is_set() or len(self._pending) > 1024):
                self._pending.popleft()
            since = self._pending[0][1] if self._pending else time.monotonic()
        return time.monotonic() - since < self._stalled_after


class HealthCheckServer(HealthServer):
    """torch's health server: 200 while the callback's wall time is within `timeout` seconds, else 503."""

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        super().__init__(LOOPBACK, port, lambda: time.time() - alive_callback() <= timeout)


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """A server that is not started yet."""
    return HealthCheckServer(alive_callback, port, timeout)
