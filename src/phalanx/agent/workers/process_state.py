"""The state letter of a process in /proc."""

from __future__ import annotations

from phalanx.kernel import stat_fields


def read_proc_state(pid: int) -> str | None:
    """R, S, D, Z, T …; None without such a process, or without /proc."""
    fields = stat_fields(pid)
    return fields[0] if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in this state does not react to any signal, not even SIGKILL."""
    return state is not None and state.startswith("D")  # ps adds letters to it
