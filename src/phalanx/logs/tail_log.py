"""`TailLog` and `tail_logfile` with torch's signatures, on top of the tee.

Better than the originals in what people rely on: `stop` returns when everything that is in the files is on
the stream, lines of different files are never torn, and `interval_sec` is only the rate at which files are
looked at where the platform cannot tell about changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from phalanx.logs.tee import Tee

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
        self._tee = Tee(name, poll_interval=interval_sec)
        self._stopped = False
        # The default is recognised, because a filter, even one that says yes, costs a call per line.
        line_filter = None if log_line_filter is _every_line else log_line_filter
        for rank, path in log_files.items():
            prefix = (log_line_prefixes or {}).get(rank, f"[{name}{rank}]:")
            self._tee.follow(path, dst, prefix, line_filter)

    def start(self) -> TailLog:
        """Starts to follow; files may appear later."""
        self._tee.start()
        return self

    def stop(self) -> None:
        """Shows the rest of the files and ends; call it when the writers are done."""
        if not self._stopped:
            self._tee.drain()
            self._tee.stop()
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
    """Follows one file until `finished` is set and all it holds is shown."""
    tee = Tee(f"file-{file}", poll_interval=interval_sec)
    try:
        tee.follow(file, dst, header, log_line_filter)
        tee.start()
        finished.wait()
        tee.drain()
    finally:
        tee.stop()
