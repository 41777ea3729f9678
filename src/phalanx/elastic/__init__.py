"""torch.distributed.elastic at Phalanx's path."""

from phalanx.elastic.lazy_modules import below

__getattr__ = below(
    __name__,
    "agent",
    "control_plane",
    "events",
    "internals",
    "lazy_modules",
    "metrics",
    "multiprocessing",
    "rendezvous",
    "timer",
    "utils",
)
