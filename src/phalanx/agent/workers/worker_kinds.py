"""The two kinds of worker, programs and functions, and `start_processes`, which starts either."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from phalanx.agent.warm.spawner import Spawner, interpreter_flags
from phalanx.agent.workers.result import RunProcsResult
from phalanx.agent.workers.worker_group import GroupOptions, PContext
from phalanx.errors import ProgramNotExecutableError, ProgramNotFoundError, StartError
from phalanx.helpers.messages import WorkerLaunch
from phalanx.job.program import BOOTSTRAP, find_program, python_flags, split_python, worker_argv
from phalanx.kernel import anonymous_file
from phalanx.worker.bootstrap import TALLY_FD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.workers.function_worker import Parcel
    from phalanx.agent.workers.subprocess_handle import WorkerHandler
    from phalanx.job.numa import NumaOptions


def program_for(program: str, env: Mapping[str, str]) -> str:
    """As find_program, with errors that are also those of subprocess, which people from torch catch."""
    try:
        return find_program(program, env)
    except StartError as error:
        why = str(error)
    exists = os.path.isdir(program) or "is not executable" in why
    failed = (ProgramNotExecutableError if exists else ProgramNotFoundError)(why)
    failed.errno = errno.EACCES if exists else errno.ENOENT
    failed.filename = program
    raise failed


class SubprocessContext(PContext):
    """Workers that are programs."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        options: GroupOptions = GroupOptions(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            numa_options,
            options=options,
        )
        self._kind: str | None = None

    def _job(self, rank: int, env: dict[str, str]) -> WorkerLaunch:
        options = self._options(rank)
        if self.spawner_kind != "exec":
            # Any number will do, and a fixed one might be a descriptor that a warm-up has opened.
            fds = self._tally_place(rank, -1)
            split = split_python(self._words(rank))
            assert split is not None
            _, mode, target, rest = split
            if rank == 0:
                self._learn = anonymous_file("phalanx-learn")
                fds = [*fds, ("learn", self._learn, -1)]
            return WorkerLaunch(rank, program=(mode, target, rest), fds=fds, options=options)
        assert isinstance(self.entrypoint, str)
        path = program_for(self.entrypoint, {**os.environ, **env})
        argv = worker_argv(self.entrypoint, path, self._words(rank), options)
        return WorkerLaunch(rank, argv=argv, path=path, fds=self._tally_place(rank))

    def _words(self, rank: int) -> list[str]:
        return [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in self.args[rank]]

    @property
    def spawner_kind(self) -> str:
        """exec, unless every rank can be a fork of one and the same Python."""
        if self._kind is None:
            words = [self._words(rank) for rank in range(self.nprocs)]
            self._kind = helpers_for(str(self.entrypoint), words, self.envs) if self.options.warm else "exec"
        return self._kind

    def _new_spawner(self) -> Spawner:
        return Spawner(self.spawner_kind)

    def _return_value(self, rank: int) -> None:
        return None

    @property
    def subprocess_handlers(self) -> dict[int, WorkerHandler]:
        """Local rank → a handle on that worker alone, once they are started."""
        from phalanx.agent.workers.subprocess_handle import WorkerHandler

        return {rank: WorkerHandler(self, rank) for rank in self._pids}


class MultiprocessContext(PContext):
    """Workers that are functions: `spawn`, `forkserver` or `fork`."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        options: GroupOptions = GroupOptions(),  # noqa: B008 - immutable
    ) -> None:
        if start_method not in ("spawn", "fork", "forkserver"):
            raise ValueError(f"start_method {start_method!r}: it is one of spawn, fork, forkserver")
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            numa_options,
            options=options,
        )
        self.start_method = start_method
        self._parcel: Parcel | None = None

    def _prepare(self) -> None:
        from phalanx.agent.workers.function_worker import Parcel

        assert callable(self.entrypoint)
        self._parcel = Parcel(list(range(self.nprocs)))
        if self.start_method != "fork":
            self._parcel.fill(self.entrypoint, self.args)  # what cannot be pickled is refused here

    def _job(self, rank: int, env: dict[str, str]) -> WorkerLaunch:
        assert self._parcel is not None
        name = f"{self.name}{rank}"
        options = self._options(rank)
        number = -1 if self.start_method == "fork" else TALLY_FD
        fds = [*self._parcel.fds(rank), *self._tally_place(rank, number)]
        if self.start_method == "spawn" and self.options.warm:
            if rank == 0:
                self._learn = anonymous_file("phalanx-learn")
                fds = [*fds, ("learn", self._learn, -1)]
            return WorkerLaunch(rank, fds=fds, program=("function", name, []), options=options)
        if self.start_method != "spawn":
            return WorkerLaunch(rank, fds=fds, name=name, options=options)
        argv = [sys.executable, *interpreter_flags(), BOOTSTRAP, "function", options, name]
        return WorkerLaunch(rank, argv=argv, path=sys.executable, fds=fds)

    @property
    def spawner_kind(self) -> str | None:
        if self.start_method == "spawn" and self.options.warm:
            return " ".join(["python", *interpreter_flags()])
        return {"spawn": "exec", "forkserver": "forkserver"}.get(self.start_method)

    def _new_spawner(self) -> Spawner:
        if self.spawner_kind is not None:
            return Spawner(self.spawner_kind)
        from phalanx.agent.workers.function_worker import fork_runner

        assert callable(self.entrypoint)
        return Spawner("fork", fork_runner(self.entrypoint, self.args))

    def _return_value(self, rank: int) -> Any:
        assert self._parcel is not None
        tag, value = self._parcel.result(rank)
        if tag == b"" and value is not None:
            raise RuntimeError(f"the return value of rank {rank} {value}")
        return value

    def error(self, rank: int) -> BaseException | None:
        """The exception that ended a rank, where it could be pickled."""
        return self._errors.get(rank)

    def _conclude(self) -> RunProcsResult:
        self._errors: dict[int, BaseException] = {}
        if self._parcel is not None:
            for rank, exit in self._exits.items():
                if exit.code != 0:
                    tag, value = self._parcel.result(rank)
                    if tag == b"E" and isinstance(value, BaseException):
                        self._errors[rank] = value
        return super()._conclude()

    def _give_back(self) -> None:
        if self._parcel is not None:
            self._parcel.close()
            self._parcel = None


def helpers_for(program: str, args: Sequence[Sequence[str]], envs: Mapping[int, Mapping[str, str]]) -> str:
    """The kind of helpers for these workers: one that forks Python where that is possible."""
    flags = python_flags(program, args, envs)
    return "exec" if flags is None else " ".join(["python", *flags])


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start one worker per local rank: a function, or a program named by a string."""
    context: PContext
    common: dict[str, Any] = {
        "name": name,
        "args": args,
        "envs": envs,
        "logs_specs": logs_specs,
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
    }
    if isinstance(entrypoint, str):
        context = SubprocessContext(entrypoint=entrypoint, **common)
    elif callable(entrypoint):
        context = MultiprocessContext(entrypoint=entrypoint, start_method=start_method, **common)
    else:
        raise TypeError(
            f"entrypoint {entrypoint!r}: give a function, or the path or name of a program as a string"
        )
    context.start()
    return context
