"""The checks of this machine alone, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.check import gpus, machine, way_to_store
from phalanx.check.bounded import Check, run_checks
from phalanx.check.harmful_variables import harmful
from phalanx.core.diagnosis.fitness import CheckFinding
from phalanx.job.environment import temporary_directory
from phalanx.job.time_budgets import COMPUTE_LIMIT

if TYPE_CHECKING:
    from phalanx.cluster.settings import Settings

MACHINE = (
    "gpus", "compute", "links", "errors", "kernel",
    "memory", "shm", "disk", "clock", "limits", "numa", "cpus",
)  # fmt: skip
"""Before a node joins a job, too (`run --check`)."""
STORE = "store"
NAMES = (*MACHINE, "variables", "name", "ports", STORE)
BETWEEN = ("network", "backend")
"""With other nodes: see meeting.py."""
_DISK_LIMIT = 15.0  # a busy file server
_SMI_LIMIT = 15.0  # without a daemon that keeps the driver loaded


def examine(
    environ: Mapping[str, str],
    only: Collection[str] = NAMES,
    directories: Sequence[tuple[str, str]] = (),
    local_addr: str = "",
    settings: Settings | None = None,
) -> list[CheckFinding]:
    """Findings of the checks that are named; `directories`: what is written there, and where.

    `settings`: of a store that this machine is to reach."""
    places = [*directories] or [("disk", temporary_directory())]
    checks = [
        Check("gpus", lambda: gpus.visible(environ)),
        Check("compute", lambda: gpus.compute(environ), COMPUTE_LIMIT),
        Check("links", lambda: gpus.links(environ)),
        Check("errors", lambda: gpus.driver_errors(environ), _SMI_LIMIT),
        Check("kernel", gpus.kernel_log),
        Check("memory", machine.memory),
        Check("shm", machine.shared_memory),
        *(Check("disk", _disk(where, what), _DISK_LIMIT) for what, where in places),
        Check("clock", machine.clock),
        Check("limits", machine.limits),
        Check("limits", machine.cgroup),
        Check("numa", lambda: machine.numa(environ)),
        Check("cpus", machine.cpus),
        Check("variables", lambda: harmful(environ)),
        Check("name", lambda: way_to_store.own_name(local_addr, settings), way_to_store.NAME_LIMIT),
        Check("ports", lambda: way_to_store.ports(settings)),
    ]
    if settings is not None:
        checks.append(
            Check(STORE, lambda: way_to_store.way_to_the_store(settings, environ), way_to_store.STORE_LIMIT)
        )
    found = run_checks([check for check in checks if check.name in only])
    return found or [CheckFinding(", ".join(only), "nothing here to look at")]


def _disk(where: str, what: str) -> Callable[[], Iterable[CheckFinding]]:
    return lambda: machine.disk(where, what)
