"""Terminal modes: a worker that is killed at a prompt (pdb, readline) leaves them changed."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any


class KeptModes:
    """Saves the terminal's modes on entry and restores them on exit."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._modes: list[Any] | None = None

    def __enter__(self) -> KeptModes:
        if os.isatty(self._fd):
            import termios

            try:
                self._modes = termios.tcgetattr(self._fd)
            except termios.error:
                pass  # it was just closed
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._modes is None:
            return
        import termios

        try:
            # Not from the background: setting the modes there would stop this process.
            if os.tcgetpgrp(self._fd) == os.getpgrp() and termios.tcgetattr(self._fd) != self._modes:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)
        except (OSError, termios.error):
            pass  # the terminal is gone
