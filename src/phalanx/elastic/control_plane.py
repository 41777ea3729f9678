"""A small HTTP server on a Unix socket inside a worker, to inspect it.

    with worker_main():
        train()

It listens at the path in `TORCH_WORKER_SERVER_SOCKET`, or not at all if that is unset. `/handler/` lists the
handlers, `/handler/ping` answers pong, `/handler/dump_traceback` shows the stack of every thread. Only the
owner can connect to the socket, and it is removed at the end. An exception that leaves the `with` block is
written to the error file, as by `record`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

from phalanx.elastic.lazy_modules import found_in
from phalanx.job.environment import WORKER_SERVER_SOCKET as TORCH_WORKER_SERVER_SOCKET
from phalanx.job.environment import worker_server_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_MAX_PATH = 107  # bytes in the address of a Unix socket


@contextmanager
def worker_main() -> Iterator[None]:
    """Serve while the block runs."""
    from phalanx.worker.recorder import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    path = worker_server_socket()
    server = WorkerServer(path) if path else None
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (0, None):
            handler.record_exception(stop)
        raise
    except BaseException as error:
        handler.record_exception(error)
        raise
    finally:
        if server is not None:
            server.close()


class WorkerServer:
    """Serves from construction to `close`, in its own thread."""

    def __init__(self, path: str) -> None:
        import threading

        if len(os.fsencode(path)) > _MAX_PATH:
            raise ValueError(
                f"{TORCH_WORKER_SERVER_SOCKET}={path}: longer than a socket address ({_MAX_PATH} bytes); "
                "use a shorter path"
            )
        _remove_stale(path)
        self._path = path
        self._server = _http_server(path)
        self._pid = os.getpid()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="phalanx-worker-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever, which polls for its stop flag.
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        """Stop and remove the socket; in a forked child, only close it."""
        if os.getpid() == self._pid:
            self._closing = True
            _connect(self._path)  # ends the wait in `accept`
            self._thread.join()
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
        self._server.server_close()


def _connect(path: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def _remove_stale(path: str) -> None:
    """Remove the socket of a worker that is gone; refuse one that is still served."""
    import stat

    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{TORCH_WORKER_SERVER_SOCKET}={path}: this file is not a socket")
        _connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
        return
    raise FileExistsError(
        f"{TORCH_WORKER_SERVER_SOCKET}={path}: another process serves it; give every worker its own path"
    )


def dump_traceback() -> str:
    """The Python stack of every thread of this process."""
    import faulthandler
    import tempfile

    with tempfile.TemporaryFile() as file:  # faulthandler needs a descriptor, and a pipe could fill up
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


HANDLERS: dict[str, Callable[[], str]] = {"ping": lambda: "pong", "dump_traceback": dump_traceback}


def answer(path: str) -> tuple[int, str, str]:
    """Status, content type and body for a path."""
    name = path.partition("?")[0].removeprefix("/handler/")
    if path in ("", "/"):
        return 200, "text/html", '<h1>Phalanx worker</h1>\n<a href="/handler/">handlers</a>\n'
    if path.rstrip("/") == "/handler":
        import json

        return 200, "application/json", json.dumps(sorted(HANDLERS))
    handler = HANDLERS.get(name)
    if handler is None:
        return 404, "text/plain", f"no handler {name!r}; use one of {', '.join(sorted(HANDLERS))}\n"
    try:
        return 200, "text/plain", handler()
    except Exception as error:  # noqa: BLE001 - goes to the client; the worker continues
        return 500, "text/plain", f"{type(error).__name__}: {error}\n"


def _http_server(path: str) -> Any:
    import socketserver
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # a client that sends nothing must not hold a thread

        def do_GET(self) -> None:
            body_size = int(self.headers.get("Content-Length") or 0)
            if body_size > 0:
                self.rfile.read(min(body_size, 65536))
            status, kind, text = answer(self.path)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # torch's server expects POST; GET is easier to type

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            """Do not write to the worker's console."""

    class WorkerHttpServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that went away."""

    before = os.umask(0o177)
    try:
        return WorkerHttpServer(path, Handler)
    finally:
        os.umask(before)


__getattr__ = found_in(__name__)
