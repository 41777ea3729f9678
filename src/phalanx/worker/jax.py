"""Makes `jax.distributed.initialize()` work without arguments in a Phalanx job.

JAX detects a launcher through classes (`ClusterEnv`), which read the variables of Slurm and Open MPI. Setting
these variables would mislead mpi4py and other libraries that read them, so a `ClusterEnv` for Phalanx is
registered when JAX is imported. It comes before JAX's own, because under `srun phalanx run …` Slurm's number
of tasks is the number of agents, not of workers.

The coordinator is a server inside rank 0, so only rank 0 can choose its port. Rank 0 binds one, holds it
until JAX has bound it, too, and publishes it in the round's store at MASTER_ADDR:MASTER_PORT.

This file uses only the standard library and imports little: a worker loads it by its path, perhaps with
another interpreter than the agent's and beside another version of this package.
"""

# No __future__ import, as in the bootstrap: programs see as few additional imports as possible.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

_CLUSTERS = "jax._src.clusters"  # where JAX keeps `ClusterEnv`
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_KEY = b"phalanx/jax/coordinator"
_TIMEOUT = 300.0  # seconds, if JAX gives none

# The part of torch's TCPStore protocol needed here.
_VALIDATE = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
_SET, _GET, _WAIT = b"\1", b"\3", b"\6"


def offer() -> None:
    """Register with JAX, now if it is loaded, else when it is imported.

    The bootstrap calls this; a Python process that it did not start (from a shell script) may call it, too.
    """
    if not is_present(os.environ):
        return
    loaded = sys.modules.get(_CLUSTERS)
    if loaded is not None:
        register(loaded)
    elif not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())


def is_present(environ: "Any") -> bool:
    """Whether this process is a Phalanx worker."""
    return all(name in environ for name in _NEEDED)


class _ImportHook:
    """Registers when JAX's cluster module is imported, then removes itself from sys.meta_path."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "Any":
        if name != _CLUSTERS:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _register_after(spec.loader)
                return spec
        return None


def _register_after(loader: "Any") -> None:
    """Make this loader, which loads one module, register after that."""
    load = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        load(module)
        register(module)

    loader.exec_module = exec_module


def register(clusters: "Any") -> None:
    """Add the class for Phalanx as the first of JAX's."""
    try:
        known = clusters.ClusterEnv._cluster_types
        if not any(kind.name == "phalanx" for kind in known):
            _define(clusters.ClusterEnv)
            known.insert(0, known.pop())
    except AttributeError as error:  # JAX has changed; explicit arguments still work
        import warnings

        warnings.warn(
            f"this version of JAX does not accept Phalanx as a cluster ({error}): pass coordinator_address, "
            "num_processes and process_id to jax.distributed.initialize()",
            stacklevel=2,
        )


def _define(base: "Any") -> None:
    class PhalanxCluster(base):  # type: ignore[misc]  # JAX is not installed for type checks
        """A launcher for JAX."""

        name = "phalanx"

        @classmethod
        def is_env_present(cls) -> bool:
            return is_present(os.environ)

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            return coordinator(timeout_secs, override_coordinator_port)

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            # JAX uses this as the number of the process's only device. A worker that is alone on its machine
            # uses all devices, as JAX does by default.
            alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
            return None if alone else int(os.environ.get("LOCAL_RANK", "0"))


_reserved: "list[socket.socket]" = []  # reserves the coordinator's port


def coordinator(timeout: float | None = None, port: str | None = None) -> str:
    """HOST:PORT of the coordinator in rank 0, the same for every worker of the round."""
    host = os.environ["MASTER_ADDR"]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if port:
        return f"{host}:{port}"
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
        return f"{host}:{os.environ['MASTER_PORT']}"  # left free for rank 0 to bind
    if os.environ["RANK"] != "0":
        return _exchange(None, timeout or _TIMEOUT)
    address = f"{host}:{_reserve_port()}"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # JAX would listen on every interface; a single node needs only this address.
        os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
    return _exchange(address, timeout or _TIMEOUT)


def _reserve_port() -> int:
    """A free port, bound but not listening, that only this user's processes can bind, too."""
    import socket

    reserved = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if reserved.family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
    )  # as gRPC does, so that it can bind it, too
    reserved.bind(("", 0))
    _reserved.append(reserved)
    return int(reserved.getsockname()[1])


def _exchange(address: str | None, timeout: float) -> str:
    """Publish the address in the round's store, or wait for it there."""
    import socket

    where = (os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"]))
    try:
        with socket.create_connection(where, timeout) as link:
            if address is not None:
                # The read ensures that it has arrived before the connection closes.
                link.sendall(_VALIDATE + _SET + _field(_KEY) + _field(address.encode()))
            else:
                link.sendall(_VALIDATE + _WAIT + (1).to_bytes(8, sys.byteorder) + _field(_KEY))
                _read(link, 1)
            link.sendall(_GET + _field(_KEY))
            return _read(link, int.from_bytes(_read(link, 8), sys.byteorder)).decode()
    except OSError as error:
        raise RuntimeError(
            f"JAX's coordinator: no address from rank 0 in the store at {where[0]}:{where[1]} within "
            f"{timeout:g} s ({error}); does every rank call jax.distributed.initialize()?"
        ) from error


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, sys.byteorder) + data


def _read(link: "socket.socket", size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the store closed the connection")
        data += more
    return data
