"""`TailLog` and `tail_logfile` with torch's signatures, on top of `LogFollower`.

Unlike the originals, `stop` returns when the stream has everything the files hold, lines of different files
never mix, and `interval_sec` is used only where files have to be polled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from phalanx.agent.logs.log_follower import LogFollower
from phalanx.elastic.lazy_modules import found_in

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["TailLog", "tail_logfile"]


def _every_line(_line: str) -> bool:
    return True


class TailLog:
    """Follows one file per rank to a stream, each line with its rank's prefix (default `[<name><rank>]:`)."""

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = _every_line,
    ) -> None:
        self._follower = LogFollower(name, poll_interval=interval_sec)
        self._stopped = False
        # The default is recognised, because even a filter that accepts everything costs a call per line.
        line_filter = None if log_line_filter is _every_line else log_line_filter
        for rank, path in log_files.items():
            prefix = (log_line_prefixes or {}).get(rank, f"[{name}{rank}]:")
            self._follower.follow(path, dst, prefix, line_filter)

    def start(self) -> TailLog:
        """Starts to follow; files may appear later."""
        self._follower.start()
        return self

    def stop(self) -> None:
        """Shows the rest of the files and stops following; call it after the writers have exited."""
        if not self._stopped:
            self._follower.drain()
            self._follower.stop()
            self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._stopped


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Follows one file until `finished` is set and everything it holds is shown."""
    follower = LogFollower(f"file-{file}", poll_interval=interval_sec)
    try:
        follower.follow(file, dst, header, log_line_filter)
        follower.start()
        finished.wait()
        follower.drain()
    finally:
        follower.stop()


__getattr__ = found_in(__name__)
