"""Signals of the agent: a scope in which they raise SignalException, and after which all is as before.

Python runs handlers in the main thread only, so in another thread the scope does nothing but warn.
Scopes may overlap, and end in any order: each removes its own handlers and no others. A handler that cannot
be removed (the scope ended in another thread, or a foreign handler calls it) passes signals on.
While a stop is under way the exception would interrupt it, so the scope can be deferred: a
signal then calls `hurry` at once, and the exception is raised when the stop is complete.
"""

from __future__ import annotations

import os
import signal
import sys

from phalanx.errors import SignalException
from phalanx.job import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType
    from typing import Any


def signals_to_handle(text: str | None = None) -> list[signal.Signals]:
    """The signals named in a comma-separated list; unknown names are reported and ignored."""
    if text is None:
        text = environment.signals()
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(signal.Signals[name])
        except KeyError:
            _warn(f"{environment.SIGNALS}: {name!r} is not a signal of this system; it is ignored")
    return found


def stray_signals(handled: list[signal.Signals]) -> list[signal.Signals]:
    """Other signals that would end this process without a word, in alphabetical order of their names.

    Not those of crashes, which a handler in Python would turn into an endless loop, and not those that are
    handled or ignored already.
    """
    names = ("SIGALRM", "SIGIO", "SIGPROF", "SIGPWR", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGXCPU")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [sig for sig in known if sig not in handled and signal.getsignal(sig) is signal.SIG_DFL]


class SignalScope:
    """Handlers that raise SignalException, from `__enter__` to `__exit__`."""

    def __init__(
        self,
        signals: list[signal.Signals] | None = None,
        post: Callable[[signal.Signals], None] | None = None,
    ) -> None:
        """`post`: called instead of raising, for an owner that has a loop to tell."""
        self._signals = signals
        self._post = post
        self._before: dict[signal.Signals, Any] = {}
        self._hurry: Callable[[], None] | None = None
        self._open = False
        self.seen: list[signal.Signals] = []
        self.armed = True  # raises once; a second exception would hit the handling of the first

    def __enter__(self) -> SignalScope:
        wanted = signals_to_handle() if self._signals is None else self._signals
        self._open = True
        if not _in_main_thread():
            if wanted:
                _warn("not in the main thread: signals are not turned into a stop of the workers")
            return self
        for sig in dict.fromkeys(wanted):  # named twice, it is still one handler
            before: Any = signal.getsignal(sig)
            while (over := _scope_of(before)) is not None and not over._open:
                before = over._before.get(sig, signal.SIG_DFL)  # it could not be taken out; now it is
            if sig == getattr(signal, "SIGHUP", None) and before is signal.SIG_IGN:
                continue  # nohup: it is ignored on purpose
            if before is None:
                continue  # set by C code; it could not be restored
            try:
                signal.signal(sig, self._handle)
                self._before[sig] = before
            except (OSError, ValueError) as error:  # SIGKILL, SIGSTOP
                _warn(f"{environment.SIGNALS}: {sig.name} cannot be handled: {error}")
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._open = False
        if not _in_main_thread():
            return  # the handlers can only be put back where they were set; until then they pass on
        for sig, before in self._before.items():
            now = signal.getsignal(sig)
            if now == self._handle:
                signal.signal(sig, before)
                continue
            # Another scope's handler replaced this one, and must not restore it; or a foreign handler did.
            top = _scope_of(now)
            for above in [] if top is None else list(top._from_here_down(sig)):
                if above._before.get(sig) == self._handle:
                    above._before[sig] = before

    def _from_here_down(self, sig: signal.Signals) -> Iterator[SignalScope]:
        """This scope and those that were entered before it and still have a handler below."""
        scope: SignalScope | None = self
        while scope is not None:
            yield scope
            scope = _scope_of(scope._before.get(sig))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sig = signal.Signals(number)
        if not self._open:
            self._pass_on(sig, frame)
            return
        for scope in self._from_here_down(sig):
            if scope._hurry is not None:  # a stop is under way there, which an exception would tear apart
                scope.seen.append(sig)
                scope._hurry()
                return
        for scope in self._from_here_down(sig):
            if scope._post is not None and scope._open:  # its owner knows what must not be torn apart
                scope.seen.append(sig)
                scope._post(sig)
                return
        self.seen.append(sig)
        if self.armed:
            self.armed = False
            raise SignalException(f"process {os.getpid()} got {sig.name}", sig)

    def _pass_on(self, sig: signal.Signals, frame: FrameType | None) -> None:
        """As if this scope had never been."""
        before = self._before.get(sig, signal.SIG_DFL)
        if callable(before):
            before(sig, frame)
        elif before == signal.SIG_DFL:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)

    def deferred(self, hurry: Callable[[], None]) -> Deferred:
        """Within: a signal calls `hurry`. Afterwards: the first signal of this scope is raised."""
        return Deferred(self, hurry)


class Deferred:
    """The time during which a SignalScope does not raise."""

    def __init__(self, scope: SignalScope, hurry: Callable[[], None]) -> None:
        self._scope = scope
        self._hurry = hurry
        self._nested = False
        self._first = False

    def __enter__(self) -> None:
        self._nested = self._scope._hurry is not None  # then the outer one raises
        if not self._nested:
            self._first = not self._scope.seen
            self._scope._hurry = self._hurry
            if len(self._scope.seen) > 1:
                self._hurry()  # another came since the one that led here

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._nested:
            return
        self._scope._hurry = None
        if error is None and self._first and self._scope.seen:
            sig = self._scope.seen[0]
            raise SignalException(f"process {os.getpid()} got {sig.name} while it was stopping", sig)


def _scope_of(handler: object) -> SignalScope | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, SignalScope) else None


def _in_main_thread() -> bool:
    threading = sys.modules.get("threading")  # not loaded: there is no other thread
    return threading is None or threading.current_thread() is threading.main_thread()


def _warn(message: str) -> None:
    from phalanx.log import warn

    warn(message)
