"""Follows the output of some ranks for one viewer: asks the agent for what is new in their log files.

The agent remembers nothing: the places up to which a viewer has read are part of every question. The pause
between two questions grows while nothing is written, and with what the answers cost the agent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from phalanx.job.units import ranks
from phalanx.web.dashboard.agent_link import AgentGone
from phalanx.web.dashboard.job_feed import AgentSource, Viewer

RANKS = 32
"""Ranks that one stream follows."""
STREAMS = 16
"""Streams at a time; one more ends the oldest."""
_SOONEST, _LATEST, _SHARE = 0.5, 4.0, 250.0
_LONGEST_LINE = 8192
_SILENCE = 15.0


def parse_ranks(text: str, world: int) -> list[int]:
    """The ranks of a filter, `0,3-7`; empty: the first ones. ValueError for anything else."""
    if len(text) > 1000:
        raise ValueError("too long")
    found = ranks(text)
    return list(range(min(world, RANKS))) if found is None else sorted(found)[:RANKS]


async def follow(source: AgentSource, wanted: list[int], viewer: Viewer) -> AsyncIterator[bytes]:
    """Events with new lines, as they are sent."""
    places: dict[str, list[Any]] = {}
    pause, silence = 0.0, 0.0
    while not viewer.over:
        request = {"ask": "read_logs", "ranks": wanted, "places": places, "all": True}
        before = source.time_used()
        try:
            answer = json.loads(await source.ask(request))
            parts = [one for told in (answer, *answer.get("peers", [])) for one in told.get("logs", [])]
            lines = _take(parts, places)
        except (AgentGone, ValueError, AttributeError, TypeError, KeyError):
            lines = []
        cost = source.time_used() - before
        if lines:
            yield b"event: lines\ndata: " + msgspec.json.encode(lines) + b"\n\n"
            pause, silence = _SOONEST, 0.0
        else:
            pause = min(max(pause, _SOONEST) * 1.5, _LATEST)
            silence += pause
            if silence > _SILENCE:
                silence = 0.0
                yield b": still here\n\n"
        await asyncio.sleep(max(pause, min(_SHARE * cost, _LATEST)))


def _take(parts: list[dict[str, Any]], places: dict[str, list[Any]]) -> list[list[Any]]:
    """[rank, stream, line] of what is new; notes how far each file was read."""
    lines: list[list[Any]] = []
    for part in parts:
        rank, stream, text = int(part["rank"]), str(part["stream"]), str(part["text"])
        places[f"{rank}/{stream}"] = [str(part["file"]), int(part["next"])]
        for line in text.split("\n")[: -1 if text.endswith("\n") else None]:
            # Of a progress bar, what a terminal would show at the end.
            shown = line.rstrip("\r").rpartition("\r")[2]
            lines.append([rank, stream, shown[:_LONGEST_LINE]])
    return lines
