"""The environment and arguments of each worker, as a pure function of the group and the settings."""

from __future__ import annotations

from phalanx.job.environment import SECRETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx.agent.spec import Worker, WorkerGroup, WorkerSpec

LOCAL_RANK_MACRO = "${local_rank}"


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    *,
    run_id: str,
    attempt: int,
    use_agent_store: bool,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """What this worker has over and above the agent's own environment."""
    spec = group.spec
    env = {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if "OMP_NUM_THREADS" in environ:
        env["OMP_NUM_THREADS"] = environ["OMP_NUM_THREADS"]
    for name in SECRETS:
        if name in environ:
            env[name] = ""  # the agents' own; workers and what they start have no use for it
    if spec.virtual_local_rank:
        env.update(virtual_device(worker.local_rank, environ))
    return env


def standby_environment(spec: WorkerSpec, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker of this local rank has in every round: a standby has it before its other ranks."""
    env = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(spec.local_world_size)}
    for name in SECRETS:
        if name in environ:
            env[name] = ""
    if spec.virtual_local_rank:
        env.update(virtual_device(local_rank, environ))
    return env


def virtual_device(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """One device per worker: each sees its own as number 0, and calls itself local rank 0."""
    # AMD's variable overrides the other one there.
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    visible = [part.strip() for part in environ.get(name, "").split(",") if part.strip()]
    if visible and local_rank >= len(visible):
        raise ValueError(
            f"--virtual-local-rank: local rank {local_rank} has no device; "
            f"{name}={environ[name]} names only {len(visible)}"
        )
    mine = visible[local_rank] if visible else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": mine, name: mine}


def substitute(args: tuple[Any, ...], local_rank: int) -> tuple[Any, ...]:
    """`${local_rank}` filled in, in the arguments that are strings."""
    number = str(local_rank)
    return tuple(
        arg.replace(LOCAL_RANK_MACRO, number) if isinstance(arg, str) and LOCAL_RANK_MACRO in arg else arg
        for arg in args
    )


def line_prefix(template: str, group: WorkerGroup, worker: Worker, *, host: str, attempt: int) -> str:
    """The log line prefix of one worker; unknown macros stay as they are."""
    for name, value in (
        ("role_name", group.spec.role),
        ("local_rank", worker.local_rank),
        ("rank", worker.global_rank),
        ("hostname", host),
        ("host", host),
        ("attempt", attempt),
    ):
        template = template.replace(f"${{{name}}}", str(value))
    return template
