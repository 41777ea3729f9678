"""The network interface for gloo and TensorPipe, where they would take the loopback for it.

Both look up the machine's own name, and are met by the other nodes at what it stands for. Where that is
nothing, or only a loopback address (as Debian sets machines up), ranks of other machines would connect to
themselves. Then, and only then, workers are told the interface by which this node reaches the place where
they meet. Whoever has set one of the two variables is left alone with both.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PATIENCE = 1.0  # for looking up our own name: where that hangs, nothing is known
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class NetworkInterface:
    """Found once per agent. The look-up of our own name begins at once, while the nodes still meet."""

    def __init__(self) -> None:
        import threading

        self._found: str | None = None
        self._hidden = False  # our name is known to lead nowhere that others could reach
        self._by = time.monotonic() + _PATIENCE
        self._looking = threading.Thread(target=self._look_up, name="phalanx-interface", daemon=True)
        self._looking.start()

    def _look_up(self) -> None:
        import socket

        from phalanx.membership.address import is_loopback

        try:
            listed = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
        except OSError:
            listed = []
        self._hidden = all(is_loopback(str(one[4][0])) for one in listed)

    def environment(self, environ: Mapping[str, str], meeting: str | None, own: str | None) -> dict[str, str]:
        """What workers get; `meeting` is their MASTER_ADDR, `own` the address that this node was given."""
        if meeting is None or any(environ.get(name) for name in VARIABLES):
            return {}
        if self._found is None:
            self._looking.join(max(0.0, self._by - time.monotonic()))
            self._found = _leading_to(meeting, own) if self._hidden else ""
        return dict.fromkeys(VARIABLES, self._found) if self._found else {}


def _leading_to(meeting: str, own: str | None) -> str:
    """The interface to name; empty where none has to be, or none is known."""
    from phalanx.membership.address import is_loopback

    address = _address(own or meeting, given=own is not None)
    return "" if not address or is_loopback(address) else interface_of(address)


def _address(name: str, given: bool) -> str:
    """A given name's own address; else the one of ours that leads there. Nothing is sent."""
    import socket

    try:
        family, kind, proto, _, where = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        if given:
            return str(where[0])
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The interface that has this address; empty where that cannot be told."""
    import fcntl
    import socket
    import struct

    try:
        if ":" in address:
            packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            with open("/proc/net/if_inet6") as file:
                return next((line.split()[5] for line in file if line.startswith(packed)), "")
        wanted = socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                asked = struct.pack("40s", name.encode())
                try:
                    answer = fcntl.ioctl(probe, _GET_ADDRESS, asked)
                except OSError:
                    continue  # it has no address
                if answer[20:24] == wanted:
                    return name
    except OSError:
        pass
    return ""
