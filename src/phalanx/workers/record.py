"""`record` and `ErrorHandler`: how a worker leaves word of an exception for whoever started it.

Phalanx captures the traceback of a Python worker without any of this. The decorator is for programs that are
also started by other launchers, and for programs that themselves start workers: a `ChildFailedError` that
passes through hands the child's error file up, so that the outermost launcher shows the innermost cause.

The environment is read when an error is recorded, never at import: a forked worker gets its own value.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from phalanx.errors import ChildFailedError
from phalanx.workers import error_file as files

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")


class ErrorHandler:
    """Writes errors of this process to the file that its parent named; subclasses may do more."""

    def initialize(self) -> None:
        """Have a crash in native code print its Python stack; leaves a handler that is already on alone."""
        import faulthandler

        if faulthandler.is_enabled():
            return
        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError, AttributeError):
            # No stderr with a file descriptor (closed, or replaced by an object in a notebook): go without.
            pass

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file; does nothing when no file was named."""
        path = self._path()
        if path:
            files.write_exception(path, e)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put `error_code` into a child's error data, in place; a plain text message has no room for one."""
        told = rootcause_error.get("message")
        if isinstance(told, dict):
            told["errorCode"] = error_code
        else:
            # Logged, not warned: a warning can be made an exception, which would hide the failure.
            import logging

            logging.getLogger("phalanx").warning(
                "error file %s: its message is plain text; error code %s is left out",
                rootcause_error_file,
                error_code,
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to our own, with the child's exit code in it when one is given."""
        record, reason = files.read_with_reason(rootcause_error_file)
        if record is None:
            data = files.message_data(f"a child process failed; {reason}", "", code=error_code or None)
        else:
            data = record.data or {}
            if error_code:
                self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        path = self._path()
        if path and not _same_file(path, rootcause_error_file):
            files.write_data(path, data)

    def _path(self) -> str:
        return os.environ.get(files.VARIABLE, "")


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses when it is given none."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorate a worker's main function: its exception goes to the error file, then on to the caller."""
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as stop:
            if stop.code == 0:
                return None  # as people know it from torch's decorator
            if stop.code is not None:
                handler.record_exception(stop)
            raise
        except ChildFailedError as failed:
            _hand_up(failed, handler)
            raise
        except BaseException as error:
            handler.record_exception(error)
            raise

    return recorded


def _hand_up(failed: ChildFailedError, handler: ErrorHandler) -> None:
    _, failure = failed.get_first_failure()
    path = os.environ.get(files.VARIABLE, "")
    if failure.error is not None and failure.error.data and os.path.exists(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
    elif path:
        # The child left no file of its own (a signal, a bare exit): say what we know in its place.
        at = int(failure.timestamp * 1e9)
        files.write_data(path, files.message_data(failure.message, failure.traceback, at, failure.exitcode))
    # Whoever sees this exception next (an excepthook) must not write over the child's own words.
    files.mark_recorded(failed, path)
