"""`phalanx check`: whether this machine is fit for a job, the way to the store, the network between nodes.

    phalanx check                                                   this machine alone
    phalanx check --only compute,disk --disk /scratch               some checks, another disk
    phalanx check --rdzv-endpoint node0:29400                       and the way to the store
    phalanx check --nnodes 4 --rdzv-endpoint node0:29400            on four nodes at once: in pairs, too
    phalanx check --environment                                     what belongs in a bug report

Each check has a time limit; one that hangs or crashes is a finding, "could not tell". See docs/check.md.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phalanx.check.local import BETWEEN, MACHINE, NAMES, STORE, examine
from phalanx.cli.parser import Parser, sources
from phalanx.cli.table import four_columns, table_width
from phalanx.core.diagnosis.fitness import EXIT_CODES, FIT, UNKNOWN, CheckFinding, NodeVerdict, judge_node
from phalanx.job.command_line import usage_error
from phalanx.job.environment import temporary_directory, variables
from phalanx.log import printable

if TYPE_CHECKING:
    from phalanx.cluster.settings import Settings
    from phalanx.job.config import Sources

DESCRIPTION = """\
Tests whether this machine is fit for a job: GPUs, memory, shared memory, disk,
clock, limits, NUMA, CPUs, variables, its name and ports. It changes nothing.

With --rdzv-endpoint, also the way to the store: name, port, token, answer.

With --nnodes N as well, run on N nodes at the same time, they meet there and
measure in pairs, twice: over TCP, and with torch's backend (NCCL with GPUs,
else gloo) where torch is installed. All of them print one verdict.
"""
EXIT_CODES_HELP = """\
Exit code: 0 fit, perhaps with warnings; 95 unfit; 1 could not tell; with
--nnodes, of the worst node. --json has the verdict and every finding.
"""
TAKES = (
    "log_dir", "nnodes", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "token_file",
    "tls_cert", "tls_key", "tls_ca",
)  # fmt: skip
_SHOWN = {UNKNOWN: "?"}
_STORE_GRACE = 5.0
_RUN_ID = "check"
_BACKENDS = ("phalanx", "c10d", "etcd")
_GROUP = "machine"
HEADS = ("check", "value", "verdict", "what to do")


class CheckOptions(NamedTuple):
    """What the command line asks for."""

    only: tuple[str, ...]
    directories: tuple[tuple[str, str], ...]  # what is written there, and where
    as_json: bool
    local_addr: str
    settings: Settings | None  # of the store that is to be reached
    together: int  # nodes


def main(argv: Sequence[str]) -> int:
    """`phalanx check [options]`."""
    options = make_parser().parse_args(argv)
    if options.environment:
        return _show_environment(options.json)
    asked = _asked(options, variables())
    if asked.settings is not None and asked.together > 1:
        from phalanx.cli.check_nodes import check_together

        return check_together(asked, asked.settings)
    findings = examine(variables(), asked.only, asked.directories, asked.local_addr, asked.settings)
    verdict = judge_node(os.uname().nodename, findings)
    if asked.as_json:
        print(as_json(verdict, findings))
    else:
        print(printable(as_text(verdict, findings, table_width())), end="")
    return EXIT_CODES[verdict.fitness]


def _show_environment(as_json: bool) -> int:
    from phalanx.check.environment import as_text, collect

    facts = collect(variables())
    if as_json:
        import json

        print(json.dumps(facts, indent=2, default=str))
    else:
        print(as_text(facts), end="")
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser("check", DESCRIPTION, epilog=EXIT_CODES_HELP)
    known = ", ".join((*NAMES, *BETWEEN))
    about = f"these checks only: {known}; {_GROUP}: those of this machine, {MACHINE[0]} to {MACHINE[-1]}"
    parser.add_value("--only", "list", about, metavar="NAMES")
    parser.add_flag("--environment", "instead: print what belongs in a bug report, with secrets masked")
    parser.add_argument(
        "--disk",
        metavar="DIR",
        action="append",
        default=[],
        help="write there as well, as for checkpoints; may be repeated",
    )
    parser.add_value("--wait", "duration", "wait for the other nodes [1m]", default=60.0, least=1)
    parser.add_flag("--json", "print JSON")
    parser.add_run_options(*TAKES, variable=False)
    return parser


def _asked(options: Namespace, environ: Mapping[str, str]) -> CheckOptions:
    """What the command line asks for, with the variables that `phalanx run` reads."""
    v = sources(options, TAKES, environ)
    nodes, only = _count(v), list(options.only or ())
    known = (*NAMES, *BETWEEN)
    if _GROUP in only:
        at = only.index(_GROUP)
        only[at : at + 1] = MACHINE
    for name in only:
        if name not in known:
            raise usage_error(f"--only {name}: no such check; there are {_GROUP}, {', '.join(known)}")
        if name in BETWEEN and nodes == 1:
            raise usage_error(f"--only {name}: needs other nodes; add --nnodes N --rdzv-endpoint HOST:PORT")
    # A variable may name the store of a job whose backend has none of these.
    endpoint = v.text("rdzv_endpoint")
    store = bool(endpoint) and (not v.given("rdzv_backend") or v.text("rdzv_backend") in _BACKENDS)
    settings = None
    if nodes > 1 or STORE in only or (store and not only):
        settings = _settings(v, nodes, options.wait)
    if not only:
        only = [name for name in known if name != STORE] if nodes > 1 else list(NAMES)
    directories = [("logs", v.text("log_dir") or temporary_directory())]
    directories += [("disk", where) for where in options.disk]
    where = tuple(dict.fromkeys(directories))
    return CheckOptions(tuple(only), where, options.json, v.text("local_addr"), settings, nodes)


def _count(v: Sources) -> int:
    """How many nodes take part."""
    least, _, most = v.text("nnodes").partition(":")
    if not (least.isdecimal() and int(least) and most in ("", least)):
        raise v.bad("nnodes", "all nodes take part in a check: write one number")
    if int(least) > 1 and not v.text("rdzv_endpoint"):
        raise v.bad("nnodes", "add --rdzv-endpoint HOST:PORT, where they meet")
    return int(least)


def _settings(v: Sources, nodes: int, wait: float) -> Settings:
    """Where the store is, and how the nodes meet there."""
    where = v.text("rdzv_endpoint")
    if not where:
        raise usage_error(f"--only {STORE}: add --rdzv-endpoint HOST:PORT, where the store is")
    backend = v.text("rdzv_backend") if v.given("rdzv_backend") else "phalanx"
    if backend not in _BACKENDS:
        raise v.bad("rdzv_backend", "a check meets through phalanx or etcd")
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.cluster.settings import Settings
    from phalanx.job.rules import trust_files

    conf = {**v.settings(), **trust_files(v), "join_timeout": wait, "store_grace": _STORE_GRACE}
    run_id = v.text("rdzv_id") if v.given("rdzv_id") else _RUN_ID
    local = v.text("local_addr") or None
    try:
        return Settings(RendezvousParameters(backend, where, run_id, nodes, nodes, local, **conf))
    except (ValueError, TypeError) as error:
        raise usage_error(str(error)) from None


def as_json(verdict: NodeVerdict, findings: Sequence[CheckFinding]) -> str:
    """For programs."""
    import json

    rows = [one.as_dict() for one in findings]
    return json.dumps({**verdict.as_dict(), "checks": rows}, indent=2)


def as_text(verdict: NodeVerdict, findings: Sequence[CheckFinding], width: int) -> str:
    """For people: a row for each finding, the verdict last."""
    rows = [(one.check, one.value, _SHOWN.get(one.fitness, one.fitness), one.advice) for one in findings]
    lines = four_columns([HEADS, *rows], width, max(map(len, (FIT, "unfit", "verdict"))))
    return "\n".join([*lines, "", verdict_line(verdict)]) + "\n"


def verdict_line(verdict: NodeVerdict) -> str:
    """`node3: unfit (GPU 2 compute: …)`."""
    return f"{verdict.node}: {verdict.fitness}" + (f" ({verdict.reason})" if verdict.reason else "")
