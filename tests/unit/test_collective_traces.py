"""Recorded dumps of real hangs (tests/support/hang_scenarios.py), damaged ones, and servers of all kinds."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.agent.supervision import trace_reader
from phalanx.agent.supervision.collective_traces import (
    condense,
    decode,
    dump_of,
    join,
    parse,
    read_dumps,
    restore,
    save,
    spread,
)
from phalanx.agent.supervision.trace_sockets import TraceSockets
from phalanx.core.diagnosis.collectives import RankTrace, explain, is_waiting, notes
from phalanx.worker.torch_collectives import GROUPS_SUFFIX, GroupMembers, TorchFinder, runs
from tests.support.hang_scenarios import expected

RECORDED = Path(__file__).parent / "flight_recorder"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))


def load(name: str) -> tuple[int, int, dict[int, dict[str, Any]]]:
    """The time of the recording, the guilty rank, and the dumps by rank."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    return recorded["now"], recorded["guilty"], {int(rank): one for rank, one in recorded["ranks"].items()}


def traces_of(name: str) -> dict[int, RankTrace]:
    now, _, dumps = load(name)
    return {rank: parse(rank, dump, now) for rank, dump in dumps.items()}


def stopped_in(name: str) -> tuple[int, ...]:
    return (1,) if name == "stopped" else ()


def test_there_are_recordings() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_on_a_real_hang(name: str) -> None:
    traces = traces_of(name)
    assert all(group.members == (0, 1, 2) for trace in traces.values() for group in trace.groups)
    found = explain(traces, stopped=stopped_in(name))
    assert found is not None
    assert expected(name, 1, 3) in found.text
    assert found.ranks == (1,)


@pytest.mark.parametrize("name", NAMES)
def test_what_other_nodes_get_leads_to_the_same_verdict(name: str) -> None:
    traces = traces_of(name)
    sent = json.dumps(condense(traces))
    assert len(sent) < 3 * 2500
    again = restore(json.loads(sent))
    before, after = (explain(found, stopped=stopped_in(name)) for found in (traces, again))
    assert before == after
    # And so does what is saved of it for torch's tools.
    saved = {rank: parse(rank, dump_of(trace), load(name)[0]) for rank, trace in again.items()}
    after = explain(saved, stopped=stopped_in(name))
    assert after is not None
    assert before is not None
    assert (after.kind, after.ranks) in ((before.kind, before.ranks), ("missing", before.ranks))


def test_a_report_of_many_operations_and_groups_is_small() -> None:
    _, _, dumps = load("missing")
    (entry,) = dumps[0]["entries"][-1:]
    entries = [
        {**entry, "collective_seq_id": number, "process_group": [str(group), f"mesh_{group}"], "pg_id": group}
        for group in range(100)
        for number in range(1, 41)
    ]
    traces = {rank: parse(rank, {"entries": entries}, 10**19) for rank in range(2)}
    assert len(json.dumps(condense(traces))) < 80_000


# ---- damage ------------------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def damaged(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any], depth: int = 0) -> Any:
    """The value with something in it replaced, or left out."""
    if depth > 4 or not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 5)) == 0:
        return draw(junk)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: damaged(value[key], draw, depth + 1)}
    index = draw(st.integers(0, len(value) - 1))
    return [*value[:index], damaged(value[index], draw, depth + 1), *value[index + 1 :]]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_dump_is_understood_as_far_as_possible(data: st.DataObject) -> None:
    now, _, dumps = load("missing")
    broken = damaged(dumps[2], data.draw)
    traces = traces_of("missing")
    if isinstance(broken, dict):
        traces[2] = parse(2, broken, now)
    else:
        del traces[2]
    found = explain(traces)
    assert found is not None
    json.dumps(condense(traces))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_report_of_another_node_is_harmless(data: st.DataObject) -> None:
    sent = json.loads(json.dumps(condense(traces_of("operation"))))
    broken = damaged(sent, data.draw)
    if isinstance(broken, dict):
        explain(restore(broken))


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null", b'"x"'])
def test_an_answer_that_is_no_dump(answer: bytes) -> None:
    assert decode(answer) is None


@pytest.mark.parametrize("ranks", [(), (0,), (0, 1, 2), (0, 2, 3, 9), tuple(range(10_000))])
def test_ranks_as_runs(ranks: tuple[int, ...]) -> None:
    assert spread(runs(ranks)) == ranks
    assert len(runs(ranks)) < 20


@pytest.mark.parametrize("text", ["0-99999999999", "-5", "x", "1-2-3", "0-1048575,0-1048575", None, 7])
def test_runs_that_are_not(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        spread(text)


def test_saved_for_torchs_tools(tmp_path: Path) -> None:
    _, _, dumps = load("missing")
    save(str(tmp_path / "fr"), dumps)
    for rank, dump in dumps.items():
        kept = pickle.loads((tmp_path / "fr" / f"rank_{rank}").read_bytes())
        assert {entry["state"] for entry in kept["entries"]} <= {"completed", "scheduled"}
        assert kept["pg_config"] == dump["pg_config"]
        assert kept["version"] == "2.10"
    save(str(tmp_path / "fr"), {0: {"entries": None}})  # damaged
    save("/proc/nowhere", dumps)  # cannot be written
    save("", dumps)


# ---- servers -----------------------------------------------------------------------------------------


@contextmanager
def server(path: Path, answer: bytes | Callable[[bytes], bytes], hold: bool = False) -> Iterator[str]:
    """A server that answers every request with these bytes, and with `hold` does not end the answer."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                request = connection.recv(4096)
                try:
                    connection.sendall(answer(request) if callable(answer) else answer)
                except OSError:
                    pass
                if not hold:
                    connection.close()
                else:
                    held.append(connection)

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield str(path)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def test_only_complete_answers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "MAX_ANSWER", 5_000_000)
    large = b"x" * 3_000_000
    answers = {
        0: http(b"{}"),
        1: http(large),
        2: http(b"{}", status="500 Internal Server Error"),
        3: http(b"{}", length=3),  # ended early
        4: b"garbage",
        5: b"",
        6: http(b"y" * 6_000_000),  # too large
    }
    with _servers(tmp_path, answers) as paths:
        paths[7] = str(tmp_path / "missing")
        paths[8] = "/" + "long" * 40
        found = trace_reader.ask({(key, "/"): path for key, path in paths.items()}, 20.0)
        assert found == {(0, "/"): b"{}", (1, "/"): large}


@contextmanager
def _servers(folder: Path, answers: dict[int, bytes]) -> Iterator[dict[int, str]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {key: stack.enter_context(server(folder / str(key), one)) for key, one in answers.items()}


def test_a_server_that_does_not_end_its_answer_delays_no_other(tmp_path: Path) -> None:
    with (
        server(tmp_path / "0", http(b"{}"), hold=True) as held,
        server(tmp_path / "1", http(b"{}")) as good,
    ):
        assert trace_reader.ask({(0, "/"): held, (1, "/"): good}, 0.3) == {(1, "/"): b"{}"}


NCCL = {
    "comm_lib_version": "2.28.9",
    "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_completed_collective": "2", "last_enqueued_collective": "3"}},
    "version": "2.10",
}
"""As torch 2.11 answers on a machine with a GPU."""


def nccl(number: int, done: bool, created: int) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[4]], "is_p2p": False,
        "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[4]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "record_id": number,
        "retired": done, "state": "completed" if done else "scheduled", "time_created_ns": created,
        "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 600000,
    }  # fmt: skip


def test_the_recorder_of_nccl_is_another_one() -> None:
    empty = {"entries": [], "pg_config": {}, "pg_status": {}, "version": "2.10"}
    waits = join([empty, {**NCCL, "entries": [nccl(2, True, 10), nccl(3, False, 20)]}])
    lacks = join([empty, {**NCCL, "entries": [nccl(2, True, 10)]}])
    assert waits is not None
    assert lacks is not None
    lacks["pg_status"] = {}  # this rank has not enqueued the third
    found = explain({0: parse(0, waits, 30), 1: parse(1, lacks, 30)})
    assert found is not None
    assert found.what == "rank 1 never entered all_reduce #3 of the default group (last was all_reduce #2)"
    assert join([]) is None
    assert join([empty]) == empty


def test_a_rank_with_two_libraries_has_one_dump() -> None:
    _, _, dumps = load("missing")
    latest = max(entry["time_created_ns"] for entry in dumps[0]["entries"])
    both = join([dumps[0], {**NCCL, "entries": [nccl(9, False, latest - 1)]}])
    assert both is not None
    assert [entry["record_id"] for entry in both["entries"]] == list(range(len(dumps[0]["entries"]) + 1))
    assert both["entries"][-2]["profiling_name"] == "nccl:all_reduce"


def hooked(number: int, library: str = "nccl2", name: str = "all_reduce") -> dict[str, Any]:
    """As torch 2.15 records an operation of a backend that does not report what completes."""
    return nccl(number, True, 10 * number) | {"profiling_name": f"{library}:{name}", "state": "scheduled"}


HOOKED = {**NCCL, "pg_status": {"0": {"last_completed_collective": "-1", "last_enqueued_collective": "1"}}}


def hooked_traces(*ranks: list[dict[str, Any]]) -> dict[int, RankTrace]:
    """The traces of ranks with these entries."""
    found = {}
    for rank, entries in enumerate(ranks):
        dump = join([{"entries": [], "pg_config": {}}, {**HOOKED, "entries": entries}])
        assert dump is not None
        found[rank] = parse(rank, dump | {"unrecorded": [], "unhealthy": []}, 100)
    return found


def test_retired_is_not_done_where_the_recorder_does_not_notice_what_completes() -> None:
    traces = hooked_traces([hooked(1), hooked(2), hooked(3)], [hooked(1), hooked(2)])
    assert not any(map(is_waiting, traces.values()))  # nobody knows
    for found in (traces, restore(json.loads(json.dumps(condense(traces))))):
        verdict = explain(found)
        assert verdict is not None
        assert verdict.text == (
            "rank 1 never entered all_reduce #3 of the default group (last was all_reduce #2); "
            "rank 0 waits in it"
        )
    together = hooked_traces([hooked(1), hooked(2)], [hooked(1), hooked(2)])
    assert explain(together) is None
    assert notes(together) == [
        "nccl2: the last is all_reduce #2 of the default group on ranks 0, 1; "
        "whether it completed is not recorded"
    ]
    differing = explain(hooked_traces([hooked(1), hooked(2)], [hooked(1), hooked(2, name="broadcast")]))
    assert differing is not None
    assert differing.kind == "mismatch"


def test_a_hook_that_notices_completion_is_taken_at_its_word() -> None:
    status = {"0": {"last_completed_collective": "1", "last_enqueued_collective": "2"}}
    entries = [hooked(1), hooked(2) | {"retired": False}]
    dump = join([{**HOOKED, "pg_status": status, "entries": entries}])
    assert dump is not None
    trace = parse(0, dump, 100)
    assert is_waiting(trace)
    assert [one.done for one in trace.groups[0].operations] == [True, False]


def test_operations_that_arrive_twice_count_once() -> None:
    """torch 2.13 answers the same, whatever the name in the request."""
    both = {**NCCL, "entries": [nccl(2, True, 10), nccl(3, False, 20)]}
    again = json.loads(json.dumps(both))
    assert join([both, again, again]) == both


def test_two_libraries_in_one_group_have_numbers_of_their_own() -> None:
    def rank(number: int, entered: int) -> RankTrace:
        done = [nccl(5, True, 5) | {"profiling_name": "gloo:barrier"}]
        dump = join([{**NCCL, "entries": [nccl(entered, entered == 2, 20)]}, {**NCCL, "entries": done}])
        assert dump is not None
        return parse(number, dump, 30)

    verdict = explain({0: rank(0, 3), 1: rank(1, 2)})
    assert verdict is not None
    assert verdict.what == "rank 1 never entered all_reduce #3 of the default group (last was all_reduce #2)"


def test_every_backend_is_asked_by_name_and_for_its_health(tmp_path: Path) -> None:
    asked: list[str] = []
    answers = {
        "/handler/fr_trace_json": {"entries": [], "pg_config": {}, "pg_status": {}},
        "/handler/fr_trace_json?backend=nccl2": {**HOOKED, "entries": [hooked(1)]},
        "/handler/fr_trace_json?backend=lost": {"pg_config": {}, "pg_status": {}},
        "/handler/fr_trace_json?backend=a%20b%2F%C3%A9%0D": {"pg_config": {}, "pg_status": {}},
        "/handler/c10d_health_check": {"healthy": False, "unhealthy_backends": ["nccl2"]},
    }

    def answer(request: bytes) -> bytes:
        path = request.split(b" ")[1].decode()
        asked.append(path)
        return http(json.dumps(answers[path]).encode()) if path in answers else http(b"", "404 Not Found")

    names = ["gloo", "nccl2", "lost", "a b/é\r"]
    line = {"name": "0", "desc": "default_pg", "ranks": "0-1", "backends": names}
    with server(tmp_path / "0", answer) as path:
        Path(path + GROUPS_SUFFIX).write_text(json.dumps(line))
        (dump,) = read_dumps({0: path}, 20.0, health=True).values()
    assert sorted(asked) == sorted([*answers, "/handler/dump_nccl_trace_json"])
    trace = parse(0, dump, 100)
    assert [one.library for one in trace.groups[0].operations] == ["nccl2"]
    assert notes({0: trace}, [1, 2]) == [
        "collectives: not recorded on ranks 1, 2 (no flight recorder answered)",
        "a b/é?: not recorded on rank 0 (none called, recorder off, or CUDA graphs)",
        "lost: not recorded on rank 0 (none called, recorder off, or CUDA graphs)",
        "nccl2: the last is all_reduce #1 of the default group on rank 0; "
        "whether it completed is not recorded",
        "nccl2: failed or was aborted on rank 0, by torch's health check",
    ]


def test_a_failed_backend_is_named_where_nobody_is_missing() -> None:
    def rank(number: int, *unhealthy: str) -> RankTrace:
        dump = {**NCCL, "entries": [nccl(3, False, 20)], "unhealthy": list(unhealthy)}
        return parse(number, dump, 30)

    verdict = explain({0: rank(0), 1: rank(1, "nccl2")})
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.text == (
        "nccl2 has failed on rank 1; ranks 0, 1 wait in all_reduce #3 of the default group"
    )


def test_groups_that_the_recorder_does_not_know_come_from_the_file(tmp_path: Path) -> None:
    lines = [
        b'{"name": "0", "desc": "default_pg", "ranks": "0-2"}',
        b"{",
        b'{"name": "7", "desc": "tp", "ranks": "0-99999999"}',
        b'{"name": "1", "desc": "tp", "ranks": "0,2"}',
    ]
    with server(tmp_path / "0", http(b'{"entries": [], "pg_config": {"": {}}}')) as path:
        Path(path + GROUPS_SUFFIX).write_bytes(b"\n".join(lines))
        (dump,) = read_dumps({0: path}, 20.0).values()
    found = {group.name: (group.label, group.members) for group in parse(0, dump, 0).groups}
    assert found == {"0": ("", (0, 1, 2)), "1": ("tp", (0, 2))}


# ---- in the worker -----------------------------------------------------------------------------------


class Group:
    """As much of a process group as is looked at."""

    group_name = "0"
    group_desc = "default_pg"


def test_a_worker_without_a_server_keeps_its_dict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PHALANX_COLLECTIVES", raising=False)
    members = GroupMembers({})
    members[Group()] = {0: 0, 1: 1}
    assert len(members) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_can_enter_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "open"
    folder.mkdir(0o755)
    monkeypatch.setenv("PHALANX_COLLECTIVES", str(folder / "0"))
    GroupMembers({})[Group()] = {0: 0}
    assert list(folder.iterdir()) == []


def test_the_finder_finds_nothing_else() -> None:
    assert TorchFinder().find_spec("torch") is None


def test_sockets_have_names_that_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    for parent in (tmp_path, deep):
        monkeypatch.setenv("TMPDIR", str(parent))
        sockets = TraceSockets()
        path = sockets.path(99_999)
        assert len(os.fsencode(path)) <= 107
        assert not os.path.exists(sockets.directory)  # the workers make it
        os.mkdir(sockets.directory)
        Path(sockets.path(0)).touch()
        sockets.close()
        sockets.close()
        assert not os.path.exists(sockets.directory)
