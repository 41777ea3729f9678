"""A running job of other machines, asked through its store by any machine that has the token.

`phalanx status`, `logs` and `stacks` ask the agent of this machine; with `--rdzv-endpoint` they put the same
questions to all nodes as an agent does (cluster/node_requests.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.cli.drain import add_store, settings_of, store_client
from phalanx.cli.parser import TRUST, Parser
from phalanx.cli.runs import NoSuchRun
from phalanx.cluster.node_requests import LONGEST_QUESTION, ask_nodes
from phalanx.core.rounds.records import decode_node
from phalanx.core.rounds.store_commands import Get
from phalanx.errors import UsageError
from phalanx.job.time_budgets import REMOTE
from phalanx.log import printable
from phalanx.observe import snapshot
from phalanx.observe.snapshot import JobSnapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from phalanx.store.client import StoreClient

_MOST_NODES = 64  # whose logs are read at once: each may send 256 KiB


def add_endpoint(parser: Parser) -> None:
    """The options that name a job of other machines; only arguments count, not the variables of a job."""
    parser.add_run_options("rdzv_endpoint", "rdzv_id", "rdzv_conf", *TRUST)
    add_store(parser, REMOTE)
    parser.set_defaults(rdzv_endpoint="", rdzv_id="")


class RemoteJob:
    """One job; `nodes`: the names of its nodes by their ids, when it was found."""

    def __init__(self, client: StoreClient, run: str, nodes: dict[str, str], timeout: float) -> None:
        self.run, self.nodes = run, nodes
        self._client, self._timeout = client, timeout

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answers of all nodes as `peers`, and how many are `silent`, as an agent gives them."""
        answers, silent = self._ask(request)
        found = [json.loads(bytes(one)) for one in answers]
        return {"peers": found, "silent": silent, "over": not found and not silent}

    def status(self) -> JobSnapshot:
        """The first node, with the others as its peers."""
        answers, silent = self._ask({"ask": "status", "gpus": True})
        found = []
        for answer in answers:
            try:
                found.append(snapshot.decode(bytes(answer)))
            except snapshot.READABLE:
                silent += 1
        if not found:
            raise NoSuchRun(f"none of the {silent} nodes of run {printable(self.run)} answered")
        found.sort(key=lambda one: (one.node < 0, one.node, one.host))
        found[0].peers, found[0].silent = found[1:], silent
        return found[0]

    def check_amount(self) -> None:
        """NoSuchRun where the logs of all nodes are too many to read at once."""
        if len(self.nodes) > _MOST_NODES:
            raise NoSuchRun(f"the job has {len(self.nodes)} nodes: choose --rank or --node, or --node all")

    def node_id(self, name: str) -> str | None:
        """The id of the one node of that name; None: all, or several; NoSuchRun: none."""
        found = [node for node, known in self.nodes.items() if name in ("", "all", known)]
        if not found:
            there = " ".join(sorted(self.nodes.values()))
            raise NoSuchRun(printable(f"{name} is not a node of the job; there are: {there}"))
        return found[0] if len(found) == 1 else None

    def _ask(self, request: dict[str, Any]) -> tuple[list[Any], int]:
        if len(json.dumps(request)) > LONGEST_QUESTION - 512:
            raise NoSuchRun("these are too many files to follow at once; choose --rank or --node")
        answers, silent = ask_nodes(self._client, self.run, request, self._timeout)
        return list(answers.values()), silent


@contextmanager
def remote_job(options: Namespace) -> Iterator[RemoteJob]:
    """The job at --rdzv-endpoint that fits the run; PhalanxError: there is none, or no store answers."""
    with store_client(options, settings_of(options)) as client:
        nodes = _jobs(client, options.timeout)
        run = _chosen(options.run or options.rdzv_id, nodes)
        yield RemoteJob(client, run, nodes[run], options.timeout)


def _jobs(client: StoreClient, timeout: float) -> dict[str, dict[str, str]]:
    """The nodes of all jobs at a store, by run id: ids and names."""
    found: dict[str, dict[str, str]] = {}
    for entry in client.request(Get("job/", prefix=True), timeout).entries:
        run, _, node = entry.key.removeprefix("job/").partition("/node/")
        record = decode_node(entry.value) if node else None
        if record is not None:
            found.setdefault(run, {})[node] = record.info.name
    return found


def _chosen(word: str, jobs: dict[str, dict[str, str]]) -> str:
    fitting = [word] if word in jobs else sorted(run for run in jobs if run.startswith(word))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"several jobs fit; name one: {printable(' '.join(fitting))}")
    there = printable(" ".join(sorted(jobs))) or "none"
    raise NoSuchRun(f"no job{f' {word!r}' if word else ''} runs at this store; there are: {there}")
