"""Rendezvous backends by name: the built-in ones, registered ones, and plug-ins.

A plug-in is an entry point of the group `phalanx.handlers` or `torchrun.handlers`: a function without
arguments that returns the creator, which takes `RendezvousParameters` and returns the handler (torchrun's
convention, for both groups). Plug-ins are looked up when their name is asked for, never at import.
"""

from __future__ import annotations

from phalanx import plugins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.handler import RendezvousHandler, RendezvousParameters

    RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
else:
    RendezvousHandlerCreator = "Callable[[RendezvousParameters], RendezvousHandler]"

ALIASES = {"c10d": "phalanx", "etcd-v2": "etcd"}


class RendezvousHandlerRegistry:
    """Creators of handlers, by the name of the backend."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Make a backend known; the same creator may come again, another one may not."""
        if not backend:
            raise ValueError("rendezvous backend: the name is empty; give it one")
        if not callable(creator):
            raise ValueError(f"rendezvous backend {backend!r}: {creator!r} is not callable")
        there = self._registry.setdefault(backend, creator)
        if there is not creator:
            raise ValueError(f"rendezvous backend {backend!r} is registered already, as {there!r}")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """The handler for these parameters."""
        creator = self._registry.get(params.backend)
        if creator is None:
            offered = plugins.names(plugins.HANDLERS)
            if params.backend not in offered:
                known = ", ".join(sorted({*self._registry, *offered}))
                raise ValueError(f"rendezvous backend {params.backend!r}: no such backend; known are {known}")
            creator = plugins.load(params.backend, plugins.HANDLERS)()
        handler = creator(params)
        made = handler.get_backend()
        if made not in (params.backend, ALIASES.get(params.backend)):
            raise RuntimeError(
                f"rendezvous backend {params.backend!r}: its creator made a handler for {made!r}; "
                "the two names must be the same"
            )
        return handler


def _static(params: RendezvousParameters) -> RendezvousHandler:
    from phalanx.cluster.static import create_rdzv_handler

    return create_rdzv_handler(params)


def _elastic(params: RendezvousParameters) -> RendezvousHandler:
    from phalanx.cluster.elastic import create_handler

    return create_handler(params)


def create_etcd_v2_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Our rendezvous over etcd, under the name that torch has for its own."""
    from phalanx.cluster.handler import RendezvousParameters
    from phalanx.job.rules import ETCD_V2
    from phalanx.log import warn

    warn(ETCD_V2)
    return _elastic(
        RendezvousParameters(
            "etcd",
            params.endpoint,
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            params.local_addr,
            **params.config,
        )
    )


rendezvous_handler_registry = RendezvousHandlerRegistry()
plugins.registered[plugins.HANDLERS[0]] = rendezvous_handler_registry._registry
for _name, _creator in (
    ("static", _static),
    ("phalanx", _elastic),
    ("c10d", _elastic),
    ("etcd", _elastic),
    ("etcd-v2", create_etcd_v2_handler),
):
    rendezvous_handler_registry.register(_name, _creator)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for these parameters, from the shared registry."""
    return rendezvous_handler_registry.create_handler(params)
