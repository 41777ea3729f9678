"""`phalanx check`: whether this machine is fit for a job, and the network between several.

    phalanx check                                                   this machine alone
    phalanx check --only compute,disk --disk /scratch               some checks, another disk
    phalanx check --nnodes 4 --rdzv-endpoint node0:29400            on four nodes at once: in pairs, too

`phalanx doctor` looks at settings and at the way to the other nodes; this command uses what a job would use.
Each check has a time limit; one that hangs or crashes is a finding, "could not tell". See docs/check.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phalanx.check.local import BETWEEN, NAMES
from phalanx.cli.parser import Parser, sources
from phalanx.cli.table import four_columns, table_width
from phalanx.core.diagnosis.fitness import EXIT_CODES, FIT, UNKNOWN, CheckFinding, NodeVerdict, judge_node
from phalanx.job.command_line import usage_error
from phalanx.job.environment import temporary_directory, variables
from phalanx.log import printable

if TYPE_CHECKING:
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.job.config import Sources

DESCRIPTION = """\
Tests whether this machine is fit for a job: GPUs, memory, shared memory, disk,
clock, limits, NUMA, CPUs. It changes nothing.

With --nnodes N, run on N nodes at the same time, they meet at the endpoint and
measure in pairs, twice: over TCP, and with torch's backend (NCCL with GPUs,
else gloo) where torch is installed. All of them print one verdict.
"""
EXIT_CODES_HELP = """\
Exit code: 0 fit, 10 warn, 20 unfit, 30 could not tell, 2 bad usage; with
--nnodes, of the worst node.
"""
TAKES = (
    "log_dir", "nnodes", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "token_file",
    "tls_cert", "tls_key", "tls_ca",
)  # fmt: skip
_SHOWN = {UNKNOWN: "?"}
_STORE_GRACE = 5.0
_RUN_ID = "check"
HEADS = ("check", "value", "verdict", "what to do")


class CheckOptions(NamedTuple):
    """What the command line asks for."""

    only: tuple[str, ...]
    directories: tuple[tuple[str, str], ...]  # what is written there, and where
    as_json: bool
    meeting: RendezvousParameters | None  # with other nodes


def main(argv: Sequence[str]) -> int:
    """`phalanx check [options]`."""
    asked = parse(argv, variables())
    if asked.meeting is not None:
        from phalanx.cli.check_nodes import check_together

        return check_together(asked, asked.meeting)
    from phalanx.check.local import examine

    findings = examine(variables(), asked.only, asked.directories)
    verdict = judge_node(os.uname().nodename, findings)
    if asked.as_json:
        print(as_json(verdict, findings))
    else:
        print(printable(as_text(verdict, findings, table_width())), end="")
    return EXIT_CODES[verdict.fitness]


def make_parser() -> Parser:
    """The options."""
    parser = Parser("check", DESCRIPTION, epilog=EXIT_CODES_HELP)
    parser.add_value("--only", "list", f"these checks only: {', '.join((*NAMES, *BETWEEN))}", metavar="NAMES")
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


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CheckOptions:
    """The words of the command line, with the variables that `phalanx run` reads."""
    options = make_parser().parse_args(argv)
    v = sources(options, TAKES, environ)
    meeting = _meeting(v, options.wait)
    known = (*NAMES, *BETWEEN)
    only = options.only or ()
    for name in only:
        if name not in known:
            raise usage_error(f"--only {name}: no such check; there are {', '.join(known)}")
        if name in BETWEEN and meeting is None:
            raise usage_error(f"--only {name}: needs other nodes; add --nnodes N --rdzv-endpoint HOST:PORT")
    directories = [("logs", v.text("log_dir") or temporary_directory())]
    directories += [("disk", where) for where in options.disk]
    return CheckOptions(only or known, tuple(dict.fromkeys(directories)), options.json, meeting)


def _meeting(v: Sources, wait: float) -> RendezvousParameters | None:
    """Where the nodes meet; None: this one is alone."""
    nodes = v.text("nnodes")
    least, _, most = nodes.partition(":")
    if not (least.isdecimal() and int(least) and most in ("", least)):
        raise v.bad("nnodes", "all nodes take part in a check: write one number")
    if int(least) == 1:
        return None
    if not v.text("rdzv_endpoint"):
        raise v.bad("nnodes", "add --rdzv-endpoint HOST:PORT, where they meet")
    backend = v.text("rdzv_backend") if v.given("rdzv_backend") else "phalanx"
    if backend not in ("phalanx", "c10d", "etcd"):
        raise v.bad("rdzv_backend", "a check meets through phalanx or etcd")
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.job.rules import trust_files

    conf = {**v.settings(), **trust_files(v), "join_timeout": wait, "store_grace": _STORE_GRACE}
    run_id = v.text("rdzv_id") if v.given("rdzv_id") else _RUN_ID
    where = v.text("rdzv_endpoint")
    try:
        return RendezvousParameters(
            backend, where, run_id, int(least), int(least), v.text("local_addr") or None, **conf
        )
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
