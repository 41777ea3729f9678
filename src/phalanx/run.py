"""`torch.distributed.run` at Phalanx's path: `phalanx.run.main(words)`, and `python -m phalanx.run …`."""

from phalanx.cli.torchrun import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    get_rdzv_endpoint,
    get_use_env,
    main,
    parse_args,
    parse_min_max_nnodes,
    run,
    run_script_path,
    torchrun_main,
)

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

# Names that users import from torch's module although it only imports them; loaded on first use.
_ELSEWHERE = {
    "DefaultLogsSpecs": "phalanx.agent.logs.specs",
    "LaunchConfig": "phalanx.elastic.agent.elastic_launch",
    "LogsSpecs": "phalanx.agent.logs.specs",
    "Std": "phalanx.agent.logs.specs",
    "elastic_launch": "phalanx.elastic.agent.elastic_launch",
    "get_logger": "phalanx.elastic.utils.functions",
    "macros": "phalanx.elastic.utils.functions",
    "record": "phalanx.worker.recorder",
}


def __getattr__(name: str) -> object:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE[name]), name)


if __name__ == "__main__":
    raise SystemExit(torchrun_main())
