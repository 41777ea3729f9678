"""`record` and `ErrorHandler`: record a worker's exception in the error file.

Phalanx captures the traceback of a Python worker without the decorator. It is for programs that also run
under other launchers, and for programs that start workers themselves: a `ChildFailedError` passes the child's
error file on, so that the outermost launcher shows the innermost cause.

The environment is read when an error is recorded, not at import: a forked worker has its own value.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from phalanx.errors import ChildFailedError
from phalanx.worker import error_file as files

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    from phalanx.agent.workers.failure import ProcessFailure

    P = ParamSpec("P")
    R = TypeVar("R")


class ErrorHandler:
    """Writes errors of this process to its error file; subclasses may do more."""

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Note the name of the function that `record` decorates; called before `initialize`."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Make a crash in native code print its Python stack, unless faulthandler is already enabled."""
        import faulthandler

        if faulthandler.is_enabled():
            return
        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError, AttributeError):
            faulthandler.enable(2, all_threads=True)  # sys.stderr is no file: closed, or a notebook's

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file, if this process has one."""
        path = _own_error_file()
        if path:
            files.write_exception(path, e)

    def record_success(self) -> None:
        """Called when the decorated function has returned; does nothing here."""

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """The report's text about a worker that a signal killed; a subclass may add what it knows."""
        return message

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add `error_code` to a child's error data, in place, unless its message is plain text."""
        content = rootcause_error.get("message")
        if isinstance(content, dict):
            content["errorCode"] = error_code
        else:
            # Logged, not warned: a warning can become an exception, which would hide the failure.
            import logging

            logging.getLogger("phalanx").warning(
                "error file %s: its message is plain text; ignoring error code %s",
                rootcause_error_file,
                error_code,
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, with the child's exit code if given."""
        record, reason = files.read_with_reason(rootcause_error_file)
        if record is None:
            data = files.message_data(f"a child process failed; {reason}", "", code=error_code or None)
        else:
            data = record.data or {}
            if error_code:
                self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        path = _own_error_file()
        if path and os.path.realpath(path) != os.path.realpath(rootcause_error_file):
            files.write_data(path, data)


def _own_error_file() -> str:
    return os.environ.get(files.VARIABLE, "")


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses by default."""
    return ErrorHandler()


def current_handler() -> ErrorHandler:
    """What `get_error_handler` gives, also where a program has replaced it at torch's path."""
    errors: Any = sys.modules.get("phalanx.elastic.multiprocessing.errors")
    made: ErrorHandler = getattr(errors, "get_error_handler", get_error_handler)()
    return made


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorate a worker's main function: an exception is written to the error file and raised again."""
    handler = error_handler or current_handler()

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.set_entrypoint_fn_name(getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as stop:
            if stop.code == 0:
                return None  # like torch's decorator
            if stop.code is not None:
                handler.record_exception(stop)
            raise
        except ChildFailedError as failed:
            _pass_on(failed, handler)
            raise
        except BaseException as error:
            handler.record_exception(error)
            raise
        handler.record_success()  # an error of its own is not one of the function
        return result

    return recorded


def _pass_on(failed: ChildFailedError, handler: ErrorHandler) -> None:
    """Pass the child's error file on; a child that left none (a signal, a bare exit) has no record."""
    _, failure = failed.get_first_failure()
    if failure.error is not None and failure.error.data and os.path.exists(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
        # A later handler of this exception (an excepthook) must not overwrite the child's record.
        files.mark_recorded(failed, _own_error_file())


def record_root_cause(cause: ProcessFailure | str, code: int) -> None:
    """Write why the workers failed to the error file of this process, the launcher."""
    path = _own_error_file()
    if isinstance(cause, str):
        data = files.message_data(cause, "", code=code)
    elif cause.error is not None and cause.error.data:
        data = dict(cause.error.data)
        content = data["message"]
        if isinstance(content, dict):  # the worker's own code, if it has named one
            data["message"] = {"errorCode": cause.exitcode, **content}
    else:
        at = int(cause.failed_at * 1e9)
        data = files.message_data(cause.message, cause.traceback, at, cause.exitcode)
    if path:
        files.write_data(path, data)
