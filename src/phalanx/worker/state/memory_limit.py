"""How much memory this process may still take: of the machine, and of the control groups it is in."""

from __future__ import annotations

from phalanx.kernel import read_text

_SPARE = 256 << 20  # left to everything else
_UNLIMITED = 1 << 60


def available() -> int:
    """Bytes, with a margin taken off."""
    free = [_machine(), *_groups()]
    return max(0, min(free) - _SPARE)


def _machine() -> int:
    for line in read_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _groups(root: str = "/sys/fs/cgroup") -> list[int]:
    """What is left in each control group from this process's own upwards, of both versions."""
    found = []
    for line in read_text("/proc/self/cgroup").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds == "":
            files = (root, "memory.max", "memory.current", "inactive_file ")
        elif "memory" in kinds.split(","):
            files = (
                f"{root}/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            )
        else:
            continue
        top, limit, usage, cache = files
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for depth in range(len(names), -1, -1):
            where = "/".join([top, *names[:depth]])
            most, now = read_text(f"{where}/{limit}").strip(), read_text(f"{where}/{usage}").strip()
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                found.append(int(most) - int(now) + _reclaimable(f"{where}/memory.stat", cache))
    return found


def _reclaimable(path: str, field: str) -> int:
    for line in read_text(path).splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0
