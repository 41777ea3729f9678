"""`phalanx check` as a person runs it: what it prints and returns, alone and with other nodes."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.job import _own_check
from phalanx.check.meeting import Measuring, MeetingVerdict, meet
from phalanx.check.pair_link import PairLink
from phalanx.check.way_to_store import resolve
from phalanx.cli import check
from phalanx.cli import main as phalanx
from phalanx.cluster.handler import RendezvousInfo
from phalanx.cluster.torch_store_adapter import StoreFacade
from phalanx.core.diagnosis.fitness import (
    EXIT_CODES,
    FIT,
    UNFIT,
    UNKNOWN,
    WARN,
    CheckFinding,
    NodeVerdict,
    judge_node,
)
from phalanx.core.exit_codes import UNFIT_NODE
from phalanx.errors import StoreAuthError
from phalanx.job.config import parse
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until
from tests.support.conforming import conforming
from tests.support.netns import TOKEN, Job, Network, free_port, possible, tell
from tests.support.run_helpers import PHALANX, Ended, Running, ended, plain_environment, script
from tests.system.test_tls import Authority

CHECK = [PHALANX[0], "check"]
hosts_possible = pytest.mark.skipif(not possible(), reason="network namespaces need root")


def with_open_files(count: int) -> list[str]:
    """Words before a command that may have so many open files: below 256 is unfit, below 4096 a warning."""
    return ["sh", "-c", f'ulimit -n {count}; exec "$@"', "sh"]


def test_this_machine_as_a_table_and_as_json(tmp_path: Path) -> None:
    words = ["--only", "disk,shm,limits", "--disk", str(tmp_path)]
    done = ended([*CHECK, "--json", *words], plain_environment())
    told = conforming("check", done.out)
    assert done.code == EXIT_CODES[told["fitness"]], done
    assert f"disk {tmp_path}" in [row["check"] for row in told["checks"]]
    assert {row["check"].partition(" /")[0] for row in told["checks"]} >= {"logs", "disk", "shared memory"}
    shown = ended([*CHECK, *words], plain_environment())
    lines = shown.out.splitlines()
    assert lines[0].split() == ["check", "value", "verdict", "what", "to", "do"]
    assert lines[-1].startswith(f"{told['node']}: ")
    assert list(tmp_path.iterdir()) == []


def test_an_unfit_machine(tmp_path: Path) -> None:
    done = ended([*CHECK, "--only=disk", "--log-dir", "/proc/logs"], plain_environment())
    assert done.code == UNFIT_NODE, done
    assert done.out.splitlines()[-1].partition(": ")[2].startswith("unfit (logs /proc: "), done
    assert done.err == ""


def test_a_node_is_checked_before_it_joins_and_only_then(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    words = [*PHALANX, "--check", "--log-dir", str(tmp_path / "logs"), "--max-restarts", "1", path]
    done = ended([*with_open_files(2000), *words], plain_environment())
    assert done.code == 0, done
    (line,) = [line for line in done.said if line.startswith("check of ")]
    assert ": warn (" in line
    assert "open files: 2000" in line
    assert done.out == ""


def test_an_unfit_node_stays_out_and_the_others_run(tmp_path: Path) -> None:
    """Why it never joined is in its logs, and known to the commands."""
    env = plain_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    run = f"stays-out-{os.getpid()}"
    with Job(tmp_path, "1:2", "", "--rdzv-id", run) as job:
        job.environment |= env
        good = job.node("good", "--check")
        good.up(1)
        bad = job.node("bad", "--check", "--log-dir", str(tmp_path / "logs"), before=with_open_files(200))
        gone = bad.end()
        assert gone.code == UNFIT_NODE, gone
        (line,) = [line for line in gone.said if "unfit" in line]
        assert "is unfit (open files: 200) and stays out of the job; phalanx check shows more" in line
        worker = good.latest()
        assert worker is not None
        assert worker.world == 1
        tell([worker])
        assert good.end().code == 0
    (path,) = (tmp_path / "logs").glob(f"{run}_*/failure.json")
    failure = json.loads(path.read_text())
    assert failure["exit_code"] == UNFIT_NODE
    assert failure["reason"] in line
    assert (failure["check"]["fitness"], failure["check"]["reason"]) == ("unfit", "open files: 200")
    assert json.loads(path.with_name("summary.json").read_text())["why"] == failure["reason"]
    listed = ended([PHALANX[0], "status", "--all", "--json"], env)
    (known,) = [one for one in json.loads(listed.out) if one["state"] == "failed"]
    assert known["exit_code"] == UNFIT_NODE
    assert (known["why"], known["logs"]) == (failure["reason"], str(path.parent))
    assert "is unfit (open files: 200)" in ended([PHALANX[0], "status", "--all"], env).out
    told = ended([PHALANX[0], "status", run], env)
    assert told.code == 1, told
    assert re.search(
        r"no job .* runs .*; run stays-out.* failed .* ago, exit code 95: .*open files: 200", told.err
    )
    assert told.err.count("\n") == 1


# ---- the way to the store ---------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    with Server(token=Token(TOKEN.encode(), "the test")) as running:
        yield running


def way(*argv: str, **env: str) -> tuple[int, dict[str, CheckFinding]]:
    """The exit code of a check of the way to the store, and its rows."""
    env = {"PHALANX_TOKEN": TOKEN} | env
    done = ended([*CHECK, "--json", "--only", "store", *argv], plain_environment(**env))
    return done.code, {row["check"]: CheckFinding(**row) for row in json.loads(done.out)["checks"]}


def test_a_store_that_answers(server: Server) -> None:
    where = f"localhost:{server.address[1]}"
    code, found = way("--rdzv-endpoint", where)
    assert found[f"reach 127.0.0.1 port {server.address[1]}"].value == "answers"
    assert found["token"].value == "accepted, from the variable PHALANX_TOKEN"
    assert (code, found["store"].fitness) == (EXIT_CODES[FIT], FIT)
    done = ended([*CHECK, "--json", "--rdzv-endpoint", where], plain_environment(PHALANX_TOKEN=TOKEN))
    names = {row["check"] for row in json.loads(done.out)["checks"]}
    assert names >= {"store", "own name", "port 29500", "memory", "open files"}, "with an endpoint, it is all"


def test_a_machine_alone_looks_at_its_name_and_ports_but_at_no_store() -> None:
    done = ended([*CHECK, "--json"], plain_environment())
    names = {row["check"] for row in json.loads(done.out)["checks"]}
    assert names >= {"own name", "port 29400", "port 29500", "memory", "GPUs"}
    assert not any(name.startswith(("reach", "token", "store")) for name in names)


def test_a_node_that_joins_is_not_asked_for_ports_and_variables() -> None:
    """Not even where variables name the store of its job."""
    words = _own_check(parse(["--check", "--no-python", "true"], {}))
    env = plain_environment(PET_RDZV_ENDPOINT="no-such-host.invalid:1", RANK="1", NCCL_SOCKET_IFNAME="no0")
    found = conforming("check", ended([*CHECK, *words], env).out)["checks"]
    names = {row["check"] for row in found}
    assert names >= {"memory", "open files", "NUMA"}
    assert not any(name.startswith(("own name", "port", "name", "NCCL", "rank")) for name in names), names


def test_a_wrong_token_says_where_ours_is_from(server: Server, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("something else")
    wrong.chmod(0o600)
    where = f"127.0.0.1:{server.address[1]}"
    code, found = way("--rdzv-endpoint", where, "--token-file", str(wrong))
    assert code == EXIT_CODES[UNFIT]
    assert found["token"].fitness == UNFIT
    assert str(wrong) in found["token"].advice
    assert "something else" not in str(found)
    assert TOKEN not in str(found)


def test_looking_makes_no_token(server: Server, tmp_path: Path) -> None:
    code, found = way(
        "--rdzv-endpoint", f"127.0.0.1:{server.address[1]}", PHALANX_TOKEN="", HOME=str(tmp_path)
    )
    assert (code, found["token"].fitness) == (EXIT_CODES[UNFIT], UNFIT)
    assert list(tmp_path.iterdir()) == []


def test_tls(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("node")
    with Server(token=Token(TOKEN.encode(), "the test"), tls=files) as server:
        where = ("--rdzv-endpoint", f"127.0.0.1:{server.address[1]}")
        _, found = way(*where, "--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
        assert found["store"].fitness == FIT
        code, found = way(*where)
        assert code == EXIT_CODES[UNFIT]
        assert "wants TLS" in found["token"].advice


def test_nobody_there_and_no_such_name() -> None:
    code, found = way("--rdzv-endpoint", "no-such-host.invalid:1")
    assert (code, found["name no-such-host.invalid"].fitness) == (EXIT_CODES[UNFIT], UNFIT)
    port = free_port()
    code, found = way("--rdzv-endpoint", f"127.0.0.1:{port}")
    here = found[f"reach 127.0.0.1 port {port}"]
    assert (code, here.fitness, here.value) == (EXIT_CODES[FIT], FIT, "no listener yet")
    _, found = way("--rdzv-backend", "etcd", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert found[f"reach 127.0.0.1 port {port}"].fitness == UNFIT


def test_something_else_listens() -> None:
    """A port that answers, but not in our words, within a stated time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def hang_up() -> None:
            while not stop.is_set():
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, found = way("--rdzv-endpoint", f"127.0.0.1:{listener.getsockname()[1]}")
        stop.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(HUNG)
    assert (code, found["store"].fitness) == (EXIT_CODES[UNFIT], UNFIT)
    assert "does not speak Phalanx's protocol" in found["store"].advice


def test_a_name_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        slow.wait(HUNG)
        return []

    monkeypatch.setattr("phalanx.check.way_to_store.socket.getaddrinfo", never)
    try:
        assert resolve("anything", 0.05) == ([], "no answer within 0.05 s")
    finally:
        slow.set()


# ---- several nodes ---------------------------------------------------------------------------------


class CheckedHosts:
    """Hosts that are checked at the same time, over links of the same speed unless another one is given."""

    def __init__(self, count: int, only: str, **speeds: str) -> None:
        self._names, self._only, self._speeds = "abcdefgh"[:count], only, speeds
        self._token = plain_environment(PHALANX_TOKEN=TOKEN)

    def run(self, *words: str, before: Mapping[str, Sequence[str]] = {}) -> list[Ended]:
        """How the check ended on each host."""
        with ExitStack() as stack:
            network = stack.enter_context(Network(*self._names))
            for name in self._names:
                network.shape(name, self._speeds.get(name, "400mbit"))
            where = f"{network.hosts['a'].address}:29400"
            meeting = ["--nnodes", str(len(self._names)), "--rdzv-endpoint", where]
            running = []
            for name in self._names:
                command = ["--json", "--only", self._only, *meeting, "--rdzv-conf", f"name={name}", *words]
                inside = [*before.get(name, ()), *network.hosts[name].inside]
                one = Running(command, before=inside, launcher=CHECK, env=self._token)
                running.append(stack.enter_context(one))
            for one in running:
                one.process.wait(3 * HUNG)  # three imports of torch at once take long on a busy machine
            return [one.end() for one in running]


def same_everywhere(ends: Sequence[Ended], *codes: int) -> dict[str, Any]:
    """What all nodes have printed, except for each one's own findings."""
    told = [conforming("check", end.out) for end in ends]
    assert {end.code for end in ends} in [{code} for code in codes], ends
    parts = [{key: one[key] for key in ("fitness", "nodes", "pairs", "notes")} for one in told]
    assert all(part == parts[0] for part in parts), parts
    assert [one["node"] for one in told] == list("abcdefgh"[: len(ends)])
    found: dict[str, Any] = parts[0]
    return found


@hosts_possible
def test_a_slow_host_and_an_unfit_one_are_named_on_every_node() -> None:
    ends = CheckedHosts(4, "network,limits", c="20mbit").run(before={"b": with_open_files(200)})
    told = same_everywhere(ends, UNFIT_NODE)
    fitness = {one["node"]: one["fitness"] for one in told["nodes"]}
    reasons = {one["node"]: one["reason"] for one in told["nodes"]}
    assert (fitness["b"], fitness["c"]) == (UNFIT, UNFIT), told
    assert UNFIT not in (fitness["a"], fitness["d"]), told
    assert reasons["b"] == "open files: 200"
    assert reasons["c"].startswith("bandwidth: slow with all partners: "), told
    rounds = [pair["round"] for pair in told["pairs"]]
    assert (rounds.count(1), rounds.count(2)) == (2, 2), told
    assert any(pair["round"] == 3 and "c" in pair["nodes"] for pair in told["pairs"]), told
    assert all(pair["bandwidth"] < 20e6 for pair in told["pairs"] if "c" in pair["nodes"]), told


@hosts_possible
def test_a_slow_host_is_named_by_the_real_backend() -> None:
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    told = same_everywhere(CheckedHosts(3, "backend", a="8mbit").run(), UNFIT_NODE, 0)
    fitness = {one["node"]: one["fitness"] for one in told["nodes"]}
    assert fitness["a"] in (UNFIT, WARN), (
        told
    )  # gloo takes many turns of a busy CPU, so that the rest may be slow
    assert (fitness["b"], fitness["c"]) == (FIT, FIT), told
    assert all(pair["gloo"] > 0 for pair in told["pairs"]), told
    (slow,) = [one["reason"] for one in told["nodes"] if one["node"] == "a"]
    assert slow.startswith("gloo: slow with all partners: "), told


def test_nodes_that_do_not_come(tmp_path: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    words = ["--only", "network", "--nnodes", "2", "--rdzv-endpoint", where, "--wait", "1"]
    done = ended([*CHECK, *words], plain_environment(PHALANX_TOKEN=TOKEN))
    assert done.code == EXIT_CODES[UNKNOWN], done
    assert "could not tell (between the nodes: 1 of 2 nodes here" in done.out


def met(present: int, count: int, lost: bool = False, network: bool = True, **ahead: float) -> MeetingVerdict:
    """The verdict of a meeting of some of these nodes; `ahead`: how far their clocks are, by name."""
    token = Token(b"o" * 32, "the test")
    found: dict[int, MeetingVerdict] = {}

    def take_part(rank: int, port: int) -> None:
        name = f"n{rank}"
        clock = lambda: time.time() + ahead.get(name, 0.0)  # noqa: E731
        how = Measuring("127.0.0.1", token, network=network, backend=False, environ={}, clock=clock)
        with Client("127.0.0.1", port, token=token) as client:
            joined = RendezvousInfo(StoreFacade(client, "round/"), rank, count, None)
            found[rank] = meet(joined, lambda: lost, rank == 0, NodeVerdict(name, FIT), how, None)

    with Server(token=token) as server:
        ports = [(rank, server.address[1]) for rank in range(present)]
        threads = [threading.Thread(target=take_part, args=where) for where in ports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HUNG)
    assert len(found) == present
    assert all(one == found[0] for one in found.values())
    return found[0]


def test_a_clock_that_is_far_from_the_others_is_named() -> None:
    reasons = {
        name: (fitness, reason) for name, fitness, reason in met(3, 3, network=False, n0=-1000.0).nodes
    }
    assert re.match(r"clock: (999|100\d)\.\d s behind the others", reasons["n0"][1])
    assert not any("clock" in reasons[name][1] for name in ("n1", "n2"))


def test_a_node_that_is_lost_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.check.meeting._AFTER_LOSS", 0.1)
    found = met(2, 3, lost=True)
    lost = ("rank 2", UNKNOWN, "it was lost before it was measured")
    assert found.nodes == [("n0", FIT, ""), ("n1", FIT, ""), lost]
    assert [pair[:3] for pair in found.pairs] == [(1, "n0", "n1")]


def test_measurements_need_the_token() -> None:
    ours, theirs = Token(b"o" * 32, "the test"), Token(b"t" * 32, "a stranger")
    here, there, stranger = (PairLink("127.0.0.1", token) for token in (ours, ours, theirs))
    try:
        where = ("127.0.0.1", there.port)
        with pytest.raises(StoreAuthError):
            stranger.measure(1, 7, where)
        with socket.create_connection(where, timeout=HUNG) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n" * 100)
            try:
                while garbage.recv(65536):
                    pass  # its greeting; it closes at the first bytes that are none
            except ConnectionResetError:
                pass
        figures = here.measure(1, 0, where)
        assert figures.latency is not None
        assert figures.bandwidth is not None
        assert 0 < figures.latency < HUNG
        assert figures.bandwidth > 0
        assert (there.received(1, 0, time.monotonic() + HUNG) or 0) > 0
        assert there.received(1, 7, time.monotonic()) is None
    finally:
        for one in (here, there, stranger):
            one.close()
    mine = ("phalanx-check-door", "phalanx-check-pair")
    wait_until(lambda: not [t for t in threading.enumerate() if t.name in mine], "the end of the threads")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["script.py"], "unrecognized arguments: script.py"),
        (["--only", "gpu"], "--only gpu: no such check; there are machine, gpus, "),
        (["--only"], "--only: expected one argument"),
        (["--disk"], "--disk: expected one argument"),
        (["--max-restarts", "2"], "unrecognized arguments: --max-restarts 2"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--only", "network"], "--only network: needs other nodes"),
        (["--only", "store"], "--only store: add --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2"], "--nnodes 2: add --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2:4", "--rdzv-endpoint", "a:1"], "--nnodes 2:4: all nodes take part"),
        (["--nnodes", "0"], "--nnodes 0: all nodes take part"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-backend", "static"], "through phalanx or etcd"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--wait", "some"], "--wait: some: not a duration"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b"], "the port must be a number"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--token-file", "/no/such"], "no such file"),
    ],
)
def test_bad_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["check", *argv]) == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["help", "check"]) == 0
    assert "0 fit, perhaps with warnings; 95 unfit; 1 could not tell" in capsys.readouterr().out


def test_the_table_is_aligned_and_ends_with_the_verdict() -> None:
    found = [
        CheckFinding("memory", "plenty"),
        CheckFinding("disk /a/long/path", "v " * 60, UNFIT, "do " * 60),
        CheckFinding("clock", "who knows", UNKNOWN),
        CheckFinding("CPUs", "busy", WARN, "end it"),
    ]
    text = check.as_text(judge_node("node3", found), found, 100)
    rows = [line for line in text.splitlines() if line[:1].strip()]
    assert all(len(line) <= 100 for line in text.splitlines()[:-1])
    column = rows[0].index("verdict")
    assert [row[column:].split()[0] for row in rows[2:-1]] == [FIT, UNFIT, "?", WARN]
    assert rows[-1].startswith("node3: unfit (disk /a/long/path: v v")
