"""Asks the agent while somebody looks, and tells every viewer what has changed since the last event.

One look serves all viewers. Its price is kept below one percent of a processor: the time between two looks is
250 times what the last ones cost the agent, within bounds. Nobody looking: no question, and no
task of this process that wakes up.

A viewer has no queue: it gets the sections that are newer than the last event it took, so that a slow one
costs no memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from phalanx.observe import snapshot
from phalanx.observe.snapshot import JobSnapshot
from phalanx.web.dashboard import page_state
from phalanx.web.dashboard.agent_link import AgentGone
from phalanx.web.dashboard.rate_history import RateHistory

VIEWERS = 64
"""Viewers at a time; one more ends the oldest."""
_SOONEST, _LATEST = 1.0, 15.0  # seconds between two looks
_SHARE = 250.0
_SILENCE = 15.0  # seconds without an event, after which a comment shows that the connection lives


class AgentSource(Protocol):
    """Where answers come from: `AgentLink`, or a simulation."""

    async def ask(self, request: dict[str, Any]) -> bytes:
        """The answer; AgentGone without one."""

    def time_used(self) -> float:
        """Processor seconds of the agent so far."""


class Viewer:
    """One stream of events; `over`: it has to end, to make room."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.over = False


class JobFeed:
    """The state of one job, as its viewers see it."""

    def __init__(self, source: AgentSource) -> None:
        self.source = source
        self.job: JobSnapshot | None = None
        self.rates = RateHistory()
        self._sections: dict[str, tuple[int, bytes]] = {}  # name -> version, JSON
        self._version = 0
        self._changed = asyncio.Condition()
        self._viewers: list[Viewer] = []
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._cost = 0.0
        self._ended = False

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    # -- looking ------------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        """Look again and again, while there are viewers."""
        while self._viewers and not self._ended:
            wait = self._looked_at + self.pause - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            if self._viewers and not self._ended:
                await self.look()

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(max(_SHARE * self._cost, _SOONEST), _LATEST)

    async def look(self) -> None:
        """Ask once, and publish what has changed."""
        self._looked_at = time.monotonic()
        before = self.source.time_used()
        try:
            job = snapshot.decode(await self.source.ask({"ask": "status", "all": True, "gpus": True}))
        except (AgentGone, *snapshot.READABLE) as error:
            await self._publish({"link": {"lost": str(error)[:200]}})
            return
        await self.take(job)
        # Now, that the agent has put the answer away. The mean of the last looks: one that fell together with
        # other work of the agent counts less.
        self._cost = 0.7 * self._cost + 0.3 * (self.source.time_used() - before)

    async def take(self, job: JobSnapshot) -> None:
        """Publish a snapshot."""
        self.job = job
        self.rates.add(job.now, page_state.beats(job), page_state.world_of(job))
        found = page_state.sections(job, self.rates.slow())
        found["rates"] = self.rates.lines()
        found["link"] = {"lost": ""}
        found["clock"] = {"now": job.now, "pause": round(self.pause, 1)}
        await self._publish(found)

    async def end(self, outcome: str, code: int, why: str) -> None:
        """The job is over; viewers part once they know."""
        self._ended = True
        await self._publish({"end": {"outcome": outcome, "exit_code": code, "why": why}})

    async def _publish(self, found: dict[str, Any]) -> None:
        async with self._changed:
            self._version += 1
            for name, values in found.items():
                data = msgspec.json.encode(values)
                known = self._sections.get(name)
                if known is None or known[1] != data:
                    self._sections[name] = self._version, data
            self._changed.notify_all()

    # -- viewers ------------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[bytes]:
        """The events of one viewer, as they are sent."""
        viewer = Viewer()
        self._viewers.append(viewer)
        while len(self._viewers) > VIEWERS:
            self._viewers.pop(0).over = True
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look_on())
            while not viewer.over:
                data = self._news(viewer)
                if data:
                    yield b"event: state\ndata: " + data + b"\n\n"
                    if "end" in viewer.seen:
                        return
                    continue
                try:
                    async with self._changed:
                        news = self._changed.wait_for(lambda: viewer.over or self._is_behind(viewer))
                        await asyncio.wait_for(news, _SILENCE)
                except asyncio.TimeoutError:  # in Python 3.10 not the built-in one
                    yield b": still here\n\n"
        finally:
            if viewer in self._viewers:
                self._viewers.remove(viewer)

    async def part(self, patience: float) -> None:
        """Wait until every viewer has taken the last event, but not long."""
        end = time.monotonic() + patience
        while self._viewers and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _is_behind(self, viewer: Viewer) -> bool:
        return any(viewer.seen.get(name) != version for name, (version, _) in self._sections.items())

    def _news(self, viewer: Viewer) -> bytes:
        new = {name: one for name, one in self._sections.items() if viewer.seen.get(name) != one[0]}
        if not new:
            return b""
        viewer.seen.update({name: version for name, (version, _) in new.items()})
        return b"{" + b",".join(b'"%s":%s' % (name.encode(), data) for name, (_, data) in new.items()) + b"}"
