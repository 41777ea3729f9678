"""What people, commands and the agent ask of the job beside its rounds: keys that this node writes.

Each call comes from any thread and is carried out by the membership's; without a connection it is void.
"""

from __future__ import annotations

from phalanx.cluster.clock import clock
from phalanx.cluster.node_requests import told_prefix
from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.quarantine import failed_check
from phalanx.core.rounds.records import encode
from phalanx.core.rounds.store_commands import Delete, Put, Txn, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx.cluster.membership import Membership
    from phalanx.cluster.shared_quarantine import QuarantinePost
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.records import HostRecord


class JobCommands:
    """Of one membership."""

    def __init__(self, owner: Membership) -> None:
        self._owner = owner
        self._prefix, self._run_id = owner.options.prefix, owner.settings.run_id
        self._post: QuarantinePost | None = None

    def drain(self) -> None:
        """Ask for this node to leave, as `phalanx drain` does."""
        self._owner.post(lambda: self._owner.send(Put(f"{self._prefix}drain/{self._owner.info.id}", b"")))

    def slow_host(self, number: int, host: str, why: str) -> None:
        """A host of a round is slow, and is to be replaced where there is a spare; empty: no longer."""
        key = f"{self._prefix}slow/{number}/{host}"
        self._owner.post(lambda: self._owner.send(Put(key, why.encode()) if why else Delete(key)))

    def answer(self, value: bytes) -> None:
        """Answer a question of another node."""

        def write() -> None:
            participant = self._owner.participant
            if participant is not None and participant.lease.number:
                key = told_prefix(self._run_id) + self._owner.info.id
                self._owner.send(Put(key, value, participant.lease.number))

        self._owner.post(write)

    def keep_goodput(self, totals: GoodputTotals) -> None:
        """This node's ledger so far, for the total of the job, should the node be lost."""

        def write() -> None:
            from phalanx.cluster.job_goodput import encode_ledger, ledgers_prefix

            participant = self._owner.participant
            if participant is not None and not self._owner.ended.is_set():
                value = encode_ledger(participant.job, totals, final=False)
                self._owner.send(Put(ledgers_prefix(self._run_id) + self._owner.info.id, value))

        self._owner.post(write)

    # Hosts that are kept out

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        """Write, or (None) delete, what is held against hosts; `then` gets whether the store has it."""
        keys = {f"{self._prefix}{HOSTS}{host}": found for host, found in hosts.items()}
        puts = tuple(Put(key, encode(found)) for key, found in keys.items() if found is not None)
        deletes = tuple(Delete(key) for key, found in keys.items() if found is None)

        def write() -> None:
            if self._owner.participant is None or self._owner.ended.is_set():
                then(False)
            else:
                self._owner.send(Txn((), puts, deletes), lambda reply: then(reply.ok))

        self._owner.post(write)

    def unfit(self, why: str) -> None:
        """This node failed its check and leaves: hold it against its host, as the leader would."""
        policy = self._owner.options.quarantine
        if policy is not None and self._owner.started:
            self.change_hosts({self._owner.info.name: failed_check(why, policy)}, lambda done: None)

    def quarantine(self) -> list[dict[str, Any]]:
        """The hosts that are quarantined: host, reason and, unless a person removes it, the seconds left."""
        participant, now = self._owner.participant, clock()
        entries = participant.hosts.state.entries if participant is not None else ()
        return [
            {"host": one.node, "reason": one.reason, "left": None if one.until is None else one.until - now}
            for one in entries
            if one.until is None or now < one.until
        ]

    def bring_quarantine(self) -> None:
        """What other jobs hold against this host counts here, unless this job knows more about it."""
        directory, name = self._owner.settings.quarantine_dir, self._owner.info.name
        if not directory or self._owner.options.quarantine is None:
            return
        from phalanx.cluster.shared_quarantine import read_host

        found = read_host(directory, name)
        if found is not None:
            key = f"{self._prefix}{HOSTS}{name}"
            self._owner.send(Txn((When(key, "create", 0),), (Put(key, encode(found)),)))

    def publish_quarantine(self, host: str) -> None:
        """Tell other jobs, and the hook, of a host that is kept out; the leader does."""
        directory, hook = self._owner.settings.quarantine_dir, self._owner.settings.quarantine_hook
        entry = next((one for one in self.quarantine() if one["host"] == host), None)
        if entry is None or not (directory or hook):
            return
        if self._post is None:
            from phalanx.cluster.shared_quarantine import QuarantinePost

            self._post = QuarantinePost(directory, hook, self._run_id)
        self._post.tell(entry)

    def close(self) -> None:
        """Stop the thread of the hook."""
        if self._post is not None:
            self._post.close()
