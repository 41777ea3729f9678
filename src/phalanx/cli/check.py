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
from phalanx.cli.table import four_columns, table_width
from phalanx.core.diagnosis.fitness import EXIT_CODES, FIT, UNKNOWN, CheckFinding, NodeVerdict, judge_node
from phalanx.job.command_line import scan, usage_error
from phalanx.job.environment import temporary_directory, variables
from phalanx.log import printable

if TYPE_CHECKING:
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.job.config import Sources

USAGE = f"""\
usage: phalanx check [--only NAMES] [--disk DIR] [--json]
                     [--nnodes N --rdzv-endpoint HOST:PORT [--wait S]]

Tests whether this machine is fit for a job: GPUs, memory, shared memory,
disk, clock, limits, NUMA, CPUs. It changes nothing.

With --nnodes N, run on N nodes at the same time, they meet at the endpoint
and measure in pairs, twice: over TCP, and with torch's backend (NCCL with
GPUs, else gloo) where torch is installed. All of them print one verdict.
It also takes these options of phalanx run: --rdzv-backend --rdzv-id
--rdzv-conf --local-addr --token-file --tls-cert --tls-key --tls-ca.

  --only NAMES   these checks only, between commas:
                 {", ".join(NAMES[:6])},
                 {", ".join(NAMES[6:])},
                 {", ".join(BETWEEN)} (with --nnodes)
  --disk DIR     write there as well, as for checkpoints; may be repeated
  --log-dir DIR  where logs would go, instead of the temporary directory
  --wait S       wait at most S seconds for the other nodes [60]
  --json         print JSON

Exit code: 0 fit, 10 warn, 20 unfit, 30 could not tell, 2 bad usage; with
--nnodes, of the worst node.
"""
TAKES = (
    "log_dir", "nnodes", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "token_file",
    "tls_cert", "tls_key", "tls_ca",
)  # fmt: skip
_SHOWN = {UNKNOWN: "?"}
_VALUED = ("--only", "--disk", "--wait")
_WAIT = 60.0
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
    if "-h" in argv or "--help" in argv:
        print(USAGE, end="")
        return 0
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


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CheckOptions:
    """The words of the command line, with the variables that `phalanx run` reads."""
    from phalanx.job.config import Sources

    own, rest = _own_options(argv)
    found = scan([word for word in rest if word != "--json"])
    if found.script is not None:
        raise usage_error(f"{found.script}: check takes options only; did you mean phalanx run --check?")
    for dest in found.values:
        if dest not in TAKES:
            raise usage_error(f"--{dest.replace('_', '-')}: check does not use it; drop it")
    v = Sources(found.values, environ)
    meeting = _meeting(v, own["--wait"][-1:])
    known = (*NAMES, *BETWEEN)
    only = [name.strip() for text in own["--only"] for name in text.split(",") if name.strip()]
    for name in only:
        if name not in known:
            raise usage_error(f"--only {name}: no such check; there are {', '.join(known)}")
        if name in BETWEEN and meeting is None:
            raise usage_error(f"--only {name}: needs other nodes; add --nnodes N --rdzv-endpoint HOST:PORT")
    directories = [("logs", v.text("log_dir") or temporary_directory())]
    directories += [("disk", where) for where in own["--disk"]]
    return CheckOptions(tuple(only) or known, tuple(dict.fromkeys(directories)), "--json" in rest, meeting)


def _meeting(v: Sources, wait: Sequence[str]) -> RendezvousParameters | None:
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

    try:
        seconds = float(wait[0]) if wait else _WAIT
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 86400:
        raise usage_error(f"--wait {wait[0]}: must be a number of seconds, 1 or more")
    conf = {**v.settings(), **trust_files(v), "join_timeout": seconds, "store_grace": _STORE_GRACE}
    run_id = v.text("rdzv_id") if v.given("rdzv_id") else _RUN_ID
    where = v.text("rdzv_endpoint")
    try:
        return RendezvousParameters(
            backend, where, run_id, int(least), int(least), v.text("local_addr") or None, **conf
        )
    except (ValueError, TypeError) as error:
        raise usage_error(str(error)) from None


def _own_options(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The options that `phalanx run` does not have, and the rest."""
    own: dict[str, list[str]] = {name: [] for name in _VALUED}
    rest: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in _VALUED:
            rest.append(word)
            continue
        raw = value if equals else next(remaining, "")
        if not raw or raw.startswith("--"):
            raise usage_error(f"{name}: needs a value; phalanx check --help")
        own[name].append(raw)
    return own, rest


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
