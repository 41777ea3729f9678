"""A node's last requests to the store, when it has ended: in the membership's thread, which may wait then.

It revokes its lease, so that no node waits for it; the host of the store stays until the other nodes have
seen how the job ended. The goodput of the job is added up before, and the keys of a job in a store that
outlives it expire.
"""

from __future__ import annotations

import threading

from phalanx.cluster.clock import clock
from phalanx.core.rounds.records import CLOSED
from phalanx.core.rounds.store_commands import Get, Revoke
from phalanx.errors import StoreError
from phalanx.job.time_budgets import END_SEEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.cluster.settings import Settings
    from phalanx.core.rounds.participant import Participant
    from phalanx.store.client import StoreClient

FEW = 64  # nodes: with more, all of them looking for each other as they leave would overload the store


class LastRequests:
    """`goodput`: this node's ledger at its end, set before `release` by an agent that has one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.goodput: NodeGoodput | None = None
        self.shares_goodput = False
        self.job_goodput: JobGoodput | None = None
        """That of the whole job, where it is known, once released."""

    def send(self, client: StoreClient, participant: Participant, rank: int, hosting: bool) -> None:
        """Leave the store; `rank`: in the last round."""
        ended, options, settings = participant.ended, participant.options, self._settings
        if client.lost is not None or (ended is not None and ended.outcome == "store"):
            return  # it has been silent for long enough
        if self.shares_goodput and options.max_nodes > 1:
            self._exchange_goodput(client, participant, rank, hosting)
        if hosting:
            # With its key the host is still part of the ending job: a newcomer sees the end, and does not
            # begin a new job at a store that is about to close.
            self._wait_for_the_others(client, participant, max(END_SEEN, options.ttl))
        left = participant.round if settings.store == "etcd" else None  # in a store that outlives the job
        over = left is not None and left.phase == CLOSED and participant.leading
        if over:
            self._wait_for_the_others(client, participant, END_SEEN)  # they may still write
        try:
            if left is None:
                self._revoke(client, participant)
                return
            from phalanx.cluster.leftovers import let_expire, round_of

            last = round_of(client, options.prefix, END_SEEN)
            self._revoke(client, participant)
            if over or left.nodes <= FEW:
                shared = f"shared/{settings.run_id}/"
                let_expire(client, (options.prefix, shared), last, over, END_SEEN)
        except StoreError:
            pass  # the lease runs out by itself; other keys are few, and the next job with this id uses them

    def _revoke(self, client: StoreClient, participant: Participant) -> None:
        # Answered, not only sent: the store may have taken up another connection of this session, and who
        # begins this job again would find a node of the last one.
        if participant.lease.number:
            client.request(Revoke(participant.lease.number), END_SEEN)

    def _wait_for_the_others(self, client: StoreClient, participant: Participant, patience: float) -> None:
        end = clock() + patience  # a node that is gone loses its key within a lease
        nodes = participant.options.prefix + "node/"
        changed = threading.Event()
        try:
            client.watch(nodes, lambda notice: changed.set(), prefix=True)
            while clock() < end:
                here = client.request(Get(nodes, prefix=True), END_SEEN).entries
                if all(entry.lease == participant.lease.number for entry in here):
                    return
                changed.wait(max(0.0, end - clock()))
                changed.clear()
        except StoreError:
            pass  # the other nodes see the closed connection

    def _exchange_goodput(
        self, client: StoreClient, participant: Participant, rank: int, hosting: bool
    ) -> None:
        """Give this node's ledger and learn that of the job, while all nodes are there.

        The host of a store that leaves takes the job with it: it adds up what the others leave behind."""
        end, own = participant.ended, self.goodput
        over = end is not None and end.outcome in ("succeeded", "failed", "closed")
        if rank < 0 or (own is None and rank):
            return
        from phalanx.cluster.job_goodput import GoodputExchange, exchange

        here = GoodputExchange(client, self._settings.run_id, participant.info.id, participant.job)
        if over and rank == 0:
            self.job_goodput = exchange(lambda: here.collect(own, participant.options.prefix + "node/"))
        elif own is not None and over:
            self.job_goodput = exchange(lambda: here.receive(own))
        elif own is not None and hosting:
            self.job_goodput = exchange(lambda: here.collect(own))
        elif own is not None:
            exchange(lambda: here.part(own))
