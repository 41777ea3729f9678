"""The agent of a job: the parts that a `JobSpec` asks for, made and put together.

Imports happen inside the functions: `phalanx run` starts its helper processes first and imports the rest of
the agent while they come up.
"""

from __future__ import annotations

from phalanx.job.command_line import usage_error
from phalanx.job.environment import (
    OMP_THREADS,
    SIGNALS,
    export,
    temporary_directory,
    uninterruptible_timeout,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import Signals
    from typing import Any

    from phalanx.agent.agent import Agent
    from phalanx.agent.logs.console import OutputOptions
    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.spec import WorkerSpec
    from phalanx.agent.state.holder import StateHolder
    from phalanx.agent.state.replicas import Replicas
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.warm.helper_pool import HelperPool
    from phalanx.cluster.handler import RendezvousHandler
    from phalanx.job.options import JobSpec
    from phalanx.observe.notifier import Notifier
    from phalanx.observe.progress_line import Progress
    from phalanx.observe.stream import Subscriber
    from phalanx.observe.trace_sender import TraceSender
    from phalanx.observe.train_status import TrainStatus
    from phalanx.web.dashboard_process import DashboardProcess


def export_environment(job: JobSpec) -> None:
    """Set what helpers and workers inherit; before the first of them starts."""
    export(SIGNALS, job.restarts.signals_to_handle)
    if job.workers.omp_num_threads is not None:
        export(OMP_THREADS, str(job.workers.omp_num_threads))


def make_agent(
    job: JobSpec,
    *,
    helpers: HelperPool | None = None,
    logs: LogsSpecs | None = None,
    health_check_server: Any = None,
    note: Callable[[str], None] | None = None,
    reason: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    stray_signals: tuple[Signals, ...] = (),
    dashboard: DashboardProcess | None = None,
    subscribers: tuple[Subscriber, ...] = (),
) -> Agent:
    """The agent for this node, ready to `run`; on an error, nothing that was made for it is left."""
    from phalanx.agent.agent import Agent
    from phalanx.agent.spec import AgentOptions
    from phalanx.core.group.restarts import RestartPolicy

    handler = make_handler(job)
    try:
        restarts = job.restarts
        policy = RestartPolicy(
            max_restarts=restarts.max_restarts,
            window=restarts.restart_window,
            no_restart_on=restarts.no_restart_on,
            hopeless=restarts.hopeless,
            restart_delay=restarts.restart_delay,
            backoff_first=restarts.backoff[0],
            backoff_max=restarts.backoff[1],
            patience=restarts.patience,
            same_failure=not restarts.restart_always,
        )
        logs = logs or make_logs(job)
        helpers = helpers or make_helpers(job)
        return Agent(
            make_spec(job, handler),
            logs,
            AgentOptions(
                start_method=job.workers.start_method,
                log_line_prefix_template=job.output.log_line_prefix_template,
                shutdown_timeout=job.restarts.shutdown_timeout,
                uninterruptible_timeout=uninterruptible_timeout(),
                health_check_server=health_check_server,
                restart_policy=policy,
                supervision=make_supervision(job),
                helpers=helpers,
                state=make_state(job, handler),
                reenter_timeout=job.restarts.reenter_timeout,
                attach=job.terminal.attach,
                output=make_output(job),
                stray_signals=stray_signals,
                job_name=job.program.name,
                note=note,
                reason=reason,
                progress=progress,
                dashboard=dashboard,
                subscribers=subscribers,
                metrics=job.watching.metrics,
            ),
        )
    except BaseException:
        handler.shutdown()
        if helpers is not None:
            helpers.close()
        raise


def make_spec(job: JobSpec, handler: RendezvousHandler) -> WorkerSpec:
    """The workers of one node, as an agent starts them."""
    from phalanx.agent.spec import WorkerSpec

    workers, cluster = job.workers, job.cluster
    if job.output.event_log_handler != "null":
        from phalanx.observe.events import choose

        choose(job.output.event_log_handler)
    return WorkerSpec(
        role=workers.role,
        local_world_size=workers.local_world_size,
        rdzv_handler=handler,
        entrypoint=job.program.entrypoint,
        args=job.program.args,
        max_restarts=job.restarts.max_restarts,
        monitor_interval=job.restarts.monitor_interval,
        master_addr=cluster.master_addr,
        master_port=cluster.master_port,
        local_addr=cluster.local_addr,
        event_log_handler=job.output.event_log_handler,
        numa_options=workers.numa_options,
        duplicate_stdout_filters=list(job.output.duplicate_stdout_filters) or None,
        duplicate_stderr_filters=list(job.output.duplicate_stderr_filters) or None,
        virtual_local_rank=workers.virtual_local_rank,
    )


def make_helpers(job: JobSpec) -> HelperPool | None:
    """The processes that fork the workers; None where each function worker is a fork of this process."""
    from phalanx.agent.warm.helper_pool import helper_pool_for, helper_pool_for_function

    entrypoint, workers = job.program.entrypoint, job.workers
    if isinstance(entrypoint, str):
        return helper_pool_for(entrypoint, tuple(map(str, job.program.args)), workers)
    return helper_pool_for_function(entrypoint, workers.start_method, workers.warm)


def make_handler(job: JobSpec) -> RendezvousHandler:
    """The node's way into the rendezvous."""
    cluster = job.cluster
    if cluster.max_nodes == 1 and cluster.rdzv_backend in ("phalanx", "c10d", "static"):
        from phalanx.cluster.solo import SoloRendezvous

        return SoloRendezvous(cluster.run_id, cluster.rdzv_backend, job.node_name)
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.cluster.registry import get_rendezvous_handler

    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                cluster.rdzv_backend,
                cluster.rdzv_endpoint,
                cluster.run_id,
                cluster.min_nodes,
                cluster.max_nodes,
                cluster.local_addr,
                **cluster.rdzv_conf,
            )
        )
    except ValueError as error:  # an address or a setting that only the backend can check
        raise usage_error(str(error)) from None


def make_supervision(job: JobSpec) -> Supervision:
    """What watches the workers, and the services of the node."""
    from phalanx.agent.supervision.supervision import Supervision

    asked = job.watching
    timeouts = (
        asked.heartbeat_timeout, asked.silence_timeout, asked.startup_timeout, asked.partial_exit_timeout,
    )  # fmt: skip
    policy = None
    watches = any(timeout is not None for timeout in (*timeouts, asked.hang_timeout))
    if watches or asked.on_hang != "restart" or asked.expect:
        from phalanx.core.diagnosis.progress import WatchPolicy

        expected = (asked.expect, asked.expect_every, asked.expect_finite)
        policy = WatchPolicy(*timeouts, asked.on_hang, *expected, asked.hang_timeout)
    return Supervision(
        policy,
        preempt_signal=asked.preempt_signal or 0,
        health=asked.health_listen,
        health_check=asked.check_command,
        replace_slow=asked.straggler_policy == "replace",
        own_check=_own_check(job) if asked.check else (),
    )


def _own_check(job: JobSpec) -> tuple[str, ...]:
    """The options of the check of this machine: where this job writes."""
    logs = ("--log-dir", job.output.log_dir) if job.output.log_dir else ()
    kept = ("--disk", job.state.keep_spill) if job.state.keep_spill else ()
    return ("--json", "--nnodes", "1", "--only", "machine", *logs, *kept)


def make_state(job: JobSpec, handler: RendezvousHandler) -> StateHolder:
    """What holds the state that workers keep."""
    from phalanx.agent.state.holder import StateHolder

    spill = None
    if job.state.keep_spill:
        from phalanx.agent.state.spill import SpillDirectory

        spill = SpillDirectory(job.state.keep_spill, job.state.keep_id or job.cluster.run_id)
        try:
            spill.prepare()
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise usage_error(f"--keep-spill {job.state.keep_spill}: {why}") from None
    replicas = make_replicas(job, handler) if job.state.keep_replicas and job.cluster.max_nodes > 1 else None
    return StateHolder(spill, replicas)


def make_replicas(job: JobSpec, handler: RendezvousHandler) -> Replicas:
    """What copies kept state between nodes."""
    from phalanx.agent.state.replicas import Replicas, ReplicaSettings
    from phalanx.errors import StoreAuthError
    from phalanx.job.environment import TOKEN_FILE, variables
    from phalanx.store.net.token import find_token

    what = f"--keep-replicas {job.state.keep_replicas}"
    settings = getattr(handler, "settings", None)
    if settings is None:
        raise usage_error(f"{what}: not with the rendezvous backend {job.cluster.rdzv_backend}")
    try:
        token = find_token({TOKEN_FILE: settings.token_file} if settings.token_file else variables())
        return Replicas(ReplicaSettings(job.cluster.run_id, settings.address(), token, settings.tls))
    except (StoreAuthError, OSError) as error:
        raise usage_error(f"{what}: {error}") from None


def make_notifier(job: JobSpec) -> Notifier | None:
    """What tells a command or a URL of incidents."""
    if not job.watching.notify:
        return None
    from phalanx.observe.notifier import JobNames, Notifier

    return Notifier(job.watching.notify, JobNames(job.program.name, job.cluster.run_id, job.node_name))


def make_dashboard(job: JobSpec, say: Callable[[str], None]) -> DashboardProcess | None:
    """The page of the job; a single node opens its address now, so that a bad one is refused."""
    if job.watching.dashboard is None:
        return None
    from phalanx.errors import PhalanxError
    from phalanx.web.dashboard_process import DashboardPlan, DashboardProcess

    try:
        return DashboardProcess(
            DashboardPlan(*job.watching.dashboard, job.cluster.max_nodes == 1, job.output.quiet), say
        )
    except PhalanxError as error:
        raise usage_error(str(error)) from None


def make_traces(job: JobSpec) -> TraceSender | None:
    """What sends a trace of each incident."""
    if not job.watching.otel:
        return None
    from phalanx.observe.notifier import JobNames
    from phalanx.observe.trace_sender import TraceSender

    return TraceSender(JobNames(job.program.name, job.cluster.run_id, job.node_name))


def make_train_status(agent: Agent) -> TrainStatus | None:
    """What reports progress to a TrainJob's status, in a pod of one."""
    from phalanx.job.environment import train_status

    target = train_status()
    if target is None:
        return None
    from phalanx.agent.node_view import train_progress
    from phalanx.observe.train_status import TrainStatus

    return TrainStatus(target, lambda: train_progress(agent), agent.post)


def make_output(job: JobSpec) -> OutputOptions | None:
    """How lines are shown and files rotated."""
    if job.output.log_format == "text" and job.output.log_rotate is None:
        return None
    from phalanx.agent.logs.console import OutputOptions

    rotate = None
    if job.output.log_rotate is not None:
        from phalanx.agent.logs.rotation import Rotation

        rotate = Rotation(*job.output.log_rotate)
    return OutputOptions(job.output.log_format == "json", rotate)


def make_logs(job: JobSpec) -> LogsSpecs:
    """Where the workers' output goes: the given object, a plug-in, or the default."""
    from phalanx.agent.logs.specs import DefaultLogsSpecs, Std

    output = job.output
    if output.logs_specs is not None and not isinstance(output.logs_specs, str):
        return output.logs_specs
    kind: Any = DefaultLogsSpecs
    if output.log_dir is None:
        try:
            temporary_directory()
        except OSError as error:
            raise usage_error(str(error)) from None
    if output.logs_specs:
        from phalanx.plugins import LOGS_SPECS, load

        kind = load(output.logs_specs, LOGS_SPECS)
    try:
        made: LogsSpecs = kind(
            log_dir=output.log_dir,
            redirects=Std.from_str(output.redirects),
            tee=Std.from_str(output.tee),
            local_ranks_filter=set(output.local_ranks_filter) if output.local_ranks_filter else None,
            **({"ranks_filter": set(output.ranks_filter)} if output.ranks_filter else {}),
            **({} if output.logs_specs else {"keep_logs": output.log_retention}),
        )
        if output.log_dir is None and not output.redirects == output.tee == "0":
            _ = made.root_log_dir  # made now, because the first line names it
    except OSError as error:
        import os

        if output.log_dir is None:
            raise usage_error(str(error.strerror or error)) from None
        why = str(error.strerror or error).removeprefix(f"log_dir {os.path.abspath(output.log_dir or '')!r} ")
        raise usage_error(f"--log-dir {output.log_dir}: {why}") from None
    return made
