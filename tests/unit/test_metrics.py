"""Metrics: handlers by group, the prof decorator, torch's names and line formats."""

from __future__ import annotations

import re
import time

import pytest

from phalanx.observe import metrics
from phalanx.observe.metrics import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    initialize_metrics,
    prof,
    profile,
    publish_metric,
    put_metric,
)


class Keep(MetricHandler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.seen.append(metric_data)

    def values(self) -> dict[str, float]:
        return {f"{m.group_name}/{m.name}": m.value for m in self.seen}


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_default", NullMetricHandler())
    monkeypatch.setattr(metrics, "_by_group", {})


@pytest.fixture
def keep() -> Keep:
    handler = Keep()
    configure(handler)
    return handler


def test_nothing_happens_until_configured(capsys: pytest.CaptureFixture[str]) -> None:
    put_metric("x", 1)
    getStream("g").add_value("x", 1)
    initialize_metrics(MetricsConfig())
    assert capsys.readouterr() == ("", "")
    assert type(getStream("g").handler) is NullMetricHandler


def test_a_group_has_its_own_handler_or_the_default(keep: Keep) -> None:
    special = Keep()
    configure(special, "special")
    put_metric("a", 1)
    put_metric("b", 2, "special")
    getStream("special").add_value("c", 3)
    MetricStream("direct", keep).add_value("d", 4)
    assert keep.values() == {"torchelastic/a": 1, "direct/d": 4}
    assert special.values() == {"special/b": 2, "special/c": 3}
    assert abs(keep.seen[0].timestamp - time.time()) < 60


def test_console_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(ConsoleMetricHandler())
    put_metric("x", 3, "g")
    assert re.fullmatch(r"\[\d+\.?\d*\]\[g\]: x=3\n", capsys.readouterr().out)


def test_prof_counts_and_times_calls(keep: Keep) -> None:
    @prof
    def work(x: int) -> int:
        """Doubles."""
        return 2 * x

    @prof(group="mine")
    def fails() -> None:
        raise LookupError("no")

    assert work(4) == 8
    assert work.__doc__ == "Doubles."
    with pytest.raises(LookupError):
        fails()
    names = {key.replace("test_prof_counts_and_times_calls.<locals>.", "") for key in keep.values()}
    assert names == {
        "torchelastic/work.success",
        "torchelastic/work.duration.ms",
        "mine/fails.failure",
        "mine/fails.duration.ms",
    }


class Machine:
    @prof
    def turn(self) -> str:
        return "turned"

    class Part:
        @prof
        def wear(self) -> None:
            """Nothing."""


@prof
def plain_function() -> None:
    """Nothing."""


def test_names_of_methods_and_functions(keep: Keep) -> None:
    assert Machine().turn() == "turned"
    Machine.Part().wear()
    plain_function()
    assert [m.name for m in keep.seen] == [
        "Machine.turn.success",
        "Machine.turn.duration.ms",
        "Machine.Part.wear.success",
        "Machine.Part.wear.duration.ms",
        f"{__name__}.plain_function.success",
        f"{__name__}.plain_function.duration.ms",
    ]
    assert all(isinstance(m.value, int) for m in keep.seen)


def test_the_old_names_still_work_and_say_what_to_use(keep: Keep) -> None:
    with pytest.warns(FutureWarning, match="put_metric") as caught:
        publish_metric("g", "x", 1)
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="prof"):
        decorate = profile("old")

    @decorate
    def work() -> None: ...

    work()
    assert set(keep.values()) == {"g/x", "old/work.success", "old/work.duration.ms"}


def test_elapsed_time() -> None:
    assert 2000 <= get_elapsed_time_ms(time.time() - 2) < 60_000


def test_config_keeps_its_params() -> None:
    assert MetricsConfig().params == {}
    assert MetricsConfig({"a": "b"}).params == {"a": "b"}


def test_torchs_names_are_where_torch_has_them() -> None:
    import phalanx.elastic.metrics as package
    from phalanx.elastic.metrics import api

    classes = (ConsoleMetricHandler, MetricData, MetricHandler, MetricsConfig, NullMetricHandler)
    functions = (configure, getStream, get_elapsed_time_ms, prof, profile, publish_metric, put_metric)
    for name in (thing.__name__ for thing in (*classes, *functions)):
        assert getattr(package, name) is getattr(api, name) is getattr(metrics, name)
    assert package.initialize_metrics is initialize_metrics
    assert api.MetricStream is MetricStream
    assert MetricData._fields == ("timestamp", "group_name", "name", "value")
