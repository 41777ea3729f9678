"""The failure report, word for word: every situation has its full text in reports/*.txt.

After an intended change of the wording, write the files anew with
`PHALANX_WRITE_GOLDEN=1 pytest tests/unit/test_report.py` and read the difference.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.workers.failure import ProcessFailure
from phalanx.observe import report
from phalanx.observe.report import format_report, report_json, root_cause
from phalanx.worker.error_file import message_data

START = 1_700_000_000.0
Make = Callable[..., ProcessFailure]
GOLDEN = Path(__file__).with_name("reports")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a failure; `message` and `stack` go through a real error file, named as on a real host."""

    def build(
        rank: int, code: int, after: float, message: str = "", stack: str = "", **more: Any
    ) -> ProcessFailure:
        path = tmp_path / f"{rank}.json"
        crash = more.pop("crash", "")
        if message:
            at = int((START + after) * 1e9)
            path.write_text(json.dumps(message_data(message, stack, at)))
        if crash:
            Path(f"{path}.stack").write_text(crash)
            os.utime(f"{path}.stack", (START + after, START + after))
        more.setdefault("exited_at", START + after + 0.004)
        if "stop" in more:
            more["stopped_at"] = START + more.pop("stop")
        failure = ProcessFailure(rank, 4700 + rank, code, str(path), **more)
        if failure.error_file != "<N/A>":
            failure.error_file = f"/logs/run_1/attempt_0/{rank}/error.json"
        return failure

    return build


STACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 88, in <module>
    main()
  File "/home/me/train.py", line 42, in step
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/nets/layers.py", line 17, in forward
    raise ValueError(f"batch of {len(x)} rows on rank RANK")
ValueError: batch of 0 rows on rank RANK
"""
LOGS = {
    "stderr_path": "/logs/run_1/attempt_0/2/stderr.log",
    "stdout_path": "/logs/run_1/attempt_0/2/stdout.log",
}
Situation = Callable[[Make], dict[int, ProcessFailure]]


def exception(make: Make) -> dict[int, ProcessFailure]:
    stack = STACK.replace("RANK", "2")
    # What the interpreter printed, with the prefix that a collective library's hook puts before each line.
    printed = "".join(f"[rank2]: {line}\n" for line in stack.splitlines()[2:])
    return {
        2: make(
            2,
            1,
            12.3,
            "ValueError: batch of 0 rows on rank 2",
            stack,
            tail="epoch 3: 98%\repoch 3: 99%\n" + printed,
            host="node-a",
            **LOGS,
        ),
        **{r: make(r, -15, 12.4, stop=12.31, host="node-a") for r in (0, 1, 3)},
    }


def nccl(make: Make) -> dict[int, ProcessFailure]:
    said = (
        "NCCL error in: /src/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), "
        "NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage.\nLast error:\n"
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    )
    return {rank: make(rank, 1, 4.2 + rank / 100, f"DistBackendError: {said}") for rank in (0, 1)}


def lost_device(make: Make) -> dict[int, ProcessFailure]:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    return {
        5: make(5, 1, 42.0, error, host="gpu-07"),
        **{rank: make(rank, -15, 42.1, stop=42.02, host="gpu-06") for rank in (0, 1)},
    }


def out_of_memory(make: Make) -> dict[int, ProcessFailure]:
    why = "probably out of memory: the kernel's count of OOM kills in its cgroup went up (/sys/fs/cgroup/job)"
    return {
        1: make(
            1,
            -9,
            247.0,
            evidence=why,
            tail="step 100 loss 0.31\nstep 200 loss 0.30\n",
            host="node-a",
            global_rank=1,
            role="trainer",
        ),
        0: make(0, -9, 277.1, stop=247.02, host="node-a"),
    }


def segfault(make: Make) -> dict[int, ProcessFailure]:
    crash = (
        "Fatal Python error: Segmentation fault\n\nThread 0x00007f01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/venv/lib/python3.11/site-packages/fastops/native.py", line 9 in fused\n'
        '  File "/home/me/train.py", line 42 in step\n  File "/home/me/train.py", line 88 in <module>\n\n'
        "Extension modules: fastops._C (total: 1)\n"
    )
    return {0: make(0, -11, 3.25, crash=crash)}


def same_on_all(make: Make) -> dict[int, ProcessFailure]:
    return {
        r: make(
            r, 1, 1.0 + r / 1000, f"ValueError: batch of 0 rows on rank {r}", STACK.replace("RANK", str(r))
        )
        for r in range(8)
    }


def echoes(make: Make) -> dict[int, ProcessFailure]:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:{}"
    return {
        5: make(
            5, -9, 30.100, host="node-b", evidence="SIGKILL from outside Phalanx; no sign of an OOM kill"
        ),
        **{r: make(r, 1, 30.09 + r / 1000, lost.format(4000 + r), host="node-a") for r in range(4)},
        6: make(
            6,
            7,
            30.5,
            "OSError: [Errno 28] No space left on device: '/scratch/out/checkpoint-000012/optimizer.bin'",
            host="node-b",
        ),
        4: make(4, -15, 30.6, stop=30.55),
        7: make(7, -9, 60.6, stop=30.55),
    }


def exit_code_only(make: Make) -> dict[int, ProcessFailure]:
    return {
        0: make(
            0, 3, 0.25, tail="cannot open /data/train.bin\n", stderr_path="/logs/run_1/attempt_0/0/stderr.log"
        )
    }


def only_victims(make: Make) -> dict[int, ProcessFailure]:
    return {r: make(r, -15, 5.0 + r / 100, stop=4.9) for r in range(3)}


def only_echoes(make: Make) -> dict[int, ProcessFailure]:
    return {
        0: make(0, 1, 9.0, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        1: make(1, -6, 9.5, tail="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"),
    }


def not_found(make: Make) -> dict[int, ProcessFailure]:
    return {0: make(0, 127, 0.01, tail="sh: 1: trian: not found\n")}


def deep_recursion(make: Make) -> dict[int, ProcessFailure]:
    frames = "".join(f'  File "/home/me/deep.py", line {n}, in f{n}\n    f{n + 1}()\n' for n in range(100))
    stack = f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n"
    return {0: make(0, 1, 0.5, "RecursionError: too deep", stack)}


SYNTAX = '  File "/home/me/train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


def syntax_error(make: Make) -> dict[int, ProcessFailure]:
    return {0: make(0, 1, 0.02, "SyntaxError: invalid syntax (train.py, line 3)", SYNTAX)}


def syntax_error_on_stderr(make: Make) -> dict[int, ProcessFailure]:
    """From an interpreter without the bootstrap."""
    return {0: make(0, 1, 0.02, tail=f"starting\n{SYNTAX}", stderr_path="/logs/run_1/attempt_0/0/stderr.log")}


def nothing_known(make: Make) -> dict[int, ProcessFailure]:
    return {0: make(0, 1, 0.02)}


def output_not_read(make: Make) -> dict[int, ProcessFailure]:
    """Several workers, and the reader of their output has exited."""
    stack = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 8, in <module>\n'
        '    print("step", n)\nBrokenPipeError: [Errno 32] Broken pipe\n'
    )
    return {r: make(r, 1, 0.02 + r / 100, "BrokenPipeError: [Errno 32] Broken pipe", stack) for r in (0, 1)}


def port_taken(make: Make) -> dict[int, ProcessFailure]:
    error = "OSError: [Errno 98] Address already in use (while attempting to bind on address ('', 35027))"
    return {0: make(0, 1, 0.02, error, STACK.replace("RANK", "0"))}


SITUATIONS: dict[str, tuple[Situation, int]] = {
    "nccl": (nccl, 100),
    "lost_device": (lost_device, 100),
    "exception": (exception, 100),
    "exception_60": (exception, 60),
    "out_of_memory": (out_of_memory, 100),
    "out_of_memory_60": (out_of_memory, 60),
    "segfault": (segfault, 100),
    "same_on_all": (same_on_all, 100),
    "echoes": (echoes, 100),
    "exit_code_only": (exit_code_only, 100),
    "only_victims": (only_victims, 100),
    "only_echoes": (only_echoes, 100),
    "not_found": (not_found, 100),
    "deep_recursion": (deep_recursion, 100),
    "syntax_error": (syntax_error, 100),
    "syntax_error_on_stderr": (syntax_error_on_stderr, 100),
    "nothing_known": (nothing_known, 100),
    "output_not_read": (output_not_read, 100),
    "port_taken": (port_taken, 100),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_golden(make: Make, name: str) -> None:
    situation, width = SITUATIONS[name]
    text = format_report("train.py", situation(make), started_at=START, width=width) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PHALANX_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_is_used() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == set(SITUATIONS)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("width", [60, 100])
def test_the_frame_fits_and_is_ascii(make: Make, name: str, width: int) -> None:
    lines = format_report("train.py", SITUATIONS[name][0](make), width=width).splitlines()
    assert "\n".join(lines).isascii()
    assert lines[0] == lines[-1] == "=" * width
    # Only what the workers wrote, and paths, may be longer: they must stay whole to be copied.
    long = [line for line in lines if len(line) > width]
    assert all("File " in line or "/logs/" in line for line in long), long


@pytest.mark.parametrize("name", SITUATIONS)
def test_colour_adds_only_colour(make: Make, name: str) -> None:
    failures = SITUATIONS[name][0](make)
    coloured = format_report("train.py", failures, colour=True, width=100)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == format_report("train.py", failures, width=100)


def test_a_traceback_is_shown_once(make: Make) -> None:
    text = format_report("train.py", exception(make))
    assert text.count("line 42, in step") == 1
    assert text.count("File ") == 3


def test_stderr_after_the_traceback_is_kept(make: Make) -> None:
    stack = STACK.replace("RANK", "0")
    failure = make(
        0, 1, 1.0, "ValueError: batch of 0 rows on rank 0", stack, tail=f"before\n{stack}terminate called\n"
    )
    text = format_report("train.py", {0: failure})
    assert "  | before\n  | terminate called\n" in text
    assert text.count("Traceback") == 1


def test_hostile_text_cannot_upset_the_terminal(make: Make) -> None:
    nasty = "\x1b[2J\x1b]0;title\x07\x00\x07 \u202ereversed \x9b31m"
    failure = make(
        0, 1, 1.0, f"ValueError: {nasty}", f"Traceback\n{nasty}\n", tail=f"{nasty}\rlast\n", host=nasty
    )
    text = format_report(nasty, {0: failure})
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
    assert "  | last" in text


def test_a_broken_pipe_of_the_only_worker_is_its_own(make: Make) -> None:
    stack = STACK.replace(
        "ValueError: batch of 0 rows on rank RANK", "BrokenPipeError: [Errno 32] Broken pipe"
    )
    failure = make(0, 1, 1.0, "BrokenPipeError: [Errno 32] Broken pipe", stack, alone=True)
    text = format_report("train.py", {0: failure})
    assert "Root cause: rank 0" in text
    assert "other nodes" not in text
    assert "check the pipe's reader" in text
    assert "/home/me/train.py:42, in step" in text
    # One of several: a socket to another rank breaks in the same words.
    failure.alone = False
    assert "First to lose a peer: rank 0" in format_report("train.py", {0: failure})


def test_names_that_are_no_utf8(make: Make) -> None:
    name = os.fsdecode(b"train\xff.py")
    stack = STACK.replace("train.py", name)
    failure = make(0, 1, 1.0, "ValueError: no", stack, stderr_path=f"/logs/{name}/stderr.log")
    text = format_report(name, {0: failure})
    assert "train\ufffd.py FAILED" in text
    assert "/logs/train\ufffd.py/stderr.log" in text
    assert "dcff" not in text.replace(
        "\\udcff", ""
    )  # in the error file it is escaped: JSON knows no such byte
    assert text.encode()


@pytest.mark.parametrize(
    ("tail", "what"),
    [
        ("Fatal Python error: init_x: no\nPython runtime state: core\n", "Fatal Python error: init_x: no"),
        (
            '[rank0]:   File "/a.py", line 2\n[rank0]:     x y\n[rank0]: SyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax",
        ),
        (STACK.replace("RANK", "0") + "and more\n", "ValueError: batch of 0 rows on rank 0"),
        ("cannot open /data\n", "exit code 1"),
    ],
)
def test_what_an_interpreter_of_somebody_else_said(make: Make, tail: str, what: str) -> None:
    assert report.summary(0, make(0, 1, 1.0, tail=tail)) == f"rank 0: {what}"


def test_text_for_a_stream_that_cannot_write_it(make: Make) -> None:
    text = format_report("train.py", {0: make(0, 1, 1.0, "ValueError: 漢 naïve")})
    assert "漢 naïve" in text
    assert "\\u6f22 na\\xefve" in report.for_stream(text, "ascii")
    assert "\\u6f22 naïve" in report.for_stream(text, "latin-1")
    assert report.for_stream(text, "utf-8") == text
    assert report.for_stream(text, "no-such-encoding").isascii()


def test_a_broken_error_file_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("{")
    text = format_report("train.py", {0: ProcessFailure(0, 1, 1, str(path), exited_at=START)}, width=200)
    assert "is not valid JSON" in text


def test_error_code_of_the_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(message_data("m", "", int(START * 1e9), 17)))
    text = format_report("train.py", {0: ProcessFailure(0, 1, 1, str(path), exited_at=START)})
    assert "error code 17 from its error file (the process: exit code 1)" in text


def test_ranks_are_those_of_the_mapping(make: Make) -> None:
    failures = {10: make(2, 1, 2.0), 9: make(1, 1, 1.0)}
    assert root_cause(failures) == (9, failures[9])
    text = format_report("train.py", failures)
    assert "Root cause: rank 9 (local rank 1), pid 4701" in text
    assert "same on   rank 10" in text


def test_many_kinds_of_failures_stay_short(make: Make) -> None:
    failures = {r: make(r, 1, 1.0 + r, f"ValueError: step {r}") for r in range(100)}
    text = format_report("train.py", failures, width=100)
    assert "... and 87 more failures, on ranks 13-99" in text
    assert len(text.splitlines()) < 40


def test_failures_in_the_same_millisecond_are_not_before_each_other(make: Make) -> None:
    failures = {rank: make(rank, 1, 1.0 - rank * 1e-4, f"ValueError: {rank}") for rank in range(2)}
    text = format_report("train.py", failures)
    assert "Root cause: rank 0" in text
    assert "rank 1  +0.000 s" in text


def test_an_exception_whose_text_is_a_report_has_its_essence_in_one_line(make: Make) -> None:
    inner = format_report("inner.py", {3: make(3, 1, 1.0, "ValueError: no data", STACK)})
    text = format_report("outer.py", {0: make(0, 1, 1.0, f"ChildFailedError: \n{inner}", inner)})
    assert "\n  error     ChildFailedError: inner.py FAILED (ValueError: no data) ...\n" in text


def test_json(make: Make) -> None:
    data = report_json("train.py", echoes(make), started_at=START)
    assert json.loads(json.dumps(data)) == data
    assert data["root_rank"] == 5
    assert data["exit_code"] == 137
    assert (data["failed"], data["echoes"], data["stopped"]) == ([5, 6], [0, 1, 2, 3], [4, 7])
    ranks = {entry["rank"]: entry for entry in data["ranks"]}
    assert ranks[5]["kind"] == "failed"
    assert ranks[5]["since_start"] == pytest.approx(30.104)
    assert ranks[1]["same_as"] == 0
    assert ranks[0]["message"].startswith("RuntimeError: [gloo")
    assert "traceback" not in ranks[1]
    data = report_json("train.py", exception(make))
    assert data["look_next"] == "/home/me/train.py:42, in step"
    assert {e["rank"]: e["kind"] for e in data["ranks"]} == {
        0: "stopped",
        1: "stopped",
        2: "failed",
        3: "stopped",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.0001, "0.000 s"),
        (0.0134, "0.013 s"),
        (3.25, "3.25 s"),
        (12.34, "12.3 s"),
        (247, "4 min 07 s"),
        (11100, "3 h 05 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text
