"""The alerts of docs/prometheus_rules.yml for jobs of many nodes, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

from tests.support.prometheus_process import check_alerts

RULES = Path(__file__).parents[2] / "docs" / "prometheus_rules.yml"
NODES = 20


def of(run: str, metric: str, values: str, nodes: range = range(NODES), labels: str = "") -> dict[str, str]:
    """One series of each node of a job."""
    return {
        f'{metric}{{job="phalanx",instance="{run}-{node}:9400",run_id="{run}"{labels}}}': values
        for node in nodes
    }


def test_a_job_whose_nodes_all_hang_is_one_alert(tmp_path: Path) -> None:
    last = "phalanx_worker_last_step_timestamp_seconds"
    series = of("hangs", last, "0+60x5 300x40", labels=',rank="0"')
    series |= of("steps", last, "0+60x60", range(1)) | of("steps", last, "0x60", range(1, NODES))
    assert check_alerts(RULES, tmp_path, series, "14m") == []
    assert check_alerts(RULES, tmp_path, series, "30m") == [("PhalanxNoStep", "hangs")]


def test_a_recovery_counts_once_however_many_nodes_took_part(tmp_path: Path) -> None:
    series = {}
    for run, count in (("few", 3), ("many", 7)):
        for nodes, cause in ((range(1), "failure"), (range(1, NODES), "peer failure")):
            labels = f',cause="{cause}",kind="restart"'
            series |= of(run, "phalanx_restarts_total", f"0+1x{count} {count}x60", nodes, labels)
    series |= of("grows", "phalanx_restarts_total", "0+1x60", labels=',cause="membership",kind="membership"')
    assert check_alerts(RULES, tmp_path, series, "12m") == [("PhalanxRestartStorm", "many")]


def test_goodput_is_that_of_the_job_and_without_heartbeats_its_uptime(tmp_path: Path) -> None:
    """A node alone may be bad; a job without heartbeats has no productive second, and is not bad for that."""
    series = {}
    for run, productive, running, lost in (
        ("good", "0+480x200", "0x200", "0+20x200"),
        ("bad", "0+400x200", "0x200", "0+80x200"),
        ("up", "0x200", "0+480x200", "0+20x200"),
        ("down", "0x200", "0+400x200", "0+80x200"),
        ("young", "0+400x200", "0x200", "0+80x200"),
    ):
        series |= of(run, "phalanx_productive_seconds_total", productive)
        series |= of(run, "phalanx_running_seconds_total", running)
        series |= of(run, "phalanx_lost_seconds_total", lost, labels=',reason="recovering"')
        series |= of(run, "phalanx_start_time_seconds", "6000x200" if run == "young" else "0x200")
    series |= of("good", "phalanx_lost_seconds_total", "0+400x200", range(1), ',reason="hung"')
    expected = [("PhalanxLowGoodput", "bad"), ("PhalanxLowGoodput", "down")]
    assert check_alerts(RULES, tmp_path, series, "120m") == expected
