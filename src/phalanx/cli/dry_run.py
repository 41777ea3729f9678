"""`phalanx run --dry-run`: exactly what would be started, and with which environment; starts nothing."""

from __future__ import annotations

import os
import shlex

from phalanx.agent.environment import substitute, worker_environment
from phalanx.agent.spec import Worker, WorkerGroup, WorkerSpec
from phalanx.cli.run import signals_of
from phalanx.config import RunConfig, worker_command
from phalanx.core.ranks import assign_identical
from phalanx.membership.solo import SoloRendezvous

UNKNOWN = "?"


def plan(config: RunConfig) -> str:
    """A page of text: the settings that matter, then each local worker's command and variables."""
    program, args = worker_command(config)
    handler = SoloRendezvous(config.run_id, config.rdzv_backend)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.local_world_size,
        rdzv_handler=handler,
        entrypoint=program,
        args=args,
        max_restarts=config.max_restarts,
        virtual_local_rank=config.virtual_local_rank,
    )
    group = WorkerGroup(spec)
    several = config.max_nodes > 1
    group.group_rank, group.group_world_size = config.node_rank, config.max_nodes
    group.workers = [
        Worker(p.local_rank, p.global_rank, p.role_rank, p.world_size, p.role_world_size)
        for p in assign_identical(config.node_rank, config.max_nodes, config.local_world_size)
    ]
    environ = dict(os.environ)
    given = {"TORCHELASTIC_SIGNALS_TO_HANDLE": signals_of(config), "TORCHELASTIC_ERROR_FILE": UNKNOWN}
    if config.omp_num_threads is not None:
        environ["OMP_NUM_THREADS"] = str(config.omp_num_threads)
    lines = [*_settings(config), ""]
    for worker in group.workers:
        env = worker_environment(
            group,
            worker,
            run_id=config.run_id,
            attempt=0,
            use_agent_store=handler.use_agent_store,
            environ=environ,
        )
        env.update(given)
        env["MASTER_ADDR"] = config.master_addr if config.rdzv_backend == "static" else "localhost"
        # Port 0, of a static rendezvous too, is one that the system chooses.
        port = config.master_port if config.rdzv_backend == "static" else None
        env["MASTER_PORT"] = str(port) if port else UNKNOWN
        if several and config.rdzv_backend != "static":
            for name in ("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"):
                env[name] = UNKNOWN
            env["GROUP_WORLD_SIZE"] = UNKNOWN
        command = shlex.join([program, *substitute(args, worker.local_rank)])
        lines.append(f"# local rank {worker.local_rank}")
        lines += [f"{name}={shlex.quote(value)} \\" for name, value in sorted(env.items())]
        lines += [command, ""]
    lines.append(f"# {UNKNOWN}: known only when it runs")
    return "\n".join(lines)


def _settings(config: RunConfig) -> list[str]:
    nodes = str(config.max_nodes)
    if config.min_nodes != config.max_nodes:
        nodes = f"{config.min_nodes} to {config.max_nodes}"
    rows = [
        ("run id", config.run_id),
        ("nodes", nodes),
        ("workers here", str(config.local_world_size)),
        ("rendezvous", f"{config.rdzv_backend} at {config.rdzv_endpoint}"),
        ("restarts", str(config.max_restarts)),
        ("grace", f"{config.shutdown_timeout:g} s"),
        ("logs", config.log_dir or "a private temporary directory"),
        ("redirects", f"{config.redirects} (tee {config.tee})"),
        ("directory", os.getcwd()),
    ]
    return [f"# {name + ':':<14}{value}" for name, value in rows]
