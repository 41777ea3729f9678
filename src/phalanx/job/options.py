"""The options of `phalanx run` as one table, and the scanner that reads argv against it.

Everything else about an option is derived from its row: both spellings, its variable, the help, and the
argparse parser that torch's `get_args_parser` callers and the completion scripts use.

Invariants:
- scanning stops at the first positional word; it and everything after it belong to the script, untouched;
- an option may be shortened as long as what is left names one option (argparse's rule, except that the two
  spellings of one option do not make it ambiguous);
- the scanner reads words, never their meaning: values are checked in `phalanx.job.config`.

`phalanx run` itself does not use argparse. Importing it and building a parser costs more than everything
else that happens before the workers are started, and its messages cannot name a variable or suggest a flag.
"""

from __future__ import annotations

from phalanx.job.environment import DEFAULT_QUARANTINE, DEFAULT_SIGNALS, HEALTH_PORT, LINE_PREFIX, STATIC_PORT

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` for it would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx.errors import UsageError

ON = "on"
"""The value of an option whose address is left out."""
SHELLS = ("bash", "zsh", "fish", "tcsh")

# Options of other launchers, too different from these names for a spelling suggestion.
_ELSEWHERE = {
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--np": "--nproc-per-node",
    "--num-processes": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--num-machines": "--nnodes",
    "--num-nodes": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-port": "--master-port",
    "--main-process-ip": "--master-addr",
    "--run-id": "--rdzv-id",
    "--timeout": "--shutdown-timeout",
}


class Option:
    """One row: what it is called, what it takes, where else its value may come from."""

    __slots__ = ("choices", "default", "dest", "env", "flags", "group", "help", "kind", "metavar")

    def __init__(
        self,
        flags: str,
        kind: str,
        default: Any,
        help: str,
        *,
        env: str | None = "PET_",
        choices: tuple[str, ...] = (),
        metavar: str = "",
    ) -> None:
        spelled: list[str] = []
        for flag in flags.split():
            spelled.append(flag)
            if "-" in flag[2:]:
                spelled.append("--" + flag[2:].replace("-", "_"))
        self.flags = tuple(spelled)
        long = next(flag for flag in spelled if flag.startswith("--"))
        self.dest = long[2:].replace("-", "_")
        self.kind = kind  # str | int | float | flag | list | address (which may be left out)
        self.default = default
        self.help = help
        self.env = env + self.dest.upper() if env in ("PET_", "PHALANX_") else env
        self.choices = choices
        self.metavar = metavar or self.dest.rpartition("_")[2].upper()
        self.group = ""

    @property
    def is_torchruns(self) -> bool:
        """Whether torchrun has it as well."""
        return (self.env or "").startswith("PET_") or self.dest in ("help", "logs_specs", "numa_binding")

    @property
    def name(self) -> str:
        """The spelling used in messages and help: long, with dashes."""
        return next(flag for flag in self.flags if flag.startswith("--"))


def _grouped(groups: dict[str, tuple[Option, ...]]) -> tuple[Option, ...]:
    for title, members in groups.items():
        for option in members:
            option.group = title
    return tuple(option for members in groups.values() for option in members)


OPTIONS: tuple[Option, ...] = _grouped(
    {
        "What to run": (
            Option("-m --module", "flag", False, "the script is a module name, as in python -m"),
            Option("--no-python", "flag", False, "the script is a program, not Python"),
            Option("--run-path", "flag", False, "run the script with this interpreter, always"),
        ),
        "Workers": (
            Option(
                "--nproc-per-node",
                "str",
                "1",
                "workers per node: a number, auto, gpu, xpu or cpu",
                metavar="N",
            ),
            Option("--role", "str", "default", "name of this group of workers", metavar="NAME"),
            Option(
                "--numa-binding",
                "str",
                None,
                "keep each worker on CPUs near its GPU: node, socket, exclusive or core-complex",
                env=None,
                choices=("node", "socket", "exclusive", "core-complex"),
                metavar="MODE",
            ),
            Option(
                "--omp",
                "str",
                "",
                "OMP_NUM_THREADS of each worker: a number, or auto for its share of the usable cores",
                env="PHALANX_",
                metavar="N",
            ),
            Option("--virtual-local-rank", "flag", False, "each worker sees one GPU, as LOCAL_RANK 0"),
            Option(
                "--start-method",
                "str",
                "spawn",
                "for function entrypoints: spawn, fork or forkserver",
                choices=("spawn", "fork", "forkserver"),
            ),
            Option(
                "--warm",
                "str",
                "auto",
                "how Python workers start: auto (forked, common imports done), off or standby",
                env="PHALANX_",
                choices=("auto", "off", "standby"),
            ),
            Option(
                "--preload",
                "list",
                (),
                "modules to import before workers are forked",
                env="PHALANX_",
                metavar="MODULES",
            ),
            Option(
                "--warmup",
                "str",
                "",
                "what a standby worker runs in advance",
                env="PHALANX_",
                metavar="MODULE:FUNCTION",
            ),
            Option(
                "--keep-warm",
                "str",
                "",
                "leave the prepared process behind for the next launch, for this long: 10m",
                env="PHALANX_",
                metavar="TIME",
            ),
            Option(
                "--attach", "int", None, "this rank reads the terminal (for pdb)", env=None, metavar="RANK"
            ),
        ),
        "Nodes": (
            Option("--standalone", "flag", False, "one node, no address needed; ignores --rdzv-*"),
            Option("--nnodes", "str", "1:1", "number of nodes, or MIN:MAX", metavar="N"),
            Option(
                "--hosts",
                "str",
                "",
                "start on these hosts over ssh: a,b,c:8 (with the number of workers)",
                env=None,
                metavar="LIST",
            ),
            Option("--hostfile", "str", "", "the same from a file, a host on each line", env=None),
            Option("--ssh", "str", "ssh", "the ssh command for --hosts", env="PHALANX_", metavar="CMD"),
            Option("--node-rank", "int", 0, "rank of this node, from 0"),
            Option("--master-addr", "str", "127.0.0.1", "static: address of node 0"),
            Option("--master-port", "int", None, f"static: port on node 0 ({STATIC_PORT})"),
            Option("--local-addr", "str", None, "address by which other nodes reach this one"),
            Option("--rdzv-backend", "str", "static", "phalanx (or c10d), static, etcd, or a plug-in"),
            Option("--rdzv-endpoint", "str", "", "where the nodes meet", metavar="HOST:PORT"),
            Option("--rdzv-id", "str", "none", "name of the job, the same on every node"),
            Option("--rdzv-conf", "str", "", "more settings: key=value,key=value", metavar="K=V,..."),
            Option("--token-file", "str", None, "file with the secret that all nodes share", env="PHALANX_"),
            Option(
                "--tls-cert", "str", None, "TLS: certificate of this node", env="PHALANX_", metavar="FILE"
            ),
            Option("--tls-key", "str", None, "TLS: private key of this node", env="PHALANX_", metavar="FILE"),
            Option("--tls-ca", "str", None, "TLS: CA of the other nodes", env="PHALANX_", metavar="FILE"),
            Option(
                "--store-grace",
                "float",
                60.0,
                "seconds that workers may run without the store",
                env="PHALANX_",
                metavar="S",
            ),
            Option(
                "--quarantine",
                "str",
                DEFAULT_QUARANTINE,
                "keep a host out for COOLDOWN s that caused K failures within WINDOW s, or off",
                env="PHALANX_",
                metavar="K:WINDOW:COOLDOWN",
            ),
            Option(
                "--quarantine-dir",
                "str",
                None,
                "share quarantined hosts with other jobs in this directory",
                env="PHALANX_",
                metavar="DIR",
            ),
            Option(
                "--quarantine-hook",
                "str",
                None,
                "shell command to run for a quarantined host, $1, as to drain it",
                env="PHALANX_",
                metavar="CMD",
            ),
        ),
        "Restarts and stopping": (
            Option("--max-restarts", "int", 0, "restarts for the whole job", metavar="N"),
            Option(
                "--restart-window",
                "float",
                None,
                "count only the restarts of the last S seconds",
                env="PHALANX_",
                metavar="S",
            ),
            Option(
                "--no-restart-on",
                "str",
                "",
                "exit codes, signals and exceptions that are not worth a restart, or none",
                env="PHALANX_",
                metavar="LIST",
            ),
            Option(
                "--restart-delay",
                "float",
                0.0,
                "seconds before every restart",
                env="PHALANX_",
                metavar="S",
            ),
            Option(
                "--backoff",
                "str",
                "0.5:30",
                "seconds before the second restart in a row, doubled up to MAX; 0: none",
                env="PHALANX_",
                metavar="S[:MAX]",
            ),
            Option(
                "--reenter-timeout",
                "float",
                5.0,
                "seconds for a worker that re-enters to unwind; 0: every restart has new processes",
                env="PHALANX_",
                metavar="S",
            ),
            Option(
                "--grace",
                "float",
                None,
                "seconds between SIGTERM and SIGKILL (30)",
                env="PHALANX_",
                metavar="S",
            ),
            Option(
                "--shutdown-timeout",
                "int",
                None,
                "torchrun's name for --grace",
                metavar="S",
            ),
            Option(
                "--signals-to-handle",
                "str",
                DEFAULT_SIGNALS,
                "signals passed on to the workers, by name",
                metavar="NAMES",
            ),
            Option(
                "--monitor-interval",
                "float",
                0.1,
                "how often to poll a plug-in backend",
                metavar="S",
            ),
        ),
        "Kept state": (
            Option(
                "--keep-replicas",
                "int",
                0,
                "copy the kept state of each node to the next one: 0 or 1",
                env="PHALANX_",
                metavar="N",
            ),
            Option(
                "--keep-spill",
                "str",
                "",
                "write kept state here if the job fails or is preempted; its next launch finds it",
                env="PHALANX_",
                metavar="DIR",
            ),
        ),
        "Hangs, health and preemption": (
            Option(
                "--heartbeat-timeout",
                "float",
                None,
                "treat S seconds without phalanx.worker.heartbeat() as a hang",
                metavar="S",
                env="PHALANX_",
            ),
            Option(
                "--silence-timeout",
                "float",
                None,
                "treat S seconds without output from any rank as a hang; implies -t 3",
                metavar="S",
                env="PHALANX_",
            ),
            Option(
                "--startup-timeout",
                "float",
                None,
                "treat S seconds without ready() or a heartbeat after the start as a hang",
                metavar="S",
                env="PHALANX_",
            ),
            Option(
                "--partial-exit-timeout",
                "float",
                None,
                "seconds that ranks may run after others have finished",
                metavar="S",
                env="PHALANX_",
            ),
            Option(
                "--hang-timeout",
                "float",
                None,
                "treat S seconds without progress of torch's collectives as a hang; needs no code",
                metavar="S",
                env="PHALANX_",
            ),
            Option(
                "--on-hang",
                "str",
                "restart",
                "what to do about a hang: restart, fail or warn",
                metavar="WHAT",
                env="PHALANX_",
                choices=("restart", "fail", "warn"),
            ),
            Option(
                "--straggler-policy",
                "str",
                "warn",
                "what to do about a host that stays slow: warn, or replace it by a spare at a checkpoint",
                metavar="WHAT",
                env="PHALANX_",
                choices=("warn", "replace"),
            ),
            Option(
                "--health-port",
                "str",
                None,
                "serve /healthz and /readyz at this address",
                metavar="[ADDR:]PORT",
                env=HEALTH_PORT,
            ),
            Option(
                "--check",
                "flag",
                False,
                "test this machine before it joins, as phalanx check does; unfit: it stays out",
                env="PHALANX_",
            ),
            Option(
                "--health-check",
                "str",
                "",
                "command that must succeed before this node joins",
                metavar="CMD",
                env="PHALANX_",
            ),
            Option(
                "--preempt-signal",
                "str",
                "",
                "signal on which workers checkpoint and exit within --grace",
                metavar="NAME",
                env="PHALANX_",
            ),
        ),
        "Watching from outside": (
            Option(
                "--expect",
                "str",
                "",
                "pattern that the output must keep matching, as in 'loss: (\\S+)'; implies -t 3",
                env="PHALANX_",
                metavar="REGEX",
            ),
            Option(
                "--expect-every",
                "str",
                "",
                "treat this time without a line that matches --expect as a hang: 300s",
                env="PHALANX_",
                metavar="TIME",
            ),
            Option(
                "--expect-finite",
                "flag",
                False,
                "treat nan or inf in the first group of --expect as a hang",
                env="PHALANX_",
            ),
            Option(
                "--notify",
                "str",
                "",
                "command (JSON on stdin) or URL (POST) to tell of failures, recoveries, hangs and the end",
                env="PHALANX_",
                metavar="CMD|URL",
            ),
            Option(
                "--dashboard",
                "address",
                "",
                "serve a page about the job, on loopback and behind a link with a token",
                env="PHALANX_",
                metavar="[HOST:PORT]",
            ),
            Option(
                "--metrics",
                "flag",
                False,
                "serve /metrics for Prometheus at --health-port",
                env="PHALANX_",
            ),
            Option(
                "--otel",
                "flag",
                False,
                "send one OpenTelemetry trace per incident, as the OTEL_* variables say",
                env="PHALANX_",
            ),
        ),
        "Output": (
            Option("--log-dir", "str", None, "directory for logs"),
            Option(
                "-r --redirects",
                "str",
                "0",
                "to files: 1 stdout, 2 stderr, 3 both, or RANK:N,...",
                metavar="STD",
            ),
            Option("-t --tee", "str", "0", "to files and the console; same values as -r", metavar="STD"),
            Option(
                "--local-ranks-filter", "str", "", "only these local ranks on the console", metavar="RANKS"
            ),
            Option(
                "--ranks-filter",
                "str",
                "",
                "only these global ranks on the console",
                env="PHALANX_",
                metavar="RANKS",
            ),
            Option(
                "--log-line-prefix-template",
                "str",
                None,
                "prefix of console lines, as in [${role_name}${local_rank}]:",
                env=LINE_PREFIX,
            ),
            Option(
                "--duplicate-stdout-filters", "list", (), "copy matching lines to one file", metavar="WORDS"
            ),
            Option("--duplicate-stderr-filters", "list", (), "the same for stderr", metavar="WORDS"),
            Option(
                "--logs-specs", "str", None, "plug-in that chooses where logs go", env=None, metavar="NAME"
            ),
            Option(
                "--event-log-handler",
                "str",
                "null",
                "where events go: null, console, file ($PHALANX_EVENTS_FILE) or a plug-in (an entry point in "
                "phalanx.event_handlers)",
            ),
            Option(
                "--log-format",
                "str",
                "text",
                "lines of the launcher, and with -t of the workers, as text or as json objects",
                env="PHALANX_",
                choices=("text", "json"),
            ),
            Option(
                "--log-rotate",
                "str",
                "",
                "move the older part of a worker's log to files of this size, and keep that many: 100M:5",
                env="PHALANX_",
                metavar="SIZE[:KEEP]",
            ),
            Option(
                "--keep-logs",
                "str",
                "7d",
                "how long temporary logs of finished jobs stay; a later run removes them: 12h, 7d, forever",
                env="PHALANX_",
                metavar="TIME",
            ),
            Option(
                "--termination-log",
                "str",
                "",
                "write why the job failed into this file (/dev/termination-log, if there is one)",
                env="PHALANX_",
                metavar="FILE",
            ),
            Option("-q --quiet", "flag", False, "print failures only", env="PHALANX_"),
            Option("--verbose", "flag", False, "print every decision and its reason", env="PHALANX_"),
        ),
        "Other": (
            Option("--dry-run", "flag", False, "show what would be started, and start nothing", env=None),
            Option("--detach", "flag", False, "run in the background, detached from the terminal", env=None),
            Option(
                "--print-completion",
                "str",
                None,
                "print a completion script: bash, zsh, fish or tcsh",
                env=None,
                choices=SHELLS,
                metavar="SHELL",
            ),
            Option("--version", "flag", False, "print the version", env=None),
            Option("-h --help", "flag", False, "print this text", env=None),
        ),
    }
)

BY_DEST: dict[str, Option] = {option.dest: option for option in OPTIONS}
_BY_FLAG: dict[str, Option] = {flag: option for option in OPTIONS for flag in option.flags}


class InformationRequested(Exception):
    """The command line asks for help, the version or a completion script."""

    def __init__(self, what: str, value: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.value = value


class Scan:
    """The words of argv: raw values, the script, and its arguments."""

    __slots__ = ("script", "script_args", "values")

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.script: str | None = None
        self.script_args: tuple[str, ...] = ()


def peek(argv: Sequence[str], dest: str, environ: Mapping[str, str]) -> str:
    """What a command line that is refused says for an option, as far as that can be told."""
    option = BY_DEST[dest]
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in option.flags:
            return value if equals else following
    return environ.get(option.env or "", "")


def usage_error(message: str) -> UsageError:
    """The error, imported here: a valid command line does not pay for the exception tree."""
    from phalanx.errors import UsageError

    return UsageError(message)


def scan(argv: Sequence[str]) -> Scan:
    """Split argv into options, script and script arguments; raise `UsageError` on words it cannot place."""
    found = Scan()
    rest = list(argv)
    position = 0
    while position < len(rest):
        word = rest[position]
        position += 1
        if word == "--":
            break
        if not _is_option(word):
            position -= 1
            break
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:
            position = _scan_cluster(found, word, rest, position)
            continue
        option = find_option(name)
        if option.kind == "flag":
            if equals:
                raise usage_error(f"{word}: {option.name} takes no value; write {option.name} alone")
            value = "1"
        elif option.kind == "address" and not equals:
            value = ON
            if position < len(rest) and is_address(rest[position]):
                value = rest[position]
                position += 1
        elif not equals:
            value = _take_value(option, rest, position)
            position += 1
        _store(found, option, value)
    if position < len(rest):
        found.script = rest[position]
        found.script_args = tuple(rest[position + 1 :])
    return found


def take_words(word: str, rest: list[str]) -> list[str]:
    """An option of `run` as another command passes it on: the word, and its value if that is the next one."""
    name, equals, _ = word.partition("=")
    kind = find_option(name).kind
    if equals or kind == "flag" or (kind == "address" and not (rest and is_address(rest[0]))):
        return [word]
    if not rest:
        raise usage_error(f"{name} needs a value")
    return [word, rest.pop(0)]


def _scan_cluster(found: Scan, word: str, rest: list[str], position: int) -> int:
    """Short options written together: -r3, -mt1, -mr 3."""
    letters = word[1:]
    while letters:
        option = _BY_FLAG.get("-" + letters[0])
        if option is None:
            raise _unknown(word)
        letters = letters[1:]
        if option.kind == "flag":
            _store(found, option, "1")
            continue
        value = letters.removeprefix("=")
        if not letters:
            value = _take_value(option, rest, position)
            position += 1
        _store(found, option, value)
        break
    return position


def _store(found: Scan, option: Option, value: str) -> None:
    if option.dest in ("help", "version"):
        raise InformationRequested(option.dest)
    if option.dest == "print_completion":
        if value not in SHELLS:
            raise usage_error(f"--print-completion {value}: no such shell; use one of {', '.join(SHELLS)}")
        raise InformationRequested("completion", value)
    found.values[option.dest] = value


def _take_value(option: Option, rest: list[str], position: int) -> str:
    if position < len(rest):
        value = rest[position]
        if not value.startswith("-") or value == "-" or " " in value or _is_number(value):
            return value
        raise usage_error(
            f"{option.name} needs a value, but {value!r} follows; "
            f"if that is the value, write {option.name}={value}"
        )
    raise usage_error(f"{option.name} needs a value: {option.name} {option.metavar}")


def _is_option(word: str) -> bool:
    """Whether a word before the script is meant as an option (argparse's rules)."""
    if not word.startswith("-") or len(word) == 1:
        return False
    if word.partition("=")[0] in _BY_FLAG:
        return True
    return not _is_number(word) and " " not in word.partition("=")[0]


def is_address(word: str) -> bool:
    """`[HOST:]PORT`, which no script is called."""
    host, _, port = word.rpartition(":")
    return port.isascii() and port.isdigit() and (not host or "/" not in host)


def _is_number(word: str) -> bool:
    body = word.removeprefix("-")
    return body.replace(".", "", 1).isdigit()


def find_option(name: str) -> Option:
    """The option a flag names, spelled in full or shortened."""
    exact = _BY_FLAG.get(name)
    if exact is not None:
        return exact
    matches: list[Option] = []
    if name.startswith("--"):
        for flag, option in _BY_FLAG.items():
            if flag.startswith(name) and option not in matches:
                matches.append(option)
    # What is unique under torchrun stays unique: its options take precedence.
    matches = [option for option in matches if option.is_torchruns] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(option.name for option in matches)
        raise usage_error(f"{name} could be {names}; write it out")
    raise _unknown(name)


def _unknown(word: str) -> UsageError:
    import difflib

    name = word.partition("=")[0]
    dashed = name.replace("_", "-")
    near = [_ELSEWHERE[dashed]] if dashed in _ELSEWHERE else []
    near = near or difflib.get_close_matches(dashed, [option.name for option in OPTIONS], 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else "options of the script go after its name"
    return usage_error(f"{word}: no such option; {hint}")


def split_list(value: str) -> list[str]:
    """Words between single commas; a doubled comma stands for one inside a word."""
    return [part.replace("\0", ",") for part in value.replace(",,", "\0").split(",")]


def truth(value: str) -> bool | None:
    """The meaning of a flag's variable, None when it has none."""
    word = value.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    return bool(int(word)) if _is_number(word) and "." not in word else None
