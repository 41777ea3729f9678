"""Errors of stores that programs written for torch can catch under torch's names, where torch is loaded."""

from __future__ import annotations

import sys

from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def dist_store_error() -> type[Exception]:
    """What torch calls DistStoreError, where torch is loaded; else our own error of a wait that ends."""
    found: type[Exception] = getattr(
        sys.modules.get("torch.distributed"), "DistStoreError", StoreTimeoutError
    )
    return found


_made: dict[tuple[type, type], type] = {}


def as_torchs(error: StoreError) -> StoreError:
    """The same error, also an instance of torch's type for it; torch is not imported for this."""
    torch: Any = sys.modules.get("torch.distributed")
    wanted = "DistNetworkError" if isinstance(error, StoreConnectionError) else "DistStoreError"
    theirs = getattr(torch, wanted, None)
    mine = type(error)
    if theirs is None or issubclass(mine, theirs):
        return error
    if (mine, theirs) not in _made:
        names = {"__module__": mine.__module__, "__doc__": mine.__doc__}
        _made[mine, theirs] = type(mine.__name__, (mine, theirs), names)
    both: StoreError = _made[mine, theirs](*error.args)
    return both.with_traceback(error.__traceback__)
