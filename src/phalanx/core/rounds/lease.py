"""This node's lease, and until when its workers may run: `core.rounds.rounds` relies on it.

This node runs workers only while its lease is certainly alive.
- An answered keep-alive proves the lease from the moment it was *sent*, for the lease's time.
- A connection that ended gives the store reason to shorten the lease to `linger`, counted from the
  end of the connection at the earliest; so the node counts from there as well.
- Nothing else counts. A refused connection was once taken as proof that the store is down, and let
  workers run on: but a firewall, a proxy or a wrong route refuses as well, while the store lives and
  gives the lease away. A job outlives a restart of its store because a store with a journal starts
  every lease again and does not shorten leases (`linger` is infinite): the restart has the lease's
  time, and a longer absence stops the workers until the store is back.
- A tenth of the time is kept back for killing workers and for clocks that run at different speeds.
"""

from __future__ import annotations

from typing import NamedTuple

FENCE = 0.9
RENEWALS = 3  # in a lease


class NodeLease(NamedTuple):
    """What the store has granted, and what is known of it; times in seconds."""

    ttl: float
    linger: float
    number: int = 0  # 0: none
    old: int = 0  # one that may be lost: it is given back when the workers are gone
    proof: float = 0.0  # when the last keep-alive was sent that the store has answered
    cap: float | None = None  # when it ends at the earliest because a connection has ended
    renew_at: float = 0.0

    @property
    def ends(self) -> float:
        """When it may be over: no worker may run on this node from then on."""
        surely = self.proof + self.ttl * FENCE
        return surely if self.cap is None else min(surely, self.cap)

    def granted(self, now: float, number: int, sent: float, hung_up: float | None) -> NodeLease:
        """A new one, asked for at `sent`; `hung_up`: when the connection ended that it was asked for on."""
        if hung_up is None:
            return self._replace(number=number, proof=sent, cap=None, renew_at=sent + self.ttl / RENEWALS)
        # It may have been granted before the connection ended, and shortened then.
        return self._replace(number=number, proof=sent, cap=hung_up + self.linger * FENCE, renew_at=now)

    def renewed(self, sent: float) -> NodeLease:
        """The store has answered a keep-alive."""
        renew_at = max(self.renew_at, sent + self.ttl / RENEWALS)
        return self._replace(proof=max(self.proof, sent), cap=None, renew_at=renew_at)

    def hung_up(self, now: float) -> NodeLease:
        """The store may shorten it from now on; a later connection that ends does not prolong that."""
        if not self.number or self.cap is not None:
            return self
        return self._replace(cap=now + self.linger * FENCE)

    def lost(self) -> NodeLease:
        """It may be over."""
        return self._replace(number=0, old=self.number)
