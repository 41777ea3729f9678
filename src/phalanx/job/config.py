"""What a job is asked to do: command lines, variables and Python objects become one checked `JobSpec`.

`parse` (argv and PET_* variables), `from_namespace` (argparse) and `from_launch_config` (Python) gather raw
values as `Sources`; `validation` turns them into the fields of a `JobSpec` or raises `UsageError` with one
line that names the value as the user wrote it. Nothing is started and nothing is written here, so a mistake
never leaves a half-started job.

An argument overrides a variable, and a variable overrides the default; an empty variable counts as unset.
"""

from __future__ import annotations

import os

from phalanx.core.record import Record
from phalanx.job import validation
from phalanx.job.environment import COMPLETION_INDEX, HEALTH_PORT, variables
from phalanx.job.options import (
    BY_DEST,
    ON,
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
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.elastic.elastic_launch import LaunchConfig
    from phalanx.errors import UsageError
    from phalanx.job.host_names import HostSlots
    from phalanx.job.numa import NumaOptions
    from phalanx.job.surroundings import Surroundings, Taken

__all__ = [
    "InformationRequested",
    "JobSpec",
    "from_launch_config",
    "from_namespace",
    "get_args_parser",
    "parse",
]


class JobSpec(Record):
    """A job as this node runs it: checked, resolved and frozen."""

    # What to run.
    entrypoint: Callable[..., Any] | str
    args: tuple[Any, ...]  # ${local_rank} is still to be filled in
    name: str  # as messages and reports call the job; empty: the entrypoint's name
    local_world_size: int
    role: str
    start_method: str
    numa_options: NumaOptions | None
    virtual_local_rank: bool
    omp_num_threads: int | None  # None: leave OMP_NUM_THREADS alone
    warm: str  # off, auto, standby
    preload: tuple[str, ...]
    warmup: str
    keep_warm: float  # seconds that the prepared zygote waits for the next launch; 0: not at all
    # Where the nodes meet.
    run_id: str
    min_nodes: int
    max_nodes: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: dict[str, Any]  # with the token, the TLS files and this node's rank, where they are given
    master_addr: str | None  # None: this node, or the one that the rendezvous chooses
    master_port: int | None
    local_addr: str | None
    hosts: tuple[HostSlots, ...]  # started from here over ssh; none: this node alone
    hosts_endpoint: str  # the endpoint that the user has given for them; empty: the first host
    ssh: str
    # Restarts and stopping.
    max_restarts: int
    restart_window: float | None
    no_restart_on: frozenset[int | str]  # codes as a shell shows them (128+n: signal n), exceptions by name
    hopeless: frozenset[int | str]  # the same, only for workers that fail early; what a job has by default
    restart_delay: float
    backoff: tuple[float, float]  # the first delay and the longest; 0: none
    patience: float  # seconds from the first failure of a crash loop to the last restart
    reenter_timeout: float  # 0: no worker re-enters
    shutdown_timeout: float
    signals_to_handle: str  # the preemption signal is one of them
    monitor_interval: float
    # Kept state.
    keep_spill: str  # a directory, or empty
    keep_id: str  # the job's name over its attempts; empty: the run ID
    keep_replicas: int  # nodes that have a copy of each node's state
    # Supervision.
    heartbeat_timeout: float | None
    silence_timeout: float | None
    startup_timeout: float | None
    partial_exit_timeout: float | None
    hang_timeout: float | None
    on_hang: str  # restart, fail, warn
    straggler_policy: str  # warn, replace
    health_port: str  # [ADDR:]PORT, or empty
    health_check: str
    check: bool
    preempt_signal: int | None
    # Output.
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: frozenset[int] | None
    ranks_filter: frozenset[int] | None  # by global rank
    log_line_prefix_template: str | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: LogsSpecs | str | None  # the name of a plug-in, or the object itself
    event_log_handler: str
    log_format: str  # text, json
    log_rotate: tuple[int, int | None] | None  # bytes of a part, and how many parts are kept (None: all)
    keep_logs: float | None  # seconds that temporary logs stay; None: forever
    termination_log: str  # empty: Kubernetes' default, if it is there
    # Watching from outside.
    expect: str  # a pattern, or empty
    expect_every: float | None
    expect_finite: bool
    notify: str  # a command or a URL, which may hold a secret
    dashboard: tuple[str, int] | None  # where the page is served
    metrics: bool
    otel: bool
    # The screen of `phalanx run`.
    attach: int | None
    dry_run: bool
    detach: bool
    quiet: bool
    verbose: bool
    scheduler: str  # whose variables were read; empty: none
    taken: tuple[tuple[str, str, str], ...]  # from it: option, value, origin
    warnings: tuple[str, ...]  # worth one line each, not worth stopping

    @property
    def node_name(self) -> str:
        """This node, as all nodes and every record call it."""
        return str(self.rdzv_conf.get("name") or os.uname().nodename)


class Sources:
    """The raw values of a command line and its variables, by option; every complaint names the source."""

    def __init__(self, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.environ = environ
        self.around: Surroundings | None = None  # below the variables of the options
        self.warnings: list[str] = []

    def from_environment(self, dest: str) -> str:
        name = BY_DEST[dest].env
        value = self.environ.get(name, "") if name else ""
        taken = self._taken(dest)
        return value or (taken.value if taken is not None else "")

    def _taken(self, dest: str) -> Taken | None:
        return self.around.settings.get(dest) if self.around is not None else None

    def look_around(self) -> None:
        """Take from the scheduler, if there is one, what the user has not given."""
        if self.given("hosts") or self.given("hostfile"):
            from phalanx.job.host_names import look_at_hosts

            found = look_at_hosts(validation.host_list(self))
            kept = {dest: taken for dest, taken in found.settings.items() if not self.given(dest)}
            self.around = found.replace(settings=kept)
            return
        if self.environ.get("SLURM_JOB_ID"):
            from phalanx.job.slurm_allocation import look as look_at_allocation

            self.around = look_at_allocation(self.environ, self._all_given())
        elif self.environ.get(COMPLETION_INDEX):
            from phalanx.job.kubernetes_pod import HOSTS, look

            self.around = look(self.environ, self._all_given(), os.uname().nodename, _text_of(HOSTS))
        if self.around is None:  # most often: nothing is imported for it
            return
        if self.around.refusal:
            raise usage_error(self.around.refusal)
        self.warnings += self.around.warnings

    def _all_given(self) -> dict[str, str]:
        """What the user has set, by option: in words and in variables."""
        given = {dest: str(value) for dest, value in self.arguments.items()}
        for dest, option in BY_DEST.items():
            value = self.environ.get(option.env, "") if option.env else ""
            if value and dest not in given and not (option.kind == "flag" and not truth(value)):
                given[dest] = value
        return given

    @property
    def taken(self) -> tuple[tuple[str, str, str], ...]:
        """What was taken from the scheduler: the option, its value, and where it comes from."""
        if self.around is None:
            return ()
        found = self.around.settings.items()
        return tuple((BY_DEST[dest].name, taken.value, taken.origin) for dest, taken in found)

    def given(self, dest: str) -> bool:
        return dest in self.arguments or bool(self.from_environment(dest))

    def name(self, dest: str) -> str:
        """What the user writes to set it."""
        return BY_DEST[dest].name

    def label(self, dest: str) -> str:
        """The value as the user wrote it."""
        if dest in self.arguments:
            return self._written(dest)
        option, taken = BY_DEST[dest], self._taken(dest)
        if taken is not None:
            return f"{option.name} {taken.value} (from {taken.origin})"
        return f"{option.env}={self.from_environment(dest)}" if self.given(dest) else self.name(dest)

    def _written(self, dest: str) -> str:
        option = BY_DEST[dest]
        return option.name if option.kind == "flag" else f"{option.name} {self.arguments[dest]}".rstrip()

    def bad(self, dest: str, what: str) -> UsageError:
        return usage_error(f"{self.label(dest)}: {what}")

    def text(self, dest: str) -> str:
        """The value as text, or the default ("" where there is none)."""
        if dest in self.arguments:
            value = str(self.arguments[dest])
        else:
            value = self.from_environment(dest) or BY_DEST[dest].default or ""
        choices = BY_DEST[dest].choices
        if choices and value and value not in choices:
            raise self.bad(dest, f"choose one of {', '.join(choices)}")
        return value

    def flag(self, dest: str) -> bool:
        if dest in self.arguments:
            return bool(self.arguments[dest])
        meaning = truth(self.from_environment(dest))
        if meaning is None:
            raise self.bad(dest, "use 1 or 0")
        return meaning

    def number(self, dest: str, low: float, high: float = float("inf"), whole: bool = False) -> float | None:
        """A number within bounds; None when there is neither a value nor a default."""
        if not self.given(dest):
            default: float | None = BY_DEST[dest].default
            return default
        raw = self.arguments[dest] if dest in self.arguments else self.from_environment(dest)
        try:
            value = self._convert(raw, whole)
        except (TypeError, ValueError):
            raise self.bad(dest, f"not a {'whole ' if whole else ''}number") from None
        if not low <= value <= high or value == float("inf"):  # false for nan as well
            bounds = f"{low:g} or more" if high == float("inf") else f"between {low:g} and {high:g}"
            bounds += ", and finite" * (value != value or value == float("inf"))
            raise self.bad(dest, f"must be {bounds}")
        return value

    def _convert(self, raw: Any, whole: bool) -> float:
        return int(raw) if whole else float(raw)

    def integer(self, dest: str, low: int, high: float = float("inf")) -> int | None:
        value = self.number(dest, low, high, whole=True)
        return None if value is None else int(value)

    def words(self, dest: str) -> tuple[str, ...]:
        raw = self.arguments[dest] if dest in self.arguments else self.from_environment(dest)
        return tuple(word for word in split_list(raw) if word)

    def settings(self) -> dict[str, Any]:
        """--rdzv-conf as a dictionary; quotes that came through a YAML file or a variable are taken off."""
        conf: dict[str, Any] = dict(self.around.conf) if self.around is not None else {}
        text = self.text("rdzv_conf").strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in pair.partition("="))
            if not key or not value:
                raise self.bad("rdzv_conf", f"{pair!r} is not key=value; write key=value,key=value")
            conf[key] = value
        return conf


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


class Fields(Sources):
    """The same for the fields of a Python object, which hold values instead of text."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        names: Mapping[str, str],
    ) -> None:
        """`names`: what the object calls an option, where that differs."""
        super().__init__(arguments, environ)
        self._names = names

    def name(self, dest: str) -> str:
        return self._names.get(dest, dest)

    def _written(self, dest: str) -> str:
        if dest == "nnodes":
            return "min_nodes={}, max_nodes={}".format(*self.arguments[dest].split(":"))
        return f"{self.name(dest)}={self.arguments[dest]!r}"

    def _convert(self, raw: Any, whole: bool) -> float:
        if isinstance(raw, str) or (whole and not hasattr(raw, "__index__")):
            raise TypeError(f"{raw!r} is not a number")
        return super()._convert(raw, whole)

    def words(self, dest: str) -> tuple[str, ...]:
        return tuple(self.arguments.get(dest, ()))


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> JobSpec:
    """The job that a command line asks for.

    Raises `UsageError` when it asks for none, and `InformationRequested` for --help and the like.
    """
    found = scan(argv)
    if found.script is None:
        took = [name for name, value in found.values.items() if list(argv[-1:]) == [value]]
        why = f" ({argv[-1]} is the value of {BY_DEST[took[-1]].name})" if took else ""
        raise usage_error(f"no script given{why}; write: phalanx run [options] script.py [arguments]")
    v = Sources(found.values, variables() if environ is None else environ)
    v.look_around()
    return _resolve(v, validation.program(v, found.script, found.script_args))


def from_namespace(namespace: Namespace, environ: Mapping[str, str] | None = None) -> JobSpec:
    """The same from what `get_args_parser().parse_args()` returned, whose defaults are the variables."""
    arguments: dict[str, str] = {}
    for option in OPTIONS:
        value = getattr(namespace, option.dest, option.default)
        if option.kind == "list":
            value = tuple(value or ())
        if value is not None and value != option.default:
            arguments[option.dest] = _written(option, value)
    v = Sources(arguments, _without_options(variables() if environ is None else environ))
    v.look_around()
    script_args = tuple(namespace.training_script_args)
    if not getattr(namespace, "use_env", True):  # of phalanx.launch
        script_args = ("--local-rank=${local_rank}", *script_args)
    return _resolve(v, validation.program(v, namespace.training_script, script_args))


def _written(option: Option, value: Any) -> str:
    if option.kind == "list":
        return ",".join(word.replace(",", ",,") for word in value)
    return "1" if value is True else str(value)


def _without_options(environ: Mapping[str, str], *but: str) -> dict[str, str]:
    options = {option.env for option in OPTIONS} - set(but)
    return {name: value for name, value in environ.items() if name not in options}


def from_launch_config(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> JobSpec:
    """The job that a `LaunchConfig` asks for."""
    names = {"rdzv_id": "run_id", "grace": "shutdown_timeout"}
    dests = (
        "nproc_per_node", "rdzv_id", "role", "rdzv_endpoint", "rdzv_backend", "max_restarts",
        "monitor_interval", "start_method", "local_addr", "event_log_handler", "signals_to_handle",
        "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank", "grace", "warm",
        "logs_specs",
    )  # fmt: skip
    values = {dest: getattr(config, names.get(dest, dest)) for dest in dests}
    values = {dest: value for dest, value in values.items() if value is not None}
    values["nnodes"] = f"{config.min_nodes}:{config.max_nodes}"
    v = Fields(values, _without_options(variables(), HEALTH_PORT), names)
    return _resolve(v, validation.entrypoint(entrypoint, args)).replace(
        rdzv_conf=dict(config.rdzv_configs),
        log_line_prefix_template=config.log_line_prefix_template,
        numa_options=config.numa_options,
        omp_num_threads=None,  # as with torch, a caller in Python sets the variable itself
        hopeless=frozenset(),  # and gets every restart that it asked for, soon
        patience=0.0,
    )


def check_worker_spec(
    entrypoint: Callable[..., Any] | str | None,
    args: Sequence[Any],
    local_world_size: int,
    max_restarts: int,
    monitor_interval: float,
    master_port: int | None,
) -> None:
    """The same rules for a torch-style `WorkerSpec`, which describes the part of a job that an agent runs."""
    validation.entrypoint(entrypoint, args)
    values = {
        "nproc_per_node": local_world_size,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
    }
    if master_port is not None:
        values["master_port"] = master_port
    v = Fields(values, {}, {"nproc_per_node": "local_world_size"})
    v.integer("nproc_per_node", 1)
    validation.restarts(v)
    v.integer("master_port", 0, 65535)


def get_args_parser(environ: Mapping[str, str] | None = None) -> ArgumentParser:
    """The same table as an argparse parser, with the names torchrun's parser gives its namespace."""
    import argparse

    environ = variables() if environ is None else environ
    types: dict[str, Any] = {"str": str, "address": str, "int": int, "float": float, "list": split_list}
    parser = argparse.ArgumentParser(prog="phalanx run", description="Run a script as a group of workers.")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.dest in ("help", "print_completion", "version"):
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
        more = {"nargs": "?", "const": ON} if option.kind == "address" else {}
        default = raw or (list(option.default) if option.kind == "list" else option.default)
        group.add_argument(
            *option.flags,
            dest=option.dest,
            type=types[option.kind],
            default=default,
            choices=list(option.choices) or None,
            metavar=option.metavar,
            help=note,
            **more,
        )
    parser.add_argument("training_script", type=str, help="what every worker runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _resolve(v: Sources, program: dict[str, Any]) -> JobSpec:
    values = {**program, **validation.workers(v), **validation.nodes(v), **validation.restarts(v)}
    values.update(validation.hosts(v))
    values.update(validation.output(v, values))
    values.update(validation.supervision(v, values))
    values.update(validation.outside(v))
    values.update(validation.preparation(v))
    values.update(validation.kept_state(v))
    values.update(validation.screen(v, values))
    scheduler = v.around.scheduler if v.around is not None else ""
    return JobSpec(**values, scheduler=scheduler, taken=v.taken, warnings=tuple(v.warnings))
