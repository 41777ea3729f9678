"""What an agent runs: the specification, the workers, the group. torch's names and fields."""

from __future__ import annotations

from phalanx.core.group.events import WorkerState
from phalanx.core.record import Record

TYPE_CHECKING = False  # on the path of every start: plain classes, no typing, no dataclasses
if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import Signals
    from typing import Any

    from phalanx.agent.logs.console import OutputOptions
    from phalanx.agent.state.holder import StateHolder
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.warm.helper_pool import HelperPool
    from phalanx.cluster.handler import RendezvousHandler
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.job.numa import NumaOptions
    from phalanx.observe.progress_line import Progress
    from phalanx.observe.stream import Subscriber
    from phalanx.web.dashboard_process import DashboardProcess


class WorkerSpec(Record, frozen=False):
    """What to run, how many of it on this node, and how often to try again."""

    def __init__(
        self,
        role: str,
        local_world_size: int,
        rdzv_handler: RendezvousHandler,
        fn: Callable[..., Any] | None = None,
        entrypoint: Callable[..., Any] | str | None = None,
        args: tuple[Any, ...] = (),
        max_restarts: int = 3,
        monitor_interval: float = 0.1,
        master_port: int | None = None,
        master_addr: str | None = None,
        local_addr: str | None = None,
        event_log_handler: str = "null",
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        virtual_local_rank: bool = False,
    ) -> None:
        if fn is not None:
            import warnings

            warnings.warn("WorkerSpec(fn=…): use entrypoint=… instead", DeprecationWarning, stacklevel=2)
            entrypoint = entrypoint or fn
        from phalanx.job.config import check_worker_spec

        check_worker_spec(entrypoint, args, local_world_size, max_restarts, monitor_interval, master_port)
        assert entrypoint is not None
        self.role = role
        self.local_world_size = int(local_world_size)
        self.rdzv_handler = rdzv_handler
        self.fn = fn
        self.entrypoint = entrypoint
        self.args = tuple(args)
        self.max_restarts = int(max_restarts)
        self.monitor_interval = monitor_interval
        self.master_port = None if master_port is None else int(master_port)
        self.master_addr = master_addr
        self.local_addr = local_addr
        self.event_log_handler = event_log_handler
        self.numa_options = numa_options
        self.duplicate_stdout_filters = duplicate_stdout_filters
        self.duplicate_stderr_filters = duplicate_stderr_filters
        self.virtual_local_rank = virtual_local_rank

    def get_entrypoint_name(self) -> str:
        """The program's or function's name; for `python script.py` the script's."""
        if isinstance(self.entrypoint, str):
            import os

            return os.path.basename(self.entrypoint)
        entrypoint = self.entrypoint
        while not hasattr(entrypoint, "__qualname__") and hasattr(entrypoint, "func"):
            entrypoint = entrypoint.func  # a functools.partial is known by what it calls
        return str(getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__))


_DEFAULTS = {
    "role": "default",
    "fn": None,
    "entrypoint": None,
    "args": (),
    "max_restarts": 3,
    "monitor_interval": 0.1,
    "master_port": None,
    "master_addr": None,
    "local_addr": None,
    "event_log_handler": "null",
    "numa_options": None,
    "duplicate_stdout_filters": None,
    "duplicate_stderr_filters": None,
    "virtual_local_rank": False,
}


class SpecLike:
    """An object of the caller's in place of a WorkerSpec: what it does not have is as by default."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._given, name) or name not in _DEFAULTS:
            return getattr(self._given, name)
        return _DEFAULTS[name]

    def get_entrypoint_name(self) -> str:
        """The program's or function's name."""
        return WorkerSpec.get_entrypoint_name(self)  # type: ignore[arg-type]  # it has what that reads


def complete(spec: Any) -> WorkerSpec:
    """The spec itself, if it has all that the agent reads."""
    if isinstance(spec, WorkerSpec) or all(hasattr(spec, n) for n in (*_DEFAULTS, "get_entrypoint_name")):
        return spec  # type: ignore[no-any-return]
    return SpecLike(spec)  # type: ignore[return-value]


class Worker:
    """One worker's place; -1 until a round has given it one."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __repr__(self) -> str:
        return (
            f"Worker(local_rank={self.local_rank}, global_rank={self.global_rank}, "
            f"role_rank={self.role_rank}, world_size={self.world_size}, "
            f"role_world_size={self.role_world_size}, id={self.id})"
        )


class WorkerGroup:
    """The workers of one role on this node, and their round."""

    __slots__ = (
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


class AgentOptions(Record):
    """How an agent runs the workers of a WorkerSpec."""

    start_method: str = "spawn"  # of functions
    log_line_prefix_template: str | None = None
    exit_barrier_timeout: float = 300.0
    shutdown_timeout: float = 30.0  # seconds between the signal and SIGKILL, at every stop
    uninterruptible_timeout: float = 0.0  # seconds in uninterruptible sleep that are a failure; 0: none are
    health_check_server: Any = None  # the caller's own
    restart_policy: RestartPolicy | None = None  # None: only `max_restarts` of the spec
    supervision: Supervision | None = None  # None: one that watches nothing
    helpers: HelperPool | None = None  # prepares helper processes ahead; the agent closes it
    state: StateHolder | None = None  # what the workers keep; None: in memory only
    reenter_timeout: float = 5.0  # seconds for a worker that re-enters to unwind; 0: none does
    attach: int | None = None  # the local rank that reads the terminal's input
    output: OutputOptions | None = None  # how lines are shown and files rotated
    stray_signals: tuple[Signals, ...] = ()  # stop the job as well, but are not sent to workers
    job_name: str = ""  # as the failure report calls the job; empty: the entrypoint's name
    note: Callable[[str], None] | None = None  # one line per incident
    dashboard: DashboardProcess | None = None  # the page of the job
    subscribers: tuple[Subscriber, ...] = ()  # of the stream of what happens (observe/stream.py)
    metrics: bool = False  # serve /metrics beside the health endpoints
    reason: Callable[[str], None] | None = None  # every decision
    progress: Progress | None = None  # the progress line of a terminal
