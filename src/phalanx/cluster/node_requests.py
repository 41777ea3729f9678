"""Questions to all nodes of a job, through its store: one key with the question, one answer key per node.

    job/<run>/ctl/ask              the question, with a random id; every node watches `ctl/` anyway
    shared/<run>/told/<node id>    a node's answer, with that id; on the node's lease, so it goes with it

A question costs one message to every node and one answer from each: O(nodes), and nothing while nobody asks.
An answer is bounded, and the next one replaces it. A node answers a question once, and never one that it
finds when it joins or reconnects. Deeds (restart, stop, drain) are done only where the store knows its
clients: with a token, or in etcd; not in an open static job.
"""

from __future__ import annotations

import json
import os
import threading
import time

from phalanx.core.rounds.store_commands import Get, Put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from msgspec import Raw

    from phalanx.core.rounds.store_commands import Notice
    from phalanx.store.client import StoreClient

ASK = "ctl/ask"
LONGEST_QUESTION = 1 << 16
LONGEST_ANSWER = 1 << 19


def told_prefix(run_id: str) -> str:
    """Where the nodes answer; outside of the prefix that the leader watches."""
    return f"shared/{run_id}/told/"


def encode_question(request: dict[str, Any], asker: str) -> tuple[str, bytes]:
    """The id of a new question, and its value; `asker` is a node's id, which does not answer itself."""
    number = os.urandom(8).hex()
    return number, json.dumps({"id": number, "from": asker, "request": request}).encode()


def decode_question(value: bytes) -> tuple[str, str, dict[str, Any]] | None:
    """Id, asker and request; None for anything else."""
    if len(value) > LONGEST_QUESTION:
        return None
    found = _object(value)
    number, asker, request = found.get("id"), found.get("from", ""), found.get("request")
    if not isinstance(number, str) or not isinstance(asker, str) or not isinstance(request, dict):
        return None
    return number[:64], asker[:256], request


def encode_answer(number: str, answer: dict[str, Any]) -> bytes:
    """A node's answer; one that is too long says so instead."""
    value = json.dumps({"id": number, "answer": answer}).encode()
    if len(value) <= LONGEST_ANSWER:
        return value
    shorter = {**answer, "workers": [], "records": [], "incidents": [], "stacks": [], "logs": []}
    value = json.dumps({"id": number, "answer": shorter}).encode()
    if len(value) <= LONGEST_ANSWER:
        return value
    return json.dumps({"id": number, "answer": {"error": "the answer is too long"}}).encode()


def decode_answer(value: bytes, number: str) -> Raw | None:
    """The answer of a node to that question, a JSON object as it came; None for anything else.

    There may be thousands, and the agent passes them on: it checks them, and makes no objects of them."""
    import msgspec

    if len(value) > 2 * LONGEST_ANSWER:
        return None
    try:
        value.decode()
        found = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        known, answer = found.get("id"), found.get("answer")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if answer is None or known is None or bytes(known) != b'"%s"' % number.encode():
        return None
    return answer if bytes(answer).startswith(b"{") else None


def ask_nodes(
    client: StoreClient, run_id: str, request: dict[str, Any], timeout: float, asker: str = ""
) -> tuple[dict[str, Raw], int]:
    """Ask every node of a job but `asker`: the answers by node id, and how many nodes did not answer.

    Waits, at most `timeout` seconds in all; raises StoreError if the store does not answer."""
    import msgspec.json  # noqa: F401 - in this thread, which may wait, and not in the one that gets answers

    prefix, told = f"job/{run_id}/", told_prefix(run_id)
    number, question = encode_question(request, asker)
    answers: dict[str, Raw] = {}
    missing: set[str] | None = None
    complete, lock = threading.Event(), threading.Lock()

    def heard(notice: Notice) -> None:
        for entry, deleted in notice.changes:
            answer = None if deleted else decode_answer(entry.value, number)
            if answer is not None:
                answers[entry.key.removeprefix(told)] = answer
        with lock:
            if missing is not None and missing <= answers.keys():
                complete.set()

    end = time.monotonic() + timeout

    def left() -> float:
        return max(0.0, end - time.monotonic())

    watch, _ = client.watch(told, heard, prefix=True, timeout=left())
    try:
        entries = client.request(Get(prefix + "node/", prefix=True), left()).entries
        nodes = {entry.key.removeprefix(prefix + "node/") for entry in entries} - {asker}
        client.request(Put(prefix + ASK, question), left())
        with lock:
            missing = nodes
            if nodes <= answers.keys():
                complete.set()
        complete.wait(left())
        return {node: answers[node] for node in sorted(nodes & answers.keys())}, len(nodes - answers.keys())
    finally:
        client.unwatch(watch)


class NodeRequests:
    """This node's part: reads the questions in `ctl/`, and has them answered, each once.

    `handle(request, answer)` is called in the membership's thread; `send` writes the answer."""

    def __init__(
        self,
        node: Callable[[], str],
        trusts: Callable[[], bool],
        handle: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None],
        send: Callable[[bytes], None],
    ) -> None:
        self._node, self._trusts, self._handle, self._send = node, trusts, handle, send
        self._last = ""

    def learn(self, key: str, value: bytes, news: bool) -> None:
        """A key below `ctl/`; `news`: it was written just now, not found."""
        if key != ASK:
            return
        question = decode_question(value)
        if question is None or question[0] == self._last:
            return
        number, asker, request = question
        self._last = number
        if not news or asker == self._node():
            return

        def answer(told: dict[str, Any]) -> None:
            self._send(encode_answer(number, told))

        if "do" in request and not self._trusts():
            answer({"error": "the job's store is open to everyone: set PHALANX_TOKEN on every node"})
        else:
            self._handle(request, answer)


def _object(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
