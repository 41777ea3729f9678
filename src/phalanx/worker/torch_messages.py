"""What torch's libraries write to stderr by themselves: where it would only mislead, it is kept back.

The level is a variable of its library, which the messages are compared with when they are written.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LEVEL = "FLAGS_caffe2_log_level"
_ERRORS = 2


def errors_only() -> Callable[[], None]:
    """Keep back what is less than an error, until the result is called; torch has been imported."""
    import ctypes

    torch: Any = sys.modules["torch"]
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        level = ctypes.c_int.in_dll(library, _LEVEL)
    except (OSError, ValueError):
        return lambda: None  # built in another way
    before = level.value
    level.value = max(before, _ERRORS)

    def restore() -> None:
        level.value = before

    return restore
