"""`phalanx run`: exit codes, what it says and when, restarts, logs, dry runs, background, terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.core.exit_codes import UNFIT_NODE
from tests.conftest import HUNG, gone, wait_until
from tests.support.run_helpers import (
    FOREVER,
    PHALANX,
    READY,
    Running,
    all_gone,
    plain_environment,
    run,
    script,
)

FAIL = "import os, sys\nif os.environ['RANK'] == '{rank}': {how}\nimport time; time.sleep(1000)\n"


# ---- exit codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('words')", 1),
        ("raise ValueError('boom')", 1),
        ("os._exit(255)", 255),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.abort()", 134),
        ("os.kill(os.getpid(), 15)", 143),
        ("os.kill(os.getpid(), 10)", 138),
    ],
)
def test_exit_code_is_the_failing_workers(how: str, code: int, tmp_path: Path) -> None:
    ended = run("--nproc-per-node", "2", script(tmp_path, FAIL.format(rank=1, how=how)))
    assert ended.code == code, ended
    assert "Root cause: rank 1" in ended.err, ended


def test_exit_code_is_that_of_the_first_to_fail(tmp_path: Path) -> None:
    # Rank 1 waits for rank 0 to be gone, so that the order is no accident.
    code = (
        "import os, sys, select\n"
        "file = os.path.join(os.path.dirname(__file__), 'fifo')\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(file, 'w')\n"
        "    os._exit(11)\n"
        "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(12))\n"
        "open(file).read()\n"
        "signal.pause()\n"
    )
    os.mkfifo(tmp_path / "fifo")
    ended = run("--nproc-per-node", "2", script(tmp_path, code))
    assert ended.code == 11, ended


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-", "1>/dev/full", "2>/dev/full"])
def test_lost_streams_change_no_exit_code(closed: str, tmp_path: Path) -> None:
    write = "for number in (1, 2):\n    try: os.write(number, b'text' * 1000)\n    except OSError: pass\n"
    path = script(tmp_path, f"import os, sys\n{write}os._exit(int(sys.argv[1]))")
    for code in (0, 3):
        words = shlex.join([*PHALANX, "--nproc-per-node", "2", path, str(code)])
        done = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], env=plain_environment(), timeout=HUNG, check=False
        )
        assert done.returncode == code


def test_success_says_one_line_at_the_start_and_one_at_the_end(tmp_path: Path) -> None:
    ended = run("--nproc-per-node", "2", script(tmp_path, "print('x')"))
    assert (ended.code, ended.out) == (0, "x\nx\n")
    first, last = ended.said
    assert "2 workers" in first
    assert "OMP_NUM_THREADS=1" in first
    assert "succeeded" in last
    assert ended.err.count("\n") == 2, ended


def test_quiet_says_nothing_but_failures(tmp_path: Path) -> None:
    assert run("-q", script(tmp_path, "")).err == ""
    ended = run("-q", "--max-restarts", "1", script(tmp_path, "raise SystemExit(4)"))
    assert ended.code == 4
    assert ended.said == []
    assert "Root cause" in ended.err


def test_verbose_says_why(tmp_path: Path) -> None:
    ended = run("--verbose", script(tmp_path, ""))
    assert any("joining the rendezvous" in line for line in ended.said), ended
    assert any("waiting for the other nodes" in line for line in ended.said), ended


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nproc-per-node", "0", "S"], "--nproc-per-node 0"),
        (["--nproc-per-node", "x", "S"], "--nproc-per-node x"),
        (["--nnodes", "4:2", "S"], "--nnodes 4:2"),
        (["--max-restarts", "-1", "S"], "--max-restarts -1"),
        (["--grace", "-2", "S"], "--grace -2"),
        (["--no-such-flag", "S"], "--no-such-flag"),
        (["--log-dir", "F", "S"], "--log-dir"),
        (["--log-dir", "/proc/none/x", "S"], "/proc/none/x"),
        (["--event-log-handler", "nosuch", "S"], "nosuch"),
        (["--logs-specs", "nosuch", "S"], "nosuch"),
        (["--attach", "3", "S"], "--attach 3"),
        (["--detach", "--log-dir", "/proc/none/x", "S"], "/proc/none/x"),
        (["--tee", "9", "S"], "--tee 9"),
        (["nosuchscript.py"], "nosuchscript.py"),
        (["--no-python", "./nosuchprogram"], "nosuchprogram"),
        (["--signals-to-handle"], "--signals-to-handle"),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost:0", "S"], "port 0"),
        ([], "no script"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_line_and_code_2(words: list[str], says: str, tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    ended = run(*[{"S": path, "F": path}.get(word, word) for word in words], cwd=tmp_path)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert says in ended.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("--master-port", str(port), script(tmp_path, "print('started')"))
    assert ended.code == UNFIT_NODE, ended
    assert ended.out == ""
    assert len([line for line in ended.said if str(port) in line]) == 1, ended
    assert "Traceback" not in ended.err


# ---- the report ----------------------------------------------------------------------------------------


def test_the_report_is_last_and_also_in_json(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    path = script(
        tmp_path, "import atexit\natexit.register(print, 'goodbye')\n" + FAIL.format(rank=1, how="1/0")
    )
    ended = run("--nproc-per-node", "2", "--log-dir", str(logs), "--tee", "3", path)
    assert ended.code == 1
    report = ended.err[ended.err.rindex("FAILED") :]
    for what in (
        "Root cause: rank 1",
        "ZeroDivisionError",
        "Traceback",
        "Stopped as a result: rank 0",
        str(logs),
    ):
        assert what in report, ended
    assert "phalanx:" not in report
    (found,) = logs.glob("*/failure.json")
    told = json.loads(found.read_text())
    assert (told["root_rank"], told["exit_code"], told["stopped"]) == (1, 1, [0])
    assert ended.err.rstrip().endswith(str(found))


def test_no_temporary_directory_is_left_unless_something_is_in_it(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    env = plain_environment(TMPDIR=str(temp))
    assert run(script(tmp_path, ""), env=env).code == 0
    assert list(temp.iterdir()) == []
    assert run(script(tmp_path, "1/0"), env=env).code == 1
    assert len(list(temp.glob("*/*/failure.json"))) == 1


def test_a_given_log_dir_keeps_its_layout(tmp_path: Path) -> None:
    assert run("--log-dir", str(tmp_path / "logs"), "-r", "1", script(tmp_path, "print(1)")).code == 0
    assert len(list((tmp_path / "logs").glob("*_*/attempt_0/0/stdout.log"))) == 1


# ---- restarts ------------------------------------------------------------------------------------------

COUNT = "import os, sys; n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print('attempt', n, flush=True)\n"


def test_restarts_until_the_budget_is_used(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    path = script(tmp_path, COUNT + "sys.exit(5)")
    ended = run("--max-restarts", "2", "--backoff", "0", "--tee", "3", "--log-dir", str(logs), path)
    assert ended.code == 5, ended
    assert re.findall(r"attempt (\d)", ended.out) == ["0", "1", "2"]
    incidents = [line for line in ended.said if "restart" in line]
    assert len(incidents) == 3, ended
    assert "restart 1 of 2" in incidents[0]
    assert "2 of 2 restarts are used" in incidents[2]
    for attempt in range(3):
        (log,) = logs.glob(f"*/attempt_{attempt}/0/stdout.log")
        assert log.read_text() == f"attempt {attempt}\n"


@pytest.mark.parametrize(("words", "attempts", "code"), [
    (["--no-restart-on", "5"], 1, 5),
    (["--no-restart-on", "6,SIGKILL"], 4, 5),
    (["--restart-window", "1000"], 4, 5),
])  # fmt: skip
def test_restart_policies(words: list[str], attempts: int, code: int, tmp_path: Path) -> None:
    ended = run("--max-restarts", "3", "--backoff", "0", *words, script(tmp_path, COUNT + "sys.exit(5)"))
    assert (ended.code, ended.out.count("attempt")) == (code, attempts), ended


AGAIN = (
    COUNT
    + """\
def step(batch): return batch["x"]
step({} if n < 3 else {"x": 0})
print("trained")
"""
)


def test_the_same_failure_again_ends_the_job(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    path = script(tmp_path, AGAIN)
    ended = run("--max-restarts", "9", "--log-dir", str(logs), path)
    assert (ended.code, ended.out.count("attempt")) == (93, 2), ended
    (line,) = [line for line in ended.said if "not restarted" in line]
    assert f"the same failure twice in a row without progress (KeyError at {path}:2, in step)" in line
    for name in ("summary.json", "failure.json"):
        (found,) = (json.loads(found.read_text()) for found in logs.glob(f"*/{name}"))
        assert found["exit_code"] == 93, found


def test_restart_always_restarts_after_the_same_failure(tmp_path: Path) -> None:
    ended = run("--max-restarts", "9", "--backoff", "0", "--restart-always", script(tmp_path, AGAIN))
    assert (ended.code, ended.out.count("attempt")) == (0, 4), ended


TOLD = {
    "text": (
        "import sys; sys.exit('no data in /data')",
        1,
        "SystemExit: no data in /data",
        "line 1, in <mod",
    ),
    "handled": (
        "import logging, sys\ntry:\n    open('/no/such')\nexcept OSError:\n    logging.exception('oh')\n"
        "    sys.exit(7)\n",
        7,
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such' (then sys.exit(7))",
        "line 3, in <module>",
    ),
    "arguments": (
        "import argparse; argparse.ArgumentParser().parse_args(['--x'])",
        2,
        "usage error: unrecognized arguments: --x",
        "Next step  check the arguments after the script's name",
    ),
    "group": (
        "raise ExceptionGroup('both', [ValueError('a'), KeyError('b')])",
        1,
        "ExceptionGroup: both (2 sub-exceptions); ValueError: a; KeyError: 'b'",
        "  | ExceptionGroup: both (2 sub-exceptions)",
    ),
    "code": ("import sys; sys.exit(4)", 4, "exit code 4, no traceback", "Next step"),
    "from none": (
        "try: 1 / 0\nexcept ArithmeticError: raise SystemExit(5) from None",
        5,
        "exit code 5, no traceback",
        "Next step",
    ),
}
if sys.version_info < (3, 11):
    del TOLD["group"]


@pytest.mark.parametrize("warm", ["auto", "off"])
@pytest.mark.parametrize("how", TOLD)
def test_the_report_tells_what_the_program_told(how: str, warm: str, tmp_path: Path) -> None:
    code, status, error, more = TOLD[how]
    ended = run("--warm", warm, script(tmp_path, code))
    assert ended.code == status, ended
    _, _, report = ended.err.partition("Root cause")
    assert f"  error     {error}" in report.replace("\n            ", " "), ended
    assert more in report, ended


def test_a_module_that_m_does_not_find_is_named_and_not_restarted(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    ended = run("--max-restarts", "3", "-m", "package.missing", cwd=tmp_path)
    assert ended.code == 1, ended
    assert any("No module named package.missing; not restarted" in line for line in ended.said), ended
    assert "  error     ModuleNotFoundError: No module named package.missing" in ended.err


ALL_AT_ONCE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each of them is to print its traceback
def f(x): return 1 / x
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
while len(os.listdir(sys.argv[1])) < int(os.environ["WORLD_SIZE"]): time.sleep(0.005)
f(0)
"""


@pytest.mark.parametrize("tee", [False, True], ids=["own stream", "teed"])
def test_tracebacks_of_several_ranks_do_not_mix(tee: bool, tmp_path: Path) -> None:
    folder = tmp_path / "up"
    folder.mkdir()
    words = ["--nproc-per-node", "6", *(["-t", "3"] * tee), script(tmp_path, ALL_AT_ONCE), str(folder)]
    ended = run(*words)
    assert ended.code == 1, ended
    printed, _, _ = ended.err.partition("\n====")
    printed = re.sub(r"\[default\d\]:", "", printed)
    lines = [line for line in printed.splitlines() if not line.startswith("phalanx: ")]
    one = lines[: next(number for number, line in enumerate(lines) if line.startswith("ZeroDiv")) + 1]
    told = [line for line in one if set(line) - set(" ^~")]  # later versions of Python add marks
    assert (told[0], len(told)) == ("Traceback (most recent call last):", 6), ended
    same = ["(the same traceback as above) ZeroDivisionError: division by zero"] * 5
    assert lines == (one + same if tee else one * 6), ended


BROKEN = {
    "module": ("import no_such_module_of_anyone", 1, "ImportError"),
    "syntax": ("def f(:\n", 1, "SyntaxError"),
    "arguments": ("import argparse; argparse.ArgumentParser().parse_args(['--nonsense'])", 2, "exit code 2"),
    "group": ("raise ExceptionGroup('several', [ValueError('x')])", 1, "ExceptionGroup"),
}
if sys.version_info < (3, 11):
    del BROKEN["group"]


@pytest.mark.parametrize("how", BROKEN)
def test_what_a_restart_cannot_help_is_not_restarted(how: str, tmp_path: Path) -> None:
    code, status, name = BROKEN[how]
    words = ["--no-restart-on", "ExceptionGroup"] if how == "group" else []
    ended = run("--max-restarts", "3", *words, script(tmp_path, code))
    assert ended.code == status, ended
    (line,) = [line for line in ended.said if "not restarted" in line]
    assert f"not restarted: {name} " in line
    assert "restart 1" not in ended.err


PASSES = """\
import os, sys, time
first = sys.argv[1]
if not os.path.exists(first):
    open(first, "w").close()
early = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2  # a slow machine may take six seconds to start it
if early or time.time() - os.stat(first).st_mtime < 6:
    raise FileNotFoundError("/data: not mounted yet")
print("trained")
"""


def test_a_cause_that_passes_after_six_seconds_does_not_end_the_job(tmp_path: Path) -> None:
    ended = run("--max-restarts", "3", script(tmp_path, PASSES), str(tmp_path / "first"))
    assert (ended.code, ended.out) == (0, "trained\n"), ended
    assert "restart 2 of 3, in 0.5 s because the workers keep failing" in ended.err


def test_a_script_that_is_away_for_a_while_is_started_again(tmp_path: Path) -> None:
    """As on a network file system: Python's exit code is that of a usage error, but the cause may pass."""
    code = COUNT + "if n == 0: os.rename(__file__, __file__ + '.away'); sys.exit(1)\n"
    path = script(tmp_path, code)
    with Running(["--max-restarts", "9", path]) as job:
        job.read_until("restart 2 of 9")
        os.rename(path + ".away", path)
        ended = job.end()
    assert ended.code == 0, ended
    assert "FileNotFoundError" in ended.err


def test_every_restart_can_have_a_delay(tmp_path: Path) -> None:
    path = script(tmp_path, COUNT + "sys.exit(5 if n == 0 else 0)")
    ended = run("--max-restarts", "1", "--restart-delay", "0.2", path)
    assert ended.code == 0, ended
    assert any("restart 1 of 1, in 0.2 s" in line for line in ended.said), ended


def test_recovers_from_a_killed_worker(tmp_path: Path) -> None:
    code = COUNT + READY + "import signal\nif n == 0: signal.pause()\n"
    with Running(["--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, code)]) as job:
        first = job.workers(2)
        os.kill(first[1], signal.SIGKILL)
        again = job.workers(4)
        ended = job.end()
    assert ended.code == 0, ended
    assert "1 restart" in ended.said[-1]
    assert set(first.values()).isdisjoint(again.values())
    assert all_gone(first)


def test_no_restart_on_a_signal(tmp_path: Path) -> None:
    path = script(tmp_path, COUNT + "os.kill(os.getpid(), 6)")
    ended = run("--max-restarts", "3", "--no-restart-on", "SIGABRT", path)
    assert (ended.code, ended.out.count("attempt")) == (134, 1), ended


CRASH_LOOP = """\
import os, sys, psutil
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.agent.spec import AgentOptions, WorkerSpec
from phalanx.core.group.restarts import RestartPolicy
from phalanx.agent.logs.specs import DefaultLogsSpecs, Std
from phalanx.cluster.solo import SoloRendezvous

rounds, temp = int(sys.argv[1]), sys.argv[2]

def used():
    # By the agent and by its helpers, which serve all rounds: descriptors, threads, bytes.
    ours = [psutil.Process()]
    if agent.helpers.current is not None:
        keeper = psutil.Process(agent.helpers.current.pid)
        ours += [keeper, *(one for one in keeper.children() if one.name() == "worker-zygote")]
    return [(one.num_fds(), one.num_threads(), one.memory_info().rss) for one in ours]

class Marking(SoloRendezvous):
    marks = []
    def next_rendezvous(self):
        self.marks.append(used())
        return super().next_rendezvous()

spec = WorkerSpec("r", 2, Marking("loop"), entrypoint=sys.executable, args=("-c", "raise SystemExit(7)"),
                  max_restarts=rounds)
options = AgentOptions(
    restart_policy=RestartPolicy(max_restarts=rounds, backoff_first=0.0), note=lambda line: None
)
agent = LocalElasticAgent(spec, DefaultLogsSpecs(temp + "/logs", redirects=Std.ALL), options=options)
result = agent.run()
assert result.is_failed() and agent.attempt == rounds, (result, agent.attempt)
assert len(Marking.marks) == rounds + 1
assert {len(mark) for mark in Marking.marks[5:]} == {3}, Marking.marks

def least(marks):
    # Of several: descriptors of workers that are being started or reaped are of the moment.
    return [tuple(map(min, zip(*process))) for process in zip(*marks)]

early, late = least(Marking.marks[5:15]), least(Marking.marks[-10:])
for before, after in zip(early, late):
    assert after[0] <= before[0] and after[1] <= before[1], (early, late)
    assert after[2] - before[2] < 4e6 + 1000 * rounds, (early, late)
assert os.listdir(temp) == ["logs"], os.listdir(temp)
"""
MANY = pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(900)])


@pytest.mark.parametrize("rounds", [30, MANY])
def test_a_crash_loop_leaks_nothing(rounds: int, tmp_path: Path) -> None:
    # Driven through the agent, without the back-off, which would make the loop take hours.
    temp = tmp_path / "temp"
    temp.mkdir()
    words = [script(tmp_path, CRASH_LOOP), str(rounds), str(temp)]
    with Running(words, launcher=[sys.executable], env=plain_environment(TMPDIR=str(temp))) as job:
        wait_until(lambda: job.process.poll() is not None, "the end of the loop", HUNG + rounds)
        ended = job.end()
    assert ended.code == 0, ended
    assert len(list((temp / "logs").glob("loop_*/attempt_*"))) == rounds + 1
    wait_until(lambda: not _mentioning(str(temp)), "the end of all processes of the loop")


def _mentioning(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if text in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


# ---- the output of workers -----------------------------------------------------------------------------


def test_tee_with_prefix_and_filter(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; print('out', flush=True); print('err', file=sys.stderr)")
    words = ["--nproc-per-node", "3", "-t", "3", "--local-ranks-filter", "1,2", "--log-dir", str(tmp_path)]
    ended = run(*words, path)
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["[default1]:out", "[default2]:out"], ended
    told = [line for line in ended.err.splitlines() if "phalanx" not in line]
    assert sorted(told) == ["[default1]:err", "[default2]:err"]
    assert len(list(tmp_path.glob("*/attempt_0/0/stdout.log"))) == 1


def test_one_worker_has_a_prefix_too_if_a_tee_is_asked_for(tmp_path: Path) -> None:
    path = script(tmp_path, "print('alone')")
    assert run("-t", "1", path).out == "[default0]:alone\n"
    assert run("--silence-timeout", "1000", path).out == "alone\n", "not asked for"


def test_the_filter_by_global_rank(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; print('rank', os.environ['RANK'])")
    for tee in ([], ["-t", "3"]):
        ended = run("--nproc-per-node", "4", "--ranks-filter", "2", *tee, path)
        assert ended.out == "[default2]:rank 2\n" if tee else "rank 2\n", ended
    ended = run("--nproc-per-node", "2", "--ranks-filter", "7", path)
    assert "--ranks-filter 7: none of these ranks exists (of 2): nothing will show" in ended.err


def test_a_run_that_recovers_leaves_no_temporary_directory(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    path = script(tmp_path, COUNT + "assert n > 0")
    ended = run("--max-restarts", "1", path, env=plain_environment(TMPDIR=str(temp)))
    assert ended.code == 0, ended
    assert not list(temp.iterdir())
    ended = run(path, env=plain_environment(TMPDIR=str(temp)))
    (log,) = temp.glob("phalanx_*/*/attempt_0/0/error.json")
    assert str(log) in ended.err, "the report names it"


def test_prefix_template(tmp_path: Path) -> None:
    template = "<${role_name} ${local_rank} ${rank} ${attempt} ${nothing}> "
    ended = run(
        "-t", "1", "--role", "r", "--log-line-prefix-template", template, script(tmp_path, "print('x')")
    )
    assert ended.out == "<r 0 0 0 ${nothing}> x\n"


def test_duplicate_filters(tmp_path: Path) -> None:
    path = script(tmp_path, "print('keep me'); print('not this')")
    logs = tmp_path / "logs"
    words = [
        "--nproc-per-node",
        "2",
        "-r",
        "3",
        "--log-dir",
        str(logs),
        "--duplicate-stdout-filters",
        "keep,other",
    ]
    assert run(*words, path).code == 0
    (combined,) = logs.glob("*/attempt_0/filtered_stdout.log")
    assert sorted(combined.read_text().splitlines()) == ["[default0]:keep me", "[default1]:keep me"]


def test_logs_specs_of_a_plug_in(tmp_path: Path) -> None:
    """Found by its entry point, also under torchrun's name for it."""
    about = tmp_path / "plug-1.0.dist-info"
    about.mkdir()
    script(about, "Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n", "METADATA")
    script(about, "[torchrun.logs_specs]\nmine = plug:Mine\n", "entry_points.txt")
    body = "    def reify(self, envs):\n        print('mine', *sorted(envs), flush=True)\n"
    code = f"{body}        return super().reify(envs)\n"
    script(
        tmp_path, f"from phalanx.agent.logs.specs import *\nclass Mine(DefaultLogsSpecs):\n{code}", "plug.py"
    )
    env = plain_environment(PYTHONPATH=str(tmp_path))
    ended = run("--logs-specs", "mine", "--nproc-per-node", "2", script(tmp_path, "print('x')"), env=env)
    assert (ended.code, ended.out) == (0, "mine 0 1\nx\nx\n"), ended


# ---- dry run, background, terminal ---------------------------------------------------------------------


def test_dry_run_shows_what_would_be_started(tmp_path: Path) -> None:
    path = script(tmp_path, "open('started', 'w')")
    words = ["--nproc-per-node", "2", "--rdzv-id", "job", "--max-restarts", "3", path, "--x=${local_rank}"]
    ended = run("--dry-run", *words, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, ""), ended
    assert not (tmp_path / "started").exists()
    shown = ended.out.split("# local rank ")[1:]
    assert len(shown) == 2
    listed = dict(re.findall(r"^(\w+)=(.*) \\$", shown[1], re.M))
    dump = script(tmp_path, "import os, json; print(json.dumps(dict(os.environ)))", "dump.py")
    told = [json.loads(line) for line in run(*words[:-2], dump).out.splitlines()]
    really = next(env for env in told if env["RANK"] == "1")
    known = {name: value for name, value in listed.items() if value != "'?'"}
    assert {name: really[name] for name in known} == known
    of_a_start = {"PHALANX_WORKER", "PHALANX_STATE", "PHALANX_COLLECTIVES", "PHALANX_REENTRY"}
    ours = {name for name in really if name not in plain_environment()} - of_a_start
    assert ours - {"LC_CTYPE"} == listed.keys()  # which Python sets by itself
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"} <= known.keys()
    assert f"{path} --x=1" in shown[1]


def test_detach_survives_the_end_of_its_terminal(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"{READY}open({str(fifo)!r}).read(); print('done', flush=True)"
    words = ["--detach", "--log-dir", str(tmp_path / "logs"), script(tmp_path, code)]
    with Running(words, terminal=True) as job:
        said = job.read_until("kill ")
        assert job.process.wait(HUNG) == 0
        job.hang_up()
    found = re.search(r"as pid (\d+); output in (\S+);", said)
    assert found is not None, said
    agent, log = int(found[1]), Path(found[2])
    assert not gone(agent)
    assert os.getsid(agent) == agent  # no key typed in the terminal can reach it
    with open(fifo, "w"):
        pass
    wait_until(lambda: gone(agent), "the end of the run in the background")
    assert "all workers succeeded" in log.read_text()
    assert "done" in log.read_text()


def test_detached_run_is_stopped_with_kill(tmp_path: Path) -> None:
    ended = run("--detach", script(tmp_path, FOREVER), cwd=tmp_path)
    assert ended.code == 0
    agent = int(re.findall(r"as pid (\d+)", ended.out)[0])
    (log,) = tmp_path.glob("phalanx-*.out")
    wait_until(lambda: "ready" in log.read_text(), "the start of the worker")
    worker = int(log.read_text().split("ready 0 ")[1].split()[0])
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: gone(agent) and gone(worker), "the end of the run in the background")
    assert "SIGTERM" in log.read_text()


def test_attach_gives_the_terminal_to_one_rank(tmp_path: Path) -> None:
    code = (
        "import os, sys; print('rank', os.environ['RANK'], 'read', ascii(sys.stdin.readline()), flush=True)"
    )
    with Running(["--attach", "1", "--nproc-per-node", "3", script(tmp_path, code)], terminal=True) as job:
        job.read_until("read ''", 2)  # the others are at the end of their input at once
        job.type(b"hello\n")
        ended = job.end()
    assert ended.code == 0, ended
    assert "rank 1 read 'hello\\n'" in ended.out


DEBUGGED = """
import os, sys, time
rank = os.environ["RANK"]
told = False
while True:
    try:
        if not told:
            told = True
            print("ready", rank, os.getpid(), flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", rank, flush=True)
        if rank != sys.argv[1]:
            raise
"""


def test_a_ctrl_c_goes_to_the_attached_rank_and_two_of_them_to_the_job(tmp_path: Path) -> None:
    words = ["--attach", "1", "--nproc-per-node", "2", "--verbose", script(tmp_path, DEBUGGED), "1"]
    with Running(words, terminal=True) as job:
        workers = job.workers(2)
        job.read_until("workers are running")
        job.type(b"\x03")
        job.read_until("interrupted 1")
        assert "interrupted 0" not in job.text
        assert not all_gone([workers[0]])
        while "SIGINT: stopping" not in job.text:
            job.type(b"\x03")
            before = job.text.count("interrupted 1") + job.text.count("SIGINT: stopping")
            while job.text.count("interrupted 1") + job.text.count("SIGINT: stopping") == before:
                job.read_on()
        job.signal(signal.SIGINT)  # rank 1 takes no SIGINT for its end: it is killed
        ended = job.end()
    assert ended.code == 128 + signal.SIGINT, ended
    assert all_gone(workers)


def test_an_attached_rank_that_takes_ctrl_c_for_its_end_ends_the_job(tmp_path: Path) -> None:
    words = ["--attach", "1", "--nproc-per-node", "2", "--max-restarts", "3", "--grace", "1", "--verbose"]
    with Running([*words, script(tmp_path, DEBUGGED), "none"], terminal=True) as job:
        job.workers(2)
        job.read_until("workers are running")
        job.type(b"\x03")
        ended = job.end()
    assert ended.code == 128 + signal.SIGINT, ended
    assert "stopped by SIGINT" in ended.out
    assert "restart 1" not in ended.out
    assert "Root cause" not in ended.out


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", os.environ["RANK"], os.getpid(), flush=True)
print("prompt> ", end="", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_one_line_says_who_a_stop_waits_for(terminal: bool, tmp_path: Path) -> None:
    words = ["--grace", "100", *(["--attach", "0"] * terminal), script(tmp_path, STUBBORN)]
    with Running(words, terminal=terminal) as job:
        workers = job.workers(1)
        job.read_until("prompt> ")
        job.signal(signal.SIGTERM)
        job.read_until("waiting for")
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 128 + signal.SIGTERM, ended
    waiting = f"phalanx: waiting for rank 0 (pid {workers[0]}) to end, "
    assert ended.out.count(waiting) == 1, ended
    assert re.search(r" s after SIGTERM; SIGKILL in \d+ s\r?\n", ended.out), ended
    assert "\x1b[K" not in ended.out, "no spinner over the prompt"


def test_standard_input_reaches_the_workers(tmp_path: Path) -> None:
    ended = run(script(tmp_path, "import sys; print(sys.stdin.read())"), stdin="from a pipe")
    assert (ended.code, ended.out) == (0, "from a pipe\n")
