"""What `worker.keep` returns: a save that is over, or, with `wait=False`, one that is under way."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class PendingSave:
    """One save; over when it is made, unless there is something to finish."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        """`finish` completes the save in a thread of its own, which outlives the end of the program."""
        self._error: BaseException | None = None
        self._thread = None
        if finish is not None:
            import threading

            self._finish = finish
            self._thread = threading.Thread(target=self._run, name="phalanx-keep")
            self._thread.start()

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the save is over; never waits."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until the save is whole; raises what made it fail."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
