"""The kernel's view of a process: its state letter in /proc."""

from __future__ import annotations

from phalanx.kernel import stat_fields


def read_proc_state(pid: int) -> str | None:
    """R, S, D, Z, T …; None when there is no such process, or no /proc."""
    fields = stat_fields(pid)
    return fields[0] if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether no signal, not even SIGKILL, can reach a process in this state."""
    return state == "D"
