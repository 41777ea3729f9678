"""Namespaces of the campaign's own: it is process 1 of a PID namespace, with private mounts and networks.

When the campaign ends, however it ends, the kernel removes all processes, mounts and interfaces in them. A
host is a network namespace that only a descriptor keeps alive. Without privileges there are no hosts: agents
meet on loopback and link faults are left out.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx import kernel

_NEW_TIME, _NEW_MOUNT, _NEW_PID, _NEW_NET = 0x80, 0x20000, 0x20000000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int) -> None:
    if getattr(_libc, name)(*args):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def run_isolated(body: Callable[[bool], int]) -> int:
    """Run `body(True)` as process 1 of new namespaces, or `body(False)` here where that is not allowed."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("mount")):
        return body(False)
    try:
        _call("unshare", _NEW_MOUNT | _NEW_PID | _NEW_NET)
    except OSError:
        return body(False)
    parent = os.getpid()
    child = os.fork()
    if child:
        return _wait(child)
    code = 1
    try:
        kernel.die_with_parent()
        if os.path.exists(f"/proc/{parent}"):  # else it ended before the line above
            for words in (["--make-rprivate", "/"], ["-t", "proc", "proc", "/proc"]):
                _tool("mount", *words)
            _tool("ip", "link", "set", "lo", "up")
            code = body(True)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - the top of this process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """Pass signals on until the campaign ends; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child itself
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _frame: os.kill(child, signum))
    while True:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code


def _tool(*words: str, inside: ChaosHost | None = None) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=enter(inside))
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class ChaosHost(NamedTuple):
    """A network namespace with one interface."""

    name: str
    address: str
    namespace: int  # descriptor
    port: str  # of the switch


def enter(host: ChaosHost | None, clock: int = 0) -> Callable[[], None]:
    """What a new process does before it executes its program; `clock`: seconds by which its clocks differ."""

    def prepare() -> None:
        kernel.die_with_parent()
        if host is not None:
            _call("setns", host.namespace, _NEW_NET)
        if clock:
            _call("unshare", _NEW_TIME)
            Path("/proc/self/timens_offsets").write_text(f"monotonic {clock} 0\nboottime {clock} 0\n")

    return prepare


def clock_possible() -> bool:
    """Whether a process can have a monotonic clock of its own."""
    show = [sys.executable, "-c", "import time; print(time.monotonic())"]
    try:
        there = subprocess.run(show, capture_output=True, check=True, preexec_fn=enter(None, 7200)).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return float(there) - time.monotonic() > 3600


def mount_small_disk(folder: Path, size: str = "4m") -> None:
    """A file system of its own for logs."""
    _tool("mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder))


def unmount(folder: Path) -> None:
    """Undo `mount_small_disk`; files still open do not matter."""
    _tool("umount", "-l", str(folder))


class PrivateNetwork:
    """Hosts around one switch, in the campaign's own namespace."""

    def __init__(self, names: Sequence[str]) -> None:
        self.hosts: dict[str, ChaosHost] = {}
        try:
            _tool("ip", "link", "add", "sw0", "type", "bridge")
            _tool("ip", "link", "set", "sw0", "up")
            for number, name in enumerate(names, 1):
                self._add(name, number)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, number: int) -> None:
        host = ChaosHost(name, f"10.77.0.{number}", _new_network(), f"p{number}")
        self.hosts[name] = host
        where = f"/proc/{os.getpid()}/fd/{host.namespace}"
        _tool("ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", where)
        _tool("ip", "link", "set", host.port, "master", "sw0", "up")
        _tool("ip", "addr", "add", f"{host.address}/24", "dev", "eth0", inside=host)
        for device in ("lo", "eth0"):
            _tool("ip", "link", "set", device, "up", inside=host)
        # `refuse` gives a host the address of another one; it must not answer for it on the switch.
        _tool("sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore", inside=host)

    def close(self) -> None:
        """Remove everything; idempotent."""
        for host in self.hosts.values():
            os.close(host.namespace)
            subprocess.run(["ip", "link", "del", host.port], capture_output=True, check=False)
        self.hosts = {}
        subprocess.run(["ip", "link", "del", "sw0"], capture_output=True, check=False)

    # -- faults: each has an undo of the same shape -----------------------------------------------------

    def cut(self, name: str, on: bool) -> None:
        """Nothing passes the link, in either direction, and no error appears."""
        _tool("ip", "link", "set", self.hosts[name].port, *(("nomaster",) if on else ("master", "sw0")))

    def cut_one_way(self, source: str, target: str, on: bool) -> None:
        """Packets from one host to the other are lost."""
        address = self.hosts[target].address
        if on:
            lost = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            _tool("ip", "neigh", "replace", address, *lost, inside=self.hosts[source])
        else:
            _tool("ip", "neigh", "del", address, "dev", "eth0", inside=self.hosts[source])

    def refuse(self, name: str, target: str, on: bool) -> None:
        """Connections to a host are reset and refused: its address becomes local, without a listener."""
        address = f"{self.hosts[target].address}/32"
        _tool("ip", "addr", "add" if on else "del", address, "dev", "lo", inside=self.hosts[name])

    def delay(self, name: str, on: bool) -> None:
        """A slow link: 300 ms each way, or a rate so low that packets queue."""
        if not on:
            _tool("tc", "qdisc", "del", "dev", "eth0", "root", inside=self.hosts[name])
            return
        for kind in (("netem", "delay", "300ms", "50ms"), _SLOW):
            try:
                _tool("tc", "qdisc", "add", "dev", "eth0", "root", *kind, inside=self.hosts[name])
                return
            except OSError as error:
                problem = error
        raise problem


_SLOW = ("tbf", "rate", "24kbit", "burst", "1600", "latency", "2s")


def delay_possible() -> bool:
    """Whether the kernel has a way to slow a link down."""
    if not shutil.which("tc"):
        return False
    network = PrivateNetwork(["probe"])
    try:
        network.delay("probe", True)
    except OSError:
        return False
    finally:
        network.close()
    return True


def _new_network() -> int:
    """A descriptor of a new network namespace."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _call("unshare", _NEW_NET)
            os.write(theirs, b"1")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(theirs)
    try:
        if not os.read(ours, 1):
            raise OSError("a network namespace cannot be made")
        return os.open(f"/proc/{child}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
