"""Exchanges through a store: the data of all ranks, and barriers that name the missing ones.

The store is any object with torch's `Store` methods. Keys are used once: give every exchange its own prefix.

Rank 0 usually serves the store, and a store that closes fails its readers. So rank 0 returns only when the
other ranks have read their values.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta

from phalanx.errors import StoreConnectionError, StoreTimeoutError
from phalanx.store.tcpstore.torch_errors import as_torchs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_MOST_NAMED = 32


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Within: waits of this store last `timeout` seconds. Afterwards: as long as before."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of `prefix0`, `prefix1`, …, by rank; rank 0 returns when all have read them."""
    keys = [f"{prefix}{peer}" for peer in range(world_size)]
    if hasattr(store, "multi_get"):
        values = [as_bytes(value) for value in store.multi_get(keys)]
    else:
        values = [as_bytes(store.get(key)) for key in keys]
    read_by_all = _arrive(store, f"{prefix}/finished", world_size)
    if rank == 0:
        store.wait([read_by_all])
    return values


def _arrive(store: Any, prefix: str, world_size: int) -> str:
    """Count this rank; the key that the last one sets. The keys are torch's: either side may be torch."""
    done = f"{prefix}/last_member"
    if int(store.add(f"{prefix}/num_members", 1)) == world_size:
        store.set(done, b"1")
    return done


def as_bytes(value: Any) -> bytes:
    """A value of a store, which may be one that returns text."""
    return value.encode() if isinstance(value, str) else bytes(value)


def synchronize(
    store: Any, data: bytes | str, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Publish `data`, and return the data of all ranks, by rank."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Until `world_size` have called this with the same prefix.

    With `rank` given, a time-out names the ranks that did not come, on every rank: each looks by itself.
    `trace_timeout` bounds the look; `rank_tracing_decoder` turns a rank into a name that people know.
    """
    if rank is not None:
        # Before the count: a rank that is counted can be found.
        store.set(f"{key_prefix}/phalanx/rank/{rank}", b"1")
    done = _arrive(store, key_prefix, world_size)
    try:
        with store_timeout(store, barrier_timeout):
            store.wait([done])
    except StoreConnectionError:
        raise
    except Exception as error:
        if not _timed_out(store, done, error):
            raise
        who = _who(store, key_prefix, world_size, rank, rank_tracing_decoder, trace_timeout)
        text = f"barrier {key_prefix!r}: {who} within {barrier_timeout:g} s"
        raise as_torchs(StoreTimeoutError(text)) from error
    if rank is not None:
        _part(store, key_prefix, world_size, rank, min(barrier_timeout, trace_timeout))


def _part(store: Any, key_prefix: str, world_size: int, rank: int, timeout: float) -> None:
    """Keep rank 0, and with it the store, until the others have seen that all have come.

    The barrier is passed already: nothing that goes wrong from here on may fail it.
    """
    parted = f"{key_prefix}/phalanx/parted"
    try:
        if int(store.add(f"{key_prefix}/phalanx/passed", 1)) == world_size:
            store.set(parted, b"1")
        elif rank == 0:
            with store_timeout(store, timeout):
                store.wait([parted])
    except Exception:  # noqa: BLE001 - a store may raise anything, and it may rightly be gone by now
        pass


def _timed_out(store: Any, done: str, error: Exception) -> bool:
    """Whether the wait ran out, as opposed to a store that broke; torch's stores have one type for both."""
    if isinstance(error, TimeoutError):
        return True
    try:
        return not store.check([done])
    except Exception:  # noqa: BLE001 - the store cannot be queried: the first error explains more
        return False


def _who(
    store: Any,
    key_prefix: str,
    world_size: int,
    rank: int | None,
    name: Callable[[int], str] | None,
    trace_timeout: float,
) -> str:
    """The missing ranks, as text."""
    if rank is None:
        arrived = int(store.add(f"{key_prefix}/num_members", 0))
        return f"only {arrived} of {world_size} came"
    with store_timeout(store, trace_timeout):
        missing = [
            peer for peer in range(world_size) if not store.check([f"{key_prefix}/phalanx/rank/{peer}"])
        ]
    if not missing:
        return f"all {world_size} ranks came, but the last one not"
    names = [name(peer) if name is not None else str(peer) for peer in missing[:_MOST_NAMED]]
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"rank {', '.join(names)}{more} of {world_size} did not come (says rank {rank})"
