"""A check of the environment: variables left over from an earlier debugging session or another launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from phalanx import devices
from phalanx.core.diagnosis.fitness import UNFIT, WARN, CheckFinding

_INTERFACES = "/sys/class/net"
# Variable, harmful values ("": any), and what they do. All are meant for debugging.
_HURTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel waits for the one before it; only for debugging"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs of one machine do not communicate directly"),
    ("NCCL_SHM_DISABLE", ("1",), "GPUs of one machine communicate over the network"),
    ("NCCL_IB_DISABLE", ("1",), "InfiniBand is not used"),
    ("NCCL_DEBUG", ("TRACE", "trace"), "NCCL writes a line for every call"),
    ("NCCL_ALGO", ("",), "NCCL cannot choose the best algorithm itself"),
    ("NCCL_PROTO", ("",), "NCCL cannot choose the best protocol itself"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL", "detail"), "every collective is checked by another one"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that waits for a lost one never stops waiting"),
    ("NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that waits for a lost one never stops waiting"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "collectives block the CPU until they are over"),
    ("TORCH_CPP_LOG_LEVEL", ("INFO", "info"), "torch logs a lot, which slows many ranks down"),
    ("CUDA_VISIBLE_DEVICES", ("-1", "NoDevFiles"), "every GPU is hidden"),
)  # fmt: skip
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def harmful(environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """What slows a job down or breaks it, and has been set before the job."""
    clean = True
    for name, values, what in _HURTS:
        value = environ.get(name, "")
        if value and (value in values or "" in values):
            clean = False
            yield CheckFinding(name, value, WARN, f"{what}; unset it unless that is intended")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for finding in _interfaces(name, environ.get(name, "")):
            clean = False
            yield finding
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > devices.count_cpus():
        clean = False
        advice = f"more threads than the {devices.count_cpus()} CPUs here, in every worker; lower it"
        yield CheckFinding("OMP_NUM_THREADS", threads, WARN, advice)
    left_over = [name for name in _OURS if name in environ]
    if left_over:
        clean = False
        advice = "left over from another launcher? the agent sets them for each worker; unset them here"
        yield CheckFinding("rank variables", " ".join(left_over), WARN, advice)
    if clean:
        yield CheckFinding("variables", "none that are known to be harmful")


def _interfaces(name: str, value: str) -> Iterator[CheckFinding]:
    if not value or value.startswith("^"):
        return
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    present = os.listdir(_INTERFACES) if os.path.isdir(_INTERFACES) else []
    fits = [i for i in present for w in wanted if w and (i == w if exact else i.startswith(w))]
    if present and not fits:
        yield CheckFinding(
            name, value, UNFIT, f"no such interface here; there are {' '.join(sorted(present))}"
        )
