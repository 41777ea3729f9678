"""torch's `PContext`, for classes of third parties that start workers in their own way.

A subclass writes `_start`, `_poll`, `_close` and `pids`. The groups of `start_processes` are instances too,
although they share no code with it: they wait for events, and this class asks at intervals.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod

from phalanx.agent.logs.console import Console
from phalanx.agent.workers.signals import SignalScope
from phalanx.agent.workers.worker_group import PContext, check_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.workers.result import RunProcsResult


class PolledContext(ABC):
    """A group of worker processes on this host."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        nprocs = len(args)
        check_ranks("args", args, nprocs)
        check_ranks("envs", envs, nprocs)
        self.name, self.entrypoint, self.args, self.envs, self.nprocs = name, entrypoint, args, envs, nprocs
        logs = logs_specs.reify(envs)
        self.stdouts, self.stderrs, self.error_files = logs.stdouts, logs.stderrs, logs.error_files
        self.filtered_stdout, self.filtered_stderr = logs.filtered_stdout, logs.filtered_stderr
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        self._console = Console(name, logs, log_line_prefixes, filters)
        self._signals = SignalScope()

    @abstractmethod
    def _start(self) -> None:
        """Start the workers, without waiting for them."""

    @abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """The result, once all workers have ended or one has failed; None before."""

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Stop what is left of the workers."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Process ids, by local rank."""

    def start(self) -> None:
        """Start the workers, and show their output where that is asked for.

        Until `close`, a signal raises SignalException."""
        self._signals.__enter__()
        self._start()
        self._console.start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result; None if there is none within `timeout` seconds (0: ask once, negative: for ever)."""
        self._signals.armed = True
        end = time.monotonic() + timeout
        while True:
            result = self._poll()
            left = end - time.monotonic() if timeout >= 0 else period
            if result is not None or left <= 0:
                return result
            time.sleep(min(period, left))

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop the workers with a signal, SIGTERM by default; after `timeout` seconds with SIGKILL."""
        try:
            self._close(death_sig or signal.SIGTERM, timeout)
            while not self._console.finish(1.0):
                pass
        finally:
            self._console.stop()
            self._signals.__exit__(None, None, None)


PolledContext.register(PContext)  # type: ignore[type-abstract]  # only isinstance looks at it
