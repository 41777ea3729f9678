"""Static rendezvous: the number of nodes and the rank of each are given, and all meet at one address.

Node 0's agent serves a store (torch's protocol) at MASTER_ADDR:MASTER_PORT; every agent, its own too, is a
client of it, and so are the workers. The agents' keys begin with `phalanx/`:

    now              the round that was formed last (0: none yet), and whose job this is
    join/N/K         node K wants to be in round N
    round/N          why round N is needed; the nodes of round N-1 wait for this key, each in a thread
    formed/N         round N is complete, or the job is over
    waiting/N        whom round N waits for, in words
    seen/N/K         node K knows that the job is over, so node 0 may go
    store/N/…        what the agents of round N tell each other

A round is complete when every node has joined it. Then node 0 empties the store, which also drops every
connection of the round before, and announces the new round in it. So no worker of a dead attempt can be heard
in the next one. Whoever loses its connection on the way connects again and finds itself in the new round, or
joins anew when it was not noticed: joining is repeated until it is answered, and repeating it is harmless.

Invariants: nobody polls, but for the words of a wait that people see; every wait ends with the join time-out
and says who is missing; a node that the others wait for in vain, that fails, or that leaves, is known by
number to all of them.
"""

from __future__ import annotations

import json
import os
import threading
import time

from phalanx.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from phalanx.membership.handler import RendezvousHandler, RendezvousStoreInfo
from phalanx.membership.static_host import StaticHost
from phalanx.membership.static_line import WaitingLine, wait_for_joins, wait_for_round
from phalanx.membership.static_watch import StaticInfo, StaticWatch, event_of, load
from phalanx.store.torch.client import TorchStoreClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.group_events import Event
    from phalanx.membership.handler import RendezvousParameters

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = 600
PREFIX = "phalanx/"
_LOST_PATIENCE = 60.0  # for node 0 to come back, once a round has run: a restart of it, not its first start
_REPLY = 30.0  # for an answer that does not depend on other nodes
_FAREWELL = 2.0  # for the others to hear from node 0 that the job is over


class StaticRendezvous(RendezvousHandler):
    """Rounds of a fixed set of nodes.

    `listener` (set it before the first round) is called from a thread with the events of `core.group_events`
    that concern the round at hand: a peer failed, left, or wants to join again. Without one, ask
    `num_nodes_waiting`, which costs nothing. `attempt` is what this node tells the others when it joins.
    `on_waiting` gets a line now and then while a round is waited for; `waiting_for` is that line at any time.
    """

    watches = True

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"node rank {rank} of {world_size}: ranks go from 0 to one less than the number of nodes"
            )
        if not 0 <= master_port <= 65535 or (master_port == 0 and world_size > 1):
            raise ValueError(
                f"master port {master_port}: nodes can only meet at a port that all of them know"
            )
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout
        self.attempt = 0
        self.listener: Callable[[Event], None] | None = None
        self.on_waiting: Callable[[str], None] | None = None
        self._host: StaticHost | None = None
        self._control: TorchStoreClient | None = None
        self._shared: TorchStoreClient | None = None  # the agents' store of the round
        self._watch: StaticWatch | None = None
        self._round = 0
        self._asked = 0  # the round that this node has asked to be in
        self._tokens: list[str] = []  # by which its words are known from those of a second one of its rank
        self._line: WaitingLine | None = None  # while it joins
        self._news: dict[str, Any] | None = None  # why the round at hand is over
        self.told: tuple[str, int] | None = None  # report and exit code of what ended the job elsewhere
        self._closed = False
        self._lock = threading.Lock()

    # -- what the agent asks ----------------------------------------------------------------------------

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def num_nodes_waiting(self) -> int:
        """1 when the round at hand is over, whatever the reason: joining again tells it."""
        return 0 if self._news is None or self._news.get("failed") is False else 1

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self.close("closed by this node", None)

    @property
    def waiting_for(self) -> str:
        """What this node waits for, in words; empty while it does not."""
        return "" if (line := self._line) is None else line.words

    def next_rendezvous(self) -> StaticInfo:
        """Join the next round, and wait for the others."""
        self._end_watch()
        if self._news is not None and self._news.get("over"):
            raise self._over(self._news)  # the store may be gone with whoever ended it
        deadline = time.monotonic() + self.timeout
        connect_by = min(deadline, time.monotonic() + _LOST_PATIENCE) if self._lost() else deadline
        token, self._asked = os.urandom(8).hex(), 0
        self._tokens.append(token)
        line = self._line = WaitingLine(self.on_waiting)
        try:
            return self._enter(self._joined(token, deadline, connect_by, line))
        finally:
            self._line = None
            line.end()

    def listen(self, post: Callable[[Event], None], show: Callable[[str], None], attempt: int) -> None:
        self.listener, self.on_waiting, self.attempt = post, show, attempt

    def report_failure(
        self,
        round: int,
        attempt: int,
        summary: str,
        final: bool = False,
        delay: float = 0.0,
        told: tuple[str, int] = ("", 1),
    ) -> None:
        """Tell the other nodes at once, so that they re-form or end with us; `told` is for their screens."""
        self.attempt = max(self.attempt, attempt)
        if final:
            self.close(summary, True, attempt, told=told)
            return
        token = "".join(self._tokens[-1:])
        why = {"node": self.rank, "token": token, "attempt": attempt, "summary": summary, "delay": delay}
        self._tell(lambda client: self._call_for(client, self._next, why))

    def leave(self) -> None:
        """Go, without ending the job: the others wait for a node of this rank to come back."""
        if not self._closed:
            self._tell(self._announce_leave)
        self._release()

    def close(
        self,
        reason: str,
        job_failed: bool | None,
        attempt: int = 0,
        *,
        timed_out: bool = False,
        told: tuple[str, int] = ("", 1),
    ) -> None:
        """The job is over for all nodes; `job_failed` None: not known."""
        if self._closed:
            return
        self._closed = True
        over = {
            "over": True,
            "node": self.rank,
            "failed": job_failed,
            "summary": reason,
            "attempt": attempt or self.attempt,
            "timeout": timed_out,
            "told": told,
        }
        self._tell(lambda client: self._announce_end(client, over))

    def shutdown(self) -> bool:
        """End the job for all and give everything back."""
        self.close("shut down", None)
        self._release()
        return True

    # -- joining ----------------------------------------------------------------------------------------

    def _joined(self, token: str, deadline: float, connect_by: float, line: WaitingLine) -> dict[str, Any]:
        while True:
            try:
                return self._join(token, deadline, connect_by, line)
            except StoreConnectionError as error:
                if self._closed:
                    raise RendezvousClosedError(f"run {self.run_id}: closed while joining") from None
                if self._control is None:
                    raise self._no_connection(error) from error
                # Emptied for the new round, most likely; or node 0 is gone and comes back, or not.
                self._drop_control()
                connect_by = min(deadline, time.monotonic() + _LOST_PATIENCE)

    def _join(self, token: str, deadline: float, connect_by: float, line: WaitingLine) -> dict[str, Any]:
        """One try: the record of the round that has this very join in it."""
        if self._closed:
            raise RendezvousClosedError(f"run {self.run_id}: the rendezvous was closed by this node")
        line.say(f"connecting to node 0 at {self._where}", connect_by)
        client = self._connected(connect_by)
        now = self._now(client, deadline)
        number = int(now["round"])
        if number:
            formed = load(client.get(f"formed/{number}"))
            if formed["tokens"][self.rank] == token:
                return formed
            replaced = 0 < self._round < number and formed["tokens"][self.rank] not in self._tokens
            if self._asked == number or replaced:
                raise self._taken(formed)
        number += 1
        mine = {"token": token, "attempt": self.attempt, "host": os.uname().nodename, "pid": os.getpid()}
        client.set(f"join/{number}/{self.rank}", json.dumps(mine))
        self._asked = number
        self._call_for(client, number, {**mine, "node": self.rank, "summary": "joins again"})
        line.say(f"joined at {self._where}, waiting for the other nodes", deadline)
        try:
            if self._host is not None:
                self._form(wait_for_joins(client, number, self.world_size, line), number)
                client = self._connected(deadline)  # the store was emptied
            wait_for_round(client, number, line)
        except StoreTimeoutError:
            raise self._time_out(client, number) from None
        formed = load(client.get(f"formed/{number}"))
        if formed.get("over"):
            client.set(f"seen/{number}/{self.rank}", b"1")
            raise self._over(formed)
        if formed["tokens"][self.rank] != token:
            raise self._taken(formed)
        return formed

    def _taken(self, formed: dict[str, Any]) -> RendezvousStateError:
        self._closed = True  # the other one speaks for this rank
        return RendezvousStateError(
            f"node rank {self.rank} was taken by {formed['hosts'][self.rank]}: "
            "two nodes were given the same --node-rank"
        )

    def _now(self, client: TorchStoreClient, deadline: float) -> dict[str, Any]:
        try:
            client.wait(["now"], max(0.0, deadline - time.monotonic()))
        except StoreTimeoutError:
            raise RendezvousTimeoutError(
                f"run {self.run_id}: {self._where} answers, but no agent of node 0 is behind it; "
                "is a worker, or another job, at that port?"
            ) from None
        now = load(client.get("now"))
        if now["run_id"] != self.run_id or now["nodes"] != self.world_size:
            self._closed = True  # not our job: nothing that this node says may reach it
            raise RendezvousStateError(
                f"node {self.rank} of {self.world_size} of run {self.run_id!r} came to {self._where}, where "
                f"run {now['run_id']!r} with {now['nodes']} nodes meets: give every node the same "
                "--rdzv-id and --nnodes, and every job its own port"
            )
        return now

    def _form(self, values: list[bytes], number: int) -> None:
        """Node 0: all have joined; begin the round with an empty store."""
        assert self._host is not None
        joins = [load(value) for value in values]
        for join in joins:
            if join.get("over"):
                raise self._over(join)
        formed = {
            "round": number,
            "attempt": max(int(join["attempt"]) for join in joins),
            "tokens": [join["token"] for join in joins],
            "hosts": [f"{join['host']} (pid {join['pid']})" for join in joins],
            "port": self._host.worker_port(self.use_agent_store),
        }
        self._drop_control()
        self._host.begin(number, formed)

    def _over(self, over: dict[str, Any]) -> RendezvousError:
        """The job ended elsewhere. Where that is not known to be a failure, it is one if we were in it."""
        self._closed = True
        what = f"run {self.run_id}: node {over['node']}: {over['summary']}"
        if over.get("timeout"):
            return RendezvousTimeoutError(over["summary"])
        failed = over.get("failed")
        if failed or (failed is None and self._round):
            return RendezvousError(f"{what}; the job is over")
        return RendezvousClosedError(what)

    def _time_out(self, client: TorchStoreClient, number: int) -> RendezvousError:
        """End the job for everybody, and say who has not come, as far as the store can tell."""
        try:
            missing = [n for n in range(self.world_size) if not client.check([f"join/{number}/{n}"])]
            if client.check([f"formed/{number}"]):  # another node was quicker, and has filled in the joins
                told = load(client.get(f"formed/{number}"))
                if told.get("over"):
                    client.set(f"seen/{number}/{self.rank}", b"1")
                    return self._over(told)
        except StoreError:
            missing = []
        names = ", ".join(map(str, missing)) or "some"
        message = (
            f"round {number} of run {self.run_id} at {self._where}: node {names} of {self.world_size} did "
            f"not come within {self.timeout:g} s; start every node with its own --node-rank, and see that it "
            "reaches that address"
        )
        self.close(message, True, timed_out=True)
        return RendezvousTimeoutError(message)

    def _enter(self, formed: dict[str, Any]) -> StaticInfo:
        """Take up the place in the round, and begin to watch for its end."""
        number = int(formed["round"])
        host, port = self._address
        shared = TorchStoreClient(
            host, port, self.timeout, connect_timeout=_REPLY, prefix=f"{PREFIX}store/{number}/"
        )
        with self._lock:
            self._round, self._news = number, None
            self.attempt = max(self.attempt, int(formed["attempt"]))
            self._shared, before = shared, self._shared
            self._watch = StaticWatch(
                TorchStoreClient(host, port, _REPLY, prefix=PREFIX), number + 1, self.rank, self._heard
            )
        if before is not None:
            before.close()
        where = RendezvousStoreInfo(self.master_addr, int(formed["port"]))
        return StaticInfo(shared, self.rank, self.world_size, where, number, self.attempt)

    # -- news of the round at hand ----------------------------------------------------------------------

    def _heard(self, number: int, news: dict[str, Any]) -> None:
        """From the watching thread: round `number` is called for, or node 0 is gone."""
        own = news.get("token") in self._tokens
        with self._lock:
            if self._closed or own or number != self._round + 1:
                return
            self._news = news
        listener = self.listener
        if listener is None or news.get("failed") is False:
            return
        if news.get("over"):
            report, code = news.get("told") or ("", 1)
            self.told = (str(report), int(code)) if report else None
        listener(event_of(news, self._round, self.attempt))

    def _lost(self) -> bool:
        return bool(self._news and self._news.get("lost"))

    def _call_for(self, client: TorchStoreClient, number: int, why: dict[str, Any]) -> None:
        client.compare_set(f"round/{number}", b"", json.dumps(why))  # the first reason is the one that counts

    def _announce_leave(self, client: TorchStoreClient) -> None:
        number = self._next
        client.delete_key(f"join/{number}/{self.rank}")  # a node that has gone must not be counted
        self._call_for(client, number, {"node": self.rank, "left": True, "summary": "left"})

    def _announce_end(self, client: TorchStoreClient, over: dict[str, Any]) -> None:
        """Wake everybody: those who run, those who wait for the round, and node 0 that waits for joins."""
        number = self._next
        nodes = range(self.world_size)
        # Before the first round only those are there that have joined it.
        there = [node for node in nodes if self._round or client.check([f"join/{number}/{node}"])]
        mine = json.dumps({**over, "there": there})
        # One of those who end the job at the same time is heard; its word goes to everybody.
        told = client.compare_set(f"formed/{number}", b"", mine)
        if told == mine.encode():
            keys = [f"round/{number}", *(f"join/{number}/{node}" for node in nodes)]
            client.multi_set(keys, [mine] * len(keys))
        there = load(told).get("there", [])
        client.set(f"seen/{number}/{self.rank}", b"1")
        if self._host is not None:
            try:
                client.wait([f"seen/{number}/{node}" for node in there], _FAREWELL)
            except StoreTimeoutError:
                pass  # whoever has not heard it by now learns it from the lost connection

    # -- connections ------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        """The round after the one at hand; for a node that is in none yet, the one it asked to be in."""
        return max(self._round + 1, self._asked)

    @property
    def _where(self) -> str:
        return f"{self.master_addr}:{self._port}"

    @property
    def _port(self) -> int:
        return self._host.port if self._host is not None else self.master_port

    @property
    def _address(self) -> tuple[str, int]:
        return self.master_addr if self._host is None else self._host.local_address, self._port

    def _connected(self, deadline: float) -> TorchStoreClient:
        """The connection of this node's agent; node 0 serves before it connects."""
        with self._lock:
            if self.rank == 0 and self._host is None and not self._closed:
                self._host = StaticHost(self.master_addr, self.master_port, self.run_id, self.world_size)
            if self._control is not None:
                return self._control
        left = max(0.0, deadline - time.monotonic())
        control = TorchStoreClient(
            *self._address, _REPLY, connect_timeout=left, prefix=PREFIX, give_up=lambda: self._closed
        )
        with self._lock:
            if not self._closed:
                self._control = control
                return control
        control.close()
        raise RendezvousClosedError(f"run {self.run_id}: closed while joining")

    def _no_connection(self, error: StoreError) -> RendezvousConnectionError:
        if self._lost():
            return RendezvousConnectionError(
                f"run {self.run_id}: the agent of node 0 at {self._where} is gone and did not come back; "
                "look at its output"
            )
        return RendezvousConnectionError(f"run {self.run_id}, node {self.rank}: {error}")

    def _tell(self, say: Callable[[TorchStoreClient], None]) -> None:
        """Tell the others something, if there is a way; a job that ends must not fail at that."""
        ended = self._news is not None and self._news.get("over")
        if ended or not (self._round or self._asked):
            return  # everybody knows, or nobody knows this node
        patience = 0.0 if self._lost() else 2.0
        for _ in range(2):  # the store may be emptied for a new round at this very moment
            try:
                with TorchStoreClient(*self._address, 5.0, connect_timeout=patience, prefix=PREFIX) as client:
                    say(client)
                return
            except StoreError:
                continue

    def _drop_control(self) -> None:
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()

    def _end_watch(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def _release(self) -> None:
        self._closed = True
        self._end_watch()
        self._drop_control()
        with self._lock:
            shared, host = self._shared, self._host
        if shared is not None:
            shared.close()
        if host is not None:
            host.close()


def create_rdzv_handler(params: RendezvousParameters) -> StaticRendezvous:
    """The handler that these parameters ask for."""
    from phalanx.membership.address import parse_rendezvous_endpoint

    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError(
            "static rendezvous: the rank of this node is missing; give --node-rank (rank=… here)"
        )
    if params.min_nodes != params.max_nodes:
        raise ValueError(
            f"static rendezvous with {params.min_nodes}:{params.max_nodes} nodes: the number must be fixed; "
            "use the phalanx backend for a range"
        )
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    timeout = params.get_as_int("join_timeout") or params.get_as_int("timeout") or DEFAULT_TIMEOUT
    return StaticRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout)
