"""torch's `RendezvousBackend`, one value that nodes read and replace, and the one over a torch store.

A job can meet through any of them (`dynamic_rendezvous`); the price of a value that has to be polled is
described in `store.embedded.blob_client`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from typing import Any

from phalanx.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.cluster.handler import RendezvousParameters

Token = Any  # torch's name: whatever a backend uses to tell the versions of its value apart


class RendezvousBackend(ABC):
    """One value that nodes read and replace."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The value and its token; None: there is none yet."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the value if `token` is still its own (None: if there is none yet).

        Returns the value that is there then, its token, and whether it was replaced."""


class C10dRendezvousBackend(RendezvousBackend):
    """The value is a key of a torch store, which may be of any kind; the key is as torch's backend has it."""

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("C10dRendezvousBackend: the run id is empty; give the job one")
        # A wait on a connection keeps other calls from it, and the nodes' leases need theirs.
        self._store = _connection_of_its_own(store)
        self._key = "torch.rendezvous." + run_id
        self._call("compare_set", self._key, "", _ABSENT)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._read(self._call("get", self._key))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        text = b64encode(state).decode()
        expected = _ABSENT if token is None else token
        if not isinstance(expected, bytes | str):
            found = self.get_state()  # not a token of this backend, so not that of the value
            return None if found is None else (*found, False)
        expected = expected if isinstance(expected, str) else expected.decode()
        there = self._call("compare_set", self._key, expected, text)
        found = self._read(there)
        return None if found is None else (*found, found[1] == text.encode())

    def _call(self, method: str, *args: Any) -> bytes:
        try:
            value = getattr(self._store, method)(*args)
        except (ValueError, RuntimeError, OSError) as error:  # torch's DistStoreError is a RuntimeError
            raise RendezvousConnectionError(f"the C10d store did not answer: {error}") from error
        return value.encode() if isinstance(value, str) else bytes(value)

    def _read(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == _ABSENT.encode():
            return None
        try:
            return b64decode(value, validate=True), value
        except ValueError as error:
            raise RendezvousStateError(
                f"the key {self._key} of the C10d store is not a rendezvous state ({value[:20]!r}); "
                "use another run id"
            ) from error


_ABSENT = "Y2FuaW1hZGFt"  # what torch's backend writes where there is no state yet: the two must agree on it


def _connection_of_its_own(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def create_c10d_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """A C10d backend and its store: a server where the endpoint is this machine's, else a client.

    `store_type=file` in the configuration takes a file, the endpoint, instead; that needs torch."""
    kind = str(params.get("store_type") or "tcp").strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(f"store_type={kind}: use tcp or file")
    store = _file_store(params) if kind == "file" else create_tcp_store(params)
    return C10dRendezvousBackend(store, params.run_id), store


def create_tcp_store(params: RendezvousParameters) -> Any:
    """The TCP store at the endpoint, served here if that is this machine; torch's own if it is installed."""
    from phalanx.job.address import parse_rendezvous_endpoint
    from phalanx.job.environment import STORE_PORT

    host, port = parse_rendezvous_endpoint(params.endpoint, STORE_PORT)
    timeout = params.get_as_int("read_timeout", 60) or 0
    if timeout <= 0:
        raise ValueError(f"read_timeout={timeout}: use a number of seconds above 0")
    chosen = params.get_as_bool("is_host")
    # Where it is not given, another process on this machine may serve it already.
    tries = (chosen,) if chosen is not None else (True, False) if _is_here(host) else (False,)
    for serves in tries:
        try:
            return _tcp_store(host, port, serves, timeout)
        except (RuntimeError, OSError, ValueError) as error:
            if serves is tries[-1]:
                raise RendezvousConnectionError(
                    f"the C10d store at {params.endpoint or host} could not be reached: {error}"
                ) from error
    raise AssertionError("the last try returns or raises")


def _tcp_store(host: str, port: int, serves: bool, timeout: float) -> Any:
    try:
        from torch.distributed import TCPStore
    except ImportError:
        from phalanx.elastic.utils.functions import create_c10d_store

        return create_c10d_store(serves, host, port, timeout=timeout, wait_for_workers=False)
    from datetime import timedelta

    return TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timedelta(seconds=timeout))


def _is_here(host: str) -> bool:
    """Whether an address is this machine's: whether it can be bound."""
    import socket

    try:
        for family, kind, proto, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, proto) as probe:
                probe.bind(where)
                return True
    except OSError:
        pass
    return False


def _file_store(params: RendezvousParameters) -> Any:
    import os
    import tempfile

    try:
        from torch.distributed import FileStore
    except ImportError:
        raise RendezvousConnectionError("store_type=file needs torch, whose FileStore it is") from None
    path = params.endpoint
    if not path:
        try:
            handle, path = tempfile.mkstemp(prefix="phalanx-rendezvous-")
        except OSError as error:
            raise RendezvousError(f"store_type=file: no temporary file can be made: {error}") from error
        os.close(handle)
    try:
        return FileStore(path)
    except (RuntimeError, OSError) as error:
        raise RendezvousConnectionError(f"the file {path} cannot be used as a store: {error}") from error
