"""`ProcessFailure`: how one worker failed, from its exit status and its error file.

The file is read once, in the constructor, so that a failure can be pickled, sent to another node and reported
after the log directory is gone. A missing, huge or broken error file still gives a correct failure.
"""

from __future__ import annotations

import os
import time

from phalanx.core.diagnosis.exit_status import code_in_words, signal_label
from phalanx.core.diagnosis.failures import WorkerExit, is_victim, moment, own_code, shell_status
from phalanx.core.record import Record
from phalanx.worker import error_file as files

TYPE_CHECKING = False  # this module delays a restart: no typing
if TYPE_CHECKING:
    from typing import Any

    from phalanx.core.diagnosis.failures import ErrorRecord

NO_FILE = "<N/A>"
NO_MESSAGE = "<NONE>"
# torch's words for a failure without an error file: programs that read logs look for them.
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
SYSTEM_TERMINATED = {"category": "system_terminated_error", "retryability": "False"}


class ProcessFailure(Record, frozen=False):
    """A failed worker: its place, time, exit status and error record."""

    error_file_data: dict[str, Any]
    message: str
    timestamp: int  # whole seconds, as torch has it; from the error file if it has a time
    failed_at: float  # the same to a fraction of a second: the earliest is the root cause

    def __init__(
        self,
        local_rank: int,
        pid: int,
        exitcode: int,
        error_file: str,
        *,
        exited_at: float | None = None,
        stopped_at: float | None = None,
        tail: str = "",
        evidence: str = "",
        host: str = "",
        stderr_path: str = "",
        stdout_path: str = "",
        global_rank: int | None = None,
        role: str = "",
        alone: bool = False,
        tolerant: bool = False,
    ) -> None:
        """`tolerant`: an error file of the wrong shape counts as none; by default it raises, as in torch."""
        self.local_rank = local_rank
        self.pid = pid
        self.exitcode = exitcode
        self.error_file = error_file
        self.exited_at = exited_at
        self.stopped_at = stopped_at
        self.tail = tail
        self.evidence = evidence
        self.host = host
        self.stderr_path = stderr_path
        self.stdout_path = stdout_path
        self.global_rank = global_rank
        self.role = role
        self.alone = alone
        self.tolerant = tolerant
        self.__post_init__()

    def __post_init__(self) -> None:
        """Read the error file; `__post_init__`, because a dataclass that extends this class calls it."""
        if self.exited_at is None:
            self.exited_at = time.time()
        if not self.tolerant:
            files.check_shape(self.error_file)
        self.error: ErrorRecord | None
        self.error, self.no_error_reason = files.read_failure(self.error_file, self.exitcode)
        self.exitcode = own_code(self.ending())
        if self.error is None:
            self.error_file_data = {"message": NO_MESSAGE, "errorTraits": dict(SYSTEM_TERMINATED)}
            self.message = self._status_message()
        elif self.error.data:
            self.error_file_data = self.error.data
            self.message = self.error.message or self._status_message()
        else:
            # A crash stack instead of an error record.
            at = int((self.error.at or self.exited_at) * 1e9)
            about = files.message_data(self.error.message, self.error.traceback, at)
            self.error_file_data = {**about, "errorTraits": dict(SYSTEM_TERMINATED)}
            self.message = self._status_message()
            self.error_file += files.STACK_SUFFIX
        self.failed_at = moment(self.ending())
        written = self.error.at if self.error is not None and self.error.data else None
        self.timestamp = int(self.failed_at if written is None else written)
        if "was not written" in self.no_error_reason or self.error_file in ("", os.devnull):
            self.error_file = NO_FILE

    def __repr__(self) -> str:
        long = ("error_file_data", "tail", "error", "no_error_reason", "tolerant")
        shown = [f"{name}={value!r}" for name, value in vars(self).items() if name not in long]
        return f"{type(self).__name__}({', '.join(shown)})"

    def ending(self, rank: int | None = None) -> WorkerExit:
        """This failure as plain data for `core.diagnosis.failures`."""
        assert self.exited_at is not None
        return WorkerExit(
            rank=self.rank if rank is None else rank,
            pid=self.pid,
            code=self.exitcode,
            at=self.exited_at,
            error=self.error,
            stopped_at=self.stopped_at,
            tail=self.tail,
            host=self.host,
            evidence=self.evidence,
            alone=self.alone,
        )

    @property
    def rank(self) -> int:
        """The global rank if known, else the local one."""
        return self.local_rank if self.global_rank is None else self.global_rank

    @property
    def is_victim(self) -> bool:
        """Whether the launcher stopped this worker, as opposed to a failure of its own."""
        return is_victim(self.ending())

    @property
    def reported_exitcode(self) -> int:
        """The exit code to show: the `errorCode` of the error file, if it has one."""
        code = self.error.code if self.error is not None else None
        return self.exitcode if code is None else code

    @property
    def shell_status(self) -> int:
        """The exit code as a shell shows it (128+n for a signal)."""
        return shell_status(self.exitcode)

    @property
    def traceback(self) -> str:
        """The worker's traceback or crash stack, or an empty string."""
        return self.error.traceback if self.error is not None else ""

    def signal_name(self) -> str:
        """`SIGKILL` and so on; `<N/A>` if it was not killed by a signal with a name."""
        name = signal_label(-self.exitcode) if self.exitcode < 0 else ""
        return name if name.startswith("SIG") else NO_FILE

    def timestamp_isoformat(self) -> str:
        """The moment of failure in local time, to the millisecond, with the offset from UTC."""
        import datetime

        try:
            when = datetime.datetime.fromtimestamp(self.failed_at).astimezone()
        except (ValueError, OverflowError, OSError):
            return NO_FILE
        return when.isoformat(timespec="milliseconds")

    @staticmethod
    def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
        """The rank that failed first, and its failure."""
        from phalanx.observe.report import root_cause

        return root_cause(failures)

    @staticmethod
    def report(name: str, failures: dict[int, ProcessFailure], *, border: str, section: str) -> str:
        """The report about these failures, for `ChildFailedError`."""
        from phalanx.observe.report import format_report

        return format_report(name, failures, border=border, section=section)

    def _status_message(self) -> str:
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        status = code_in_words(self.exitcode)
        return f"{NO_TRACEBACK} (process {self.pid} failed with {status} and left no traceback)"
