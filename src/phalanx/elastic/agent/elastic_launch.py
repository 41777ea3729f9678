"""Launching from Python: a `LaunchConfig`, and functions or programs run as the workers of a job.

    results = elastic_launch(LaunchConfig(1, 1, 4, rdzv_backend="phalanx"), train)(path)

Results come by global rank. A failure is raised as ChildFailedError, which for a function is also of the
type that the function itself raised, with the worker's traceback as its cause.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.agent.agent import Agent
from phalanx.agent.job import export_environment, make_agent
from phalanx.agent.logs.specs import DefaultLogsSpecs, LogsSpecs
from phalanx.agent.workers.result import RunResult
from phalanx.elastic.internals import entrypoint_name
from phalanx.elastic.lazy_modules import seen_in
from phalanx.errors import ChildFailedError, PhalanxError
from phalanx.job import environment
from phalanx.job.config import from_launch_config
from phalanx.job.numa import NumaOptions
from phalanx.log import warn


@dataclass
class LaunchConfig:
    """How to launch; torch's fields and defaults, except for the backend, which is Phalanx's own."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "phalanx"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = environment.DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    warm: str = "auto"  # not in torch: auto, off or standby, as of `phalanx run --warm`

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", 900)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = environment.shutdown_timeout()
        if not self.shutdown_timeout >= 0:  # false for nan as well
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: use 0 seconds or more")


class elastic_launch:  # torch's name; it is called like a function
    """Called with the arguments of the entrypoint, runs the job and returns results by global rank."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        launch = seen_in("phalanx.launcher.api", "launch_agent", launch_agent)
        results: dict[int, Any] = launch(
            self._config, self._entrypoint, list(args), self._health_check_server
        )
        return results


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run the job to its end on this node."""
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    job = from_launch_config(config, entrypoint, args)
    for warning in job.warnings:
        warn(warning)
    export_environment(job)
    agent = make_agent(job, health_check_server=health_check_server)
    if config.metrics_cfg:
        from phalanx.observe.metrics import MetricsConfig, initialize_metrics

        initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        result = agent.run()
    finally:
        agent.run_logs.remove_empty()
    if result.is_failed():
        known = isinstance(entrypoint, str) or hasattr(entrypoint, "__name__")  # not a functools.partial
        name = entrypoint_name(entrypoint, args) if known else ""
        raise failure_of(name or agent.get_worker_group().spec.get_entrypoint_name(), result, agent)
    return result.return_values


def failure_of(name: str, result: RunResult, agent: Agent) -> PhalanxError:
    """The failure as an exception; of the worker's own type as well, where that is possible."""
    if not result.failures:  # another node failed, or something that is not a worker
        return PhalanxError(agent.outcome.message if agent.outcome else f"{name} failed")
    plain = ChildFailedError(name, result.failures, result.stopped)
    first, _ = plain.get_first_failure()
    original = exception_of(agent, first)
    return plain if original is None else of_both_types(plain, original)


def exception_of(agent: Agent, global_rank: int) -> BaseException | None:
    """The exception that ended a function worker, where it could be pickled."""
    from phalanx.agent.workers.worker_kinds import MultiprocessContext

    if isinstance(agent.context, MultiprocessContext):
        for worker in agent.get_worker_group().workers:
            if worker.global_rank == global_rank:
                return agent.context.error(worker.local_rank)
    return None


def of_both_types(plain: ChildFailedError, original: BaseException) -> ChildFailedError:
    """An exception that is caught as ChildFailedError and as the type that the worker raised."""
    error = plain
    kind = type(original)
    if isinstance(original, Exception) and not isinstance(plain, kind):
        again = (of_both_types, (plain, original))
        body = {"__module__": kind.__module__, "__reduce__": lambda _self: again}
        try:
            error = _blank(type(kind.__name__, (type(plain), kind), body), original)
            # Not through __init__: the next one in the line of both types is the worker's type's own.
            error.name, error.failures, error.stopped = plain.name, plain.failures, plain.stopped
            error.args = plain.args
        except Exception:  # noqa: BLE001 - a type that cannot be combined; the plain one has it all
            error = plain
    error.__cause__ = original
    return error


def _blank(both: Any, original: BaseException) -> Any:
    """An instance with the original's attributes, made without its `__init__`, which may take others."""
    from types import GetSetDescriptorType, MemberDescriptorType

    error = both.__new__(both)
    error.__dict__.update(original.__dict__)
    for kind in type(original).__mro__:
        if kind is Exception:
            break
        for name, slot in vars(kind).items():  # errno, filename and the like live outside __dict__
            if isinstance(slot, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                try:
                    setattr(error, name, getattr(original, name))
                except (AttributeError, TypeError):
                    pass  # unset in the original, or read-only
    return error
