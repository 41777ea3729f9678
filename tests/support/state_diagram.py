"""A state machine's table as Markdown: a Mermaid diagram, then every phase with what each event leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from phalanx.core.group import group
from phalanx.core.rounds import participant
from phalanx.core.rounds.participant_state import MEANINGS, NodePhase
from phalanx.core.text_enum import TextEnum

P = TypeVar("P", bound=TextEnum)


def drawn(rows: Mapping[P, Mapping[str, tuple[P, ...]]], meanings: Mapping[P, str]) -> str:
    """`rows`: by phase, the first one first and the last one last, the targets of each event."""
    phases = list(rows)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {phases[0]}"]
    for phase, row in rows.items():
        edges: dict[P, list[str]] = {}
        for name, targets in row.items():
            for target in targets:
                if target is not phase:  # the table below lists these; arrows to the same phase only clutter
                    edges.setdefault(target, []).append(name)
        for target, names in edges.items():
            lines.append(f"    {phase} --> {target} : {', '.join(names)}")
    lines += [f"    {phases[-1]} --> [*]", "```", ""]
    lines += ["| phase | meaning | event | leads to |", "|---|---|---|---|"]
    for phase, row in rows.items():
        label, meaning = str(phase), meanings[phase]
        for name, targets in row.items():
            where = ", ".join("stays" if target is phase else str(target) for target in targets)
            lines.append(f"| {label} | {meaning} | {name} | {where} |")
            label = meaning = ""
        if not row:
            lines.append(f"| {label} | {meaning} | | |")
    return "\n".join(lines) + "\n"


def of_the_group() -> str:
    """The table of `core/group/group.py`."""
    rows = {
        phase: {kind.__name__: targets for kind, (_, targets) in row.items()}
        for phase, row in group.MOVES.items()
    }
    return drawn(rows, {phase: words.meaning for phase, words in group.WORDS.items()})


def of_the_participant() -> str:
    """The tables of `core/rounds/participant.py`."""
    rows: dict[NodePhase, dict[str, tuple[NodePhase, ...]]] = {}
    for phase, row in participant.MOVES.items():
        rows[phase] = {kind.__name__: targets for kind, (_, targets) in row.items() if targets}
        for duty in (participant.LEASE, *participant.DUTIES):
            if targets := duty.phases.get(phase, ()):
                rows[phase][duty.name] = targets
    return drawn(rows, MEANINGS)
