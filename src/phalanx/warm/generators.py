"""Random generators that an import made: workers must not share what was drawn from the system.

A fresh process seeds such a generator from the system, so every rank and every restart has another sequence;
forks of one process would all have the same. One seeded with a number by the package is the same in every
process and has to stay so. The two are told apart by a comparison with another process that did the same
imports: a state that both have is deterministic.

All generator objects count, wherever they are kept: the garbage collector knows them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def all_generators() -> list[Any]:
    """Every generator object of this process, of `random`, numpy and torch."""
    import gc

    bases = tuple(_classes())
    if not bases:
        return []
    known: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in known:
            known[kind] = issubclass(kind, bases)
        if known[kind]:
            found.append(thing)
    torch: Any = sys.modules.get("torch._C")
    default = getattr(torch, "default_generator", None)  # some are not known to the collector
    if default is not None and not any(one is default for one in found):
        found.append(default)
    return found


def _classes() -> Iterable[type]:
    for module, names in (
        ("random", ("Random",)),
        ("numpy.random.mtrand", ("RandomState",)),
        ("numpy.random.bit_generator", ("BitGenerator", "SeedSequence")),
        ("torch._C", ("Generator",)),
    ):
        for name in names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type):
                yield found


def state_of(generator: Any) -> Any:
    """Its state as a value to compare; None if it has none (SystemRandom)."""
    try:
        if hasattr(generator, "getstate"):  # random
            return generator.getstate()
        if hasattr(generator, "entropy"):  # a SeedSequence
            return generator.entropy, generator.spawn_key, generator.n_children_spawned
        if hasattr(generator, "initial_seed"):  # torch; the state itself is a tensor
            return generator.initial_seed(), generator.get_state().tolist()
        state = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.state
    except Exception:  # noqa: BLE001 - a subclass without a state
        return None
    return _plain(state)


def _plain(state: Any) -> Any:
    """numpy's states contain arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def states(generators: Iterable[Any]) -> set[int]:
    """Check sums of their states."""
    return {_checksum(state) for state in map(state_of, generators) if state is not None}


def _checksum(state: Any) -> int:
    import zlib

    return zlib.crc32(repr(state).encode())


class GeneratorPlan:
    """What every worker does with the generators that the preload made."""

    def __init__(self, fixed: set[int]) -> None:
        """`fixed`: the check sums that another process has, too."""
        self.random: list[Any] = []  # from the system: another sequence in every worker
        self.fixed: list[tuple[Any, Any]] = []  # `random` seeds its own again after a fork
        for generator in all_generators():
            state = state_of(generator)
            if state is None:
                continue
            if _checksum(state) not in fixed:
                self.random.append(generator)
            elif hasattr(generator, "setstate"):
                self.fixed.append((generator, state))

    def apply(self) -> None:
        """In a worker, before the script's first line."""
        for generator in self.random:
            try:
                _seed_again(generator)
            except Exception:  # noqa: BLE001 - a subclass with rules of its own keeps what it has
                pass
        for generator, state in self.fixed:
            generator.setstate(state)


def _seed_again(generator: Any) -> None:
    if hasattr(generator, "entropy") or hasattr(generator, "seed_seq"):
        # In place, as a fresh process makes it: other objects refer to this one.
        generator.__init__()
    else:
        generator.seed()
