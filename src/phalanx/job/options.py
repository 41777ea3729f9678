"""The description of a job: the options of `phalanx run` as one typed table, and the `JobSpec` they make.

A section is a group of options. An attribute with an annotation is both a row of the table and a field of the
job: its value, read and checked, is what the agent gets. One without an annotation is only an input of the
rules in `phalanx.job.rules`, which fill the fields that belong to several options.

Everything else about an option is derived from its row: both spellings, its variable, the kind of value and
its bounds, help, completion, the reference page docs/options.md, and the argparse parser that torch's
`get_args_parser` callers use.
"""

from __future__ import annotations

import os

from phalanx.core.record import Record, dataclass_transform
from phalanx.job.environment import DEFAULT_SIGNALS, HEALTH_PORT, STATIC_PORT
from phalanx.job.units import DAY, format_duration

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` for it would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, ClassVar

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.job.host_names import HostSlots
    from phalanx.job.numa import NumaOptions

OURS = "PHALANX_"
SHELLS = ("bash", "zsh", "fish", "tcsh")
NEVER_MORE = float("inf")
METAVARS = {
    "address": "[HOST:]PORT", "choice": "MODE", "directory": "DIR", "duration": "TIME", "file": "FILE",
    "int": "N", "port": "PORT", "ranks": "RANKS", "signal": "SIGNAL", "std": "STD",
}  # fmt: skip


class Option:
    """One row: what it is called, what it takes, where else its value may come from."""

    __slots__ = (
        "choices", "common", "default", "dest", "env", "flags", "group", "help", "kind", "least", "metavar",
        "most", "name", "words",
    )  # fmt: skip

    def __init__(
        self,
        flags: str,
        kind: str,
        default: Any,
        help: str,
        env: str | None,
        choices: tuple[str, ...],
        metavar: str,
        least: float,
        most: float,
        words: Mapping[str, Any],
        common: bool,
    ) -> None:
        *short, self.name = flags.split()  # in messages and help: long, with dashes
        self.dest = self.name[2:].replace("-", "_")
        underscored = "--" + self.dest
        self.flags = (*short, self.name, *([underscored] if underscored != self.name else ()))
        self.kind = kind  # of value: a name in units.READERS
        self.default = default  # as torch's parser has it; else as the job has it
        self.help = help
        self.env = env + self.dest.upper() if env in ("PET_", OURS) else env
        self.choices = choices
        self.metavar = metavar or METAVARS.get(kind) or self.dest.rpartition("_")[2].upper()
        self.least, self.most = least, most
        self.words = words  # with a meaning of their own, instead of a value of the kind
        self.common = common  # in the short help
        self.group = ""

    def check(self, value: Any) -> None:
        """Refuse a number out of bounds; values of other kinds have none."""
        if self.kind == "choice":
            if value and value not in self.choices:
                raise ValueError(f"choose one of {', '.join(self.choices)}")
        elif self.kind in ("int", "port", "duration") and not (
            self.least <= value <= self.most and value != NEVER_MORE
        ):  # nan is in no bounds
            shown = format_duration if self.kind == "duration" and self.most != NEVER_MORE else "{:g}".format
            least, most = shown(self.least), shown(self.most)
            bounds = f"{least} or more" if self.most == NEVER_MORE else f"between {least} and {most}"
            raise ValueError(f"must be {bounds}{', and finite' * (value == NEVER_MORE)}")

    @property
    def is_torchruns(self) -> bool:
        """Whether torchrun 2.13 has it as well, so that a shortened option means what it always has."""
        if self.dest == "log_line_prefix_template":
            return False
        return (self.env or "").startswith("PET_") or self.dest in ("help", "logs_specs", "numa_binding")


def option(
    flags: str,
    kind: str,
    default: Any,
    help: str,
    *,
    env: str | None = OURS,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    least: float = 0,
    most: float = NEVER_MORE,
    words: Mapping[str, Any] = {},
    common: bool = False,
) -> Any:
    """A row; its type is that of the value."""
    return Option(flags, kind, default, help, env, choices, metavar, least, most, words, common)


def torchrun(flags: str, kind: str, default: Any, help: str, **more: Any) -> Any:
    """A row that torchrun has as well, with its variable."""
    more.setdefault("env", "PET_")
    return option(flags, kind, default, help, **more)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section(Record):
    """Options of one subject; `fields`: those whose value is a field of the job."""

    if TYPE_CHECKING:
        fields: ClassVar[dict[str, Option]]
        rows: ClassVar[tuple[Option, ...]]

    def __init_subclass__(cls, title: str = "") -> None:
        super().__init_subclass__()
        found = {name: row for name, row in vars(cls).items() if isinstance(row, Option)}
        for row in found.values():
            row.group = title
        cls.rows = tuple(found.values())
        cls.fields = {name: found[name] for name in cls._fields if name in found}
        cls._defaults = {}  # a section is filled by the rules, never by its rows


class Program(Section, title="What to run"):
    """What each worker runs."""

    module = torchrun(
        "-m --module", "flag", False, "the script is a module name, as in python -m", common=True
    )
    no_python = torchrun("--no-python", "flag", False, "the script is a program, not Python", common=True)
    run_path = torchrun("--run-path", "flag", False, "run the script with this interpreter, always")

    entrypoint: Callable[..., Any] | str
    args: tuple[Any, ...]  # ${local_rank} is still to be filled in
    name: str  # as messages and reports call the job; empty: the entrypoint's name


class Workers(Section, title="How many"):
    """The workers of a node, and how they start."""

    local_world_size: int = torchrun(
        "--nproc-per-node", "workers", "1", "workers per node: a number, auto, gpu, xpu or cpu", metavar="N",
        words=dict.fromkeys(("auto", "gpu", "xpu", "cpu")), common=True,
    )  # fmt: skip
    role: str = torchrun("--role", "text", "default", "name of this group of workers", metavar="NAME")
    numa_binding = torchrun(
        "--numa-binding", "choice", None,
        "bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex",
        env=None, choices=("node", "socket", "exclusive", "core-complex"),
    )  # fmt: skip
    numa_options: NumaOptions | None
    omp = option(
        "--omp", "text", "",
        "OMP_NUM_THREADS of each worker: a number, or auto for its share of the usable cores",
        metavar="N",
    )  # fmt: skip
    omp_num_threads: int | None  # None: leave OMP_NUM_THREADS alone
    virtual_local_rank: bool = torchrun(
        "--virtual-local-rank", "flag", False, "each worker sees one GPU, as LOCAL_RANK 0"
    )
    start_method: str = torchrun(
        "--start-method", "choice", "spawn", "for function entrypoints: spawn, fork or forkserver",
        choices=("spawn", "fork", "forkserver"),
    )  # fmt: skip
    warm: str = option(
        "--warm", "choice", "auto",
        "how Python workers start: auto (forked, common imports done), off or standby",
        choices=("auto", "off", "standby"), common=True,
    )  # fmt: skip
    preload: tuple[str, ...] = option(
        "--preload", "list", (), "modules to import before workers are forked", metavar="MODULES"
    )
    warmup: str = option(
        "--warmup", "text", "", "what a standby worker runs in advance", metavar="MODULE:FUNCTION"
    )
    warm_for: float = option(
        "--warm-for", "duration", 0.0,
        "keep the prepared process for the next launch, for this long: 10m, or off",
        most=DAY, words={"off": 0.0},
    )  # fmt: skip


class Cluster(Section, title="Where"):
    """How many nodes there are, and where they meet."""

    standalone = torchrun(
        "--standalone", "flag", False, "one node, no address needed; ignores the rendezvous", common=True
    )
    nnodes = torchrun("--nnodes", "text", "1:1", "number of nodes, or MIN:MAX", metavar="N", common=True)
    min_nodes: int
    max_nodes: int
    host_list = option(
        "--hosts", "text", "", "start on these hosts over ssh: a,b,c:8 (with the number of workers)",
        env=None, metavar="LIST", common=True,
    )  # fmt: skip
    hostfile = option("--hostfile", "file", "", "the same from a file, a host on each line", env=None)
    hosts: tuple[HostSlots, ...]  # started from here over ssh; none: this node alone
    hosts_endpoint: str  # the endpoint that the user has given for them; empty: the first host
    ssh: str = option("--ssh", "text", "ssh", "the ssh command for --hosts", metavar="CMD")
    node_rank = torchrun("--node-rank", "int", 0, "rank of this node, from 0", metavar="RANK")
    given_addr = torchrun("--master-addr", "text", "127.0.0.1", "static: address of node 0")
    given_port = torchrun(
        "--master-port", "port", None, f"static: port on node 0 ({STATIC_PORT})", most=65535
    )
    master_addr: str | None  # None: this node, or the one that the rendezvous chooses
    master_port: int | None
    local_addr: str | None = torchrun(
        "--local-addr", "text", None, "address by which other nodes reach this one"
    )
    backend = torchrun(
        "--rdzv-backend", "text", "static", "phalanx (or c10d), static, etcd, or a plug-in",
        words=dict.fromkeys(("phalanx", "static", "etcd")), common=True,
    )  # fmt: skip
    rdzv_backend: str
    endpoint = torchrun(
        "--rdzv-endpoint", "text", "", "where the nodes meet", metavar="HOST:PORT", common=True
    )
    rdzv_endpoint: str
    rdzv_id = torchrun("--rdzv-id", "text", "none", "name of the job, the same on every node", common=True)
    run_id: str
    conf = torchrun("--rdzv-conf", "text", "", "more settings: key=value,key=value", metavar="K=V,...")
    rdzv_conf: dict[str, Any]  # with the token, the TLS files and this node's rank, where they are given
    token_file = option("--token-file", "file", None, "file with the secret that all nodes share")
    tls_cert = option("--tls-cert", "file", None, "TLS: certificate of this node", metavar="FILE")
    tls_key = option("--tls-key", "file", None, "TLS: private key of this node", metavar="FILE")
    tls_ca = option("--tls-ca", "file", None, "TLS: CA of the other nodes", metavar="FILE")
    store_grace = option("--store-grace", "duration", 60.0, "how long workers may run without the store")
    quarantine = option(
        "--quarantine", "quarantine", "3:1h:1h",
        "quarantine a host for COOLDOWN after it causes K failures within WINDOW, or off",
        metavar="K:WINDOW:COOLDOWN",
    )  # fmt: skip
    quarantine_dir = option(
        "--quarantine-dir", "directory", None, "share quarantined hosts with other jobs in this directory"
    )
    quarantine_hook = option(
        "--quarantine-hook", "text", None, "shell command to run for a quarantined host, $1, as to drain it",
        metavar="CMD",
    )  # fmt: skip


class Restarts(Section, title="Restarts and stopping"):
    """When to try again, and how to stop."""

    max_restarts: int = torchrun("--max-restarts", "int", 0, "restarts for the whole job", common=True)
    restart_window: float | None = option(
        "--restart-window", "duration", None, "count only the restarts within this time", least=0.001
    )
    no_restart_on: frozenset[int | str] = option(  # codes as a shell shows them (128+n: signal n), exceptions
        "--no-restart-on", "failures", "",
        "exit codes, signals and exceptions that are not worth a restart, or none",
        metavar="LIST",
    )  # fmt: skip
    restart_always: bool = option(
        "--restart-always", "flag", False, "restart also after the same failure twice without progress"
    )
    hopeless: frozenset[int | str]  # the same, only for workers that fail early; what a job has by default
    restart_delay: float = option("--restart-delay", "duration", 0.0, "wait before every restart", most=DAY)
    backoff: tuple[float, float] = option(  # the first delay and the longest; 0: none
        "--backoff", "backoff", "0.5s:30s",
        "wait before the second restart in a row, doubled each time up to MAX; 0: none",
        metavar="TIME[:MAX]",
    )  # fmt: skip
    patience: float  # seconds from the first failure of a crash loop to the last restart
    reenter_timeout: float = option(
        "--reenter-timeout", "duration", 5.0,
        "time for a worker that re-enters to unwind; 0: every restart has new processes", most=DAY,
    )  # fmt: skip
    grace = option("--grace", "duration", None, "time between SIGTERM and SIGKILL (30s)", common=True)
    grace_of_torchrun = torchrun(
        "--shutdown-timeout", "int", None, "torchrun's name for --grace, in seconds", metavar="S"
    )
    shutdown_timeout: float
    signals_to_handle: str = torchrun(  # the preemption signal is one of them
        "--signals-to-handle", "text", DEFAULT_SIGNALS, "signals passed on to the workers, by name",
        metavar="NAMES",
    )  # fmt: skip
    monitor_interval: float = torchrun(
        "--monitor-interval", "duration", 0.1, "how often to poll a plug-in backend", least=0.001
    )


class Watching(Section, title="Watching"):
    """What counts as a hang and what follows from it; health and preemption."""

    hang_timeout: float | None = option(
        "--hang-timeout", "duration", None,
        "treat this time without progress of torch's collectives as a hang; needs no code",
        least=0.001, common=True,
    )  # fmt: skip
    heartbeat_timeout: float | None = option(
        "--heartbeat-timeout", "duration", None,
        "treat this time without phalanx.worker.heartbeat() as a hang", least=0.001, common=True,
    )  # fmt: skip
    silence_timeout: float | None = option(
        "--silence-timeout", "duration", None,
        "treat this time without output from any rank as a hang; implies -t 3", least=0.001,
    )  # fmt: skip
    startup_timeout: float | None = option(
        "--startup-timeout", "duration", None,
        "treat this time without ready() or a heartbeat after the start as a hang", least=0.001,
    )  # fmt: skip
    partial_exit_timeout: float | None = option(
        "--partial-exit-timeout", "duration", None,
        "how long ranks may run after others have finished", least=0.001,
    )  # fmt: skip
    expect: str = option(
        "--expect", "text", "",
        "pattern that the output must keep matching, as in 'loss: (\\S+)'; implies -t 3", metavar="REGEX",
    )  # fmt: skip
    expect_every: float | None = option(
        "--expect-every", "duration", None,
        "treat this time without a line that matches --expect as a hang", least=0.001, most=30 * DAY,
    )  # fmt: skip
    expect_finite: bool = option(
        "--expect-finite", "flag", False, "treat nan or inf in the first group of --expect as a hang"
    )
    on_hang: str = option(
        "--on-hang", "choice", "restart", "response to a hang: restart, fail or warn",
        choices=("restart", "fail", "warn"), metavar="WHAT", common=True,
    )  # fmt: skip
    straggler_policy: str = option(
        "--straggler-policy", "choice", "warn",
        "response to a host that stays slow: warn, or replace it by a spare at a checkpoint",
        choices=("warn", "replace"), metavar="WHAT",
    )  # fmt: skip
    check: bool = option(
        "--check", "flag", False,
        "test this machine before it joins, as phalanx check does; unfit: it stays out", common=True,
    )  # fmt: skip
    check_command: str = option(
        "--check-command", "text", "", "command that must succeed before this node joins", metavar="CMD"
    )
    preempt_signal: int | None = option(
        "--preempt-signal", "signal", None, "signal on which workers checkpoint and exit within --grace"
    )
    health_listen: str = option(
        "--health-listen", "listen", "", "serve /healthz and /readyz at this address", env=HEALTH_PORT,
        metavar="[HOST:]PORT",
    )  # fmt: skip
    metrics: bool = option("--metrics", "flag", False, "serve /metrics for Prometheus at --health-listen")
    otel: bool = option(
        "--otel", "flag", False, "send one OpenTelemetry trace per incident, as the OTEL_* variables say"
    )
    notify: str = option(  # it may hold a secret
        "--notify", "text", "",
        "command (JSON on stdin) or URL (POST) for failures, recoveries, hangs and the end",
        metavar="CMD|URL", common=True,
    )  # fmt: skip
    dashboard: tuple[str, int] | None = option(
        "--dashboard", "page", None, "serve a page about the job, on loopback and behind a link with a token",
        metavar="[[HOST:]PORT]", common=True,
    )  # fmt: skip


class KeptState(Section, title="State"):
    """What becomes of the state that workers keep."""

    keep_spill: str = option(
        "--keep-spill", "directory", "",
        "write kept state here if the job fails or is preempted; its next launch finds it",
        common=True,
    )  # fmt: skip
    keep_id: str  # the job's name over its attempts; empty: the run ID
    keep_replicas: int = option(
        "--keep-replicas", "int", 0, "copy the kept state of each node to the next one: 0 or 1", most=1
    )


class Output(Section, title="Output"):
    """Where the output of the workers goes, and what the launcher prints."""

    log_dir: str | None = torchrun("--log-dir", "directory", None, "directory for logs", common=True)
    redirects: str = torchrun(
        "-r --redirects", "std", "0", "to files: 1 stdout, 2 stderr, 3 both, or RANK:N,..."
    )
    tee: str = torchrun("-t --tee", "std", "0", "to files and the console; same values as -r", common=True)
    local_ranks_filter: frozenset[int] | None = torchrun(
        "--local-ranks-filter", "ranks", "", "only these local ranks on the console: 0,3-7"
    )
    ranks_filter: frozenset[int] | None = option(
        "--ranks-filter", "ranks", "", "only these global ranks on the console: 0,3-7", common=True
    )
    log_line_prefix_template: str | None = torchrun(
        "--log-line-prefix-template", "text", "",
        "prefix of console lines, as in [${role_name}${local_rank}]:",
    )  # fmt: skip
    duplicate_stdout_filters: tuple[str, ...] = torchrun(
        "--duplicate-stdout-filters", "list", (), "copy matching lines to one file", metavar="WORDS"
    )
    duplicate_stderr_filters: tuple[str, ...] = torchrun(
        "--duplicate-stderr-filters", "list", (), "the same for stderr", metavar="WORDS"
    )
    logs_specs: LogsSpecs | str | None = torchrun(  # the name of a plug-in, or the object itself
        "--logs-specs", "text", None, "plug-in that chooses where logs go", env=None, metavar="NAME"
    )
    event_log_handler: str = torchrun(
        "--event-log-handler", "text", "null",
        "where events go: null, console, file ($PHALANX_EVENTS_FILE) or a plug-in (an entry point in "
        "phalanx.event_handlers)",
    )  # fmt: skip
    log_format: str = option(
        "--log-format", "choice", "text",
        "lines of the launcher, and with -t of the workers, as text or as json objects",
        choices=("text", "json"),
    )  # fmt: skip
    log_rotate: tuple[int, int | None] | None = option(  # bytes of a part, and how many are kept (None: all)
        "--log-rotate", "rotation", None,
        "move the older part of a worker's log to files of this size, and keep that many: 100M:5",
        metavar="SIZE[:PARTS]",
    )  # fmt: skip
    log_retention: float | None = option(  # seconds; None: forever
        "--log-retention", "duration", 7 * DAY,
        "how long temporary logs of finished jobs stay; a later run removes them: 12h, 7d, forever",
        most=3650 * DAY, words={"forever": None},
    )  # fmt: skip
    termination_log: str = option(  # empty: Kubernetes' default, if it is there
        "--termination-log", "file", "",
        "write why the job failed into this file (/dev/termination-log, if there is one)",
    )  # fmt: skip
    quiet: bool = option("-q --quiet", "flag", False, "print failures only", common=True)
    verbose: bool = option("--verbose", "flag", False, "print every decision and its reason")


class Terminal(Section, title="Other"):
    """What the launcher does with the terminal."""

    attach: int | None = option(
        "--attach", "int", None, "this rank reads the terminal (for pdb)", env=None, metavar="RANK"
    )
    dry_run: bool = option(
        "--dry-run", "flag", False, "show what would be started, and start nothing", env=None, common=True
    )
    detach: bool = option(
        "--detach", "flag", False, "run in the background, detached from the terminal", env=None
    )
    completion = option(
        "--print-completion", "choice", None, "print a completion script: bash, zsh, fish or tcsh",
        env=None, choices=SHELLS, metavar="SHELL",
    )  # fmt: skip
    version = option("--version", "flag", False, "print the version", env=None)
    help = option("-h --help", "flag", False, "print the options that most jobs need", env=None, common=True)
    help_all = option(
        "--help-all", "flag", False, "print all options, with their variables and defaults", env=None,
        common=True,
    )  # fmt: skip


SECTIONS = (Program, Workers, Cluster, Restarts, Watching, KeptState, Output, Terminal)
OPTIONS: tuple[Option, ...] = tuple(row for section in SECTIONS for row in section.rows)
BY_DEST: dict[str, Option] = {row.dest: row for row in OPTIONS}


class JobSpec(Record):
    """A job as this node runs it: checked, resolved and frozen."""

    program: Program
    workers: Workers
    cluster: Cluster
    restarts: Restarts
    watching: Watching
    state: KeptState
    output: Output
    terminal: Terminal
    scheduler: str  # whose variables were read; empty: none
    taken: tuple[tuple[str, str, str], ...]  # from it: option, value, origin
    origins: tuple[tuple[str, str], ...]  # of a dry run: options with their values, and where they were set
    warnings: tuple[str, ...]  # worth one line each, not worth stopping

    @property
    def node_name(self) -> str:
        """This node, as all nodes and every record call it."""
        return str(self.cluster.rdzv_conf.get("name") or os.uname().nodename)
