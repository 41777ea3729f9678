"""The signal module without its enumerations, which take longer to load than all that helpers do at first.

The numbers and functions are the same; a handler that was never set is 0 or 1 instead of a `Handlers`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
else:
    import _signal as signal

__all__ = ["signal"]
