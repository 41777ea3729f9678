"""What a launch must have in common with an earlier one to use the zygote that it left behind.

Everything that a worker inherits from its launcher and that cannot be given to it afterwards, or only with
privileges, is part of the key and compared as a whole: a kept zygote is used where nobody can tell the
difference, and not at all elsewhere. What a start hands over anyway (standard streams, arguments, variables
of a round) is not.
"""

from __future__ import annotations

import os
import sys

from phalanx import kernel
from phalanx.job.environment import socket_scope
from phalanx.python_command import PACKAGE_ROOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PROTOCOL = "1"  # between an agent and a kept zygote

# Change from one command of a shell to the next, and say nothing about it.
_PASSING = frozenset({"_", "OLDPWD", "SHLVL"})
_OWN = ("PHALANX_", "PET_")  # options of the launcher

_STATUS = (
    "Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Seccomp_filters", "Cpus_allowed_list", "Mems_allowed_list", "THP_enabled",
)  # fmt: skip
_FILES = (
    "limits", "oom_score_adj", "timerslack_ns", "personality", "coredump_filter", "loginuid", "sessionid",
    "attr/current", "cgroup",
)  # fmt: skip

# get_mempolicy, ioprio_get, keyctl: numbers of system calls
_CALLS = {"x86_64": (239, 252, 250), "aarch64": (236, 31, 219)}
_IOPRIO_WHO_PROCESS = 1
_KEYCTL_GET_KEYRING_ID, _SESSION_KEYRING = 0, -3


def launch_key(program: str, preload: Iterable[str], environ: Mapping[str, str]) -> str:
    """`program`: script, interpreter, flags and the state of the package directories (import_cache.py)."""
    parts = [_PROTOCOL, program, *preload, *_interpreter()]
    parts += [f"{name}={value}" for name, value in sorted(environ.items()) if not _is_passing(name)]
    parts += _surroundings()
    return "\n".join(part.replace("\n", "\\n") for part in parts)


def name_of(program: str) -> str:
    """The name of the socket: one for each script and interpreter of a user. It ends in the script's name."""
    import zlib

    what, *rest = program.split("|")
    data = "|".join([what, *(part for part in rest if "@" not in part)]).encode("utf-8", "surrogateescape")
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in os.path.basename(what))
    place = f"{zlib.crc32(data):08x}{zlib.adler32(data):08x}"
    return f"\0phalanx-kept/{socket_scope()}{place}/{shown.replace(' ', '?')[-40:]}"


def _is_passing(name: str) -> bool:
    return name in _PASSING or name.startswith(_OWN)


def _interpreter() -> list[str]:
    here = os.path.join(PACKAGE_ROOT, "phalanx")
    own = [f"{name} {_newest(os.path.join(here, name))}" for name in ("helpers", "helpers/preload", "worker")]
    return [sys.version, f"{sys.executable} {_identity(sys.executable)}", here, *own]


def _newest(folder: str) -> str:
    """The state of the package's own files. Not of the folder: it changes when byte code is first written."""
    with os.scandir(folder) as entries:
        times = [entry.stat().st_mtime_ns for entry in entries if entry.name.endswith(".py")]
    return f"{len(times)} {max(times, default=0)}"


def _surroundings() -> list[str]:
    """What a child inherits of this process."""
    lines = kernel.read_text("/proc/self/status").splitlines()
    found = [line for line in lines if line.partition(":")[0] in _STATUS]
    found += [f"{name} {kernel.read_text('/proc/self/' + name)}" for name in _FILES]
    for name in kernel.list_dir("/proc/self/ns"):
        found.append(f"{name} {_link('/proc/self/ns/' + name)}")
    found.append(f"root {_link('/proc/self/root')} {_identity('/')}")
    found.append(f"directory {_link('/proc/self/cwd')} {_identity('.')}")
    found.append(f"host {os.uname().nodename}")
    found.append(f"nice {os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}")
    return found + _asked_of_the_kernel()


def _asked_of_the_kernel() -> list[str]:
    """The policies for memory and disk, and the keyring: no file shows them."""
    calls = _CALLS.get(os.uname().machine)
    if calls is None:
        return []
    call = kernel.system_call
    mode = bytes(bytearray(8))  # an object of its own: the kernel writes into it
    policy = call(calls[0], mode, 0, 0, 0, 0)
    return [
        f"memory policy {policy} {mode[:4].hex()}",
        f"disk priority {call(calls[1], _IOPRIO_WHO_PROCESS, 0)}",
        f"keyring {call(calls[2], _KEYCTL_GET_KEYRING_ID, _SESSION_KEYRING, 0)}",
    ]


def _identity(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return "missing"
    if path in ("/", "."):
        return f"{found.st_dev} {found.st_ino}"
    return f"{found.st_dev} {found.st_ino} {found.st_mtime_ns} {found.st_size}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
