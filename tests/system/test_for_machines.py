"""What a job tells machines: JSON lines, rotated logs, termination log, notifications, expected output."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.core.exit_codes import HANG, NO_MEETING
from phalanx.plugins import installed
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port
from tests.support.prometheus_process import check_metrics, check_rules, needs_client, prometheus
from tests.support.run_helpers import FOREVER, Ended, Running, plain_environment, run, script

# Prints a good deal and some bytes that are not text; rank 1 fails in the first attempt.
WORKER = r"""
import os, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for number in range(3000):
    print(f"line {number} of {rank} {'x' * 60}")
sys.stdout.flush()
os.write(2, b"not text: \xff\xc3\r\n10%\r100%")
if rank == "1" and attempt == "0":
    raise RuntimeError("boom in attempt " + attempt)
"""


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def of(found: list[dict[str, Any]], rank: int | None) -> list[dict[str, Any]]:
    return [one for one in found if one["rank"] == rank]


def written(found: list[dict[str, Any]]) -> bytes:
    pieces = [base64.b64decode(o["base64"]) if "base64" in o else o["line"].encode() for o in found]
    ends = [b"" if one.get("partial") else b"\n" for one in found]
    return b"".join(piece + end for piece, end in zip(pieces, ends, strict=True))


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def told(tmp_path: Path, *flags: str) -> tuple[Ended, list[dict[str, Any]]]:
    notes = tmp_path / "notes"
    words = (
        "--nproc-per-node", "2", "-t", "3", "--log-format", "json", "--log-rotate", "64K",
        "--log-dir", str(tmp_path / "logs"), "--termination-log", str(tmp_path / "why"),
        "--backoff", "0", "--notify", f"cat >> {notes}; echo >> {notes}",
    )  # fmt: skip
    done = run(*words, *flags, script(tmp_path, WORKER))
    return done, messages(notes)


@pytest.mark.parametrize("backend", [(), ("--rdzv-backend", "phalanx", "--nnodes", "1:2")])
def test_every_record_has_the_name_of_the_node(tmp_path: Path, backend: tuple[str, ...]) -> None:
    """Several nodes may run on one machine: its name would not tell them apart."""
    conf = "name=alpha,last_call_timeout=0.1"
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}") if backend else ()
    done, notes = told(tmp_path, "--max-restarts", "1", "--rdzv-conf", conf, *backend, *endpoint)
    assert done.code == 0, done
    (events,) = (tmp_path / "logs").glob("*/events.jsonl")
    kept = messages(events)
    assert {one["host"] for one in (*objects(done.out), *objects(done.err), *kept)} == {"alpha"}
    assert {one["node"] for one in kept if one["kind"] == "incident"} == {"alpha"}
    assert {one["host"] for one in notes} == {"alpha"}


def test_a_job_that_recovers(tmp_path: Path) -> None:
    done, notes = told(tmp_path, "--max-restarts", "1")
    assert done.code == 0, done
    # Every line is an object, and every byte of every stream is in them.
    shown, errors = objects(done.out), objects(done.err)
    lines = [f"line {n} of {{}} {'x' * 60}" for n in range(3000)]
    for rank in (0, 1):
        mine = [one["line"] for one in of(shown, rank)]
        # Rank 0 may have been stopped at any time in the first attempt.
        assert mine[-3000:] == [line.format(rank) for line in lines]
        assert {one["stream"] for one in of(shown, rank)} == {"stdout"}
        assert written(of(errors, rank)).endswith(b"not text: \xff\xc3\r\n10%\r100%")
    assert b"RuntimeError: boom in attempt 0\n" in written(of(errors, 1))
    assert {one["stream"] for one in of(errors, None)} == {"phalanx"}
    ours = [one["line"] for one in of(errors, None)]
    assert "rank 1: RuntimeError: boom in attempt 0" in "\n".join(ours)
    assert any(line.startswith("all workers succeeded") for line in ours)
    # The files have the same, in parts.
    folder = next((tmp_path / "logs").glob("*/attempt_1")) / "0"
    parts = sorted(folder.glob("stdout.log.0*"))
    assert len(parts) > 2
    assert all(part.stat().st_size <= 65536 for part in parts)
    whole = b"".join(path.read_bytes() for path in (*parts, folder / "stdout.log"))
    assert whole.decode().splitlines() == [line.format(0) for line in lines]
    # What was told of it.
    assert [note["event"] for note in notes] == ["failure", "recovery", "end"]
    assert "boom" in notes[0]["text"]
    assert notes[0]["restarts"] == notes[1]["restarts"] == 1
    assert (notes[2]["outcome"], notes[2]["exit_code"]) == ("SUCCEEDED", 0)
    assert not (tmp_path / "why").exists()


def test_a_job_that_fails(tmp_path: Path) -> None:
    done, notes = told(tmp_path)
    assert done.code == 1, done
    why = (tmp_path / "why").read_bytes()
    assert len(why) <= 4096
    assert "boom in attempt 0" in why.decode()
    report = [one["line"] for one in of(objects(done.err), None)]
    assert why.decode().splitlines()[0] in report
    assert [note["event"] for note in notes] == ["failure", "end"]
    assert (notes[1]["outcome"], notes[1]["exit_code"]) == ("FAILED", 1)
    assert "boom" in notes[1]["reason"]


def test_every_other_end_reaches_the_termination_log(tmp_path: Path) -> None:
    why = tmp_path / "why"
    path = script(tmp_path, FOREVER)
    with Running(["--termination-log", str(why), path]) as job:
        job.workers(1)
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
    assert why.read_text().startswith("stopped by SIGTERM after ")
    # Two nodes, and the other one never comes.
    endpoint = ("--rdzv-backend", "phalanx", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nnodes", "2")
    environ = plain_environment(PHALANX_TERMINATION_LOG=str(why))
    done = run(*endpoint, "--rdzv-conf", "join_timeout=1", path, env=environ)
    assert done.code == NO_MEETING, done
    assert why.read_text().strip() in " ".join(done.said)
    # A command line that is wrong, also as JSON.
    done = run("--log-format=json", "--termination-log", str(why), "--nproc-per-node", "many", path)
    assert done.code == 2
    assert why.read_text() == "phalanx run: --nproc-per-node many: use a number, auto, gpu, xpu or cpu"
    assert [one["line"] for one in objects(done.err)] == [why.read_text()]


def test_output_that_stops_or_is_not_finite(tmp_path: Path) -> None:
    body = (
        "import os, time\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "print('step 1 loss:', 'nan' if first else '0.5', flush=True)\n"
        "time.sleep(1000)\n"
    )
    done = run(
        "--expect", r"loss: (\S+)", "--expect-every", "1.5s", "--expect-finite", "--max-restarts", "1",
        "--backoff", "0", "--grace", "1", "--termination-log", str(tmp_path / "why"), script(tmp_path, body),
    )  # fmt: skip
    assert done.code == HANG, done
    assert "step 1 loss: nan" in done.out
    assert "rank 0 printed a value that is not finite: step 1 loss: nan" in done.err
    stopped = r"no line of rank 0 matched 'loss: \(\\\\S\+\)' for \d+\.\d s"
    assert re.search(stopped, done.err), done
    assert re.search(stopped, (tmp_path / "why").read_text())


@pytest.mark.long
def test_a_killed_launcher_leaves_every_byte(tmp_path: Path) -> None:
    """SIGKILL of the agent at any moment of the rotation: each line is in the files, and in order."""
    body = (
        "import os\n"
        "for number in range(10**9):\n"
        "    os.write(1, b'%010d\\n' % number)\n"
        "    if number == 20000: os.write(2, b'enough\\n')\n"
    )
    for turn in range(20):
        logs = tmp_path / str(turn)
        flags = ("-r", "1", "--log-rotate", "16K", "--log-dir", str(logs))
        with Running([*flags, script(tmp_path, body)]) as job:
            job.read_until("enough")
            job.signal(signal.SIGKILL)
            job.end()
        folder = next(logs.glob("*/attempt_0/0"))
        parts = [path.read_bytes() for path in sorted(folder.glob("stdout.log.0*"))]
        live = (folder / "stdout.log").read_bytes().lstrip(b"\0")
        if parts and live.startswith(parts[-1]):  # killed between copy and hole: it is in both
            parts.pop()
        lines = b"".join([*parts, live]).splitlines()
        assert lines == [b"%010d" % number for number in range(len(lines))]
        assert len(lines) > 20000


# Heartbeats; rank 0 fails in the first attempt when it is told to.
STEPS = r"""
import os, sys, time
from phalanx import worker
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
for step in range(10**9):
    worker.heartbeat(step)
    time.sleep(0.01)
    if first and os.environ["RANK"] == "0" and os.path.exists(sys.argv[1]): os.kill(os.getpid(), 9)
"""


def port_of(agent: int) -> int:
    """Where an agent that was given port 0 listens for probes."""
    found = [
        one.laddr.port
        for one in psutil.Process(agent).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.ip == "127.0.0.2"
    ]
    return found[0] if found else 0


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=HUNG) as answer:
        return str(answer.read().decode())


RULES = Path(__file__).parents[2] / "docs" / "prometheus_rules.yml"


def measured(tmp_path: Path) -> Running:
    """A job of two workers that fails once, when the file `kill` is there."""
    flags = ["--health-listen", "127.0.0.2:0", "--metrics", "--max-restarts", "1", "-t", "1", "--grace", "1"]
    flags += ["--rdzv-id", "m"]
    return Running(["--nproc-per-node", "2", *flags, script(tmp_path, STEPS), str(tmp_path / "kill")])


def test_metrics_of_a_job_that_is_killed(tmp_path: Path) -> None:
    needs_client()
    with measured(tmp_path) as job:
        job.read_until("attempt 0", 2)
        wait_until(lambda: port_of(job.agent), "the health port")
        port = port_of(job.agent)
        wait_until(lambda: 'last_step_timestamp_seconds{rank="1",run_id="m"}' in page(port), "a step")
        wait_until(lambda: 'phalanx_workers{run_id="m",state="ready"} 2.0' in page(port), "both workers")
        assert 'phalanx_lost_seconds_total{reason="recovering",run_id="m"} 0.0\n' in page(port)
        (tmp_path / "kill").touch()
        job.read_until("attempt 1", 2)
        stage = 'phalanx_recovery_seconds_count{phase="first_step",run_id="m"} 1.0'
        wait_until(lambda: stage in page(port), "the first step after the restart")
        text = page(port)
        assert 'phalanx_restarts_total{cause="failure",kind="restart",run_id="m"} 1.0' in text
        assert 'phalanx_lost_seconds_total{reason="recovering",run_id="m"} 0.0\n' not in text
        assert 'phalanx_goodput_ratio{run_id="m"} 0.' in text
        assert 'phalanx_log_bytes_total{run_id="m",stream="stdout"} 20.0' in text
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
    assert check_metrics(text) == ""
    assert "3 rules found" in check_rules(RULES)


@pytest.mark.long
def test_a_real_prometheus_with_the_rules_and_the_dashboard(tmp_path: Path) -> None:
    needs_client()
    with measured(tmp_path) as job:
        job.read_until("attempt 0", 2)
        wait_until(lambda: port_of(job.agent), "the health port")
        with prometheus(tmp_path, f"127.0.0.2:{port_of(job.agent)}", RULES) as server:
            wait_until(lambda: (server.value("phalanx_worker_steps_total") or 0) > 0, "a scrape", 120)
            (tmp_path / "kill").touch()
            job.read_until("attempt 1", 2)
            # A scrape that took too long has no values: the next one has.
            count = 'sum(phalanx_restarts_total{cause="failure",kind="restart"})'
            wait_until(lambda: server.value(count) == 1, "the restart")
            wait_until(lambda: 0 < (server.value("phalanx_goodput_ratio") or 0) < 1, "the goodput")
            (group,) = server.get("/api/v1/rules")["data"]["groups"]
            assert [rule["name"] for rule in group["rules"]] == [
                "PhalanxNoStep", "PhalanxLowGoodput", "PhalanxRestartStorm",
            ]  # fmt: skip
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
            dashboard = json.loads((RULES.parent / "grafana_dashboard.json").read_text())
            for panel in dashboard["panels"]:
                for target in panel["targets"]:
                    answer = server.get(
                        "/api/v1/query",
                        query=target["expr"].replace("$instance", ".*").replace("$run_id", "m"),
                    )
                    assert answer["status"] == "success", (panel["title"], answer)
        job.signal(signal.SIGTERM)
        assert job.end().code == 143


class Collector:
    """An OTLP receiver: keeps the requests, decoded with the protocol's own definitions."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                collector.got.append((self.path, dict(self.headers), request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> Collector:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_a_trace_per_incident(tmp_path: Path) -> None:
    if not installed("otel"):
        assert not os.environ.get("CI"), "the OpenTelemetry SDK has to be there in CI"
        pytest.skip("needs the OpenTelemetry SDK")
    body = (
        "import os, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '1': raise RuntimeError('boom')\n"
        "while True: time.sleep(1000)\n"
    )
    with Collector() as collector:
        environ = plain_environment(
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server.server_address[1]}",
            OTEL_EXPORTER_OTLP_HEADERS="x-key=SECRET",
            OTEL_RESOURCE_ATTRIBUTES="team=vision",
            OTEL_SERVICE_NAME="training",
        )
        flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--otel", "--backoff", "0")
        with Running([*flags, script(tmp_path, body)], env=environ) as job:
            # While the job runs: its end would not wait for a machine that is this busy.
            wait_until(lambda: collector.got, "the trace", 3 * HUNG)
            job.signal(signal.SIGTERM)
            done = job.end()
    assert done.code == 143, done
    assert "SECRET" not in done.err
    ((path, headers, request),) = collector.got
    assert path == "/v1/traces"
    assert headers["x-key"] == "SECRET"
    (resource,) = request.resource_spans
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (about["service.name"], about["team"]) == ("training", "vision")
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    root = spans.pop("incident: failure")
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert {"detect", "stop", "reform", "start", "first_line"} <= spans.keys()
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    facts = {one.key.removeprefix("phalanx.incident."): one.value for one in root.attributes}
    assert (facts["rank"].int_value, facts["exit_code"].int_value) == (1, 1)
    assert "RuntimeError: boom" in facts["reason"].string_value
    assert facts["recovery"].string_value == "restart"
    assert root.status.code == 2
