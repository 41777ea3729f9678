"""Names of torch that begin with an underscore, and that real programs use all the same.

Each is here because a published package imports it; behaviour as in torch 2.13.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.membership.handler import RendezvousParameters


def fq_hostname() -> str:
    """The fully qualified name of this machine."""
    import socket

    return socket.getfqdn(socket.gethostname())


class RoleInstanceInfo:
    """What one agent tells the others: its role, its node rank, and how many workers it has."""

    __slots__ = ("local_world_size", "rank", "role")

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        """As JSON, for a store."""
        names = ("role", "rank", "local_world_size")
        return json.dumps({name: getattr(self, name) for name in names}).encode()

    @staticmethod
    def deserialize(data: bytes) -> RoleInstanceInfo:
        """What `serialize` made."""
        return RoleInstanceInfo(**json.loads(bytes(data)))

    @staticmethod
    def compare(obj1: RoleInstanceInfo, obj2: RoleInstanceInfo) -> int:
        """Negative, zero or positive, by role and then by rank."""
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: list[RoleInstanceInfo], role: str) -> tuple[int, int]:
        """The first and the last index of a role in a sorted list; -1 where it is not in it."""
        places = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """What a job is called: the function's name, the program's, or for this Python the script's."""
    if entrypoint is None:
        return ""
    if not isinstance(entrypoint, str):
        return str(entrypoint.__name__)
    if entrypoint != sys.executable:
        return entrypoint
    return next((str(arg) for arg in args if not str(arg).startswith("-")), "")


def addr_and_port(params: RendezvousParameters) -> tuple[str | None, int | None]:
    """The address and port of a static rendezvous; of any other (None, None)."""
    if params.backend != "static":
        return None, None
    from phalanx.membership.address import parse_rendezvous_endpoint

    host, port = parse_rendezvous_endpoint(params.endpoint, -1)
    if port == -1:
        raise ValueError(f"rendezvous endpoint {params.endpoint!r}: the port is missing; add --master-port")
    return host, port


def parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """`key=value,key=value` as a dictionary."""
    found: dict[str, str] = {}
    text = config_str.strip()
    for pair in text.split(",") if text else []:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError(f"rendezvous configuration {config_str!r}: write key=value,key=value")
        if not value:
            raise ValueError(f"rendezvous configuration {config_str!r}: {key} has no value")
        found[key] = value
    return found


def matches_machine_hostname(host: str) -> bool:
    """Whether a host name or address is this machine's."""
    import socket

    from phalanx.membership.address import names_loopback

    if names_loopback(host) or host in (socket.gethostname(), fq_hostname()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, proto, _, where in found:
        if where[0] in ("0.0.0.0", "::"):
            continue
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.bind((where[0], 0))  # only an address of this machine can be bound
            return True
        except OSError:
            continue
    return False


def create_tcp_store(params: RendezvousParameters) -> Any:
    """The store at a rendezvous endpoint: served by the node whose address it is, else a client of it.

    torch's own TCPStore where torch is loaded, because such programs hand it to torch; else Phalanx's, which
    speaks the same protocol.
    """
    from phalanx.environment import STORE_PORT
    from phalanx.errors import RendezvousConnectionError
    from phalanx.membership.address import parse_rendezvous_endpoint

    host, port = parse_rendezvous_endpoint(params.endpoint, STORE_PORT)
    given = params.get_as_bool("is_host")
    hosts = matches_machine_hostname(host) if given is None else given
    timeout = params.get_as_int("read_timeout", 60) or 60
    if timeout <= 0:
        raise ValueError(f"read_timeout={timeout}: use a whole number of seconds, 1 or more")
    error: Exception | None = None
    # Several agents on the host itself: one of them serves, and the others are clients.
    for serves in (True, False) if hosts and given is None else (hosts,):
        try:
            return _tcp_store(host, port, serves, timeout)
        except (OSError, RuntimeError, ValueError) as why:
            error = why
    raise RendezvousConnectionError(f"no store at {host}:{port}: {error}") from error


def _tcp_store(host: str, port: int, serves: bool, timeout: int) -> Any:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and hasattr(torch, "TCPStore"):
        from datetime import timedelta

        return torch.TCPStore(
            host, port, is_master=serves, timeout=timedelta(seconds=timeout), multi_tenant=True
        )
    from phalanx.integrations.torch_functions import create_c10d_store

    return create_c10d_store(serves, host, port, timeout=timeout, wait_for_workers=False)
