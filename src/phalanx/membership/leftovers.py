"""The keys of a finished job in a store that outlives it: they expire.

A node that comes late still has to find out that its job is over, and a job that uses the run id again which
hosts are quarantined, so the keys stay for a day. Quarantines that are longer, or that a person has to lift,
stay until then.
"""

from __future__ import annotations

from phalanx.core.round_causes import HOSTS
from phalanx.core.round_records import UNTIL_REMOVED, decode_host
from phalanx.core.store_commands import Get, Grant, Put, Txn, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.store_commands import Entry
    from phalanx.store.embedded.client import Client

KEPT = 86400.0
_BATCH = 50  # of a transaction; etcd allows 128 operations


def let_expire(client: Client, prefixes: tuple[str, ...], nodes: str, own: int, patience: float) -> None:
    """Put the keys below these prefixes on a lease, unless another node has a key below `nodes`.

    `nodes`: empty where the job is over for all. `own`: this node's lease."""
    if nodes and any(
        entry.lease != own for entry in client.request(Get(nodes, prefix=True), patience).entries
    ):
        return
    found = [e for one in prefixes for e in client.request(Get(one, prefix=True), patience).entries]
    left = [entry for entry in found if not entry.lease and not _outlives(entry)]
    lease = client.request(Grant(KEPT), patience).number if left else 0
    for start in range(0, len(left), _BATCH):
        batch = left[start : start + _BATCH]
        # The first node of the next job with this id may have been quicker.
        unchanged = tuple(When(entry.key, "mod", entry.mod) for entry in batch)
        puts = tuple(Put(entry.key, entry.value, lease) for entry in batch)
        client.request(Txn(unchanged, puts), patience)


def _outlives(entry: Entry) -> bool:
    """Whether it is a quarantine that lasts longer."""
    record = decode_host(entry.value) if f"/{HOSTS}" in entry.key else None
    return record is not None and bool(record.reason) and (record.left == UNTIL_REMOVED or record.left > KEPT)
