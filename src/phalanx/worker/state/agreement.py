"""Which save all ranks resume from, found through the round's store: one message per rank, and one for all.

Each rank writes what it has, and counts itself. The last one reads all of it and writes the result. The count
of calls is in the store, too: a round begins with an empty one, whichever processes are part of it.
"""

from __future__ import annotations

import json
import os
import time

from phalanx.errors import StateError, StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.store.tcpstore.client import TorchStoreClient
    from phalanx.worker.state.rank_state import RankState

Moments = list[tuple[int, int]]  # step, and the round in which it was kept


def newest_common(moments: Iterable[Moments]) -> tuple[int, int] | None:
    """The first of one list that is in all lists; each has the newest save first.

    Not the highest step: a job that went back to an older one reaches the same steps again.
    """
    first, *others = moments
    return next((moment for moment in first if all(moment in other for other in others)), None)


def agree(state: RankState, name: str, timeout: float) -> int | None:
    """The step, the same in every rank; each forgets its newer saves of this name."""
    place = state.place
    moments = state.moments(name)
    if place.world_size == 1:
        found = newest_common([moments])
    else:
        with round_store("agree()", "phalanx/state/", timeout) as store:
            found = _exchange(store, name, place.rank, place.world_size, moments, timeout)
    if found is None:
        return None
    state.forget_newer(name, found)
    return found[0]


def round_store(what: str, prefix: str, timeout: float) -> TorchStoreClient:
    """The store of this round, which is empty when it begins; `what` asks for it."""
    from phalanx.store.tcpstore.client import TorchStoreClient

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not port.isdigit():
        raise StateError(
            f"{what} needs the store that the agents serve: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, "
            "or agree through a collective of your own"
        )
    return TorchStoreClient(host, int(port), timeout, prefix=prefix)


def _exchange(
    store: TorchStoreClient, name: str, rank: int, world_size: int, moments: Moments, timeout: float
) -> tuple[int, int] | None:
    until = time.monotonic() + timeout
    call = store.add(f"calls/{name}/{rank}", 1)
    prefix = f"agree/{name}/{call}/"
    result = prefix + "result"
    store.set(f"{prefix}{rank}", json.dumps(moments))
    if store.add(prefix + "count", 1) == world_size:
        texts = store.multi_get([f"{prefix}{other}" for other in range(world_size)])
        store.set(result, json.dumps(newest_common(_moments(text) for text in texts)))
    try:
        store.wait([result], max(0.0, until - time.monotonic()))
    except StoreTimeoutError:
        missing = [str(r) for r in range(world_size) if not store.check([f"{prefix}{r}"])]
        raise StateError(
            f"agree({name!r}): not every rank called it within {timeout:g} s; missing: "
            + ", ".join(missing[:16])
            + (" …" if len(missing) > 16 else "")
        ) from None
    found = json.loads(store.get(result))
    return None if found is None else (int(found[0]), int(found[1]))


def _moments(text: bytes) -> Moments:
    try:
        return [(int(step), int(round_)) for step, round_ in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise StoreError(f"agree(): an unreadable value in the store: {text[:80]!r}") from error
