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
from phalanx.elastic.lazy_modules import found_in

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

__getattr__ = found_in(__name__)  # what users import from torch's module although it only imports it


if __name__ == "__main__":
    raise SystemExit(torchrun_main())
