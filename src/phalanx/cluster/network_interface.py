"""The network interface for gloo and TensorPipe, where they would take the loopback for it.

Both look up the machine's own name, and the other nodes connect to its address. Where that is missing, or is
a loopback address (as Debian sets machines up), ranks of other machines would connect to themselves. Then
workers get the name of the interface by which this node reaches the workers' meeting place. If one of the two
variables is set, both stay as they are.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PATIENCE = 1.0  # for name look-ups: where they hang, workers get no name
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class NetworkInterface:
    """Found once per agent. Names are looked up in threads; the first look-up begins while the nodes meet."""

    def __init__(self, wake: Callable[[Callable[[], None]], None]) -> None:
        """`wake`: posts a call to the owner loop, so that it looks at `ready` again."""
        self._wake = wake
        self._found: str | None = None
        self._by = 0.0
        self._hidden = False  # this machine's name leads nowhere that others could reach
        self._own_name = self._begin(self._look_up_own_name)

    def _begin(self, look_up: Callable[[], None]) -> threading.Thread:
        import threading

        thread = threading.Thread(target=look_up, name="phalanx-interface", daemon=True)
        thread.start()
        return thread

    def _look_up_own_name(self) -> None:
        import socket

        from phalanx.job.address import is_loopback

        try:
            listed = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
        except OSError:
            listed = []
        self._hidden = all(is_loopback(str(one[4][0])) for one in listed)

    def find(self, environ: Mapping[str, str], meeting: str | None, own: str | None) -> None:
        """Begin to find it; `meeting` is the workers' MASTER_ADDR, `own` the address given to this node."""
        if meeting is None or any(environ.get(name) for name in VARIABLES):
            self._found = ""
        if self._found is not None or self._by:
            return
        self._by = time.monotonic() + _PATIENCE

        def look_up() -> None:
            self._own_name.join(_PATIENCE)
            self._found = _leading_to(meeting or "", own) if self._hidden else ""
            self._wake(lambda: None)

        self._begin(look_up)

    def deadline(self) -> float | None:
        """When a look-up that hangs is given up; None while none is under way."""
        return self._by if self._by and self._found is None else None

    @property
    def ready(self) -> bool:
        """Whether `environment` is known, or will not be."""
        return self._found is not None or time.monotonic() >= self._by

    @property
    def environment(self) -> dict[str, str]:
        """What the workers get."""
        return dict.fromkeys(VARIABLES, self._found) if self._found else {}


def _leading_to(meeting: str, own: str | None) -> str:
    """The interface to name; empty where none has to be, or none is known."""
    from phalanx.job.address import is_loopback

    address = _address(own or meeting, given=own is not None)
    return "" if not address or is_loopback(address) else interface_of(address)


def _address(name: str, given: bool) -> str:
    """A given name's own address; else the local one that leads there. Nothing is sent."""
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
    """The interface that has this address; empty where that is not known."""
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
