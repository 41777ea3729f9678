"""Progress in the status of a Kubeflow TrainJob: a real job, and a server like the controller's."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phalanx.job import environment
from phalanx.observe import train_status
from phalanx.observe.train_status import TrainProgress, report
from tests.conftest import HUNG
from tests.support.run_helpers import plain_environment, run, script
from tests.system.test_tls import Authority

TRAIN = """\
import sys
from phalanx import worker
for step in range(int(sys.argv[1])):
    worker.heartbeat(step)
sys.exit(int(sys.argv[2]))
"""
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"


class Controller(ThreadingHTTPServer):
    """Takes reports, over TLS, from those who show the token."""

    def __init__(self, authority: Authority, code: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        signed = authority.sign("server", "IP:127.0.0.1")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(signed.cert, signed.key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.code = code
        self.got: list[tuple[str, str, dict[str, object]]] = []


class Requests(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def controller(authority: Authority) -> Iterator[Controller]:
    with Controller(authority) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pod(controller: Controller, authority: Authority, folder: Path, **more: str) -> dict[str, str]:
    (folder / "token").write_text("a.b.c\n")
    found = {
        "KUBEFLOW_TRAINER_STATUS_URL": f"https://127.0.0.1:{controller.server_port}{PATH}",
        "KUBEFLOW_TRAINER_STATUS_CA_CERT": str(authority.cert),
        "KUBEFLOW_TRAINER_STATUS_TOKEN": str(folder / "token"),
    }
    return plain_environment(**found | more)


def metrics(body: dict[str, object]) -> dict[str, str]:
    status = body["trainerStatus"]
    assert isinstance(status, dict)
    return {one["name"]: one["value"] for one in status["metrics"]}


def test_the_last_report_of_a_job(controller: Controller, authority: Authority, tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN)
    env = pod(controller, authority, tmp_path)
    ended = run("--nproc-per-node", "2", train, "30", "0", env=env)
    assert ended.code == 0, ended
    path, shown, body = controller.got[-1]  # a slow job reports before its end, too
    assert (path, shown) == (PATH, "Bearer a.b.c")
    found = metrics(body)
    assert (found["step"], found["workers"], found["nodes"], found["restarts"]) == ("29", "2", "1", "0")
    status = body["trainerStatus"]
    assert isinstance(status, dict)
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)

    ended = run("--max-restarts", "0", train, "3", "7", env=env)
    assert ended.code == 7, ended
    assert len(controller.got) >= 2
    status = controller.got[-1][2]["trainerStatus"]
    assert isinstance(status, dict)
    assert "progressPercentage" not in status  # it is not done

    before = len(controller.got)
    assert run(train, "0", "0", env=env).code == 0
    assert len(controller.got) == before, "without steps, whatever the script reports itself is left alone"


def test_a_controller_that_cannot_be_used_costs_one_line(
    controller: Controller, authority: Authority, tmp_path: Path
) -> None:
    train = script(tmp_path, TRAIN)
    controller.code = 403
    token, ca = str(tmp_path / "none"), str(authority.sign("other").cert)
    for more, why in (
        ({}, "the server answered with 403"),
        ({"KUBEFLOW_TRAINER_STATUS_TOKEN": token}, "No such file or directory"),
        ({"KUBEFLOW_TRAINER_STATUS_CA_CERT": ca}, "the server cannot be reached"),
        ({"KUBEFLOW_TRAINER_STATUS_CA_CERT": token}, "the server cannot be reached: No such file"),
        ({"KUBEFLOW_TRAINER_STATUS_URL": "https://127.0.0.1:1/"}, "the server cannot be reached"),
    ):
        ended = run(train, "3", "0", env=pod(controller, authority, tmp_path, **more))
        assert ended.code == 0, ended
        (line,) = (line for line in ended.err.splitlines() if "KUBEFLOW_TRAINER_STATUS_URL: " in line)
        assert why in line
        assert "a.b.c" not in ended.err


def test_reports() -> None:
    first = TrainProgress(1000.0, 10, 0, 4, 32, 0.5)
    then = TrainProgress(1020.0, 50, 1, 3, 24, 0.75)
    assert report(then, first, False) == {
        "trainerStatus": {
            "metrics": [
                {"name": "step", "value": "50"},
                {"name": "steps_per_second", "value": "2"},
                {"name": "restarts", "value": "1"},
                {"name": "nodes", "value": "3"},
                {"name": "workers", "value": "24"},
                {"name": "goodput", "value": "0.750"},
            ],
            "lastUpdatedTime": "1970-01-01T00:17:00.000000Z",
        }
    }
    assert "steps_per_second" not in metrics(report(first, None, False))
    assert "steps_per_second" not in metrics(report(first, then, False))  # a restart from an older step


def test_reports_have_the_fields_of_the_api() -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    body = report(TrainProgress(1000.0, 10, 0, 4, 32, 0.5), None, True)
    known = api.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()["trainerStatus"]
    assert known.keys() == body["trainerStatus"].keys()
    assert known["metrics"] == body["trainerStatus"]["metrics"]


def test_reports_come_while_steps_are_made(
    controller: Controller, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_status, "_FIRST", 0.01)
    monkeypatch.setattr(train_status, "_EVERY", 0.01)
    for name, value in pod(controller, authority, tmp_path).items():
        monkeypatch.setenv(name, value)
    target = environment.train_status()
    assert target is not None
    asked = iter([None, *(TrainProgress(float(at), step, 0, 1, 1, 1.0) for at, step in enumerate((5, 5, 9)))])
    enough = threading.Event()

    def sample() -> TrainProgress | None:
        found = next(asked, last)
        if found is last:
            enough.set()
        return found

    last = TrainProgress(7.0, 20, 0, 1, 1, 1.0)
    status = train_status.TrainStatus(target, sample, lambda call: call())
    assert enough.wait(HUNG)
    status.close(succeeded=True)
    steps = [metrics(body)["step"] for _, _, body in controller.got]
    assert steps[:2] == ["5", "9"]  # nothing was sent before a step, or for the same one again
    assert set(steps[2:]) == {"20"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert environment.train_status() is None, "a launch in a worker is a job of its own"
