"""Standbys: what they do ahead of a restart, and that a worker made of one is like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from phalanx.agent.warm.spawner import Spawner
from phalanx.helpers.messages import Exit, StandbyRank, WorkerLaunch
from tests.conftest import HUNG, gone, wait_until
from tests.support.run_helpers import PHALANX, Running, plain_environment
from tests.support.run_helpers import run as run_job


@pytest.fixture
def helpers() -> Iterator[Callable[..., Spawner]]:
    made: list[Spawner] = []

    def make(**kwargs: Any) -> Spawner:
        made.append(Spawner("python", **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def written(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(dedent(text))
    return path


def known(main: Path, *args: str, runs_script: bool = False, rank: int = 0, world: int = 1) -> StandbyRank:
    env = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    return StandbyRank(("script", str(main), list(args)), env, runs_script=runs_script)


def parked(spawner: Spawner, count: int) -> list[int]:
    def there() -> bool:
        spawner.events(0)
        return len(spawner.parked) == count

    wait_until(there, f"{count} standbys; {spawner.standby_lines}")
    return list(spawner.parked)


def line_of(spawner: Spawner) -> str:
    """The one line that a standby was reported with."""

    def said() -> bool:
        spawner.events(0)
        return bool(spawner.standby_lines)

    wait_until(said, "a line")
    assert len(spawner.standby_lines) == 1
    return spawner.standby_lines[0]


def ends(spawner: Spawner, count: int) -> list[Exit]:
    found: list[Exit] = []
    while len(found) < count:
        found += [event for event in spawner.events(HUNG) if isinstance(event, Exit)]
    return found


def launch(main: Path, *args: str, rank: int = 0, world: int = 1, log: Path | None = None) -> WorkerLaunch:
    job = WorkerLaunch(rank, program=("script", str(main), list(args)))
    job.env = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "RANK": str(10 + rank)}
    if log is not None:
        job.stdout = job.stderr = str(log)
        job.options = "oe"
    return job


# -- the warm-up ------------------------------------------------------------------------------------


def test_a_warm_up_beside_the_script_is_found_and_knows_its_local_rank(helpers: Any, tmp_path: Path) -> None:
    """What it prints is in the log of the worker, and nowhere if no worker comes of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    written(
        folder,
        """\
        import os
        state = []
        def warm():
            state.append(os.environ["LOCAL_RANK"] + "/" + os.environ["LOCAL_WORLD_SIZE"])
            print("warmed", state, "RANK" in os.environ)
        """,
        "beside.py",
    )
    main = written(
        folder, "import sys, beside\nprint('run', beside.state, sys.path[0] == sys.argv[1], flush=True)\n"
    )
    log = tmp_path / "log"
    spawner = helpers()
    spawner.park(2, "beside:warm", [known(main, str(folder), rank=rank, world=2) for rank in range(2)])
    waiting = parked(spawner, 2)
    pids = spawner.spawn([launch(main, str(folder), rank=1, world=2, log=log)], os.environ)
    assert pids[1] in waiting
    assert ends(spawner, 1)[0].code == 0
    assert log.read_text() == "warmed ['1/2'] False\nrun ['1/2'] True\n"
    assert len(parked(spawner, 1)) == 1  # the other rank's is still there


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "ModuleNotFoundError: No module named 'beside'"),
        ("", "module 'beside' has no function 'warm'"),
        ("def warm(): raise ValueError('no\\ndevice')", "ValueError: no device"),
        ("import sys\ndef warm(): sys.exit(3)", "SystemExit: 3"),
        ("import os\ndef warm(): os._exit(3)", "ended its process (exited with code 3)"),
        ("import os\ndef warm(): os.kill(os.getpid(), 11)", "ended its process (was killed by signal 11)"),
        ("import time\ndef warm(): time.sleep(1000)", "did not finish within 0.3 s and was killed"),
    ],
)
def test_a_warm_up_that_does_not_work_is_one_line(
    text: str | None, says: str, helpers: Any, tmp_path: Path
) -> None:
    if text is not None:
        written(tmp_path, text + "\n", "beside.py")
    main = written(tmp_path, "import sys; sys.exit(7)\n")
    spawner = helpers()
    ranks = [known(main, rank=rank, world=2) for rank in range(2)]
    spawner.park(2, "beside:warm", ranks, limit=0.3 if "sleep" in (text or "") else None)
    assert line_of(spawner) == f"--warmup beside:warm: {says}; restarts go on without standbys"
    spawner.park(2, "beside:warm", ranks)  # not tried again
    spawner.spawn([launch(main, rank=rank, world=2) for rank in range(2)], os.environ)
    assert [end.code for end in ends(spawner, 2)] == [7, 7]
    assert len(spawner.standby_lines) == 1
    assert spawner.parked == []


def test_a_standby_that_dies_is_not_counted(helpers: Any) -> None:
    spawner = helpers()
    spawner.park(2)
    first, _ = parked(spawner, 2)
    os.kill(first, signal.SIGKILL)
    parked(spawner, 1)
    spawner.park(2)
    parked(spawner, 2)


def test_a_stopped_standby_does_not_hold_up_a_start(helpers: Any, tmp_path: Path) -> None:
    main = written(tmp_path, "import sys; sys.exit(7)\n")
    spawner = helpers()
    spawner.park(1)
    (pid,) = parked(spawner, 1)
    os.kill(pid, signal.SIGSTOP)
    assert spawner.spawn([launch(main)], os.environ)[0] != pid
    assert ends(spawner, 1)[0].code == 7
    assert gone(pid)


# -- scripts that wait for their rank ---------------------------------------------------------------

WAITS = """\
import json, os, sys
from phalanx import worker
print("built", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], "RANK" in os.environ)
print("a warning", file=sys.stderr)
os.environ["MINE"] = "set by the script"
os.environ.pop("GIVEN", None)
worker.wait_for_rank()
worker.wait_for_rank()
names = ("RANK", "LOCAL_RANK", "MINE", "GIVEN", "PER_START")
state = {name: os.environ.get(name) for name in names}
state.update(pid=os.getpid(), nice=os.getpriority(0, 0), cwd=os.getcwd(), argv=sys.argv[1:],
             name=open("/proc/self/comm").read(), modules=sorted(sys.modules),
             files=sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{fd}")))
print(json.dumps(state), flush=True)
"""


@pytest.mark.parametrize("titles", [True, False], ids=["", "without setproctitle"])
def test_a_standby_runs_the_script_up_to_where_it_waits(
    titles: bool, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output, variables and descriptors as of a worker that starts from scratch."""
    monkeypatch.setenv("GIVEN", "by the agent")
    if not titles:  # a checkout that is run without its packages
        (tmp_path / "hidden" / "setproctitle").mkdir(parents=True)
        (tmp_path / "hidden" / "setproctitle" / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"), prepend=os.pathsep)
    main = written(tmp_path, WAITS)
    spawner = helpers()
    found = []
    for round in range(2):
        log = tmp_path / f"log{round}"
        job = launch(main, "an argument", log=log)
        job.env = {**job.env, "PER_START": str(round)}
        if round:
            spawner.park(1, "", [known(main, "an argument", runs_script=True)])
            (waiting,) = parked(spawner, 1)
            title = " ".join(psutil.Process(waiting).cmdline())
            assert title.rstrip().endswith("[standby 0]") == titles
        pids = spawner.spawn([job], os.environ)
        assert ends(spawner, 1)[0].code == 0
        *before, last = log.read_text().splitlines()
        assert sorted(before) == ["a warning", "built 0 1 False" if round else "built 0 1 True"]
        state = json.loads(last)
        assert state.pop("pid") == pids[0]
        assert state.pop("PER_START") == str(round)
        state["files"] = [name.replace("log1", "log0") for name in state["files"] if "[" not in name]
        found.append(state)
    assert pids[0] == waiting
    assert found[0] == found[1]
    assert found[0]["RANK"] == "10"
    assert not any("standby" in name for name in found[0]["modules"])


def test_what_an_unused_standby_prints_is_shown_to_nobody(
    helpers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main = written(tmp_path, WAITS)
    spawner = helpers()
    spawner.park(1, "", [known(main, runs_script=True)])
    parked(spawner, 1)
    spawner.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('no such\\nfile')", "failed: file (MAIN:1)"),
        ("import os; print(os.environ['RANK'])", "failed: KeyError: 'RANK' (MAIN:1)"),
        ("pass", "exited with code 0"),
        ("import sys; sys.exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11"),
    ],
)
def test_a_script_that_ends_before_it_waits_is_one_line(
    text: str, says: str, helpers: Any, tmp_path: Path
) -> None:
    main = written(tmp_path, text + "\n")
    spawner = helpers()
    spawner.park(1, "", [known(main, runs_script=True)])
    assert line_of(spawner) == (
        f"standby: {main} before wait_for_rank(): {says.replace('MAIN', str(main))}; "
        "restarts go on without standbys"
    )
    main.write_text("import sys; sys.exit(7)\n")
    spawner.spawn([launch(main)], os.environ)
    assert ends(spawner, 1)[0].code == 7
    assert spawner.parked == []


@pytest.mark.parametrize("edited", ["train.py", "model.py"])
def test_a_standby_of_an_edited_script_is_not_used(edited: str, helpers: Any, tmp_path: Path) -> None:
    model = "VALUE = 1\n"
    text = (
        "import sys, model\nfrom phalanx import worker\nworker.wait_for_rank()\nsys.exit(model.VALUE + 2)\n"
    )
    written(tmp_path, model, "model.py")
    main = written(tmp_path, text)
    spawner = helpers()
    spawner.park(1, "", [known(main, runs_script=True)])
    (waiting,) = parked(spawner, 1)
    if edited == "model.py":
        written(tmp_path, model.replace("1", "31"), "model.py")
    else:
        written(tmp_path, text.replace("+ 2", "+ 32"))
    pids = spawner.spawn([launch(main)], os.environ)
    assert pids[0] != waiting
    assert ends(spawner, 1)[0].code == 33
    line = line_of(spawner)
    assert line == f"standby: {tmp_path / edited} has changed since it was loaded; starting anew"
    wait_until(lambda: gone(waiting), "the end of the stale one")


def test_a_standby_that_is_still_building_does_not_hold_up_a_start(helpers: Any, tmp_path: Path) -> None:
    began = tmp_path / "began"
    main = written(
        tmp_path,
        f"""\
        import os, sys, time
        if "RANK" not in os.environ:
            open({str(began)!r}, "w").write(str(os.getpid()))
            time.sleep(1000)
        sys.exit(7)
        """,
    )
    spawner = helpers()
    spawner.park(1, "", [known(main, runs_script=True)])
    wait_until(lambda: began.exists() and began.read_text(), "the standby")
    spawner.spawn([launch(main)], os.environ)
    assert ends(spawner, 1)[0].code == 7
    wait_until(lambda: gone(int(began.read_text())), "its end")


def test_a_standby_keeps_the_handlers_and_threads_that_the_script_made(helpers: Any, tmp_path: Path) -> None:
    main = written(
        tmp_path,
        """\
        import signal, sys, threading
        from phalanx import worker
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        asked, answered = threading.Event(), threading.Event()
        def serve():
            asked.wait()
            answered.set()
        threading.Thread(target=serve, daemon=True).start()
        worker.wait_for_rank()
        asked.set()
        answered.wait()
        signal.raise_signal(signal.SIGUSR1)
        """,
    )
    spawner = helpers()
    spawner.park(1, "", [known(main, runs_script=True)])
    (waiting,) = parked(spawner, 1)
    assert spawner.spawn([launch(main)], os.environ)[0] == waiting
    assert ends(spawner, 1)[0].code == 7


# -- through the command ----------------------------------------------------------------------------

JOB = """\
import os, sys, threading
from phalanx import worker
{build}
print("built", os.getpid(), flush=True)
worker.on_preempt(lambda: print("preempted", flush=True))
worker.ready()
worker.wait_for_rank()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
{work}
print("ready", os.environ["RANK"], os.getpid(), attempt, worker.supervised(), flush=True)
if attempt < {last}:
    threading.Event().wait()
{end}
"""
# Fails when both ranks are here: the end of the first one stops the other, which must have printed by then.
FAILS_TOGETHER = """\
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
while len(os.listdir(sys.argv[1])) < 2: threading.Event().wait(0.01)
raise RuntimeError("the end")
"""
STANDBY = ["--warm", "standby", "--max-restarts", "3", "--startup-timeout", "30"]


def standbys(run: str) -> set[int]:
    """As `phalanx status` shows them."""
    command = [PHALANX[0], "status", run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=False)
    jobs = json.loads(done.stdout) if done.returncode == 0 else []
    return {pid for job in jobs for pid in job["standbys"]["pids"]}


def waiting_standbys(run: str, count: int) -> set[int]:
    """Those that run the script and wait for their rank."""
    found: set[int] = set()

    def there() -> bool:
        nonlocal found
        found = {pid for pid in standbys(run) if _runs_script(pid)}
        return len(found) == count

    wait_until(there, f"{count} standbys that wait")
    return found


def _runs_script(pid: int, parent: int | None = None) -> bool:
    try:
        process = psutil.Process(pid)
        return "[standby" in " ".join(process.cmdline()) and parent in (None, process.ppid())
    except psutil.NoSuchProcess:
        return False


def test_a_killed_worker_goes_on_from_where_its_standby_waits(tmp_path: Path) -> None:
    """Twice; the last incarnation fails, and its own error is reported."""
    main = written(tmp_path, JOB.format(build="", work="", last=2, end=FAILS_TOGETHER))
    (tmp_path / "last").mkdir()
    run = f"standby-{os.getpid()}-{tmp_path.name}"
    words = [
        "--rdzv-id",
        run,
        *STANDBY,
        "--nproc-per-node",
        "2",
        "--no-restart-on",
        "1",
        str(main),
        str(tmp_path / "last"),
    ]
    with Running(words, env=plain_environment()) as job:
        for attempt in range(2):
            pids = job.workers(2 * (attempt + 1))
            waiting = waiting_standbys(run, 2)
            os.kill(pids[0], signal.SIGKILL)
            job.read_until(f" {attempt + 1} True", 2)
            again = job.workers(2 * (attempt + 2))
            assert set(again.values()) == waiting, job.text
        done = job.end()
    assert done.code == 1
    assert "RuntimeError: the end" in done.out
    for pid in waiting:
        assert done.out.count(f"built {pid}\n") == 1
    assert done.out.count("built") == 6


LATE = """
import asyncio, email.mime.text, http.client, multiprocessing.pool, unittest, xml.dom.minidom
import os, sys, threading, time
from phalanx import worker
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)  # a long set-up

@worker.reenter
def train(round):
    print("ready", round.rank, os.getpid(), flush=True)
    threading.Event().wait()

train()
"""


def test_workers_that_re_enter_have_one_set_of_standbys(tmp_path: Path) -> None:
    """Helpers that were prepared for a later start, before any worker could re-enter, then have none."""
    main, go = written(tmp_path, LATE), tmp_path / "go"
    run = f"standby-{os.getpid()}-{tmp_path.name}"
    words = ["--rdzv-id", run, "--warm", "standby", "--max-restarts", "3", "--nproc-per-node", "2"]
    with Running([*words, str(main), str(go)]) as job:
        wait_until(lambda: len(standbys(run)) == 2, "standbys of the new helpers", 90.0)
        go.touch()
        first = job.workers(2)
        zygote = psutil.Process(first[0]).ppid()
        waiting: set[int] = set()

        def beside_the_workers() -> bool:
            nonlocal waiting
            waiting = standbys(run)
            return len(waiting) == 2 and all(_runs_script(pid, zygote) for pid in waiting)

        wait_until(beside_the_workers, "one set of standbys, of the helpers that the workers have", 90.0)
        os.kill(first[1], signal.SIGKILL)
        second = job.workers(4)
        assert second[0] == first[0]
        assert second[1] in waiting


def test_a_preemption_reaches_callbacks_that_a_standby_registered(tmp_path: Path) -> None:
    main = written(tmp_path, JOB.format(build="", work="", last=9, end=""))
    run = f"standby-{os.getpid()}-{tmp_path.name}"
    words = ["--rdzv-id", run, *STANDBY, "--preempt-signal", "SIGUSR1", "--grace", "2", str(main)]
    with Running(words, env=plain_environment()) as job:
        pids = job.workers(1)
        waiting_standbys(run, 1)
        os.kill(pids[0], signal.SIGKILL)
        job.read_until(" 1 True")
        job.signal(signal.SIGUSR1)
        job.read_until("preempted")
        job.end()


def test_the_warm_up_of_a_job_that_fails_is_told_on_the_console(tmp_path: Path) -> None:
    main = written(tmp_path, "import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    words = ["--warm", "standby", "--warmup", "beside:warm", str(main)]
    with Running(words, env=plain_environment(), stdin=-1) as job:
        job.read_until("--warmup beside:warm: ModuleNotFoundError: No module named 'beside'; restarts")
        assert job.process.stdin is not None
        job.process.stdin.close()
        assert job.end().code == 0


ALL_REDUCE = """
import torch
import torch.distributed as dist
"""
WORK = """
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("sum", int(one), flush=True)
"""


def test_standbys_of_torch_workers_reduce_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    main = written(tmp_path, JOB.format(build=ALL_REDUCE, work=WORK, last=1, end=""))
    run = f"standby-{os.getpid()}-{tmp_path.name}"
    words = ["--rdzv-id", run, *STANDBY, "--preload", "torch", "--nproc-per-node", "2", str(main)]
    with Running(words, env=plain_environment()) as job:
        pids = job.workers(2)
        waiting = waiting_standbys(run, 2)
        os.kill(pids[1], signal.SIGKILL)
        job.read_until("sum 2", 4)
        assert set(job.workers(4).values()) == waiting
        assert job.end().code == 0


def test_wait_for_rank_returns_at_once_elsewhere(tmp_path: Path) -> None:
    main = written(
        tmp_path, "from phalanx import worker\nworker.wait_for_rank()\nprint('went on', flush=True)\n"
    )
    for words in (["--warm", "off"], ["--warm", "auto"], ["--warm", "standby"]):
        done = run_job(*words, "--nproc-per-node", "2", str(main))
        assert done.code == 0
        assert done.out.count("went on") == 2


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "wait_for_rank.py"
    done = run_job(*STANDBY, "--nproc-per-node", "2", str(example), "--kill")
    assert done.code == 0
    for attempt in range(2):
        for rank in range(2):
            assert f"attempt {attempt}: rank {rank} of 2, True after" in done.out


@pytest.mark.parametrize("library", ["json", "torch.distributed"])
def test_what_a_standby_does_in_advance_loads_nothing_of_others(library: str) -> None:
    """A program could tell by it that it is not a start from scratch."""
    pytest.importorskip(library.partition(".")[0])
    script = (
        f"import sys, {library}\nfrom phalanx.worker import api\nbefore = set(sys.modules)\napi._prepare()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    loaded = done.stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= {"phalanx"}
    assert ("phalanx.worker.state.agreement" in loaded) == (library != "json")
