"""`--hosts a,b,user@c:8` and `--hostfile FILE`: the hosts of a job and how many workers each runs.

A host file has a host on each line, as MPI's have: `a`, `a:8` or `a slots=8`; `#` begins a comment.
"""

from __future__ import annotations

import os

from phalanx.core.record import Record
from phalanx.job.surroundings import Surroundings, Taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class HostSlots(Record):
    """A host as ssh knows it, and its number of workers; 0: what --nproc-per-node says."""

    target: str  # [user@]name, as ssh takes it
    slots: int = 0

    @property
    def name(self) -> str:
        """The host in messages."""
        return self.target.rpartition("@")[2]


def parse_hosts(text: str) -> list[HostSlots]:
    """The hosts of a list between commas; ValueError says what is wrong."""
    return _checked(_host(word.strip()) for word in text.split(",") if word.strip())


def parse_host_file(text: str) -> list[HostSlots]:
    """The hosts of a file's lines."""
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        host = _host(words[0])
        found.append(host.replace(slots=_number(slots[0], line.strip())) if slots else host)
    return _checked(found)


def look_at_hosts(hosts: Sequence[HostSlots]) -> Surroundings:
    """What the list says about the job; the port is a random one, below those that Linux gives to clients."""
    if not hosts:
        return Surroundings("--hosts")
    first = hosts[0].name
    port = 16384 + int.from_bytes(os.urandom(2), "big") % 13000
    endpoint = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    settings = {
        "nnodes": Taken(str(len(hosts)), "the number of hosts"),
        "rdzv_backend": Taken("phalanx", "the hosts meet at a store"),
        "rdzv_endpoint": Taken(endpoint, "the first host"),
        "rdzv_id": Taken(os.urandom(6).hex(), "at random"),
    }
    return Surroundings("--hosts", settings)


def _host(word: str) -> HostSlots:
    if word.startswith("["):  # [::1]:8
        name, bracket, rest = word[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{word!r}: write an IPv6 address as [::1] or [::1]:SLOTS")
        slots = rest[1:]
    else:
        name, colon, slots = word.rpartition(":")
        if not colon or word.count(":") > 1:
            name, slots = word, ""
    host = HostSlots(name, _number(slots, word) if slots else 0)
    # ssh would take a name that begins with a dash for an option; a comma ends a name in --rdzv-conf.
    if name.startswith("-") or host.name[:1] in ("", "-") or not name.isprintable() or set(" ,") & set(name):
        raise ValueError(f"{word!r} is not a host; write HOST or HOST:SLOTS")
    return host


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10000):
        raise ValueError(f"{whole!r}: the number of workers must be a whole number, 1 or more")
    return int(text)


def _checked(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    found: dict[str, HostSlots] = {}
    for host in hosts:
        if host.target in found:
            raise ValueError(f"{host.target} is named twice; for two workers on it write {host.target}:2")
        found[host.target] = host
    if not found:
        raise ValueError("no host is named")
    return list(found.values())
