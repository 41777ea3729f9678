"""A small HTTP server on a Unix socket inside a worker, for whoever wants to ask how it is.

    with worker_main():
        train()

It listens where `TORCH_WORKER_SERVER_SOCKET` says, and not at all when that is unset. What it answers:
`/handler/` the names there are, `/handler/ping` pong, `/handler/dump_traceback` the stack of every thread.
The socket is readable by its owner only, and is removed at the end. An exception that passes through the
`with` is recorded in the error file, as by `record`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_LONGEST = 107  # bytes of a path that fit into the kernel's address of a Unix socket


@contextmanager
def worker_main() -> Iterator[None]:
    """Serve while the block runs."""
    from phalanx.workers.record import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET, "")
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
    """Serves from construction to `close`, in a thread of its own."""

    def __init__(self, path: str) -> None:
        import threading

        if len(os.fsencode(path)) > _LONGEST:
            raise ValueError(
                f"{TORCH_WORKER_SERVER_SOCKET}={path}: longer than the {_LONGEST} bytes that fit a socket's "
                "address; use a shorter path"
            )
        _remove_stale(path)
        self._path = path
        self._server = _http_server(path)
        self._pid = os.getpid()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="phalanx-worker-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever: it wakes up again and again to see whether it should stop.
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        """Stop, and remove the socket; in a forked child only let go of it."""
        if os.getpid() == self._pid:
            self._closing = True
            _knock(self._path)
            self._thread.join()
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
        self._server.server_close()


def _knock(path: str) -> None:
    """Wake a server that waits for somebody to ask."""
    import socket

    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(path)


def _remove_stale(path: str) -> None:
    """Remove the socket of a worker that is gone; one that is still served is somebody else's."""
    import stat

    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{TORCH_WORKER_SERVER_SOCKET}={path}: there is a file that is no socket")
        _knock(path)
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

    with tempfile.TemporaryFile() as file:  # faulthandler needs a real descriptor; a pipe could fill up
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
        return 404, "text/plain", f"no handler {name!r}; there are {', '.join(sorted(HANDLERS))}\n"
    try:
        return 200, "text/plain", handler()
    except Exception as error:  # noqa: BLE001 - the asker gets it; the worker goes on
        return 500, "text/plain", f"{type(error).__name__}: {error}\n"


def _http_server(path: str) -> Any:
    import socketserver
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        """One request of one asker."""

        timeout = 10.0  # an asker who does not ask must not hold a thread

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

        do_POST = do_GET  # torch's server takes POST for handlers; people type GET

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            """Be silent: this is the worker's console."""

    class WorkerHttpServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """An asker that went away is not worth a word."""

    before = os.umask(0o177)
    try:
        return WorkerHttpServer(path, Handler)
    finally:
        os.umask(before)
