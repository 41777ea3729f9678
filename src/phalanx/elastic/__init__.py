"""torch.distributed.elastic at Phalanx's path: names, and nothing but names."""

from phalanx.lazy_modules import below

__getattr__ = below(
    __name__,
    "agent",
    "control_plane",
    "events",
    "metrics",
    "multiprocessing",
    "rendezvous",
    "timer",
    "utils",
)
