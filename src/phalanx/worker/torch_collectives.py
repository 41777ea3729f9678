"""Lets the agent read which collectives a torch worker has entered, without the worker's help, and lets the
worker name the agent's store as it likes.

torch has a small HTTP server in C++ (`_WorkerServer`) whose threads need no interpreter lock: it answers
while the program is inside a collective, holds the lock or has deadlocked in Python. The agent asks it for
torch's flight recorder (`agent/supervision/collective_traces.py`). It listens on a Unix socket in a directory
that only this user can enter, and that the agent removes.

It is opened with the first process group, not with the import of torch: its threads must not exist in a
program that forks before it communicates (Python warns of a fork with threads), and never in a zygote. The
moment is seen by a dict: torch keeps the members of its groups in one, and the worker replaces it by one that
also writes them to a file, because the flight recorder does not know them for every library. Nothing of this
is in a traceback. A child that the worker forks opens and writes nothing.

The agent serves the store at MASTER_ADDR only, and torch 2.15 takes another name of that host for another
store, whose port rank 0 then tries to bind. In `init_method="tcp://localhost:$MASTER_PORT"`, the name is
replaced where torch parses it.

This file uses only the standard library and imports little: a worker loads it by its path, like bootstrap.py.
"""

# No __future__ import, as in the bootstrap: programs see as few additional imports as possible.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType
    from typing import Any

VARIABLE = "PHALANX_COLLECTIVES"  # as in phalanx.job.environment: the path of the socket
GROUPS_SUFFIX = ".groups"
"""Beside the socket: a line of JSON for every process group of the rank."""
_MODULE = "torch.distributed.distributed_c10d"
_MEMBERS = "_pg_group_ranks"  # process group -> {global rank: rank in the group}
_RENDEZVOUS = "torch.distributed.rendezvous"  # the module above imports it


def offer() -> None:
    """Make both changes to torch, now if it is loaded (in the zygote), else when it is imported."""
    loaded = sys.modules.get(_MODULE)
    if loaded is not None:
        arrange(loaded)
    elif not any(isinstance(finder, TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchFinder())


class TorchFinder:
    """Changes torch's module when it is imported, then removes itself from sys.meta_path."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "Any":
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _arrange_after(spec.loader)
                return spec
        return None


def _arrange_after(loader: "Any") -> None:
    load = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        del loader.exec_module  # the class's own again
        load(module)
        arrange(module)

    loader.exec_module = exec_module


def arrange(module: "Any") -> None:
    """Make torch's dict of the members of process groups one that notices new ones; name the store."""
    rendezvous: Any = sys.modules.get(_RENDEZVOUS)
    parse = getattr(rendezvous, "urlparse", None)
    if parse is not None:
        rendezvous.urlparse = lambda url, *more: name_store(parse(url, *more))
    known = getattr(module, _MEMBERS, None)
    if type(known) is dict:  # else another version of torch: the stacks have to do
        setattr(module, _MEMBERS, GroupMembers(known))


def name_store(url: "Any") -> "Any":
    """A parsed `init_method`; one that leads to the agent's store has the host name that the agent gave."""
    try:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        served = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        if not served or url.scheme != "tcp" or str(url.port) != port or url.hostname in (None, host):
            return url
        if not _same_host(url.hostname, host):
            return url
        return url._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except (KeyError, ValueError, OSError):  # no worker, no such port, or a name without an address
        return url


def _same_host(one: str, other: str) -> bool:
    import socket

    def addresses(name: str) -> "set[Any]":
        return {found[4][0] for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}

    def is_here(address: str) -> bool:
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
        return True

    ones, others = addresses(one), addresses(other)
    return bool(ones & others) or (any(map(is_here, ones)) and any(map(is_here, others)))


class GroupMembers(dict):  # type: ignore[type-arg]  # generic at run time costs an import
    """The members of process groups; makes each new group known to the agent."""

    _worker = 0  # the process that has opened a server, or has tried to
    _path = ""

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        try:
            self._note(group, ranks)
        except Exception:  # noqa: BLE001 - the program must not notice
            pass

    def _note(self, group: "Any", ranks: "Iterable[int]") -> None:
        if not self._worker:
            self._worker = os.getpid()
            path = os.environ.get(VARIABLE, "")
            if path and open_server(path):
                self._path = path + GROUPS_SUFFIX
        if not self._path or os.getpid() != self._worker:
            return
        import json

        about = {"name": group.group_name, "desc": group.group_desc, "ranks": runs(ranks)}
        about["backends"] = sorted({_recorder(group, device) for device in group._device_types})
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            os.write(fd, json.dumps(about).encode() + b"\n")
        finally:
            os.close(fd)


def _recorder(group: "Any", device: "Any") -> str:
    """The name under which torch records the operations of a group on a device."""
    try:
        return str(group._get_backend(device).name())
    except Exception:  # noqa: BLE001 - of a third party's backend
        return "c10d"  # as torch's hook does


def runs(ranks: "Iterable[int]") -> str:
    """`0-63,70`: short for the largest groups."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def open_server(path: str) -> bool:
    """Listen at `path`; False where that is not possible."""
    directory = os.path.dirname(path)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass  # another rank's
    found = os.lstat(directory)
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        return False
    for left in (path, path + GROUPS_SUFFIX):
        try:
            os.unlink(left)  # of a worker that was killed
        except FileNotFoundError:
            pass
    import ctypes

    from torch._C._distributed_c10d import _WorkerServer

    from phalanx.worker.torch_messages import errors_only

    restore = errors_only()  # it writes a line to stderr where it listens
    try:
        server = _WorkerServer(path)
    finally:
        restore()
    # It lives until the process ends. Its destructor shuts the socket down, which a forked child shares with
    # the worker: at the end of such a child, torch would abort the worker.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return True
