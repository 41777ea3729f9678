"""The elastic rendezvous: nodes come and go, and every change gives a new numbered round.

Two ways to use it:
- The agent attaches a `Listener`, which gets everything as it happens.
- Other code calls torch's methods: `next_rendezvous` waits for a round; `num_nodes_waiting` reports, without
  a request, whether that round is over, and then `next_rendezvous` is called again. Calling it while the
  round still runs requests a new one from all nodes, as a torch agent does after a failure.

No call but `next_rendezvous`, `shutdown`, `leave`, and `set_closed` before the first round, waits.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from phalanx.cluster.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from phalanx.cluster.meetings import shared_prefix
from phalanx.cluster.membership import Membership
from phalanx.cluster.settings import Settings
from phalanx.core.group.events import PeerFailed, RoundFailed
from phalanx.core.rounds.rounds import NO_MORE
from phalanx.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from phalanx.job.address import names_loopback
from phalanx.job.environment import shares_store
from phalanx.job.time_budgets import LAST_WORD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.cluster.listener import Listener, Meeting
    from phalanx.core.group.ranks import WorkerRanks
    from phalanx.core.rounds.participant_events import End, Remark, RoundEnd
    from phalanx.core.rounds.records import Round

_CLOSE = 30.0  # for a node that has not joined to close the job


def create_handler(params: RendezvousParameters) -> ElasticRendezvous:
    """For the registry."""
    return ElasticRendezvous(Settings(params))


class ElasticInfo(RendezvousInfo):
    """A round as this node sees it, with its number and what serves the workers' store here."""

    def __init__(self, meeting: Meeting, store: Any, slots: int | None) -> None:
        """`slots`: the workers of this node; None: the leader does not know, and the nodes exchange them."""
        where = RendezvousStoreInfo(meeting.address, meeting.port)
        super().__init__(store, meeting.place.rank, meeting.round.nodes, where)
        self.round = meeting.round.number
        self.attempt = meeting.round.restarts
        self.served = meeting.served
        self._place, self._slots = meeting.place, slots

    @property
    def worker_ranks(self) -> list[WorkerRanks] | None:
        """The ranks of this node's workers, as the leader has placed them."""
        return None if self._slots is None else self._place.offsets.workers(self._slots)


class NextRound:
    """What `next_rendezvous` waits for: the round after the one that its caller has, or the end."""

    def __init__(self, gone: Callable[[int], None]) -> None:
        """`gone(number)`: no caller has this round, which is over."""
        self._gone = gone
        self.changed = threading.Condition()
        self.meeting: Meeting | None = None
        self.over = self.closed = False
        self.end: End | None = None

    def round_ready(self, meeting: Meeting) -> None:
        with self.changed:
            self.meeting = meeting
            self.changed.notify_all()

    def round_over(self, event: RoundEnd, now: Round | None) -> None:
        with self.changed:
            if self.meeting is not None:
                self._gone(self.meeting.round.number)
            self.over, self.meeting = True, None
            failed = isinstance(event, PeerFailed) and event.final
            self.closed |= failed or (isinstance(event, RoundFailed) and event.kind == "closed")
            self.changed.notify_all()

    def job_over(self, end: End) -> None:
        with self.changed:
            self.end, self.over = end, True
            self.closed |= end.outcome in ("closed", "succeeded", "failed", "timeout")
            self.changed.notify_all()

    def waits(self, text: str) -> None:
        """torch's interface has no place for it."""

    def remarks(self, remark: Remark) -> None:
        """torch's interface has no place for it."""

    def lease_until(self, when: float) -> None:
        """The caller starts no workers that could be stopped."""

    def asked(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        """The caller answers no questions."""


class ElasticRendezvous(RendezvousHandler):
    """This node's handle on the rounds of a job."""

    watches = True

    def __init__(self, settings: Settings) -> None:
        self._settings, self.node_name = settings, settings.name
        self.membership: Membership | None = None
        self._attached = False
        self._next = NextRound(lambda number: self._joined().workers_gone(number))
        self._number = 0  # of the round that `next_rendezvous` gave last
        self._closed_here = False

    @property
    def settings(self) -> Any:
        """What this node's part in the rendezvous was made from."""
        return self._settings

    # torch's interface

    def get_backend(self) -> str:
        return self._settings.backend

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        return self._attached and shares_store()

    def next_rendezvous(self) -> ElasticInfo:
        """Wait for the next round that this node is part of."""
        if self._attached:
            raise RendezvousStateError(
                "an agent drives this rendezvous, and would not learn of the round: call its _rendezvous, or "
                "override _rendezvous, so that the agent leaves next_rendezvous to you"
            )
        coming = self._next
        if self._closed_here and coming.end is None:
            run, name = self._settings.run_id, self._settings.name
            raise RendezvousClosedError(f"run {run} is over (closed by {name}, this node)")
        membership = self._joined()
        with coming.changed:
            if self._number and coming.end is None:
                if not coming.over:
                    membership.request_round(self._number, "a new round was asked for", self.restarts)
                membership.workers_gone(self._number)
            coming.changed.wait_for(lambda: coming.end is not None or coming.meeting is not None)
            meeting, coming.meeting, coming.over = coming.meeting, None, False
            if coming.end is not None:
                raise error_of(coming.end, self._settings)
        assert meeting is not None
        self._number = meeting.round.number
        return self.info(meeting)

    def num_nodes_waiting(self) -> int:
        """1 when the current round is over, so that it is time to call `next_rendezvous`."""
        return int(self._next.over)

    def is_closed(self) -> bool:
        return self._closed_here or self._next.closed

    def set_closed(self) -> None:
        """End the job for all nodes; a node that has not joined it waits until they have been told."""
        joined = self.membership is not None
        membership = self._joined()
        if not membership.ended.is_set():
            membership.close(f"closed by {self._settings.name}")
            if not joined:
                membership.ended.wait(_CLOSE)
        self._closed_here = True

    def shutdown(self) -> bool:
        """End the job for all nodes and close everything."""
        membership = self.membership
        if membership is not None:
            if membership.started and not membership.ended.is_set():
                self.set_closed()
                membership.workers_gone(self._number)
                membership.ended.wait(LAST_WORD)
            membership.release()
        return True

    def leave(self, reason: str = "left") -> None:
        """Leave and close everything; the other nodes go on."""
        membership = self.membership
        if membership is not None and membership.started:
            if not membership.ended.is_set():
                membership.leave(reason)
                membership.workers_gone(self._number)
                membership.ended.wait(LAST_WORD)
            membership.release()

    # For an agent

    def attach(
        self,
        listener: Listener,
        open_meeting: Callable[[str], tuple[Any, int]],
        *,
        slots: int,
        role: str,
        max_restarts: int | None,
    ) -> Membership:
        """Report everything as it happens; `start` of the result joins.

        `max_restarts` None: the caller counts restarts."""
        options = replace(self._settings.options, max_restarts=max_restarts)
        self._attached = True
        self.membership = Membership(
            self._settings, options, listener, open_meeting, slots, role, self.use_agent_store
        )
        return self.membership

    def info(self, meeting: Meeting) -> ElasticInfo:
        """A round in torch's form, with the store that its nodes share."""
        from phalanx.cluster.torch_store_adapter import StoreFacade

        assert self.membership is not None
        assert self.membership.client is not None
        prefix = shared_prefix(self._settings.run_id, meeting.round.number) + "store/"
        return ElasticInfo(meeting, StoreFacade(self.membership.client, prefix), self._slots)

    @property
    def _slots(self) -> int | None:
        """The number of this node's workers, where an agent has given it to the leader."""
        return self.membership.info.slots if self._attached and self.membership is not None else None

    def _joined(self) -> Membership:
        if self.membership is None:
            from phalanx.job.address import free_port

            options = replace(self._settings.options, max_restarts=None)
            self.membership = Membership(
                self._settings,
                options,
                self._next,
                lambda _address: (None, free_port()),
                shares_port=self.use_agent_store,
            )
            self.membership.start()
        return self.membership


def error_of(end: End, settings: Settings) -> RendezvousError:
    """The end of a membership as an exception, with what to check."""
    outcome, reason, current = end[:3]
    if outcome == "left":
        return RendezvousGracefulExitError(reason)
    if outcome in ("succeeded", "failed", "closed"):
        return RendezvousClosedError(
            f"run {settings.run_id} is over ({outcome}: {reason}); start it again when its nodes have gone, "
            "or with another --rdzv-id"
        )
    if outcome == "port":  # on another host, or later, it may be free
        return RendezvousConnectionError(
            f"{reason}; end the program that has the port, or choose another with --rdzv-endpoint"
        )
    if outcome == "replaced":
        return RendezvousStateError(f"{settings.name} is no longer part of run {settings.run_id}: {reason}")
    if outcome in ("refused", "mismatch"):
        return RendezvousStateError(reason)
    if outcome == "store" and settings.where not in reason:
        reason += f"; it is {settings.host_name}"
    if settings.fixed:
        return _static_error(outcome, reason, settings)
    if settings.blob is not None:
        return _blob_error(outcome, reason, settings)
    etcd = settings.store == "etcd"
    where, tried = settings.where, ", ".join(settings.addresses())
    check = f"phalanx check --rdzv-endpoint {where}" + " --rdzv-backend etcd" * etcd
    secret = "user and password" if etcd else "token"
    if outcome == "timeout" and NO_MORE in reason:
        return RendezvousTimeoutError(f"run {settings.run_id}: {reason}")
    if outcome == "timeout":
        came = "" if current is None or not reason else f"{reason}; "
        if names_loopback(settings.host):
            came += f"nodes on other machines cannot meet at {where}, name an address they reach; "
        return RendezvousTimeoutError(
            f"{came}check on the missing nodes: the same --rdzv-id ({settings.run_id}) and --rdzv-endpoint "
            f"({where}: {tried}), the same {secret}, and whether they reach that port ({check})"
        )
    if outcome == "connect":
        return RendezvousConnectionError(
            f"{reason} Tried {tried}; check that {'etcd' if etcd else 'the node with that address'} runs, "
            f"that the port is open, and the {secret} ({check})"
        )
    return RendezvousError(reason) if outcome == "error" else RendezvousConnectionError(reason)


def _blob_error(outcome: str, reason: str, settings: Settings) -> RendezvousError:
    if outcome == "timeout":
        return RendezvousTimeoutError(
            f"run {settings.run_id}: {reason}; check that all nodes use the same run id, and can read and "
            f"write the state of {settings.where}"
        )
    return RendezvousConnectionError(f"run {settings.run_id}: {reason}")


def _static_error(outcome: str, reason: str, settings: Settings) -> RendezvousError:
    run, where = f"run {settings.run_id}", settings.where
    if outcome == "timeout":
        return RendezvousTimeoutError(
            f"{run}: {reason}; start every node with its own --node-rank, and check that it reaches {where}"
        )
    if outcome == "connect":
        return RendezvousConnectionError(
            f"{run}, node {settings.rank}: {reason} Check that node 0 runs and that this node reaches {where}"
        )
    return RendezvousConnectionError(f"{run}: {reason}")
