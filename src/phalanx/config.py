"""What a run was asked to do: the only reader of argv and environment.

`parse` turns words and variables into one `RunConfig` that cannot change afterwards, or raises `UsageError`
with one line that names the value and what to do. It starts nothing and writes nothing, so a bad command
line costs nobody a half-started job.

An argument beats a variable, a variable beats the default; an empty variable counts as unset. Which of the
two it was stays known until the end, so that a message blames `PET_NNODES=4:2` and not a flag nobody wrote.

`RunConfig` is written out by hand: `dataclasses` (through `inspect`) takes longer to import than all the rest
of the launcher's start together.
"""

from __future__ import annotations

import os
import sys

from phalanx import validation
from phalanx.options import (
    BY_DEST,
    OPTIONS,
    InformationRequested,
    Option,
    scan,
    split_list,
    truth,
    usage_error,
)

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` for it would cost milliseconds
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx.errors import UsageError

__all__ = [
    "InformationRequested",
    "RunConfig",
    "from_namespace",
    "get_args_parser",
    "parse",
    "worker_command",
]


class RunConfig:
    """Everything `phalanx run` needs to know, checked and resolved; frozen."""

    script: str
    script_args: tuple[str, ...]
    module: bool
    no_python: bool
    run_path: bool
    python_exec: str  # the interpreter of Python workers
    nproc_per_node: str  # as asked: "gpu", "4", …
    local_world_size: int  # what it came to
    min_nodes: int
    max_nodes: int
    node_rank: int
    node_rank_given: bool  # elastic backends use a node rank only when somebody chose it
    standalone: bool  # asked for, or implied by one node without a port
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: dict[str, str]
    run_id: str
    master_addr: str
    master_port: int | None
    local_addr: str | None
    token_file: str | None  # None: PHALANX_TOKEN, or the private file in the user's home
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    store_grace: float
    max_restarts: int
    restart_window: float | None
    no_restart_on: frozenset[int]  # as a shell shows them: 128+n stands for signal n
    shutdown_timeout: float
    signals_to_handle: str
    monitor_interval: float
    start_method: str
    role: str
    numa_binding: str | None
    virtual_local_rank: bool
    omp_num_threads: int | None  # None: leave OMP_NUM_THREADS alone
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: frozenset[int] | None
    log_line_prefix_template: str | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: str | None
    event_log_handler: str
    heartbeat_timeout: float | None
    silence_timeout: float | None
    startup_timeout: float | None
    partial_exit_timeout: float | None
    on_hang: str  # restart, fail, warn
    health_port: str  # [ADDR:]PORT, or empty
    health_check: str
    preempt_signal: int | None
    warm: str  # off, auto, standby
    preload: tuple[str, ...]
    warmup: str
    attach: int | None
    dry_run: bool
    detach: bool
    quiet: bool
    verbose: bool
    warnings: tuple[str, ...]  # worth one line each, not worth stopping

    def __init__(self, **values: Any) -> None:
        wrong = values.keys() ^ self.__annotations__.keys()
        if wrong:
            raise TypeError(f"RunConfig: missing or unknown fields: {', '.join(sorted(wrong))}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RunConfig.{name} cannot be set; use replace({name}=…) for a changed copy")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"RunConfig.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if isinstance(other, RunConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # it holds a dict

    def __repr__(self) -> str:
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some fields changed."""
        return RunConfig(**{**self.__dict__, **changes})


class Sources:
    """Raw values and where each came from; turns them into numbers with the source in every complaint."""

    def __init__(self, arguments: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.environ = environ
        self.warnings: list[str] = []

    def from_environment(self, dest: str) -> str:
        name = BY_DEST[dest].env
        return self.environ.get(name, "") if name else ""

    def given(self, dest: str) -> bool:
        return dest in self.arguments or bool(self.from_environment(dest))

    def label(self, dest: str) -> str:
        """How the value was written, for messages."""
        option = BY_DEST[dest]
        if dest in self.arguments:
            return option.name if option.kind == "flag" else f"{option.name} {self.arguments[dest]}".rstrip()
        return f"{option.env}={self.from_environment(dest)}" if self.given(dest) else option.name

    def bad(self, dest: str, what: str) -> UsageError:
        return usage_error(f"{self.label(dest)}: {what}")

    def text(self, dest: str) -> str:
        """The value as written, or the default ("" where there is none)."""
        if dest in self.arguments:
            value = self.arguments[dest]
        else:
            value = self.from_environment(dest) or BY_DEST[dest].default or ""
        choices = BY_DEST[dest].choices
        if choices and value and value not in choices:
            raise self.bad(dest, f"choose one of {', '.join(choices)}")
        return value

    def flag(self, dest: str) -> bool:
        if dest in self.arguments:
            return True
        meaning = truth(self.from_environment(dest))
        if meaning is None:
            raise self.bad(dest, "use 1 or 0")
        return meaning

    def number(self, dest: str, low: float, high: float = float("inf"), whole: bool = False) -> float | None:
        """A number within bounds; None when neither a value nor a default is there."""
        if not self.given(dest):
            default: float | None = BY_DEST[dest].default
            return default
        raw = self.arguments[dest] if dest in self.arguments else self.from_environment(dest)
        try:
            value = int(raw) if whole else float(raw)
        except ValueError:
            raise self.bad(dest, f"not a {'whole ' if whole else ''}number") from None
        if not low <= value <= high or value == float("inf"):  # false for nan as well
            bounds = f"{low:g} or more" if high == float("inf") else f"between {low:g} and {high:g}"
            bounds += ", and finite" * (value != value or value == float("inf"))
            raise self.bad(dest, f"must be {bounds}")
        return value

    def integer(self, dest: str, low: int, high: float = float("inf")) -> int | None:
        value = self.number(dest, low, high, whole=True)
        return None if value is None else int(value)

    def words(self, dest: str) -> tuple[str, ...]:
        raw = self.arguments[dest] if dest in self.arguments else self.from_environment(dest)
        return tuple(word for word in split_list(raw) if word)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The run that these words and variables ask for.

    Raises `UsageError` when they ask for none, and `InformationRequested` for --help and --print-completion.
    """
    found = scan(argv)
    if found.script is None:
        took = [name for name, value in found.values.items() if list(argv[-1:]) == [value]]
        why = f" ({argv[-1]} is the value of {BY_DEST[took[-1]].name})" if took else ""
        raise usage_error(f"no script given{why}; write: phalanx run [options] script.py [arguments]")
    return _resolve(Sources(found.values, environ), found.script, found.script_args)


def from_namespace(namespace: Namespace, environ: Mapping[str, str]) -> RunConfig:
    """The same from what `get_args_parser().parse_args()` returned (variables already folded in)."""
    arguments: dict[str, str] = {}
    for option in OPTIONS:
        value = getattr(namespace, option.dest, option.default)
        if option.kind == "list":
            value = tuple(value or ())
        if value is not None and value != option.default:
            arguments[option.dest] = _written(option, value)
    read_already = {option.env for option in OPTIONS}
    others = {name: value for name, value in environ.items() if name not in read_already}
    script_args = tuple(namespace.training_script_args)
    return _resolve(Sources(arguments, others), namespace.training_script, script_args)


def _written(option: Option, value: Any) -> str:
    if option.kind == "list":
        return ",".join(word.replace(",", ",,") for word in value)
    return "1" if value is True else str(value)


def get_args_parser(environ: Mapping[str, str] | None = None) -> ArgumentParser:
    """The same table as an argparse parser, with the names torchrun's parser gives its namespace."""
    import argparse

    environ = os.environ if environ is None else environ
    types: dict[str, Any] = {"str": str, "int": int, "float": float, "list": split_list}
    parser = argparse.ArgumentParser(prog="phalanx run", description="Run a script as a group of workers.")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.dest in ("help", "print_completion"):
            continue  # argparse brings its own help, and a namespace has no use for a completion script
        group = groups.get(option.group) or groups.setdefault(
            option.group, parser.add_argument_group(option.group)
        )
        raw = environ.get(option.env, "") if option.env else ""
        note = option.help.replace("%", "%%")
        if option.kind == "flag":
            default = bool(truth(raw)) if raw else option.default
            group.add_argument(
                *option.flags, dest=option.dest, action="store_true", default=default, help=note
            )
            continue
        default = raw or (list(option.default) if option.kind == "list" else option.default)
        group.add_argument(
            *option.flags,
            dest=option.dest,
            type=types[option.kind],
            default=default,
            choices=list(option.choices) or None,
            metavar=option.metavar,
            help=note,
        )
    parser.add_argument("training_script", type=str, help="what every worker runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def worker_command(config: RunConfig) -> tuple[str, tuple[str, ...]]:
    """The program and arguments of a worker; `${local_rank}` in the arguments is still to be filled in.

    Without -u: the workers' output is line-buffered by the bootstrap, one write per line instead of one per
    fragment.
    """
    if config.run_path:
        return sys.executable, (config.script, *config.script_args)
    if config.no_python:
        return config.script, config.script_args
    if config.module:
        return config.python_exec, ("-m", config.script, *config.script_args)
    return config.python_exec, (config.script, *config.script_args)


def _resolve(v: Sources, script: str, script_args: tuple[str, ...]) -> RunConfig:
    values: dict[str, Any] = {"script": script, "script_args": script_args}
    values.update(validation.program(v, script))
    values.update(validation.workers(v))
    values.update(validation.nodes(v))
    values.update(validation.restarts(v))
    values.update(validation.output(v, values["local_world_size"]))
    values.update(validation.watching(v, values))
    values.update(validation.terminal(v, values))
    return RunConfig(**values, warnings=tuple(v.warnings))
