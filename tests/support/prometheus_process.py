"""Debian's Prometheus for tests: `promtool`, and a server that scrapes a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HUNG
from tests.support.netns import free_port


def program(name: str) -> str:
    """The path of a program; without it the test is skipped, except in CI."""
    unpacked = Path(sys.prefix, "prometheus", "usr", "bin")  # by `make prometheus`
    path = shutil.which(name) or shutil.which(name, path=str(unpacked))
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed; in CI it has to be")
        pytest.skip(f"needs {name}")
    return path


def needs_client() -> None:
    """Skip the test without prometheus-client, except in CI."""
    if find_spec("prometheus_client") is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus-client is not installed; in CI it has to be")
        pytest.skip("needs prometheus-client")


def check_metrics(text: str) -> str:
    """What `promtool check metrics` has to say; empty if nothing."""
    return _promtool("check", "metrics", stdin=text)


def check_rules(path: Path) -> str:
    """What `promtool check rules` has to say."""
    return _promtool("check", "rules", str(path))


def check_alerts(rules: Path, folder: Path, series: dict[str, str], at: str) -> list[tuple[str, str]]:
    """The alerts that fire at a time for these series (promtool's notation), by name and run id.

    `promtool test rules` compares with what is expected, and prints what there is if that is nothing."""
    found = []
    names = re.findall(r"alert: (\w+)", rules.read_text())
    for name in names:
        test = {
            "rule_files": [str(rules)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": one, "values": values} for one, values in series.items()],
                    "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []}],
                }
            ],
        }
        (folder / "test.json").write_text(json.dumps(test))
        told = _promtool("test", "rules", str(folder / "test.json"))
        assert "FAILED" in told or "SUCCESS" in told, told
        got = told.partition("got:")[2]
        found += [(name, run) for run in re.findall(r'Labels:{[^}]*run_id="([^"]*)"', got)]
    return sorted(found)


def _promtool(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [program("promtool"), *words],
        input=stdin, capture_output=True, text=True, timeout=HUNG, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


class Prometheus:
    """A server that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """An answer of its API; None while it does not answer."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        try:
            with urllib.request.urlopen(f"{self._url}{path}{words}", timeout=HUNG) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read()) if error.code == 400 else None  # 503: it is starting
        except (OSError, ValueError):
            return None

    def value(self, expression: str) -> float | None:
        """The value of an expression with one result; None if it has none."""
        answer = self.get("/api/v1/query", query=expression)
        found = answer["data"]["result"] if answer and answer["status"] == "success" else []
        return float(found[0]["value"][1]) if found else None


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """A server that scrapes one target all the time and has these rules."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}\n"
        f"rule_files: [{json.dumps(str(rules))}]\n"
        f"scrape_configs: [{{job_name: phalanx, static_configs: [{{targets: [{json.dumps(target)}]}}]}}]\n"
    )
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with open(folder / "prometheus.log", "wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            yield Prometheus(port)
        finally:
            server.kill()
