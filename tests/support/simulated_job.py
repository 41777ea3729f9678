"""A job of any size that does not exist, for the page: what its agents would answer, made from a clock.

`python -m tests.support.simulated_job 4096` serves its page and prints the link; with one more word, `agent`,
it is the agent of node 0 instead, and prints its socket.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time
from typing import Any

from phalanx.core.ledger.goodput import CATEGORIES

TOKEN = "0123456789abcdef"
PER_NODE = 8


class SimulatedJob:
    """Five steps per second, two of rank 13; rank 21 has failed a minute ago, and a host is kept out."""

    def __init__(self, ranks: int, began: float | None = None) -> None:
        self.ranks = ranks
        self.began = time.time() - 600 if began is None else began
        self.asked: list[dict[str, Any]] = []

    async def ask(self, request: dict[str, Any]) -> bytes:
        self.asked.append(request)
        if request.get("ask") == "read_logs":
            return json.dumps({"logs": []}).encode()
        return json.dumps(self.snapshot(time.time())).encode()

    def time_used(self) -> float:
        return 0.0

    def snapshot(self, now: float) -> dict[str, Any]:
        first, *others = (self.node(number, now) for number in range(-(-self.ranks // PER_NODE)))
        return {**first, "peers": others, "silent": 0}

    def node(self, number: int, now: float) -> dict[str, Any]:
        """The answer of one agent."""
        ranks = range(number * PER_NODE, min(self.ranks, (number + 1) * PER_NODE))
        return {
            "run": "simulated-7f3a", "name": "pretrain.py", "host": f"gpu-{number:03d}", "pid": 4000 + number,
            "since": self.began, "now": now, "phase": "RUNNING", "state": "running",
            "id": f"node-{number}", "address": f"10.0.{number // 256}.{number % 256}", "role": "default",
            "lease_age": 0.4, "round": 3, "node": number, "restarts": 1, "max_restarts": 5,
            "world_size": self.ranks, "workers": [self.worker(rank, now) for rank in ranks],
            "incident_count": 1, "records": [self.incident(now)], "ledger": self.ledger(now, len(ranks)),
            "cause": "Root cause: rank 21\n  error   RuntimeError: CUDA error: uncorrectable ECC error",
            "cause_at": now - 60,
            "quarantine": [{"host": "gpu-999", "reason": "its node was lost", "left": 1800.0}],
        }  # fmt: skip

    def worker(self, rank: int, now: float) -> dict[str, Any]:
        rate = 2.0 if rank == 13 else 5.0
        step = int((now - self.began) * rate)
        return {
            "rank": rank, "local_rank": rank % PER_NODE, "role_rank": rank, "pid": 10000 + rank,
            "running": True, "ready": True, "state": "checkpointing" if rank % 97 == 5 else "ready",
            "uptime": now - self.began, "cpu": 0.98, "memory": 9 << 30, "step": step, "rate": rate,
            "quiet": (now - self.began) - step / rate, "section": "",
            "last_line": f"step {step} loss 2.314 grad_norm 0.87 tokens/s 412,331",
        }  # fmt: skip

    def incident(self, now: float) -> dict[str, Any]:
        return {
            "number": 1,
            "reason": "rank 21: RuntimeError: CUDA error: uncorrectable ECC error; restart 1 of 5",
            "trigger": "failure", "recovery": "restart", "round": 2, "attempt": 1, "timestamp": now - 60,
            "node": "gpu-002", "rank": 21, "pid": 10021, "exit_code": 1, "detect": 0.004, "stop": 0.21,
            "reform": 0.4, "start": 0.05, "first_line": 0.3, "first_step": 2.1, "total": 0.76, "over": True,
        }  # fmt: skip

    def ledger(self, now: float, ranks: int) -> dict[str, Any]:
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        wall = (now - self.began) * ranks
        seconds.update(starting=8.0 * ranks, recovering=3.0 * ranks, checkpointing=0.02 * wall)
        seconds["productive"] = wall - sum(seconds.values())
        return {"ranks": ranks, "goodput": seconds["productive"] / wall, "seconds": seconds, "lost": {}}


async def serve(ranks: int) -> None:
    from phalanx.web.dashboard.job_feed import JobFeed
    from phalanx.web.dashboard.pages import make_app
    from phalanx.web.dashboard.server import PageServer

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}", flush=True)
    app = make_app(JobFeed(SimulatedJob(ranks)), token=TOKEN, host="127.0.0.1")
    await PageServer(app, listener).serve()


def be_agent(ranks: int) -> None:
    """The real socket of an agent; the answers of the other nodes are read and written as they would be."""
    from phalanx.agent.status import StatusSocket
    from phalanx.cluster.node_requests import decode_answer, encode_answer
    from phalanx.core.group.group import Phase

    job = SimulatedJob(ranks)
    others = range(1, -(-ranks // PER_NODE))
    told = [encode_answer("7", job.node(number, time.time())) for number in others]

    def handle(_request: dict[str, Any], answer: Any) -> None:
        peers = [decode_answer(one, "7") for one in told]
        answer({**job.node(0, time.time()), "peers": peers, "silent": 0})

    status, known = StatusSocket(handle), False
    while True:
        poll = select.poll()
        for fd, mask in status.fds(Phase.RUNNING):
            poll.register(fd, mask)
        if not known:
            known = True
            print(status.name[1:], flush=True)
        until = status.deadline(Phase.RUNNING)
        poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000 + 1)
        status.look(Phase.RUNNING, time.monotonic())


if __name__ == "__main__":
    if "agent" in sys.argv:
        be_agent(int(sys.argv[1]))
    asyncio.run(serve(int(sys.argv[1])))
