"""Every exception Phalanx raises on purpose, in one tree.

    PhalanxError
    ├── UsageError (ValueError)             a command line, variable or option is wrong → exit code 2
    ├── StartError (RuntimeError)           workers could not be started; nothing is left half-started
    │   ├── ProgramNotFoundError (FileNotFoundError)
    │   └── ProgramNotExecutableError (PermissionError)
    ├── UnkillableError (RuntimeError)      a worker survived SIGKILL (uninterruptible sleep)
    ├── SignalException                     a signal asked the agent to stop
    ├── ChildFailedError                    workers failed; carries the failures and prints the report
    ├── StoreError
    │   ├── StoreConnectionError (ConnectionError)
    │   ├── StoreAuthError                  the token was refused
    │   └── StoreTimeoutError (TimeoutError)
    ├── StateError (RuntimeError)           state could not be kept, or agreed on
    └── RendezvousError
        ├── RendezvousClosedError
        ├── RendezvousTimeoutError
        ├── RendezvousConnectionError
        ├── RendezvousStateError
        └── RendezvousGracefulExitError     the node was asked to leave; not a failure

A message says what happened, the value, and what to do about it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing and signal would cost every start some milliseconds
if TYPE_CHECKING:
    import signal

    from phalanx.workers.failure import ProcessFailure


class PhalanxError(Exception):
    """The root of the tree."""


class UsageError(PhalanxError, ValueError):
    """Bad input from a person: shown as one line, exit code 2, before anything starts."""


class StartError(PhalanxError, RuntimeError):
    """The group could not be started; every process made for it is gone."""


class ProgramNotFoundError(StartError, FileNotFoundError):
    """The program that the workers are to run does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])  # an OSError with an errno would add its own text


class ProgramNotExecutableError(StartError, PermissionError):
    """The program that the workers are to run exists, but is not executable."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnkillableError(PhalanxError, RuntimeError):
    """Processes survived SIGKILL; the message names pid and state."""


class StateError(PhalanxError, RuntimeError):
    """State could not be kept, because it does not fit, or ranks could not agree on what they have kept."""


class SignalException(PhalanxError):  # torch's name
    """Raised in the main thread when a handled signal arrives."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class ChildFailedError(PhalanxError):
    """A group of workers failed; `str()` is the failure report, written on demand."""

    def __init__(
        self,
        name: str,
        failures: dict[int, ProcessFailure],
        stopped: dict[int, ProcessFailure] | None = None,
    ) -> None:
        """`stopped`: the workers that were stopped because of the failures; the report names them."""
        if not failures:
            raise ValueError(f"ChildFailedError({name!r}): needs at least one failure to report")
        self.name = name
        self.failures = failures
        self.stopped = stopped or {}
        # As arguments of the exception, they make it picklable.
        super().__init__(name, failures, self.stopped)

    def __str__(self) -> str:
        return "\n" + self.format_msg()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, ranks={sorted(self.failures)})"

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank and failure that is the root cause."""
        from phalanx.observe.report import root_cause

        return root_cause(self.failures)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The whole report as plain text."""
        from phalanx.observe.report import format_report

        everyone = {**self.failures, **self.stopped}
        return format_report(self.name, everyone, border=boarder_delim, section=section_delim)


class StoreError(PhalanxError):
    """Something about the key-value store."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection to it was lost."""


class StoreAuthError(StoreError):
    """The two sides do not hold the same token."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key or a barrier was not there in time."""


class RendezvousError(PhalanxError):
    """Something about forming the group of nodes."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: the job is over."""


class RendezvousTimeoutError(RendezvousError):
    """Not enough nodes joined in time."""


class RendezvousConnectionError(RendezvousError):
    """The rendezvous backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The backend holds an invalid state."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was asked to leave; the job goes on without it."""
