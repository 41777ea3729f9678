"""Sends this process's stdout or stderr to a file at descriptor level, so that C code is caught too.

Invariants
- Python's and C's buffers are flushed on the way in and on the way out: each byte lands on the side where
  it was printed.
- On exit the descriptor is what it was before, whatever the body raised; nested uses undo in order.
- It is descriptor 1 or 2 that moves. A `sys.stdout` that was replaced (pytest, notebooks) is flushed but
  left alone: who replaced it decides where it goes.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["get_libc", "get_std_cm", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> Any:
    """The C library of this process, or None where there is none to be had; used to flush C's buffers."""
    try:
        import ctypes

        return ctypes.CDLL(None)
    except (ImportError, OSError, TypeError):
        return None


def _flush(std: str, libc: Any) -> None:
    for stream in (getattr(sys, std, None), getattr(sys, f"__{std}__", None)):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # closed or full: what it held is lost either way, and the redirection still stands
    if libc is not None:
        libc.fflush(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """While the body runs, everything written to `std` ("stdout" or "stderr") goes to `to_file`."""
    fd = _DESCRIPTORS.get(std)
    if fd is None:
        raise ValueError(f'redirect({std!r}): unknown stream; use "stdout" or "stderr"')
    libc = get_libc()
    _flush(std, libc)
    try:
        saved: int | None = os.dup(fd)
    except OSError:
        saved = None  # it was closed before (a daemon): close it again afterwards
    try:
        # O_APPEND: when somebody truncates the log, writing goes on at its new end, not after a hole.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        target = os.open(to_file, flags, 0o666)
    except OSError:
        if saved is not None:
            os.close(saved)
        raise
    try:
        if target == fd:
            os.set_inheritable(fd, True)
        else:
            os.dup2(target, fd)
            os.close(target)
        yield
    finally:
        _flush(std, libc)
        if saved is None:
            os.close(fd)
        else:
            os.dup2(saved, fd)
            os.close(saved)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def get_std_cm(
    std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """The redirection to a file, or none for an empty name."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
