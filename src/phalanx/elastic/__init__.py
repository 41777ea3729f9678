"""torch.distributed.elastic at Phalanx's path."""

from phalanx.elastic.lazy_modules import found_in

__getattr__ = found_in(
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
