"""Every exception Phalanx raises on purpose, in one tree.

    PhalanxError
    ├── UsageError (ValueError)             a command line, variable or option is wrong → exit code 2
    ├── StartError (RuntimeError)           workers could not be started; nothing is left half-started
    │   ├── ProgramNotFoundError (FileNotFoundError)
    │   └── ProgramNotExecutableError (PermissionError)
    ├── NodeUnfit                           this node failed its check and stays out of the job
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

Where torch's exception of the same name is loaded, an instance is also one of that: `except` clauses written
for torch catch it. A clause looks at the classes of an exception alone, so such an instance has a class that
is made of both.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing and signal would cost every start some milliseconds
if TYPE_CHECKING:
    import signal
    from typing import Any

    from typing_extensions import Self

    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.core.diagnosis.fitness import NodeVerdict


# Exceptions that torch has too: name → its module there.
_ERRORS = "torch.distributed.elastic.multiprocessing.errors"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.api"
_TORCHS = {
    "ChildFailedError": _ERRORS,
    "SignalException": "torch.distributed.elastic.multiprocessing.api",
    "RendezvousError": _RENDEZVOUS,
    "RendezvousClosedError": _RENDEZVOUS,
    "RendezvousTimeoutError": _RENDEZVOUS,
    "RendezvousConnectionError": _RENDEZVOUS,
    "RendezvousStateError": _RENDEZVOUS,
    "RendezvousGracefulExitError": _RENDEZVOUS,
}


class PhalanxError(Exception):
    """The root of the tree."""


class AlsoTorchs(Exception):
    """Of an exception that torch has too: its instances are torch's as well, where torch's is loaded."""

    _plain: type[AlsoTorchs] | None = None  # of a class made of ours and torch's: ours

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made: Self = super().__new__(_with_torchs(cls), *args)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the plain class: the process that reads it may have no torch."""
        found: Any = super().__reduce__()
        return (type(self)._plain or found[0], *found[1:])


def _with_torchs(cls: Any) -> Any:
    """The class itself, or one that is also torch's of the same name."""
    module = sys.modules.get(_TORCHS.get(cls.__name__, ""))
    theirs = getattr(module, cls.__name__, None)
    if cls.__module__ != __name__ or not isinstance(theirs, type) or issubclass(cls, theirs):
        return cls
    made = _made.get(theirs)
    if made is None:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        made = _made[theirs] = type(cls.__name__, (cls, theirs), {**body, "_plain": cls})
    return made


_made: dict[type, type] = {}


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


class NodeUnfit(PhalanxError):
    """This node failed its check and stays out of the job."""

    def __init__(self, message: str, verdict: NodeVerdict | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict  # for the quarantine


class UnkillableError(PhalanxError, RuntimeError):
    """Processes survived SIGKILL; the message names pid and state."""


class StateError(PhalanxError, RuntimeError):
    """State could not be kept, because it does not fit, or ranks could not agree on what they have kept."""


class SignalException(AlsoTorchs, PhalanxError):  # torch's name
    """Raised in the main thread when a handled signal arrives."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        Exception.__init__(self, msg)  # not the next class's, which may be torch's
        self.sigval = sigval


class ChildFailedError(AlsoTorchs, PhalanxError):
    """A group of workers failed; `str()` is the failure report, written on demand."""

    def __init__(
        self,
        name: str,
        failures: dict[int, ProcessFailure],
        stopped: dict[int, ProcessFailure] | None = None,
    ) -> None:
        """`stopped`: the workers that were stopped because of the failures; the report names them."""
        if not failures:
            raise AssertionError(f"ChildFailedError({name!r}): needs at least one failure to report")
        self.name = name
        self.failures = failures
        self.stopped = stopped or {}
        # As arguments of the exception, they make it picklable.
        Exception.__init__(self, name, failures, self.stopped)

    def __str__(self) -> str:
        return "\n" + self.format_msg()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, ranks={sorted(self.failures)})"

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank and failure that is the root cause."""
        return self._reporter.root_cause(self.failures)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The whole report as plain text."""
        everyone = {**self.failures, **self.stopped}
        return self._reporter.report(self.name, everyone, border=boarder_delim, section=section_delim)

    @property
    def _reporter(self) -> type[ProcessFailure]:
        """The class of the failures writes their report: this module is below everything that could."""
        return type(next(iter(self.failures.values())))


class StoreError(PhalanxError):
    """Something about the key-value store."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection to it was lost."""


class StoreAuthError(StoreError):
    """The two sides do not hold the same token."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key or a barrier was not there in time."""


class RendezvousError(AlsoTorchs, PhalanxError):
    """Something about forming the group of nodes."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: the job is over."""


class RendezvousTimeoutError(RendezvousError):
    """Not enough nodes joined in time."""


class RendezvousConnectionError(RendezvousError):
    """The rendezvous backend cannot be reached, or refuses this node."""


class RendezvousStateError(RendezvousError):
    """The backend holds an invalid state."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was asked to leave; the job goes on without it."""
