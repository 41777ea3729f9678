"""The logs of one run: its directory, and what is left of it at the end."""

from __future__ import annotations

import os

from phalanx.observe.log_layout import worker_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.agent.logs.specs import DefaultLogsSpecs, LogsSpecs
    from phalanx.agent.workers.worker_group import PContext


class RunLogs:
    """Where the workers of one agent write."""

    def __init__(self, specs: LogsSpecs | None, run_id: Callable[[], str]) -> None:
        """`specs`: None where the agent's owner has workers, and logs, of its own."""
        self.specs, self._run_id = specs, run_id
        self._early: str | None = None

    def _default(self) -> DefaultLogsSpecs | None:
        """The specs, unless they are a plug-in's, which has its own layout of files."""
        from phalanx.agent.logs.specs import DefaultLogsSpecs

        return self.specs if isinstance(self.specs, DefaultLogsSpecs) else None

    def directory(self, context: PContext | None) -> str | None:
        """The directory of this run, once workers have started."""
        if context is None or not context.error_files:
            return self._early
        if self._default() is None and self.specs is not None:
            return self.specs.root_log_dir
        directory = worker_directory(next(iter(context.error_files.values())))
        return os.path.dirname(os.path.dirname(directory)) if directory else None

    def make(self) -> None:
        """Make that directory, where it was named, for a node that ends before its workers start."""
        specs = self._default()
        if specs is not None and not specs.is_temporary:
            try:
                self._early = specs.run_dir(self._run_id())
            except OSError:
                pass  # it may be what this node ends for

    def remove_empty(self) -> None:
        """Remove the temporary directories of this run that hold no output; given ones stay."""
        specs = self._default()
        if specs is not None:
            specs.remove_empty()

    def clean_up(self, succeeded: bool) -> None:
        """The same, and what is of no use after a success; old directories of this user, too."""
        specs = self._default()
        if specs is not None:
            specs.clean_up(succeeded)
