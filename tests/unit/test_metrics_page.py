"""`/metrics`: names, units and labels as Prometheus wants them; counters that never fall; a bounded price."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from phalanx.core.ledger.goodput import CATEGORIES
from phalanx.core.ledger.incidents import Incident
from phalanx.observe.incident_counters import BOUNDS, PHASES, DurationCounts, IncidentCounters
from phalanx.observe.stream import IncidentChanged
from phalanx.plugins import MISSING
from phalanx.web.health import HealthServer
from phalanx.web.metrics import MetricsPage, MetricsSample, RankSample
from tests.conftest import HUNG
from tests.support.prometheus_process import check_metrics, needs_client

FAILURE = Incident(1, "rank 1 failed", "failure", "restart", over=False)


def counters(*incidents: Incident) -> IncidentCounters:
    made = IncidentCounters()
    for one in incidents:
        made.take(IncidentChanged(one, 0))
    return made


def sample(seconds: dict[str, float] | None = None, counted: IncidentCounters | None = None) -> MetricsSample:
    counted = counted or counters()
    return MetricsSample(
        'run "7"', "train.py", "default", "a1", 1000.0, 0.75,
        seconds or dict.fromkeys(CATEGORIES, 1.5), counted.restarts, counted.recovery,
        [RankSample(8, "ready", 12, 1010.5), RankSample(9, "starting")], 3, 2, 1,
        {"stdout": 4096}, {"nodes": 7, "workers": 0},
    )  # fmt: skip


def page(take: Callable[[], MetricsSample]) -> MetricsPage:
    return MetricsPage(take, lambda call: call())


def test_durations_are_counted_as_prometheus_counts() -> None:
    counts = DurationCounts()
    for seconds in (0.0, 0.01, 0.011, 5000.0):
        counts.add(seconds)
    found = counts.cumulative()
    assert found[:2] == [("0.01", 2.0), ("0.03", 3.0)]
    assert found[-1] == ("+Inf", 4.0)
    assert len(found) == len(BOUNDS) + 1
    assert counts.sum == pytest.approx(5000.021)


def test_recoveries_are_counted_when_they_begin_and_measured_when_they_are_over() -> None:
    made = counters(
        FAILURE,
        FAILURE.replace(over=True, detect=0.01, stop=0.2, total=0.5),
        FAILURE.replace(trigger="hang"),
        FAILURE.replace(recovery="end"),
        FAILURE.replace(recovery="end", over=True, detect=0.3),
    )
    assert made.restarts == {("failure", "restart"): 1, ("hang", "restart"): 1}
    assert {phase: sum(made.recovery[phase].counts) for phase in PHASES if made.recovery[phase].sum} == {
        "detect": 2, "stop": 1, "total": 1,
    }  # fmt: skip


def test_the_page_has_every_metric() -> None:
    needs_client()
    from prometheus_client import parser

    counted = counters(FAILURE, FAILURE.replace(over=True, total=0.5))
    code, kind, body = page(lambda: sample(counted=counted)).answer()
    assert code == 200
    assert kind.startswith("text/plain")
    families = {one.name: one for one in parser.text_string_to_metric_families(body.decode())}
    values = {
        (one.name, *sorted(item for item in one.labels.items() if item[0] != "run_id")): one.value
        for family in families.values()
        for one in family.samples
    }
    assert {one.labels["run_id"] for family in families.values() for one in family.samples} == {'run "7"'}
    assert values["phalanx_goodput_ratio",] == 0.75
    assert values["phalanx_lost_seconds_total", ("reason", "recovering")] == 1.5
    reasons = {key[1][1] for key in values if key[0] == "phalanx_lost_seconds_total"}
    assert reasons == set(CATEGORIES) - {"productive", "running"}
    assert values["phalanx_running_seconds_total",] == 1.5
    assert values["phalanx_productive_seconds_total",] == 1.5
    assert values["phalanx_restarts_total", ("cause", "failure"), ("kind", "restart")] == 1
    assert values["phalanx_recovery_seconds_bucket", ("le", "1"), ("phase", "total")] == 1
    assert values["phalanx_recovery_seconds_sum", ("phase", "total")] == 0.5
    assert values["phalanx_worker_last_step_timestamp_seconds", ("rank", "8")] == 1010.5
    assert values["phalanx_worker_steps_total", ("rank", "8")] == 12
    assert ("phalanx_worker_steps_total", ("rank", "9")) not in values
    assert (
        values["phalanx_workers", ("state", "ready")] == values["phalanx_workers", ("state", "starting")] == 1
    )
    assert (values["phalanx_round",], values["phalanx_nodes",], values["phalanx_standbys",]) == (3, 2, 1)
    assert values["phalanx_log_bytes_total", ("stream", "stdout")] == 4096
    assert values["phalanx_store_operations_total", ("store", "nodes")] == 7
    without = page(lambda: sample().replace(goodput=None)).answer()[2].decode()
    assert "phalanx_goodput_ratio" not in without, "without heartbeats nothing is known of it"


def test_promtool_finds_no_fault() -> None:
    needs_client()
    counted = counters(FAILURE, FAILURE.replace(over=True, total=0.5))
    assert check_metrics(page(lambda: sample(counted=counted)).answer()[2].decode()) == ""


def test_a_counter_never_falls() -> None:
    needs_client()
    values = iter([5.0, 4.0, 6.0])

    def take() -> MetricsSample:
        return sample(dict.fromkeys(CATEGORIES, next(values)))

    shown = page(take)
    for expected in ("5.0", "5.0", "6.0"):
        shown._taken_at = -1e9  # long ago
        assert f'total{{reason="hung",run_id="run \\"7\\""}} {expected}' in shown.answer()[2].decode()


def test_many_clients_cost_the_agent_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_client()
    monkeypatch.setattr("phalanx.web.metrics._FRESH", 1e9)
    taken = []

    def take() -> MetricsSample:
        taken.append(1)
        return sample()

    shown = page(take)
    clients = [threading.Thread(target=shown.answer) for _ in range(20)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert len(taken) == 1


def test_an_agent_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_client()
    monkeypatch.setattr("phalanx.web.metrics.METRICS", 0.01)
    began = time.monotonic()
    assert MetricsPage(sample, lambda _call: None).answer()[0] == 503
    assert time.monotonic() - began < HUNG


def test_a_defect_in_a_sample_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_client()
    said: list[str] = []
    monkeypatch.setattr("phalanx.log.warn", said.append)

    def broken() -> MetricsSample:
        raise RuntimeError("a defect")

    shown = page(broken)
    assert [shown.answer()[0] for _ in range(3)] == [503] * 3
    assert said == ["/metrics: RuntimeError: a defect"]


def test_without_the_package_the_route_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    shown = page(sample)
    server = HealthServer("", 0, lambda: True, pages={"/metrics": shown.answer})
    server.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=HUNG)
        with refused.value as answer:
            assert (answer.code, answer.read().decode()) == (501, f"/metrics {MISSING['metrics']}\n")
        head = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", method="HEAD")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(head, timeout=HUNG)
        with refused.value as answer:
            assert answer.read() == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=HUNG) as answer:
            assert (answer.status, answer.read()) == (200, b"")
    finally:
        server.stop()
