"""Names of torch that begin with an underscore, and that real programs use all the same.

Each is here because a published package imports it; behaviour as in torch 2.13 to 2.15.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.handler import RendezvousParameters

IS_WINDOWS, IS_MACOS = sys.platform == "win32", sys.platform == "darwin"


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
        import json

        names = ("role", "rank", "local_world_size")
        return json.dumps({name: getattr(self, name) for name in names}).encode()

    @staticmethod
    def deserialize(data: bytes) -> RoleInstanceInfo:
        """What `serialize` made."""
        import json

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
    from phalanx.job.address import parse_rendezvous_endpoint

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

    from phalanx.job.address import names_loopback

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
