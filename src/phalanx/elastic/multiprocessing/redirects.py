"""Redirects this process's stdout or stderr to a file at descriptor level, including output of C code.

Invariants
- Python's and C's buffers are flushed on entry and exit: each byte goes where it was printed.
- On exit the descriptor is restored, whatever the body raised; nested uses undo in order.
- Only descriptor 1 or 2 moves. A replaced `sys.stdout` (pytest, notebooks) is flushed and otherwise left as
  it is.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.elastic.lazy_modules import found_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["get_libc", "get_std_cm", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> Any:
    """The C library of this process, to flush C's buffers; None if it cannot be loaded."""
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
                pass  # closed or full: its buffer is lost either way, and the redirection is still valid
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
        saved = None  # it was closed (a daemon): close it again afterwards
    try:
        # O_APPEND: after a truncation, writes continue at the new end and leave no hole.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        target = os.open(to_file, flags, 0o600)
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
    """The redirection to a file; an empty name redirects nothing."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


__getattr__ = found_in(__name__)
