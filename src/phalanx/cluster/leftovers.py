"""The keys of a finished job in a store that outlives it: they expire.

A node that comes late still has to find out that its job is over, and a job that uses the run id again which
hosts are quarantined, so the keys stay for a day. Quarantines that are longer, or that a person has to lift,
stay until then.
"""

from __future__ import annotations

from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.records import UNTIL_REMOVED, decode_host
from phalanx.core.rounds.store_commands import Get, Grant, Put, Txn, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.rounds.store_commands import Entry
    from phalanx.store.client import StoreClient

KEPT = 86400.0
ROUND = "ctl/round"
_BATCH = 50  # of a transaction; etcd allows 128 operations
_ATTEMPTS = 5


def round_of(client: StoreClient, prefix: str, patience: float) -> bytes:
    """What tells this job from the next one with its id."""
    entries = client.request(Get(prefix + ROUND), patience).entries
    return entries[0].value if entries else b""


def let_expire(
    client: StoreClient, prefixes: tuple[str, str], last: bytes, is_over: bool, patience: float
) -> None:
    """Put the keys below these prefixes on a lease, once this node has left.

    Not if the job goes on with another node, or if the next one has begun: then its round is not `last`."""
    round_key, node_keys = prefixes[0] + ROUND, prefixes[0] + "node/"
    same = When(round_key, "value", value=last) if last else When(round_key, "create", 0)
    lease = 0
    for _ in range(_ATTEMPTS):
        found = [e for one in prefixes for e in client.request(Get(one, prefix=True), patience).entries]
        if not is_over and any(entry.key.startswith(node_keys) for entry in found):
            return  # the last of them does it
        if any(entry.key == round_key and entry.value != last for entry in found):
            return
        left = [entry for entry in found if not entry.lease and not _outlives(entry)]
        if not left:
            return
        lease = lease or client.request(Grant(KEPT), patience).number
        for start in range(0, len(left), _BATCH):
            batch = left[start : start + _BATCH]
            unchanged = tuple(When(entry.key, "mod", entry.mod) for entry in batch)
            puts = tuple(Put(entry.key, entry.value, lease) for entry in batch)
            client.request(Txn((same, *unchanged), puts), patience)
        # Another node may have changed some meanwhile, with its figures or as the last one, too: look again.


def _outlives(entry: Entry) -> bool:
    """Whether it is a quarantine that lasts longer."""
    record = decode_host(entry.value) if f"/{HOSTS}" in entry.key else None
    return record is not None and bool(record.reason) and (record.left == UNTIL_REMOVED or record.left > KEPT)
