"""What does not fit together in a job, in one line each: nodes that are refused, nodes with another --nnodes.

The leader publishes its --nnodes in `ctl/nnodes`, and a node with another one answers in `ctl/nnodes/<id>`;
every node watches `ctl/`, so all of them are told. Both keys are on a lease: they end with their node, and
mean nothing to the next job of this run id.
"""

from __future__ import annotations

from phalanx.core.rounds.participant_events import Remark
from phalanx.core.rounds.records import printable
from phalanx.core.rounds.store_commands import Put, Txn, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.core.rounds.leader_view import Options
    from phalanx.core.rounds.participant import Participant
    from phalanx.core.rounds.store_commands import Command

KEY = "ctl/nnodes"
_MOST = 16  # lines of a kind: strangers can come as often as they like


class Mismatches:
    """What this node has found so far; each is told once."""

    def __init__(self, options: Options, name: str, remark: Callable[[Remark], None]) -> None:
        least, most = options.min_nodes, options.max_nodes
        self._wanted = str(most) if least == most else f"{least}:{most}"
        self._options, self._name, self.remark = options, name, remark
        self._said: set[tuple[str, str]] = set()
        self._disagrees = False  # with the leader
        self._published = 0  # the lease with which this node has written

    def refused(self, host: str, why: str) -> None:
        """The store here has turned a node away."""
        self._note_once(("refused", f"{host} {why}"), f"refused a node at {host}: {why}")

    def visited(self, host: str) -> None:
        """A host speaks torch's protocol, as the workers of a round do, and there is no round yet."""
        what = "speaks the protocol of torch's store, and no worker runs yet: does that node run torchrun?"
        self._note_once(("visited", host), f"a program at {host} {what} Start every node with phalanx run")

    def publish(self, participant: Participant) -> Command | None:
        """What this node writes once per lease: its --nnodes, as the leader or because it has another one."""
        lease, prefix = participant.lease.number, self._options.prefix
        if self._options.fixed or lease in (0, self._published):
            return None
        if participant.leading:
            leader = When(prefix + "ctl/leader", "value", value=participant.info.id.encode())
            command = Txn((leader,), (Put(prefix + KEY, self._wanted.encode(), lease),))
        elif self._disagrees:
            text = f"{self._wanted} {self._name}"
            command = Txn((), (Put(f"{prefix}{KEY}/{participant.info.id}", text.encode(), lease),))
        else:
            return None
        self._published = lease
        return command

    def learn(self, key: str, value: bytes) -> None:
        """Take in a key below `ctl/`."""
        if not key.startswith(KEY) or self._options.fixed:
            return
        theirs, _, name = printable(value[:300].decode(errors="replace")).partition(" ")
        if theirs == self._wanted:
            return
        self._disagrees |= key == KEY
        who = "the leader" if key == KEY else name
        self._note_once(
            ("nnodes", f"{who} {theirs}"),
            f"{who} was started with --nnodes {theirs}, and this node with {self._wanted}: the leader's "
            "counts; give every node the same",
        )

    def _note_once(self, what: tuple[str, str], text: str) -> None:
        if what not in self._said and sum(kind == what[0] for kind, _ in self._said) < _MOST:
            self._said.add(what)
            self.remark(Remark(text))
