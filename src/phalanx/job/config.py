"""What a job is asked to do: command lines, variables and Python objects become one checked `JobSpec`.

`parse` (argv and PET_* variables), `from_namespace` (argparse) and `from_launch_config` (Python) gather raw
values as `Sources`, which read them as the table says; `rules` has what several options decide together. What
is wrong is a `UsageError` of one line that names the value as the user wrote it. Nothing is started and
nothing is written here, so a mistake never leaves a half-started job.

An argument overrides a variable, a variable the file beside the script (`settings_file`), the file what the
scheduler says, and that the default; an empty variable counts as unset.
"""

from __future__ import annotations

import os

from phalanx.job import rules
from phalanx.job.command_line import ON, InformationRequested, scan, usage_error
from phalanx.job.environment import COMPLETION_INDEX, HEALTH_PORT, SECRETS, variables
from phalanx.job.options import BY_DEST, OPTIONS, JobSpec, Option, Program, Section
from phalanx.job.units import READERS, truth, words

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` for it would cost milliseconds
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    from phalanx.elastic.agent.elastic_launch import LaunchConfig
    from phalanx.errors import UsageError
    from phalanx.job.surroundings import Surroundings, Taken

    S = TypeVar("S", bound=Section)

__all__ = [
    "InformationRequested",
    "JobSpec",
    "from_launch_config",
    "from_namespace",
    "get_args_parser",
    "parse",
]


class Sources:
    """The raw values of a command line and its variables, by option; every complaint names the source."""

    def __init__(self, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.environ = environ
        self.file, self.in_file = "", dict[str, str]()  # its name and its values, below the variables
        self.around: Surroundings | None = None  # below the file
        self.warnings: list[str] = []

    def from_outside(self, dest: str) -> str:
        """The value that no argument has set: the variable's, the file's, or the scheduler's; empty: none."""
        taken = self._taken(dest)
        return (
            self._variable(dest) or self.in_file.get(dest, "") or (taken.value if taken is not None else "")
        )

    def _variable(self, dest: str) -> str:
        name = BY_DEST[dest].env
        return self.environ.get(name, "") if name else ""

    def read_file(self, directory: str) -> None:
        """Take the values of a file in this directory, if there is one."""
        if any(os.path.exists(os.path.join(directory, name)) for name in ("phalanx.toml", "pyproject.toml")):
            from phalanx.job.settings_file import read_settings

            self.file, self.in_file = read_settings(directory)

    def _taken(self, dest: str) -> Taken | None:
        return self.around.settings.get(dest) if self.around is not None else None

    def look_around(self) -> None:
        """Take from the scheduler, if there is one, what the user has not given."""
        if self.given("hosts") or self.given("hostfile"):
            from phalanx.job.host_names import look_at_hosts

            found = look_at_hosts(rules.host_list(self))
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
        """What the user has set, by option: in words, in variables and in the file."""
        given = {dest: str(value) for dest, value in self.arguments.items()}
        for dest, option in BY_DEST.items():
            value = self._variable(dest) or self.in_file.get(dest, "")
            if value and dest not in given and not (option.kind == "flag" and not truth(value)):
                given[dest] = value
        return given

    def origins(self) -> tuple[tuple[str, str], ...]:
        """What the user has set, as on a command line, and where."""
        found = []
        for dest, value in self._all_given().items():
            option = BY_DEST[dest]
            shown = "..." if option.env in SECRETS else value
            words = option.name if option.kind == "flag" else f"{option.name} {shown}"
            where = self.file
            if dest in self.arguments:
                where = "the command line"
            elif self._variable(dest):
                where = option.env or ""
            found.append((words, where))
        return tuple(found)

    @property
    def taken(self) -> tuple[tuple[str, str, str], ...]:
        """What was taken from the scheduler: the option, its value, and where it comes from."""
        if self.around is None:
            return ()
        found = self.around.settings.items()
        return tuple((BY_DEST[dest].name, taken.value, taken.origin) for dest, taken in found)

    def given(self, dest: str) -> bool:
        return dest in self.arguments or bool(self.from_outside(dest))

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
        if dest in self.in_file and not self._variable(dest):
            return f"{self.file}: {dest.replace('_', '-')} = {self.in_file[dest]}"
        return f"{option.env}={self.from_outside(dest)}" if self.given(dest) else self.name(dest)

    def _written(self, dest: str) -> str:
        option = BY_DEST[dest]
        return option.name if option.kind == "flag" else f"{option.name} {self.arguments[dest]}".rstrip()

    def bad(self, dest: str, what: str) -> UsageError:
        return usage_error(f"{self.label(dest)}: {what}")

    def text(self, dest: str) -> str:
        """The value as it is written, or the default ("" where there is none)."""
        if dest in self.arguments:
            return str(self.arguments[dest])
        return self.from_outside(dest) or str(BY_DEST[dest].default or "")

    def value(self, dest: str) -> Any:
        """The value, of the kind and within the bounds that the table has for it."""
        option = BY_DEST[dest]
        if option.kind == "flag":
            return self.flag(dest)
        given = self.arguments[dest] if dest in self.arguments else self.from_outside(dest) or None
        if given is None:
            default = option.default
            return READERS[option.kind](default) if isinstance(default, str) else default
        try:
            return self._read(option, given)
        except ValueError as error:
            raise self.bad(dest, str(error)) from None

    def _read(self, option: Option, given: Any) -> Any:
        word = given.strip().lower()
        if word in option.words:
            return option.words[word]
        if not given and option.default is None:
            return None
        try:
            value = READERS[option.kind](given)
            option.check(value)
        except ValueError as error:
            raise ValueError(", or ".join((str(error), *option.words))) from None
        return value

    def flag(self, dest: str) -> bool:
        if dest in self.arguments:
            return bool(self.arguments[dest])
        meaning = truth(self.from_outside(dest))
        if meaning is None:
            raise self.bad(dest, "use 1 or 0")
        return meaning

    def fill(self, section: type[S], **known: Any) -> S:
        """A section of the job: fields that the rules have found, and the values of the other options."""
        rows = section.fields.items()
        values = {field: self.value(row.dest) for field, row in rows if field not in known}
        return section(**values, **known)

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

    def _read(self, option: Option, given: Any) -> Any:
        whole = option.kind in ("int", "port")
        if whole or option.kind == "duration":
            if isinstance(given, str) or (whole and not hasattr(given, "__index__")):
                raise ValueError(f"not a {'whole ' if whole else ''}number")
            option.check(given)
            return int(given) if whole else given
        if isinstance(given, str):
            return super()._read(option, given)
        return tuple(given) if option.kind == "list" else given


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
    v.read_file("" if v.flag("module") else os.path.dirname(found.script))
    v.look_around()
    return _resolve(v, rules.program(v, found.script, found.script_args))


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
    return _resolve(v, rules.program(v, namespace.training_script, script_args))


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
    job = _resolve(v, rules.entrypoint(entrypoint, args))
    # As with torch, a caller in Python sets OMP_NUM_THREADS itself, and gets every restart, soon.
    return job.replace(
        workers=job.workers.replace(numa_options=config.numa_options, omp_num_threads=None),
        cluster=job.cluster.replace(rdzv_conf=dict(config.rdzv_configs)),
        restarts=job.restarts.replace(hopeless=frozenset(), patience=0.0, restart_always=True),
        output=job.output.replace(log_line_prefix_template=config.log_line_prefix_template),
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
    rules.entrypoint(entrypoint, args)
    values = {
        "nproc_per_node": local_world_size,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
        **({} if master_port is None else {"master_port": master_port}),
    }
    v = Fields(values, {}, {"nproc_per_node": "local_world_size"})
    if not hasattr(local_world_size, "__index__") or local_world_size < 1:
        raise v.bad("nproc_per_node", "must be 1 or more")
    for dest in values:
        if values[dest] is None:  # elsewhere, that is the default
            raise v.bad(dest, "not a number")
        v.value(dest)


def get_args_parser(environ: Mapping[str, str] | None = None) -> ArgumentParser:
    """The same table as an argparse parser, with the names torchrun's parser gives its namespace."""
    import argparse

    environ = variables() if environ is None else environ
    parser = argparse.ArgumentParser(prog="phalanx run", description="Run a script as a group of workers.")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.dest in ("help", "help_all", "version"):
            continue  # argparse brings its own help
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
        more = {"nargs": "?", "const": ON} if option.kind == "page" else {}
        default = raw or (list(option.default) if option.kind == "list" else option.default)
        group.add_argument(
            *option.flags,
            dest=option.dest,
            type=_argparse_type(option),
            default=default,
            choices=list(option.choices) or None,
            metavar=option.metavar,
            help=note,
            **more,
        )
    parser.add_argument("training_script", type=str, help="what every worker runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _argparse_type(option: Option) -> Callable[[str], Any]:
    """What torch's parser makes of a word; ours stay text until they are read."""
    if option.kind == "list":
        return lambda text: list(words(text))
    if not option.is_torchruns:
        return str
    return {"int": int, "port": int, "duration": float}.get(option.kind, str)


def _resolve(v: Sources, program: Program) -> JobSpec:
    workers, cluster = rules.workers(v), rules.cluster(v)
    watching = rules.watching(v, cluster)
    return JobSpec(
        program=program,
        workers=workers,
        cluster=cluster,
        restarts=rules.restarts(v, watching),
        watching=watching,
        state=rules.kept_state(v),
        output=rules.output(v, workers, cluster, watching),
        terminal=rules.terminal(v, workers, cluster),
        scheduler=v.around.scheduler if v.around is not None else "",
        taken=v.taken,
        origins=v.origins() if v.flag("dry_run") else (),
        warnings=tuple(v.warnings),
    )
