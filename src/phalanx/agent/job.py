"""The agent of a job: the parts that a `JobSpec` asks for, made and put together.

Imports happen inside the functions: `phalanx run` starts its helper processes first and imports the rest of
the agent while they come up.
"""

from __future__ import annotations

from phalanx.job.environment import OMP_THREADS, SIGNALS, export, temporary_directory
from phalanx.job.options import usage_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import Signals
    from typing import Any

    from phalanx.agent.logs.console import OutputOptions
    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.spec import WorkerSpec
    from phalanx.agent.state.holder import StateHolder
    from phalanx.agent.state.replicas import Replicas
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.warm.helper_pool import HelperPool
    from phalanx.cluster.handler import RendezvousHandler
    from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from phalanx.job.config import JobSpec
    from phalanx.observe.notifier import Notifier
    from phalanx.observe.progress_line import Progress
    from phalanx.observe.stream import Subscriber
    from phalanx.observe.trace_sender import TraceSender
    from phalanx.observe.train_status import TrainStatus
    from phalanx.web.dashboard_process import DashboardProcess


def export_environment(job: JobSpec) -> None:
    """Set what helpers and workers inherit; before the first of them starts."""
    export(SIGNALS, job.signals_to_handle)
    if job.omp_num_threads is not None:
        export(OMP_THREADS, str(job.omp_num_threads))


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
) -> LocalElasticAgent:
    """The agent for this node, ready to `run`; on an error, nothing that was made for it is left."""
    from phalanx.agent.spec import AgentOptions
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    handler = make_handler(job)
    try:
        policy = RestartPolicy(
            max_restarts=job.max_restarts,
            window=job.restart_window,
            no_restart_on=job.no_restart_on,
            hopeless=job.hopeless,
            restart_delay=job.restart_delay,
            backoff_first=job.backoff[0],
            backoff_max=job.backoff[1],
            patience=job.patience,
            readiness=job.startup_timeout is not None,  # then workers report when they are set up
        )
        logs = logs or make_logs(job)
        helpers = helpers or make_helpers(job)
        return LocalElasticAgent(
            make_spec(job, handler),
            logs,
            start_method=job.start_method,
            log_line_prefix_template=job.log_line_prefix_template,
            shutdown_timeout=job.shutdown_timeout,
            health_check_server=health_check_server,
            options=AgentOptions(
                restart_policy=policy,
                supervision=make_supervision(job),
                helpers=helpers,
                state=make_state(job, handler),
                reenter_timeout=job.reenter_timeout,
                attach=job.attach,
                output=make_output(job),
                stray_signals=stray_signals,
                job_name=job.name,
                note=note,
                reason=reason,
                progress=progress,
                dashboard=dashboard,
                subscribers=subscribers,
                metrics=job.metrics,
            ),
        )
    except BaseException:
        handler.shutdown()
        if helpers is not None:
            helpers.close()
        raise


def make_spec(job: JobSpec, handler: RendezvousHandler) -> WorkerSpec:
    """The part of the job that torch's classes know."""
    from phalanx.agent.spec import WorkerSpec

    return WorkerSpec(
        role=job.role,
        local_world_size=job.local_world_size,
        rdzv_handler=handler,
        entrypoint=job.entrypoint,
        args=job.args,
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_interval,
        master_addr=job.master_addr,
        master_port=job.master_port,
        local_addr=job.local_addr,
        event_log_handler=job.event_log_handler,
        numa_options=job.numa_options,
        duplicate_stdout_filters=list(job.duplicate_stdout_filters) or None,
        duplicate_stderr_filters=list(job.duplicate_stderr_filters) or None,
        virtual_local_rank=job.virtual_local_rank,
    )


def make_helpers(job: JobSpec) -> HelperPool | None:
    """The processes that fork the workers; None where each function worker is a fork of this process."""
    from phalanx.agent.warm.helper_pool import helper_pool_for, helper_pool_for_function

    if isinstance(job.entrypoint, str):
        args = tuple(str(arg) for arg in job.args)
        return helper_pool_for(
            job.entrypoint, args, job.warm, job.preload, job.warmup, job.local_world_size, job.keep_warm
        )
    return helper_pool_for_function(job.entrypoint, job.start_method, job.warm)


def make_handler(job: JobSpec) -> RendezvousHandler:
    """The node's way into the rendezvous."""
    if job.max_nodes == 1 and job.rdzv_backend in ("phalanx", "static"):
        from phalanx.cluster.solo import SoloRendezvous

        return SoloRendezvous(job.run_id, job.rdzv_backend, job.node_name)
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.cluster.registry import get_rendezvous_handler

    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                job.rdzv_backend,
                job.rdzv_endpoint,
                job.run_id,
                job.min_nodes,
                job.max_nodes,
                job.local_addr,
                **job.rdzv_conf,
            )
        )
    except ValueError as error:  # an address or a setting that only the backend can check
        raise usage_error(str(error)) from None


def make_supervision(job: JobSpec) -> Supervision:
    """What watches the workers, and the services of the node."""
    from phalanx.agent.supervision.supervision import Supervision

    timeouts = (
        job.heartbeat_timeout, job.silence_timeout, job.startup_timeout, job.partial_exit_timeout,
    )  # fmt: skip
    policy = None
    watches = any(timeout is not None for timeout in (*timeouts, job.hang_timeout))
    if watches or job.on_hang != "restart" or job.expect:
        from phalanx.core.diagnosis.progress import WatchPolicy

        expected = (job.expect, job.expect_every, job.expect_finite) if job.expect else ("", None, False)
        policy = WatchPolicy(*timeouts, job.on_hang, *expected, job.hang_timeout)
    return Supervision(
        policy,
        preempt_signal=job.preempt_signal or 0,
        health=job.health_port,
        health_check=job.health_check,
        replace_slow=job.straggler_policy == "replace",
        own_check=_own_check(job) if job.check else (),
    )


def _own_check(job: JobSpec) -> tuple[str, ...]:
    """The options of the check of this machine: where this job writes."""
    logs = ("--log-dir", job.log_dir) if job.log_dir else ()
    kept = ("--disk", job.keep_spill) if job.keep_spill else ()
    return ("--json", "--nnodes", "1", *logs, *kept)


def make_state(job: JobSpec, handler: RendezvousHandler) -> StateHolder:
    """What holds the state that workers keep."""
    from phalanx.agent.state.holder import StateHolder

    spill = None
    if job.keep_spill:
        from phalanx.agent.state.spill import SpillDirectory

        spill = SpillDirectory(job.keep_spill, job.keep_id or job.run_id)
        try:
            spill.prepare()
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise usage_error(f"--keep-spill {job.keep_spill}: {why}") from None
    replicas = make_replicas(job, handler) if job.keep_replicas and job.max_nodes > 1 else None
    return StateHolder(spill, replicas)


def make_replicas(job: JobSpec, handler: RendezvousHandler) -> Replicas:
    """What copies kept state between nodes."""
    from phalanx.agent.state.replicas import Replicas, ReplicaSettings
    from phalanx.errors import StoreAuthError
    from phalanx.job.environment import TOKEN_FILE, variables
    from phalanx.store.net.token import find_token

    what = f"--keep-replicas {job.keep_replicas}"
    settings = getattr(handler, "settings", None)
    if settings is None:
        raise usage_error(f"{what}: not with the rendezvous backend {job.rdzv_backend}")
    try:
        token = find_token({TOKEN_FILE: settings.token_file} if settings.token_file else variables())
        return Replicas(ReplicaSettings(job.run_id, settings.address(), token, settings.tls))
    except (StoreAuthError, OSError) as error:
        raise usage_error(f"{what}: {error}") from None


def make_notifier(job: JobSpec) -> Notifier | None:
    """What tells a command or a URL of incidents."""
    if not job.notify:
        return None
    from phalanx.observe.notifier import JobNames, Notifier

    return Notifier(job.notify, JobNames(job.name, job.run_id, job.node_name))


def make_dashboard(job: JobSpec, say: Callable[[str], None]) -> DashboardProcess | None:
    """The page of the job; a single node opens its address now, so that a bad one is refused."""
    if job.dashboard is None:
        return None
    from phalanx.errors import PhalanxError
    from phalanx.web.dashboard_process import DashboardPlan, DashboardProcess

    try:
        return DashboardProcess(DashboardPlan(*job.dashboard, job.max_nodes == 1, job.quiet), say)
    except PhalanxError as error:
        raise usage_error(str(error)) from None


def make_traces(job: JobSpec) -> TraceSender | None:
    """What sends a trace of each incident."""
    if not job.otel:
        return None
    from phalanx.observe.notifier import JobNames
    from phalanx.observe.trace_sender import TraceSender

    return TraceSender(JobNames(job.name, job.run_id, job.node_name))


def make_train_status(agent: LocalElasticAgent) -> TrainStatus | None:
    """What reports progress to a TrainJob's status, in a pod of one."""
    from phalanx.job.environment import train_status

    target = train_status()
    if target is None:
        return None
    from phalanx.agent.node_view import train_progress
    from phalanx.observe.train_status import TrainStatus

    return TrainStatus(target, lambda: train_progress(agent), agent._post)


def make_output(job: JobSpec) -> OutputOptions | None:
    """How lines are shown and files rotated."""
    if job.log_format == "text" and job.log_rotate is None:
        return None
    from phalanx.agent.logs.console import OutputOptions

    rotate = None
    if job.log_rotate is not None:
        from phalanx.agent.logs.rotation import Rotation

        rotate = Rotation(*job.log_rotate)
    return OutputOptions(job.log_format == "json", rotate)


def make_logs(job: JobSpec) -> LogsSpecs:
    """Where the workers' output goes: the given object, a plug-in, or the default."""
    from phalanx.agent.logs.specs import DefaultLogsSpecs, Std

    if job.logs_specs is not None and not isinstance(job.logs_specs, str):
        return job.logs_specs
    kind: Any = DefaultLogsSpecs
    if job.log_dir is None:
        try:
            temporary_directory()
        except OSError as error:
            raise usage_error(str(error)) from None
    if job.logs_specs:
        from phalanx.plugins import load

        kind = load(job.logs_specs, "phalanx.logs_specs", "torchrun.logs_specs")
    try:
        made: LogsSpecs = kind(
            log_dir=job.log_dir,
            redirects=Std.from_str(job.redirects),
            tee=Std.from_str(job.tee),
            local_ranks_filter=set(job.local_ranks_filter) if job.local_ranks_filter else None,
            **({"ranks_filter": set(job.ranks_filter)} if job.ranks_filter else {}),
            **({} if job.logs_specs else {"keep_logs": job.keep_logs}),
        )
        if job.log_dir is None and not job.redirects == job.tee == "0":
            _ = made.root_log_dir  # made now, because the first line names it
    except OSError as error:
        import os

        if job.log_dir is None:
            raise usage_error(str(error.strerror or error)) from None
        why = str(error.strerror or error).removeprefix(f"log_dir {os.path.abspath(job.log_dir or '')!r} ")
        raise usage_error(f"--log-dir {job.log_dir}: {why}") from None
    return made
