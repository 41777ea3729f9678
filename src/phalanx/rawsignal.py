"""The signal module without its enumerations, which take longer to load than the rest of a helper's start.

The numbers and functions are the same; a default handler is 0 or 1 instead of a `Handlers` member.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
else:
    import _signal as signal

__all__ = ["signal"]
