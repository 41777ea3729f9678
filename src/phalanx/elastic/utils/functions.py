"""Small functions of torch's interface for programs that import them from `phalanx.elastic.utils`.

Phalanx itself does not use them.
"""

from __future__ import annotations

import os
import socket

from phalanx.errors import StoreConnectionError, StoreError
from phalanx.job import environment
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.torch_errors import as_torchs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any


class macros:  # torch's name
    """The macros in the arguments of a worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Replace `${local_rank}` and `$local_rank` in strings; other values stay."""
        from string import Template

        return [Template(a).safe_substitute(local_rank=local_rank) if isinstance(a, str) else a for a in args]


def get_env_variable_or_raise(env_name: str) -> str:
    """A variable that must be set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"the environment variable {env_name} is not set; set it before the start")
    return value


def get_socket_with_port() -> socket.socket:
    """A socket on a free port of all addresses, which does not listen; the caller closes it."""
    from phalanx.job.address import bound_everywhere

    return socket.socket(fileno=bound_everywhere().detach())


def get_log_level() -> str:
    """The log level: LOGLEVEL, or WARNING."""
    return environment.log_level()


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger with the level of LOGLEVEL, by default with the name of the caller's module."""
    import logging
    import sys

    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__", "phalanx"))
    logger.setLevel(get_log_level())
    return logger


class ServedStore(TorchStoreClient):
    """A store and its server; closing it closes both."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        from phalanx.store.tcpstore.server import TorchStoreServer

        self._server = TorchStoreServer(host, port)
        try:
            self._server.start()
            super().__init__(self._server.address[0], self._server.port, timeout)
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        super().close()
        self._server.close()


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TorchStoreClient:
    """A store with torch's methods and protocol, with its server or as a client; `close` it at the end.

    It is not an instance of a torch class, so no process group can be built on it; the other side may be
    torch's. Without a port, or with 0, a server takes a free one (`store.port`); a given port that is in use
    is tried `retries` times. `timeout` bounds the connection, and the wait for `world_size` sides.
    `use_libuv` has no effect: the server speaks the protocol of both.
    """
    if server_port == -1 and (not is_server or world_size > 1):
        raise ValueError(
            f"create_c10d_store: server_port is missing, and {world_size} sides have to know it; give a port"
        )
    try:
        store = _served(server_addr, max(server_port, 0), timeout, retries) if is_server else None
        store = store or TorchStoreClient(server_addr, server_port, timeout)
        if wait_for_workers:
            from phalanx.store.tcpstore.barrier import barrier

            try:
                store.join_members()
                barrier(store, world_size, "_tcp_store/num_members", timeout)
            except BaseException:
                store.close()
                raise
    except StoreError as error:
        raise as_torchs(error) from error.__cause__
    return store


def _served(host: str, port: int, timeout: float, retries: int) -> TorchStoreClient:
    import errno
    import time

    for attempt in range(1, retries + 1):
        try:
            return ServedStore(host, port, timeout)
        except StoreConnectionError as error:
            cause = error.__cause__
            if not port or attempt == retries or getattr(cause, "errno", None) != errno.EADDRINUSE:
                raise
        time.sleep(0.1 * attempt)  # there is no event for a port that becomes free
    return ServedStore(host, port, timeout)
