"""What installed packages add: plug-ins by entry point, in Phalanx's groups and in torchrun's, and extras."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDLERS = ("phalanx.handlers", "torchrun.handlers")
LOGS_SPECS = ("phalanx.logs_specs", "torchrun.logs_specs")
EVENT_HANDLERS = ("phalanx.event_handlers",)

registered: dict[str, dict[str, Any]] = {}
"""What the registries of this process have, by the first name of the group."""

EXTRAS = {
    "dashboard": ("starlette", "uvicorn"),
    "metrics": ("prometheus_client",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
MISSING = {
    "dashboard": "needs the packages starlette and uvicorn; install phalanx[dashboard]",
    "metrics": "needs the package prometheus-client; install phalanx[metrics]",
    "otel": "needs the OpenTelemetry SDK; install phalanx[otel]",
}


def names(groups: tuple[str, ...]) -> set[str]:
    """The names that are registered or installed for an extension point; slow: it searches the packages."""
    from importlib.metadata import entry_points

    offered = {entry.name for group in groups for entry in entry_points(group=group)}
    return offered | registered.get(groups[0], {}).keys()


def load(name: str, groups: tuple[str, ...]) -> Any:
    """The object that an installed package offers under this name; ValueError lists the names there are."""
    from importlib.metadata import entry_points

    for group in groups:
        for entry in entry_points(group=group, name=name):
            return entry.load()
    known = names(groups)
    there = f"there are {', '.join(sorted(known))}" if known else "no installed package offers any"
    raise ValueError(f"{name!r} is not an entry point of {' or '.join(groups)}; {there}")


def installed(extra: str) -> bool:
    """Whether the packages of an optional part are there."""
    from importlib.util import find_spec

    try:
        return all(find_spec(package) is not None for package in EXTRAS[extra])
    except ModuleNotFoundError:  # the package around it
        return False
