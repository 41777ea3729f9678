"""`phalanx doctor`: checks whether this machine can run a job and reach the other nodes.

    phalanx doctor                                                  this machine alone
    phalanx doctor --rdzv-endpoint node0:29400                      and the way to the store
    phalanx doctor --rdzv-endpoint node0:29400 --with 4             on four nodes at once: they meet

It changes nothing, and every check has a time limit. The exit code is 0 without a problem, 1 with one, 2 for
bad usage. A `warn` does not stop a job; a `problem` does, or will. Options and variables are those of
`phalanx run`, so they can be copied from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from phalanx.cli.table import four_columns, table_width
from phalanx.job.command_line import scan, usage_error
from phalanx.job.environment import variables
from phalanx.log import printable

OK, WARN, PROBLEM = "ok", "warn", "problem"
TAKES = (
    "rdzv_endpoint", "rdzv_backend", "rdzv_conf", "local_addr", "token_file", "tls_cert", "tls_key", "tls_ca",
)  # fmt: skip
USAGE = """\
usage: phalanx doctor [--rdzv-endpoint HOST:PORT] [--with N] [--json]

Checks names, reachability, token, clocks, ports, shared memory, limits, GPUs
and variables, and suggests a fix for each problem. It also takes these
options of phalanx run: --rdzv-backend --rdzv-conf --local-addr --token-file
--tls-cert --tls-key --tls-ca.

  --with N   run on N nodes at the same time: wait for the others at the
             endpoint, test all connections and compare the clocks
  --wait S   wait at most S seconds [30]
  --json     print JSON

Exit code: 0 no problem, 1 a problem, 2 bad usage.
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
    words = list(argv)
    if "-h" in words or "--help" in words:
        print(USAGE, end="")
        return 0
    as_json = "--json" in words
    asked = parse([word for word in words if word != "--json"], variables())
    found = examine(asked, variables())
    if as_json:
        import json

        rows = [row._asdict() for row in found]
        print(json.dumps({"ok": not _in_the_way(found), "checks": rows}, indent=2))
    else:
        print(printable(as_table(found, table_width())), end="")
    return 1 if _in_the_way(found) else 0


def parse(words: list[str], environ: Mapping[str, str]) -> Asked:
    """The words of the command line, with the variables that `phalanx run` reads."""
    from phalanx.job.config import Sources

    own, rest = _own_options(words)
    found = scan(rest)
    if found.script is not None:
        raise usage_error(f"{found.script}: doctor takes options only; did you mean phalanx run?")
    for dest in found.values:
        if dest not in TAKES:
            raise usage_error(f"--{dest.replace('_', '-')}: doctor does not use it; drop it")
    v = Sources(found.values, environ)
    tls = (v.text("tls_cert"), v.text("tls_key"), v.text("tls_ca"))
    together, wait = own.get("--with", 1.0), own.get("--wait", 30.0)
    if together > 1 and not v.text("rdzv_endpoint"):
        raise usage_error(f"--with {together:g}: add --rdzv-endpoint HOST:PORT, where they meet")
    return Asked(
        v.text("rdzv_endpoint"), v.text("rdzv_backend"), v.settings(), v.text("local_addr"),
        v.text("token_file"), tls, int(together), wait,
    )  # fmt: skip


def _own_options(words: list[str]) -> tuple[dict[str, float], list[str]]:
    """--with and --wait, which `phalanx run` does not have, and the rest."""
    own: dict[str, float] = {}
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in ("--with", "--wait"):
            rest.append(word)
            continue
        raw = value if equals else next(remaining, "")
        try:
            own[name] = float(raw)
        except ValueError:
            own[name] = -1.0
        whole = name == "--wait" or own[name] == int(own[name])
        if not 1 <= own[name] <= 100_000 or not whole:
            raise usage_error(f"{name} {raw}: must be a number, 1 or more")
    return own, rest


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
