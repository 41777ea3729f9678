"""`phalanx doctor`: checks whether this machine can run a job and reach the other nodes.

    phalanx doctor                                                  this machine alone
    phalanx doctor --rdzv-endpoint node0:29400                      and the way to the store
    phalanx doctor --rdzv-endpoint node0:29400 --with 4             on four nodes at once: they meet

It changes nothing, and every check has a time limit. The exit code is 0 without a problem, 1 with one, 2 for
bad usage. A `warn` does not stop a job; a `problem` does, or will. Options and variables are those of
`phalanx run`, so they can be copied from there.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from phalanx.cli.parser import Parser, sources
from phalanx.cli.table import four_columns, table_width
from phalanx.job.command_line import usage_error
from phalanx.job.environment import variables
from phalanx.log import printable

OK, WARN, PROBLEM = "ok", "warn", "problem"
TAKES = (
    "rdzv_endpoint", "rdzv_backend", "rdzv_conf", "local_addr", "token_file", "tls_cert", "tls_key", "tls_ca",
)  # fmt: skip
DESCRIPTION = """\
Checks names, reachability, token, clocks, ports, shared memory, limits, GPUs
and variables, and suggests a fix for each problem.
"""


class Finding(NamedTuple):
    """One row: the check, the value found, the verdict, and what to do."""

    check: str
    value: str
    verdict: str = OK
    advice: str = ""


class Asked(NamedTuple):
    """What the command line asks for."""

    endpoint: str
    backend: str
    conf: Mapping[str, str]
    local_addr: str
    token_file: str
    tls: tuple[str, str, str]
    together: int
    wait: float


def main(argv: Sequence[str]) -> int:
    """`phalanx doctor [options]`."""
    options = make_parser().parse_args(argv)
    found = examine(_asked(options, variables()), variables())
    if options.json:
        import json

        rows = [row._asdict() for row in found]
        print(json.dumps({"ok": not _in_the_way(found), "checks": rows}, indent=2))
    else:
        print(printable(as_table(found, table_width())), end="")
    return 1 if _in_the_way(found) else 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser("doctor", DESCRIPTION, epilog="Exit code: 0 no problem, 1 a problem, 2 bad usage.")
    parser.add_value(
        "--with",
        "int",
        "run on N nodes at the same time: wait for the others at the endpoint, test all connections and "
        "compare the clocks",
        dest="together",
        default=1,
        least=1,
    )
    parser.add_value("--wait", "duration", "wait for the other nodes [30s]", default=30.0, least=1)
    parser.add_flag("--json", "print JSON")
    parser.add_run_options(*TAKES, variable=False)
    return parser


def _asked(options: Namespace, environ: Mapping[str, str]) -> Asked:
    v = sources(options, TAKES, environ)
    tls = (v.text("tls_cert"), v.text("tls_key"), v.text("tls_ca"))
    if options.together > 1 and not v.text("rdzv_endpoint"):
        raise usage_error(f"--with {options.together}: add --rdzv-endpoint HOST:PORT, where they meet")
    return Asked(
        v.text("rdzv_endpoint"), v.text("rdzv_backend"), v.settings(), v.text("local_addr"),
        v.text("token_file"), tls, options.together, options.wait,
    )  # fmt: skip


def examine(asked: Asked, environ: Mapping[str, str]) -> list[Finding]:
    """Every check in turn; one that raises becomes a row of its own."""
    from phalanx.cli import doctor_machine, doctor_network

    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: doctor_network.own_name(asked),
        lambda: doctor_network.ports(asked),
        doctor_machine.shared_memory,
        doctor_machine.limits,
        doctor_machine.cgroup,
        lambda: doctor_machine.gpus(environ),
        lambda: doctor_machine.variables(environ),
    ]
    if asked.endpoint:
        checks.insert(1, lambda: doctor_network.way_to_the_store(asked, environ))
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except (OSError, ValueError, LookupError) as error:
            found.append(Finding("a check failed", f"{type(error).__name__}: {error}", WARN, "report this"))
    return found


def _in_the_way(found: Iterable[Finding]) -> bool:
    return any(row.verdict == PROBLEM for row in found)


def as_table(found: Sequence[Finding], width: int) -> str:
    """One row per finding, with what to do at its end or below."""
    lines = four_columns([Finding("check", "value", "verdict", "what to do"), *found], width, len("problem"))
    bad = [row.check for row in found if row.verdict == PROBLEM]
    doubtful = sum(row.verdict == WARN for row in found)
    lines += ["", f"in the way: {', '.join(bad)}" if bad else f"nothing in the way ({doubtful} to look at)"]
    return "\n".join(lines) + "\n"
