"""Metrics by group and name, sent to a handler of the user's choice.

A group without a handler of its own uses the default one, which drops everything until `configure` is called.
Invariants: a group's own handler takes precedence; durations come from the monotonic clock; nothing is
computed for the null handler; the formats are torch's.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_GROUP = "torchelastic"


class MetricData(NamedTuple):  # a tuple, as in torch
    """One value; `timestamp` is seconds since the epoch."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricsConfig:
    """Free-form settings for `initialize_metrics`."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params: dict[str, str] = {} if params is None else params


class MetricHandler(abc.ABC):
    """A destination of values."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Accept one value; must return quickly, because it runs on the agent's thread."""


class ConsoleMetricHandler(MetricHandler):
    """Prints one line per value."""

    def emit(self, metric_data: MetricData) -> None:
        """Print it to standard output."""
        timestamp, group, name, value = metric_data
        print(f"[{timestamp}][{group}]: {name}={value}")


class NullMetricHandler(MetricHandler):
    """Drops everything."""

    def emit(self, metric_data: MetricData) -> None:
        """Drop it."""


_default: MetricHandler = NullMetricHandler()
_by_group: dict[str, MetricHandler] = {}


class MetricStream:
    """The values of one group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Send one value with the current time."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Does nothing; exists for compatibility with torch."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Use `handler` for one group, or for all groups without a handler of their own."""
    global _default
    if group is None:
        _default = handler
    else:
        _by_group[group] = handler


def _handler(group: str) -> MetricHandler:
    return _by_group.get(group, _default)


def getStream(group: str) -> MetricStream:
    """The stream of a group, with its current handler."""
    return MetricStream(group, _handler(group))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    """Send one value to its group's handler."""
    handler = _handler(metric_group)
    if type(handler) is NullMetricHandler:
        return
    handler.emit(MetricData(time.time(), metric_group, metric_name, metric_value))


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Milliseconds since a `time.time()` value."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prof(fn: Callable[..., Any] | None = None, group: str = DEFAULT_GROUP) -> Any:
    """Decorator: every call sends `<name>.success` or `<name>.failure`, and `<name>.duration.ms`."""
    if fn is None:
        return functools.partial(prof, group=group)
    name: str = getattr(fn, "__qualname__", type(fn).__name__)
    return measured(fn, group, name if "." in name else f"{fn.__module__}.{name}")


def measured(fn: Callable[P, R], group: str, name: str) -> Callable[P, R]:
    """`fn`, whose calls send these metrics under `name`."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        start = time.monotonic()
        outcome = "failure"
        try:
            result = fn(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            put_metric(f"{name}.{outcome}", 1, group)
            put_metric(f"{name}.duration.ms", int((time.monotonic() - start) * 1000), group)

    return wrapper


def _deprecated(what: str, instead: str) -> None:
    import warnings

    warnings.warn(f"{what} is deprecated: use {instead}", FutureWarning, stacklevel=3)


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Deprecated: an older `prof`, whose metrics have the bare function name."""
    _deprecated("profile()", "@prof(group=...)")

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        return measured(fn, DEFAULT_GROUP if group is None else group, fn.__name__)

    return decorate


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: `put_metric` with the arguments in another order."""
    _deprecated("publish_metric()", "put_metric(name, value, group)")
    put_metric(metric_name, metric_value, metric_group)
