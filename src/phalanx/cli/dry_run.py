"""`phalanx run --dry-run`: what would be started, and with which environment; nothing is."""

from __future__ import annotations

import os
import shlex

from phalanx.agent.job import make_spec
from phalanx.agent.spec import Worker, WorkerGroup
from phalanx.agent.workers.environment import substitute, worker_environment
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.ranks import assign_identical
from phalanx.job.environment import ERROR_FILE, OMP_THREADS, SIGNALS, variables
from phalanx.job.options import JobSpec
from phalanx.job.units import format_duration

UNKNOWN = "?"


def plan(job: JobSpec) -> str:
    """A page of text: the settings that matter, then each local worker's command and variables."""
    assert isinstance(job.program.entrypoint, str)
    handler = SoloRendezvous(job.cluster.run_id, job.cluster.rdzv_backend)
    group = WorkerGroup(make_spec(job, handler))
    several = job.cluster.max_nodes > 1
    rank = job.cluster.rdzv_conf["rank"] if job.cluster.rdzv_backend == "static" else 0
    group.group_rank, group.group_world_size = rank, job.cluster.max_nodes
    group.workers = [
        Worker(p.local_rank, p.global_rank, p.role_rank, p.world_size, p.role_world_size)
        for p in assign_identical(rank, job.cluster.max_nodes, job.workers.local_world_size)
    ]
    environ = dict(variables())
    given = {SIGNALS: job.restarts.signals_to_handle, ERROR_FILE: UNKNOWN}
    if job.workers.omp_num_threads is not None:
        environ[OMP_THREADS] = str(job.workers.omp_num_threads)
    lines = [*_settings(job), ""]
    for worker in group.workers:
        env = worker_environment(
            group,
            worker,
            run_id=job.cluster.run_id,
            attempt=0,
            use_agent_store=handler.use_agent_store,
            environ=environ,
        )
        env.update(given)
        env["MASTER_ADDR"] = job.cluster.master_addr or "localhost"
        env["MASTER_PORT"] = str(job.cluster.master_port or UNKNOWN)  # 0: the system chooses one
        if several and job.cluster.rdzv_backend != "static":
            for name in ("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"):
                env[name] = UNKNOWN
            env["GROUP_WORLD_SIZE"] = UNKNOWN
        command = shlex.join([job.program.entrypoint, *substitute(job.program.args, worker.local_rank)])
        lines.append(f"# local rank {worker.local_rank}")
        lines += [f"{name}={shlex.quote(value)} \\" for name, value in sorted(env.items())]
        lines += [command, ""]
    lines.append(f"# {UNKNOWN}: known only when it runs")
    return "\n".join(lines)


def _settings(job: JobSpec) -> list[str]:
    nodes = str(job.cluster.max_nodes)
    if job.cluster.min_nodes != job.cluster.max_nodes:
        nodes = f"{job.cluster.min_nodes} to {job.cluster.max_nodes}"
    rows = [
        ("run id", job.cluster.run_id),
        ("nodes", nodes),
        ("workers here", str(job.workers.local_world_size)),
        ("rendezvous", f"{job.cluster.rdzv_backend} at {job.cluster.rdzv_endpoint}"),
        ("restarts", str(job.restarts.max_restarts)),
        ("grace", format_duration(job.restarts.shutdown_timeout)),
        ("logs", job.output.log_dir or "a private temporary directory"),
        ("redirects", f"{job.output.redirects} (tee {job.output.tee})"),
        ("directory", os.getcwd()),
    ]
    lines = [f"# {name + ':':<14}{value}" for name, value in rows]
    lines += [f"# from {where}: {words}" for words, where in job.origins]
    return lines + [f"# from {job.scheduler}: {option} {value} ({why})" for option, value, why in job.taken]
