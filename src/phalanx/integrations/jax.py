"""Makes `jax.distributed.initialize()`, with no arguments, understand a job of ours.

JAX learns about a launcher from classes (`ClusterEnv`), not from variables: the variables that its own
classes read are those of Slurm and Open MPI. Setting these would lie to mpi4py and to everything else that
looks for them, so a class of our own is put in front of JAX's when JAX is imported, in front because under
`srun phalanx run …` Slurm's count of tasks is the number of agents and not of workers.

The coordinator is a server inside rank 0, so nobody but rank 0 can pick its port. Rank 0 does, holds it
until it is bound for good, and tells the others through the store of the round at MASTER_ADDR:MASTER_PORT.

Standard library only, nothing of the package, and few modules at import: a worker loads this file by its
path, perhaps with another interpreter than the agent's and beside another version of this package.
"""

# Not even __future__, as in the bootstrap: a program finds as few of our imports as can be.
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
_PATIENCE = 300.0  # seconds, where JAX names none

# The part of torch's TCPStore protocol that is needed here.
_VALIDATE = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
_SET, _GET, _WAIT = b"\1", b"\3", b"\6"


def offer() -> None:
    """Have our class known to JAX: now if it is loaded, else as soon as it is.

    The bootstrap calls it; a Python that it did not start (below a shell script, say) may call it itself.
    """
    if not is_present(os.environ):
        return
    loaded = sys.modules.get(_CLUSTERS)
    if loaded is not None:
        register(loaded)
    elif not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


def is_present(environ: "Any") -> bool:
    """Whether this process is a worker of ours."""
    return all(name in environ for name in _NEEDED)


class _Hook:
    """Waits on sys.meta_path for JAX's cluster module, adds to it, and is gone."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "Any":
        if name != _CLUSTERS:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _after(spec.loader)
                return spec
        return None


def _after(loader: "Any") -> None:
    """Let this loader, which loads one module, register with it when it has."""
    load = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        load(module)
        register(module)

    loader.exec_module = exec_module


def register(clusters: "Any") -> None:
    """Add our class to JAX's, as the first."""
    try:
        known = clusters.ClusterEnv._cluster_types
        if not any(kind.name == "phalanx" for kind in known):
            _define(clusters.ClusterEnv)
            known.insert(0, known.pop())
    except AttributeError as error:  # JAX has changed; what a program passes itself still works
        import warnings

        warnings.warn(
            f"this JAX does not take Phalanx as a cluster ({error}): pass coordinator_address, num_processes "
            "and process_id to jax.distributed.initialize()",
            stacklevel=2,
        )


def _define(base: "Any") -> None:
    class PhalanxCluster(base):  # type: ignore[misc]  # JAX is not there when this is checked
        """What JAX asks of a launcher."""

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
            # JAX makes this the number of the one device the process may use. A worker that is alone on its
            # machine has all of them, which is JAX's own habit: one process for a host.
            alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
            return None if alone else int(os.environ.get("LOCAL_RANK", "0"))


_held: "list[socket.socket]" = []  # keeps the coordinator's port ours until JAX has bound it, and after


def coordinator(timeout: float | None = None, port: str | None = None) -> str:
    """HOST:PORT where rank 0 serves JAX's coordination, the same for every worker of the round."""
    host = os.environ["MASTER_ADDR"]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if port:
        return f"{host}:{port}"
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
        return f"{host}:{os.environ['MASTER_PORT']}"  # left free for whatever rank 0 wants to bind there
    if os.environ["RANK"] != "0":
        return _tell_or_ask(None, timeout or _PATIENCE)
    address = f"{host}:{_hold_port()}"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # JAX would listen on every interface; what only this machine needs, only this machine shall reach.
        os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
    return _tell_or_ask(address, timeout or _PATIENCE)


def _hold_port() -> int:
    """A free port that nobody else is given: bound, not listened on, and shared only with ourselves."""
    import socket

    holder = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if holder.family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, so that it can bind too
    holder.bind(("", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


def _tell_or_ask(address: str | None, timeout: float) -> str:
    """Put the address into the round's store, or wait for it there."""
    import socket

    where = (os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"]))
    try:
        with socket.create_connection(where, timeout) as link:
            if address is not None:
                # The read makes sure that it has arrived before the connection goes.
                link.sendall(_VALIDATE + _SET + _field(_KEY) + _field(address.encode()))
            else:
                link.sendall(_VALIDATE + _WAIT + (1).to_bytes(8, sys.byteorder) + _field(_KEY))
                _read(link, 1)
            link.sendall(_GET + _field(_KEY))
            return _read(link, int.from_bytes(_read(link, 8), sys.byteorder)).decode()
    except OSError as error:
        raise RuntimeError(
            f"JAX's coordinator: nothing from rank 0 through the store at {where[0]}:{where[1]} within "
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
