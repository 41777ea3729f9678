"""The routes of the page. Every one is behind `guard.PageGuard`.

Files are read once and served from memory by their names: no path of a client is ever joined to one.
"""

from __future__ import annotations

import asyncio
import json
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.web.dashboard import log_files, log_stream
from phalanx.web.dashboard.agent_link import AgentGone
from phalanx.web.dashboard.guard import PageGuard
from phalanx.web.dashboard.job_feed import JobFeed, Viewer
from phalanx.web.dashboard.page_state import rank_detail

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_LONGEST_BODY = 4096
_ASKING = 5.0  # seconds for the body of a request


def make_app(feed: JobFeed, *, token: str, host: str) -> PageGuard:
    """The application of one job."""
    return PageGuard(PageRoutes(feed).app, token, host)


class PageRoutes:
    """What can be asked for."""

    def __init__(self, feed: JobFeed) -> None:
        self._feed = feed
        self._static = {
            entry.name: entry.read_bytes()
            for entry in files("phalanx.web.dashboard").joinpath("static").iterdir()
            if entry.name.rpartition(".")[2] in _KINDS
        }
        self._streams: list[Viewer] = []
        self.app = Starlette(
            routes=[
                Route("/", self.index),
                Route("/static/{name}", self.static),
                Route("/api/events", self.events),
                Route("/api/rank/{rank:int}", self.rank),
                Route("/api/logs", self.logs),
                Route("/api/files", self.files),
                Route("/api/file", self.file),
                Route("/api/stacks", self.stacks, methods=["POST"]),
                Route("/api/drain", self.drain, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refuse},
        )

    async def index(self, request: Request) -> Response:
        return Response(self._static["index.html"], media_type=_KINDS["html"])

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._static or name == "index.html":
            raise HTTPException(404, "no such file")
        return Response(self._static[name], media_type=_KINDS[name.rpartition(".")[2]])

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._feed.watch(), media_type="text/event-stream")

    async def rank(self, request: Request) -> Response:
        rank, job, rates = request.path_params["rank"], self._feed.job, self._feed.rates.current()
        found = rank_detail(job, rank, rates[rank] if rank < len(rates) else None) if job else None
        if found is None:
            raise HTTPException(404, "no such rank, or nothing is known of it yet")
        return JSONResponse(found)

    # -- logs ---------------------------------------------------------------------------------------

    async def logs(self, request: Request) -> Response:
        world = self._feed.job.world_size if self._feed.job else log_stream.RANKS
        try:
            ranks = log_stream.parse_ranks(request.query_params.get("ranks", ""), world)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return StreamingResponse(self._follow(ranks), media_type="text/event-stream")

    async def _follow(self, ranks: list[int]) -> Any:
        viewer = Viewer()
        self._streams.append(viewer)
        while len(self._streams) > log_stream.STREAMS:
            self._streams.pop(0).over = True
        try:
            async for event in log_stream.follow(self._feed.source, ranks, viewer):
                yield event
        finally:
            if viewer in self._streams:
                self._streams.remove(viewer)

    def _log_directory(self) -> str:
        return self._feed.job.logs if self._feed.job else ""

    async def files(self, request: Request) -> Response:
        found = await asyncio.to_thread(log_files.list_files, self._log_directory())
        return JSONResponse({"files": found})

    async def file(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        data = await asyncio.to_thread(log_files.read_end, self._log_directory(), name)
        if data is None:
            raise HTTPException(404, "no such log file")
        return Response(data, media_type="text/plain; charset=utf-8")

    # -- deeds --------------------------------------------------------------------------------------

    async def stacks(self, request: Request) -> Response:
        body = await _body(request)
        ranks = body.get("ranks")
        question: dict[str, Any] = {"ask": "stacks", "all": True}
        if isinstance(ranks, list):
            question["ranks"] = [rank for rank in ranks[:4096] if type(rank) is int]
        return await self._ask(question)

    async def drain(self, request: Request) -> Response:
        body = await _body(request)
        node = body.get("node")
        if body.get("confirm") is not True or not isinstance(node, str):
            raise HTTPException(400, "a drain names a node, and is confirmed")
        others = len(self._feed.job.peers) if self._feed.job else 0
        return await self._ask({"do": "drain", "node": node, **({"all": True} if others else {})})

    async def _ask(self, question: dict[str, Any]) -> Response:
        try:
            return Response(await self._feed.source.ask(question), media_type="application/json")
        except AgentGone as error:
            raise HTTPException(503, f"the agent does not answer: {error}") from None


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings; small, and soon."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON")
    try:
        found = json.loads(await asyncio.wait_for(_bytes(request), _ASKING))
    except (ValueError, RecursionError, asyncio.TimeoutError, ClientDisconnect):
        raise HTTPException(400, "not a JSON object") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "not a JSON object")
    return found


async def _bytes(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _LONGEST_BODY:
            raise HTTPException(413, "too long")
    return data
