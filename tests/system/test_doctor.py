"""`phalanx doctor` against real sockets, stores and doctors: what it finds, says and returns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli import doctor, doctor_machine, doctor_network
from phalanx.cli import main as phalanx
from phalanx.cli.doctor import OK, PROBLEM, WARN, Finding
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG
from tests.system.test_tls import Authority

SECRET = "doctor's secret"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PHALANX_TOKEN", SECRET)
    with Server(token=Token(SECRET.encode(), "the test")) as running:
        yield running


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Finding]]:
    code = phalanx(["doctor", "--json", *argv])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    return code, {row["check"]: Finding(**row) for row in told["checks"]}


def test_this_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = rows(capsys)
    assert {"own name", "port 29400", "shared memory", "open files", "processes", "GPUs"} <= found.keys()
    assert not any(check.startswith(("reach", "token", "store")) for check in found)
    assert all(
        row.verdict in (OK, WARN, PROBLEM) and (row.verdict == OK or row.advice) for row in found.values()
    )


def test_a_store_that_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = rows(capsys, "--rdzv-endpoint", f"localhost:{server.address[1]}")
    assert found[f"reach 127.0.0.1 port {server.address[1]}"].value == "answers"
    assert found["token"].value == "accepted, from the variable PHALANX_TOKEN"
    assert found["store"].verdict == OK
    assert code == int(any(row.verdict == PROBLEM for row in found.values()))


def test_a_wrong_token_says_where_ours_is_from(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("something else")
    where = f"127.0.0.1:{server.address[1]}"
    code, found = rows(capsys, "--rdzv-endpoint", where, "--token-file", str(wrong))
    assert code == 1
    assert found["token"].verdict == PROBLEM
    assert str(wrong) in found["token"].advice
    assert "something else" not in str(found)
    assert SECRET not in str(found)


def test_looking_makes_no_token(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PHALANX_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, found = rows(capsys, "--rdzv-endpoint", f"127.0.0.1:{server.address[1]}")
    assert (code, found["token"].verdict) == (1, PROBLEM)
    assert list(tmp_path.iterdir()) == []


def test_tls(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", SECRET)
    files = Authority(tmp_path).sign("node")
    with Server(token=Token(SECRET.encode(), "the test"), tls=files) as server:
        where = ("--rdzv-endpoint", f"127.0.0.1:{server.address[1]}")
        _, found = rows(
            capsys, *where, "--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca
        )
        assert found["store"].verdict == OK
        code, found = rows(capsys, *where)
        assert code == 1
        assert "wants TLS" in found["token"].advice


def test_nobody_there_and_no_such_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = rows(capsys, "--rdzv-endpoint", "no-such-host.invalid:1")
    assert (code, found["name no-such-host.invalid"].verdict) == (1, PROBLEM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    _, found = rows(capsys, "--rdzv-endpoint", f"127.0.0.1:{port}")
    here = found[f"reach 127.0.0.1 port {port}"]
    assert (here.verdict, here.value) == (OK, "no listener yet")
    _, found = rows(capsys, "--rdzv-backend", "etcd", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert found[f"reach 127.0.0.1 port {port}"].verdict == PROBLEM


def test_something_else_listens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that answers, but not in our words, within a stated time."""
    monkeypatch.setenv("PHALANX_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def hang_up() -> None:
            while not stop.is_set():
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, found = rows(capsys, "--rdzv-endpoint", f"127.0.0.1:{listener.getsockname()[1]}")
        stop.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(HUNG)
    assert (code, found["store"].verdict) == (1, PROBLEM)
    assert "does not speak Phalanx's protocol" in found["store"].advice


def test_a_name_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        slow.wait(HUNG)
        return []

    monkeypatch.setattr("phalanx.cli.doctor_network.socket.getaddrinfo", never)
    try:
        assert doctor_network.resolve("anything", 0.05) == ([], "no answer within 0.05 s")
    finally:
        slow.set()


def test_doctors_meet_and_try_all_ways(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**os.environ, "PHALANX_TOKEN": SECRET, "HOME": str(tmp_path)}
    words = ["doctor", "--rdzv-endpoint", f"127.0.0.1:{port}", "--with", "3", "--wait", "30", "--json"]
    doctors = [
        subprocess.Popen([sys.executable, "-m", "phalanx", *words], stdout=subprocess.PIPE, env=environ)
        for _ in range(3)
    ]
    for one in doctors:
        out, _ = one.communicate(timeout=HUNG * 2)
        told = {row["check"]: row for row in json.loads(out)["checks"]}
        assert told["meeting"]["value"] == "3 of 3 nodes came"
        ways = [row for row in json.loads(out)["checks"] if row["check"].startswith(("way to", "clock of"))]
        assert len(ways) == 4
        assert {row["verdict"] for row in ways} == {OK}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["script.py"], "unrecognized arguments: script.py"),
        (["--nnodes", "2"], "unrecognized arguments: --nnodes 2"),
        (["--with", "2"], "where they meet"),
        (["--with", "some", "--rdzv-endpoint", "a:1"], "--with: some: not a whole number"),
        (["--with", "1.5", "--rdzv-endpoint", "a:1"], "--with: 1.5: not a whole number"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["doctor", *argv]) == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["help", "doctor"]) == 0
    assert "--rdzv-endpoint HOST:PORT" in capsys.readouterr().out


def verdicts(found: Iterator[Finding]) -> dict[str, str]:
    return {row.check: row.verdict for row in found}


def test_variables_that_hurt() -> None:
    assert verdicts(doctor_machine.variables({})) == {"variables": OK}
    hurt = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_DEBUG": "TRACE",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "nosuch0",
        "OMP_NUM_THREADS": "100000",
        "RANK": "3",
    }
    found = verdicts(doctor_machine.variables(hurt))
    assert found.pop("NCCL_SOCKET_IFNAME") == PROBLEM
    assert set(found) == {
        "CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "NCCL_ALGO", "OMP_NUM_THREADS", "rank variables",
    }  # fmt: skip
    assert set(found.values()) == {WARN}
    fine = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "^docker0"}
    assert verdicts(doctor_machine.variables(fine)) == {"variables": OK}


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    (missing,) = doctor_machine.shared_memory(str(tmp_path / "none"))
    assert missing.verdict == PROBLEM


def test_cgroup_limits(tmp_path: Path) -> None:
    for name, value in {"memory.max": str(1 << 29), "pids.max": "100", "cpu.max": "50000 100000"}.items():
        (tmp_path / name).write_text(value)
    found = verdicts(doctor_machine.cgroup(str(tmp_path)))
    assert found == {"memory limit": WARN, "tasks limit": WARN, "CPU limit": WARN}


def test_the_table_has_four_columns_and_a_last_word() -> None:
    found = [Finding("a", "fine"), Finding("b", "v " * 60, PROBLEM, "do " * 60)]
    text = doctor.as_table(found, 100)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.splitlines()[0].split() == ["check", "value", "verdict", "what", "to", "do"]
    assert text.splitlines()[-1] == "in the way: b"
