"""`torch.distributed.launch` at Phalanx's path; deprecated, as there: use `phalanx run`.

    python -m phalanx.launch --nproc-per-node 2 train.py

It has the options of `phalanx run` and --use-env. Without --use-env, each worker gets its local rank as the
argument --local-rank=N as well as in LOCAL_RANK.
"""

from __future__ import annotations

from phalanx.cli.torchrun import get_args_parser, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from phalanx.job.options import JobSpec

__all__ = ["launch", "main", "parse_args"]


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Words into the namespace that torch's parser makes."""
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        default=False,
        action="store_true",
        help="pass the local rank in LOCAL_RANK only, not as --local-rank",
    )
    return parser.parse_args(args)


def launch(args: Namespace) -> None:
    """Run what a namespace asks for; `ChildFailedError` when it fails, `SignalException` when stopped."""
    _check(args)
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """The command, called from Python: returns on success, else raises as `phalanx.run.main` does."""
    from phalanx.cli.run import execute

    _warn()
    execute(_job(parse_args(args)), raises=True)


def _console() -> int:
    """`python -m phalanx.launch`; the exit code."""
    from phalanx.cli import complain
    from phalanx.cli.run import execute
    from phalanx.errors import UsageError

    _warn()
    try:
        return execute(_job(parse_args(None)))
    except UsageError as error:
        return complain("", str(error))


def _warn() -> None:
    import warnings

    warnings.warn(
        "phalanx.launch is deprecated: use `phalanx run`, which behaves as with --use-env, "
        "and read the local rank from LOCAL_RANK instead of --local-rank",
        FutureWarning,
        stacklevel=3,
    )


def _job(args: Namespace) -> JobSpec:
    from phalanx.job.config import from_namespace

    _check(args)
    return from_namespace(args)


def _check(args: Namespace) -> None:
    if args.no_python and not args.use_env:
        from phalanx.job.command_line import usage_error

        raise usage_error("--no-python without --use-env: only Python scripts get --local-rank; add it")


if __name__ == "__main__":
    raise SystemExit(_console())
