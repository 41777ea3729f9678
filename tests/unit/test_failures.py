"""The root cause of a failed group: golden cases from failures/*.txt, and the rules one by one."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.diagnosis.failures import (
    Diagnosis,
    ErrorRecord,
    WorkerExit,
    diagnose,
    echo_of,
    fingerprint,
    is_victim,
    moment,
    ranks_text,
    root_of,
    shell_status,
    signature,
)


def golden_cases() -> list[tuple[str, str, str]]:
    cases = []
    for path in sorted(Path(__file__).with_name("failures").glob("*.txt")):
        for block in path.read_text().split("\n== ")[1:]:
            title, body = block.split("\n", 1)
            given_text, expected = body.split("----\n")
            cases.append((f"{path.stem}: {title}", given_text, expected.strip()))
    return cases


def parse(text: str) -> tuple[list[WorkerExit], float | None]:
    endings, started = [], None
    for line in filter(None, text.splitlines()):
        words = dict(word.split("=", 1) for word in shlex.split(line))
        if "started" in words:
            started = float(words["started"])
            continue
        error = None
        if "error" in words:
            message, _, at = words["error"].rpartition("@")
            error = ErrorRecord(message, at=float(at), precise="." in at)
        endings.append(
            WorkerExit(
                int(words["rank"]),
                100 + int(words["rank"]),
                int(words["code"]),
                float(words["at"]),
                error,
                float(words["stop"]) if "stop" in words else None,
                words.get("tail", ""),
            )
        )
    return endings, started


def describe(d: Diagnosis, started: float | None) -> str:
    lines = [f"root {d.root.rank} at {moment(d.root, started):.3f}, job exits with {d.exit_code}"]
    for name in ("failed", "echoes", "victims"):
        if getattr(d, name):
            lines += [" ".join([name, *(str(e.rank) for e in getattr(d, name))])]
    lines += [f"group {ranks_text(g.ranks)}" for g in d.groups if len(g.ranks) > 1]
    return "\n".join([*lines, f"reason: {d.reason}"])


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [pytest.param(g, e, id=title) for title, g, e in golden_cases()],
)
def test_golden(given_text: str, expected: str) -> None:
    endings, started = parse(given_text)
    for order in itertools.islice(itertools.permutations(endings), 24):
        assert describe(diagnose(order, started), started) == expected


@pytest.mark.parametrize(
    "text",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError: ",
        "DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error",
        "DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
        "RuntimeError: [gloo/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "RuntimeError: Process group has been destroyed",
        "ncclRemoteError: A call failed, possibly a network error or a remote process that went away",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)",
    ],
)
def test_lost_peer_is_an_echo(text: str) -> None:
    assert echo_of(WorkerExit(0, 1, 1, 1.0, ErrorRecord(text)))
    assert echo_of(WorkerExit(0, 1, 1, 1.0, None, tail=f"noise\n{text}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: rank 3 has no data",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'",
        "AssertionError: connection pool size must be positive",
        "EOFError: Ran out of input",
        "EOFError: EOF when reading a line",
        "TimeoutError: the dataset server did not answer",
    ],
)
def test_a_failure_of_its_own_is_no_echo(text: str) -> None:
    assert not echo_of(WorkerExit(0, 1, 1, 1.0, ErrorRecord(text)))


CHAIN = """Traceback (most recent call last):
  File "a.py", line 1, in f
    step()
{first}

{link}

Traceback (most recent call last):
  File "a.py", line 2, in f
    cleanup()
{last}
"""
CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize("link", [CAUSE, CONTEXT])
def test_first_link_of_an_exception_chain_decides(link: str) -> None:
    lost, real = "ConnectionResetError: [Errno 104] Connection reset by peer", "ValueError: bad"
    wrapped = CHAIN.format(first=lost, link=link, last=real)
    assert echo_of(WorkerExit(0, 1, 1, 1.0, ErrorRecord(real, wrapped)))
    teardown = CHAIN.format(first=real, link=link, last=lost)
    assert not echo_of(WorkerExit(0, 1, 1, 1.0, ErrorRecord(lost, teardown)))


def test_a_kill_is_never_an_echo() -> None:
    assert not echo_of(WorkerExit(0, 1, -9, 1.0, tail="Connection reset by peer"))
    assert echo_of(WorkerExit(0, 1, -6, 1.0, tail="Watchdog caught collective operation timeout"))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([7, 0, 1, 2, 3], "ranks 0-3, 7"),
        ([5, 1, 2, 9, 10, 11], "ranks 1, 2, 5, 9-11"),
    ],
)
def test_ranks_text(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_shell_status() -> None:
    assert [shell_status(c) for c in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_fingerprint_keeps_what_differs() -> None:
    one = WorkerExit(0, 1, 1, 1.0, ErrorRecord("ValueError: step 7 of 10"))
    two = WorkerExit(1, 2, 1, 1.0, ErrorRecord("ValueError: step 8 of 10"))
    assert fingerprint(one) != fingerprint(two)
    assert fingerprint(WorkerExit(0, 1, 1, 1.0, tail="a\nb\n")) != fingerprint(
        WorkerExit(1, 2, 1, 1.0, tail="a\nc\n")
    )
    assert fingerprint(WorkerExit(0, 1, 1, 1.0, tail="a\nb\n")) == fingerprint(
        WorkerExit(1, 2, 1, 1.0, tail="c\nb")
    )
    assert fingerprint(WorkerExit(0, 1, -9, 1.0)) != fingerprint(WorkerExit(0, 1, -11, 1.0))


def test_nothing_ended() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        diagnose([])


times = st.floats(min_value=1.0, max_value=100.0)
endings_strategy = st.lists(
    st.builds(
        WorkerExit,
        rank=st.integers(0, 50),
        pid=st.integers(1, 99),
        code=st.integers(-15, 5),
        at=times,
        error=st.none()
        | st.builds(
            ErrorRecord,
            message=st.sampled_from(["ValueError: x", "Connection reset by peer"]),
            at=st.none() | times,
            precise=st.booleans(),
        ),
        stopped_at=st.none() | times,
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda e: e.rank,
)


@given(endings_strategy)
def test_every_ending_has_one_place_and_the_root_is_the_best_of_them(endings: list[WorkerExit]) -> None:
    d = diagnose(endings)
    placed = [e.rank for e in [*d.failed, *d.echoes, *d.victims]]
    assert sorted(placed) == sorted(e.rank for e in endings if e.code != 0)
    for group in (d.failed, d.echoes, d.victims):
        stamps = [int(moment(e) * 1000 + 0.5) for e in group]
        assert stamps == sorted(stamps)
    best = d.failed or d.echoes or d.victims
    assert not best or d.root is best[0]
    assert all(is_victim(e) for e in d.victims)
    assert sorted(r for g in d.groups for r in g.ranks) == sorted(e.rank for e in [*d.failed, *d.echoes])
    assert d.reason
    assert 0 < d.exit_code < 256


@given(
    st.permutations(range(4)),
    st.lists(st.sampled_from(["", "real", "echo", "victim"]), min_size=4, max_size=4),
)
def test_the_root_alone_is_the_same(order: list[int], kinds: list[str]) -> None:
    endings = []
    for rank in order:
        kind = kinds[rank]
        message = {"real": "ValueError: no", "echo": "ConnectionResetError: gone"}.get(kind)
        error = ErrorRecord(message, at=10.0 + rank, precise=True) if message else None
        stop = 5.0 if kind == "victim" else None
        endings.append(WorkerExit(rank, 100 + rank, 1 if kind else 0, 11.0 + rank, error, stop))
    assert root_of(endings) == diagnose(endings).root


# ---- the same failure again --------------------------------------------------------------------------

OWN = """Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    main()
  File "/home/me/train.py", line 12, in main
    model(batch)
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl
    return forward_call(*args, **kwargs)
"""
PLACE = "/home/me/train.py:12, in main"
LOST = (
    OWN
    + "ConnectionError: peer\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + OWN
)


def end(code: int, error: ErrorRecord | None = None, **more: Any) -> WorkerExit:
    return WorkerExit(0, 7, code, 1.0, error, **more)


def record(message: str, *kinds: str, traceback: str = OWN, **more: Any) -> ErrorRecord:
    return ErrorRecord(message, traceback, kinds=kinds or (message.partition(":")[0], "Exception"), **more)


SIGNATURES: dict[str, tuple[WorkerExit, str]] = {
    "an exception and its place": (end(1, record("ValueError: x")), f"ValueError at {PLACE}"),
    "whatever its text": (end(1, record("ValueError: batch 77")), f"ValueError at {PLACE}"),
    "of torch's own class": (
        end(1, record("OutOfMemoryError: CUDA out of memory", "OutOfMemoryError", "RuntimeError")),
        f"OutOfMemoryError at {PLACE}",
    ),
    "a record without classes": (end(1, ErrorRecord("mine.Bad: x", OWN)), f"Bad at {PLACE}"),
    "recorded, then killed at the end": (end(-11, record("ValueError: x")), f"ValueError at {PLACE}"),
    "only a library's frame": (
        end(1, record("ValueError: x", traceback='  File "/a/site-packages/b.py", line 3, in c\n')),
        "ValueError at /a/site-packages/b.py:3, in c",
    ),
    "a syntax error": (
        end(1, record("SyntaxError: x", traceback='  File "/home/me/t.py", line 3\n    def f(:\n')),
        "SyntaxError at /home/me/t.py:3",
    ),
    "a crash and its place": (
        end(-11, record("Fatal Python error: Segmentation fault")),
        f"SIGSEGV at {PLACE}",
    ),
    "a crash without a stack": (end(-11), "SIGSEGV"),
    "out of memory": (end(-9, evidence="out of memory: the kernel killed pid 7"), "SIGKILL, out of memory"),
    "probably": (end(-9, evidence="probably out of memory: the kernel's count"), "SIGKILL, out of memory"),
    "maybe another process": (end(-9, evidence="possibly out of memory: a process, maybe this one"), ""),
    "killed from outside": (end(-9, evidence="SIGKILL from outside Phalanx; no sign of an OOM kill"), ""),
    "asked to stop": (end(-15), ""),
    "a bare exit code": (end(3), ""),
    "a text of sys.exit": (end(1, record("SystemExit: no data", "SystemExit")), ""),
    "Ctrl-C": (end(1, record("KeyboardInterrupt: ", "KeyboardInterrupt")), ""),
    "no place": (end(1, record("ValueError: x", traceback="")), ""),
    "wrong arguments": (end(2, ErrorRecord("usage error: --x is missing")), ""),
    "a file that is not there": (
        end(1, record("FileNotFoundError: /data", "FileNotFoundError", "OSError")),
        "",
    ),
    "the same, of a foreign record": (end(1, ErrorRecord("FileNotFoundError: /data", OWN)), ""),
    "torch's store": (end(1, record("DistStoreError: x", "DistStoreError", "DistError", "RuntimeError")), ""),
    "NCCL": (end(1, record("DistBackendError: NCCL error", "DistBackendError", "DistError")), ""),
    "a port in use": (end(1, record("RuntimeError: address already in use")), ""),
    "a library's own network error": (end(1, record("RemoteError: 503 Service Unavailable")), ""),
    "a process of its own that was killed": (
        end(1, record("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.")),
        "",
    ),
    "caused by one": (end(1, record("RuntimeError: x", traceback=LOST + "RuntimeError: x\n")), ""),
    "a group with one": (end(1, record("ExceptionGroup: x", members=("TimeoutError: x",))), ""),
    "a lost device": (end(1, record("AcceleratorError: CUDA error: uncorrectable ECC error")), ""),
    "a lost peer": (end(1, record("RuntimeError: Connection reset by peer")), ""),
    "a lost peer, by a watchdog that aborts": (end(-6, tail="NCCL communicator was aborted"), ""),
    "a lost peer, but there is none": (end(-6, tail="communicator aborted", alone=True), "SIGABRT"),
    "stopped by the launcher": (end(-6, stopped_at=0.5), ""),
}


@pytest.mark.parametrize("case", SIGNATURES)
def test_signature(case: str) -> None:
    ending, expected = SIGNATURES[case]
    assert signature(ending) == expected
