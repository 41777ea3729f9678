"""Endpoints and addresses. Never a reverse look-up: it can hang for a minute where DNS is poor."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket as socket


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """(host, port) of `host:port`, `[v6]:port`, `host`, or nothing at all (localhost)."""
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    if "," in text:
        raise ValueError(f"rendezvous endpoint {endpoint!r}: name one; several are for --rdzv-backend etcd")
    if "://" in text:
        raise ValueError(
            f"rendezvous endpoint {endpoint!r}: write host:port, without {text.partition('://')[0]}://"
        )
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise ValueError(f"rendezvous endpoint {endpoint!r}: write [address]:port")
        colon, port = rest[:1], rest[1:]
    elif text.count(":") > 1:
        raise ValueError(f"rendezvous endpoint {endpoint!r}: put an IPv6 address in brackets: [{text}]:port")
    else:
        host, colon, port = text.partition(":")
    if colon and not port:
        raise ValueError(f"rendezvous endpoint {endpoint!r}: the port after ':' is missing")
    if any(not (char.isalnum() or char in "_.:-%") for char in host):
        raise ValueError(f"rendezvous endpoint {endpoint!r}: {host!r} is not a valid host name")
    if not host:
        raise ValueError(f"rendezvous endpoint {endpoint!r}: the host is missing")
    if not port:
        return host, default_port
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"rendezvous endpoint {endpoint!r}: the port must be a number from 0 to 65535")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can use an address."""
    return address.startswith("127.") or address == "::1"


def names_loopback(host: str) -> bool:
    """Whether the host is this machine, by name or address."""
    return host == "localhost" or is_loopback(host)


def listening_address(host: str) -> str:
    """The address to listen on for a host name: the name itself, unless it is a loopback address here.

    Many systems give a machine's own name a loopback address (Debian: 127.0.1.1). Other nodes know it by
    another address, which this machine cannot find out, so it listens on all of its addresses.
    """
    if names_loopback(host):
        return host
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host  # binding it gives the better message
    return "0.0.0.0" if all(is_loopback(str(where[4][0])) for where in found) else host


def own_address() -> str:
    """The name other nodes are most likely to know this one by."""
    import socket

    return socket.gethostname()


def free_port() -> int:
    """A port that was free a moment ago; only for workers that bind it themselves."""
    probe = bound_everywhere()
    try:
        return int(probe.getsockname()[1])
    finally:
        probe.close()


def bound_everywhere(port: int = 0) -> socket.socket:
    """A socket at all addresses of this machine, of both families if it has both; it does not listen yet."""
    import _socket as socket  # not socket: every start of one node waits for this

    failure: OSError | None = None
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            failure = error
            continue
        try:
            if port:  # one that the system chooses has no old connections, and is held against everybody
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind((address, port))
        except OSError as error:
            failure = error
            made.close()
            continue
        return made
    assert failure is not None
    raise failure
