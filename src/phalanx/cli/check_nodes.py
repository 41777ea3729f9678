"""`phalanx check --nnodes N`: this machine, then all of them together, with one verdict for all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.check.local import NAMES, examine
from phalanx.cli.check import CheckOptions, as_json, as_text, verdict_line
from phalanx.cli.table import table_width
from phalanx.core.diagnosis.fitness import (
    EXIT_CODES,
    UNKNOWN,
    CheckFinding,
    NodeVerdict,
    judge_node,
    plain_rate,
    show_rate,
    worst,
)
from phalanx.errors import PhalanxError
from phalanx.job.command_line import usage_error
from phalanx.job.environment import TOKEN_FILE, variables
from phalanx.log import printable, write_stderr

if TYPE_CHECKING:
    from phalanx.check.backend_process import BackendProcess
    from phalanx.check.meeting import MeetingVerdict
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.cluster.settings import Settings
    from phalanx.store.net.token import Token


def check_together(asked: CheckOptions, settings: Settings) -> int:
    """Check this machine, meet the others, print the verdict on all."""
    from phalanx.check.meeting import start_backend

    environ = variables()
    try:
        token, address = _token(settings), settings.address()
    except (ValueError, PhalanxError) as error:
        raise usage_error(str(error)) from None
    backend = start_backend(environ, address) if "backend" in asked.only else None
    try:
        # Before the meeting, which has threads: the checks fork.
        local = [name for name in asked.only if name in NAMES]
        findings = examine(environ, local, asked.directories, asked.local_addr, settings) if local else []
        own = judge_node(settings.name, findings)
        if not asked.as_json:
            if findings:
                print(printable(as_text(own, findings, table_width())), flush=True)
            others = asked.together - 1
            write_stderr(f"phalanx check: meeting {others} other nodes at {settings.where}\n")
        found = _meet(asked, settings.params, own, (address, token), environ, backend)
    finally:
        if backend is not None:
            backend.close()
    if isinstance(found, str):
        verdict = NodeVerdict(own.node, UNKNOWN, f"between the nodes: {found}")
        print(as_json(verdict, findings) if asked.as_json else printable(verdict_line(verdict)))
        return EXIT_CODES[worst((UNKNOWN, own.fitness))]
    overall = worst(fitness for _, fitness, _ in found.nodes)
    if asked.as_json:
        print(_as_json(own, findings, found, overall))
    else:
        print(printable(_as_text(found)), end="")
    return EXIT_CODES[overall]


def _token(settings: Settings) -> Token:
    from phalanx.store.net.token import find_token

    return find_token({TOKEN_FILE: settings.token_file} if settings.token_file else variables())


def _meet(
    asked: CheckOptions,
    params: RendezvousParameters,
    own: NodeVerdict,
    where: tuple[str, Token],
    environ: Mapping[str, str],
    backend: BackendProcess | None,
) -> MeetingVerdict | str:
    """The verdict on all nodes, or why there is none."""
    from phalanx.check.meeting import Measuring, meet
    from phalanx.cluster.elastic import create_handler

    handler = create_handler(params)
    try:
        joined = handler.next_rendezvous()
        how = Measuring(*where, "network" in asked.only, "backend" in asked.only, environ)
        assert handler.membership is not None
        hosting = handler.membership.hosting
        return meet(joined, lambda: handler.num_nodes_waiting() > 0, hosting, own, how, backend)
    except (PhalanxError, OSError) as error:
        return str(error)
    finally:
        if handler.membership is not None:
            handler.membership.release()  # without a farewell: the host of the store may be gone by now


def _as_json(own: NodeVerdict, findings: Sequence[CheckFinding], found: MeetingVerdict, overall: str) -> str:
    told = {
        "node": own.node,
        "fitness": overall,
        "nodes": [NodeVerdict(*node).as_dict() for node in found.nodes],
        "pairs": [
            {"round": number, "nodes": [one, two], **{kind: plain_rate(kind, rates[kind]) for kind in rates}}
            for number, one, two, rates in found.pairs
        ],
        "notes": found.notes,
        "checks": [one.as_dict() for one in findings],
    }
    return json.dumps(told, indent=2)


def _as_text(found: MeetingVerdict) -> str:
    """The figures of all pairs, then a line for each node."""
    kinds = list(dict.fromkeys(kind for _, _, _, rates in found.pairs for kind in rates)) or ["rate"]
    rows = [("pair", "round", *kinds)]
    for number, one, two, rates in found.pairs:
        shown = [show_rate(kind, rates[kind]) if kind in rates else "no result" for kind in kinds]
        rows.append((f"{one} - {two}", str(number), *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    lines += ["", *found.notes, *([""] if found.notes else [])]
    return "\n".join([*lines, *(verdict_line(NodeVerdict(*node)) for node in found.nodes)]) + "\n"
