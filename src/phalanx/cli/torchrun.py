"""torchrun's Python interface: the functions of `torch.distributed.run`, with its names and shapes.

Called from Python, `main` and `run` raise: `UsageError` (a ValueError) for bad usage, `ChildFailedError` for
failed workers, `SignalException` when stopped. The console scripts turn that into exit codes.

What differs, and why:
- `main` is the command `phalanx run`: its lines appear on stderr, and the exception has the report. `run` is
  the call: it prints nothing.
- `config_from_args` refuses what cannot work (a missing script, a bad number) before anything is started.
- `--run-path` becomes a program and its arguments; torch makes a function of it.
- flags that only `phalanx run` has and `LaunchConfig` cannot hold (--attach, --dry-run, --restart-window …)
  work in `main`, not in `run`.
"""

from __future__ import annotations

import sys

from phalanx.job.environment import OMP_THREADS, STATIC_PORT, export, variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.elastic.agent.elastic_launch import LaunchConfig


def get_args_parser() -> ArgumentParser:
    """The options as an argparse parser; PET_* variables are its defaults."""
    from phalanx.job.config import get_args_parser as parser

    return parser()


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Words into the namespace that torchrun's parser makes."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` as two numbers."""
    parts = str(nnodes).split(":")
    if len(parts) > 2:
        raise RuntimeError(f"nnodes={nnodes}: write a number, or MIN:MAX")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"nnodes={nnodes}: write a number, or MIN:MAX") from None
    return numbers[0], numbers[-1]


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of workers that `N`, `auto`, `cpu`, `gpu` or `xpu` means on this machine."""
    from phalanx.devices import resolve_nproc

    try:
        count = resolve_nproc(str(nproc_per_node), variables())
    except ValueError:
        raise ValueError(f"nproc_per_node={nproc_per_node}: use a number, auto, gpu, xpu or cpu") from None
    if count < 1:
        raise ValueError(f"nproc_per_node={nproc_per_node}: that is no worker on this machine")
    return count


def get_use_env(args: Namespace) -> bool:
    """Whether workers read their local rank from the environment only; False: from --local-rank as well."""
    return bool(getattr(args, "use_env", True))


def get_rdzv_endpoint(args: Namespace) -> str:
    """Where the nodes meet: the endpoint, or for static MASTER_ADDR:MASTER_PORT."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        port = STATIC_PORT if args.master_port is None else args.master_port
        host = str(args.master_addr)
        return f"[{host}]:{port}" if host.count(":") > 1 and not host.startswith("[") else f"{host}:{port}"
    return str(args.rdzv_endpoint)


def config_from_args(args: Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What a namespace asks for: the configuration, the program, and its arguments."""
    from phalanx.agent.job import make_logs
    from phalanx.elastic.agent.elastic_launch import LaunchConfig
    from phalanx.job.config import from_namespace

    job = from_namespace(args)
    if job.workers.omp_num_threads is not None:
        export(OMP_THREADS, str(job.workers.omp_num_threads))
    config = LaunchConfig(
        min_nodes=job.cluster.min_nodes,
        max_nodes=job.cluster.max_nodes,
        nproc_per_node=job.workers.local_world_size,
        logs_specs=make_logs(job),
        run_id=job.cluster.run_id,
        role=job.workers.role,
        rdzv_endpoint=job.cluster.rdzv_endpoint,
        rdzv_backend=job.cluster.rdzv_backend,
        rdzv_configs=dict(job.cluster.rdzv_conf),
        max_restarts=job.restarts.max_restarts,
        monitor_interval=job.restarts.monitor_interval,
        start_method=job.workers.start_method,
        log_line_prefix_template=job.output.log_line_prefix_template,
        local_addr=job.cluster.local_addr,
        event_log_handler=job.output.event_log_handler,
        numa_options=job.workers.numa_options,
        signals_to_handle=job.restarts.signals_to_handle,
        duplicate_stdout_filters=list(job.output.duplicate_stdout_filters) or None,
        duplicate_stderr_filters=list(job.output.duplicate_stderr_filters) or None,
        virtual_local_rank=job.workers.virtual_local_rank,
        shutdown_timeout=job.restarts.shutdown_timeout,
    )
    return config, job.program.entrypoint, list(job.program.args)


def run(args: Namespace) -> None:
    """Run what a namespace asks for; `ChildFailedError` when it fails, `SignalException` when stopped."""
    from phalanx.elastic.agent.elastic_launch import elastic_launch
    from phalanx.elastic.lazy_modules import seen_in

    config, entrypoint, words = config_from_args(args)
    seen_in("phalanx.run", "elastic_launch", elastic_launch)(config, entrypoint)(*words)


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this process, as if it had been started with these arguments."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def main(args: Sequence[str] | None = None) -> None:
    """Run what the words ask for (sys.argv's by default): returns on success, else raises."""
    from phalanx.cli.run import execute
    from phalanx.job.config import InformationRequested, parse

    words = list(sys.argv[1:] if args is None else args)
    try:
        job = parse(words)
    except InformationRequested:
        from phalanx.cli import invoke

        raise SystemExit(invoke("run", words)) from None  # as argparse does after --help
    execute(job, raises=True)


def torchrun_main() -> int:
    """`phalanx-torchrun`: torchrun's command line; the exit code."""
    from phalanx.cli import invoke

    return invoke("run", sys.argv[1:])
